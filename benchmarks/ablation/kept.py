"""What a sweep's students keep: KL(base || student) on held-out prompts where the base model does well.

The gold documents stand at the last slots; the response is the base model's greedy answer. PromptSpec at the number of
documents trained on, and at 8, which the toy's base learned on. Values are nats a token, means over examples.

Example (from the project's top folder, after the study):
  python -m benchmarks.ablation.kept benchmarks/ablation/one_hop.yaml
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pipelines.generate import PromptSpec
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.ablation.in_process import answer
from pipelines.plan import MODEL_FOLDER, make_plan
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe, sweep_cells
from pos2distill.errors import UserError
from pos2distill.losses.kl import forward_kl, mean_by_row
from pos2distill.models.head import LogitTransform
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.store.artifacts import Artifact
from pos2distill.tasks.permutations import Placement

LEARNED_DOCUMENTS = 8
_BATCH_ROWS = 50


@dataclass(frozen=True)
class Reference:
    """The base model's answers and its logits (T, V) at them, batch by batch."""

    batches: tuple[ResponseBatch, ...]
    logits: tuple[Tensor, ...]

    @property
    def entropy(self) -> float:
        """Of the base model's distribution, nats a token."""
        tokens = torch.cat([each.log_softmax(-1) for each in self.logits])
        return float(-(tokens.exp() * tokens).sum(-1).mean())


def kl_to(reference: Reference, student: PreTrainedModel) -> float:
    """Mean over rows of the mean over tokens of KL(base || student)."""
    rows = [
        mean_by_row(forward_kl(base_TV, _logits(student, batch)), batch.row_T, batch.rows)
        for batch, base_TV in zip(reference.batches, reference.logits, strict=True)
    ]
    return float(torch.cat(rows).mean())


def make_reference(recipe: Recipe, examples: Artifact, documents: int) -> Reference:
    """Ask the base model the held-out examples with the gold documents at the last slots."""
    study = recipe.study
    hops = study.data.hops[0]
    prompt_specs = PromptSpec(documents, {hops: (Placement(tuple(range(documents - hops, documents))),)})
    params = SamplingParams(0.0, 1.0, study.evaluation.max_new_tokens, stop_ids=())
    answers = answer(recipe, study.model, examples.read_table("evaluation.parquet"), [prompt_specs], params)
    prompts, responses = ([ids.values.to_numpy() for ids in answers[name]] for name in ("prompt_ids", "response_ids"))
    batches = tuple(
        collate(prompts[start : start + _BATCH_ROWS], responses[start : start + _BATCH_ROWS])
        for start in range(0, len(prompts), _BATCH_ROWS)
    )
    base = load_model(study.model)
    return Reference(batches, tuple(_logits(base, batch) for batch in batches))


def measure(recipe: Recipe) -> Iterator[dict[str, Any]]:
    """One row for every cell of the sweep.

    Raises:
        UserError: if a cell's checkpoint is not there.
    """
    references: dict[tuple[str, int], Reference] = {}
    for settings, cell in sweep_cells(recipe):
        plan = make_plan(cell)
        if not plan.checkpoint.manifest():
            raise UserError(f"{plan.checkpoint.url}: is not there; run the study first")
        path = f"{plan.checkpoint.url}/{MODEL_FOLDER}"
        student = load_model(cell.study.model.model_copy(update={"path": path}))
        row: dict[str, Any] = {"settings": settings}
        for documents in (cell.study.data.documents, LEARNED_DOCUMENTS):
            key = plan.examples.fingerprint, documents
            if key not in references:
                references[key] = make_reference(cell, plan.examples, documents)
            row[f"{documents} documents"] = {
                "kl": kl_to(references[key], student),
                "base_entropy": references[key].entropy,
            }
        yield row


@torch.no_grad()
def _logits(lm: PreTrainedModel, batch: ResponseBatch) -> Tensor:
    head: Any = lm.get_output_embeddings()
    logits_TV: Tensor = LogitTransform(lm.config)(head(response_hidden_states(lm, batch)))
    return logits_TV


def main(arguments: list[str]) -> int:
    """Measure the recipe in the first argument and write NAME_kept.json beside it."""
    try:
        recipe = load_recipe(arguments[0], arguments[1:])
        rows = list(measure(recipe))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = Path(arguments[0]).with_name(f"{recipe.name}_kept.json")
    path.write_text(json.dumps({"name": recipe.name, "cells": rows}, indent=1) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
