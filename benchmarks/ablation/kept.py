"""How far the students of a sweep have moved from the base model where the base model does well: KL(base || student).

The prompts are those of held-out examples with the gold documents at the last slots, and the responses are the base
model's greedy answers. Values are nats per token, averaged over the tokens of a response, then over examples. The
prompt lengths are the one of training and those of `--documents`. For the toys use 8, the longest prompts on which
their base models were trained.

Example (from the project's top folder, after the study):
  python -m benchmarks.ablation.kept benchmarks/ablation/one_hop.yaml --documents 8
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipelines.executors.local import LocalExecutor
from pipelines.plan import make_plan
from pipelines.stages.prepare import EVALUATION_FILE
from pipelines.stages.resolve import with_model
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.config.sweep import sweep_cells
from pos2distill.errors import UserError
from pos2distill.losses.kl import forward_kl, mean_by_row
from pos2distill.models.head import LogitTransform
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.sampling.blocks import index_blocks
from pos2distill.sampling.operators import evaluation_operators, greedy_params
from pos2distill.sampling.prompting import PromptSpec
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import model_url
from pos2distill.tasks.permutations import Placement


@dataclass(frozen=True)
class Reference:
    """The base model's answers in batches, and its logits (T, V) at the response tokens of each batch."""

    batches: Sequence[ResponseBatch]
    logits: Sequence[Tensor]

    @property
    def entropy(self) -> float:
        """Mean entropy of the base model's distribution, in nats per token."""
        log_probabilities_TV = torch.cat([logits_TV.log_softmax(-1) for logits_TV in self.logits])
        entropy_T = -(log_probabilities_TV.exp() * log_probabilities_TV).sum(-1)
        return float(entropy_T.mean())


def kl_to(reference: Reference, student: PreTrainedModel) -> float:
    """KL(base || student): mean over rows of the mean over response tokens."""
    kls = []
    for batch, base_TV in zip(reference.batches, reference.logits, strict=True):
        kl_T = forward_kl(base_TV, _logits(student, batch))
        kls.append(mean_by_row(kl_T, batch.row_T, batch.row_count))
    return float(torch.cat(kls).mean())


def make_reference(recipe: Recipe, examples: Artifact, documents: int, batch_rows: int) -> Reference:
    """Generate the base model's answers to the evaluation examples, with the gold documents at the last slots."""
    study = recipe.study
    hops = study.data.hops[0]
    last_slots = tuple(range(documents - hops, documents))
    specs = [PromptSpec(documents, {hops: (Placement(last_slots),)})]
    operators = evaluation_operators(study, recipe.runtime, examples, EVALUATION_FILE, specs, greedy_params(study))
    count = len(examples.read_table(EVALUATION_FILE, ["example_id"]))
    blocks = index_blocks(np.arange(count), recipe.runtime.samplers.batch_size)
    executor = LocalExecutor(recipe.runtime)
    answers = pa.concat_tables(executor.map(blocks, operators, label="answers of the base model"))

    prompts = [ids.values.to_numpy() for ids in answers["prompt_ids"]]
    responses = [ids.values.to_numpy() for ids in answers["response_ids"]]
    base = load_model(study.model)
    batches, logits = [], []
    for start in range(0, len(prompts), batch_rows):
        batch = collate(prompts[start : start + batch_rows], responses[start : start + batch_rows])
        batches.append(batch)
        logits.append(_logits(base, batch))
    return Reference(batches, logits)


def measure(recipe: Recipe, other_documents: Sequence[int], batch_rows: int) -> Iterator[dict[str, Any]]:
    """One result for every study of the sweep.

    Args:
        other_documents: further prompt lengths.
        batch_rows: rows of one forward pass.

    Raises:
        UserError: the checkpoint of a study is not finished.
    """
    # Studies that evaluate the same examples share their references.
    references: dict[tuple[str, int], Reference] = {}
    for settings, cell in sweep_cells(recipe):
        plan = make_plan(cell)
        checkpoint, examples = plan.distill.artifact, plan.prepare.artifact
        if checkpoint.manifest() is None:
            raise UserError(f"{checkpoint.url}: no finished checkpoint; run `study` first")
        student = load_model(with_model(cell.study, model_url(checkpoint)).model)
        result: dict[str, Any] = {"settings": settings}
        for documents in (cell.study.data.documents, *other_documents):
            key = examples.fingerprint, documents
            if key not in references:
                references[key] = make_reference(cell, examples, documents, batch_rows)
            reference = references[key]
            result[f"{documents} documents"] = {"kl": kl_to(reference, student), "base_entropy": reference.entropy}
        yield result


@torch.no_grad()
def _logits(lm: PreTrainedModel, batch: ResponseBatch) -> Tensor:
    head: Any = lm.get_output_embeddings()
    logits_TV: Tensor = LogitTransform(lm.config)(head(response_hidden_states(lm, batch)))
    return logits_TV


def main() -> int:
    """Measure every study of a recipe and write NAME_kept.json to the recipe's folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, help="YAML file of the sweep")
    parser.add_argument("overrides", nargs="*", metavar="SETTING=VALUE", help="the same as those of the study")
    parser.add_argument("--documents", type=int, nargs="*", default=[], help="further prompt lengths")
    parser.add_argument("--batch-rows", type=int, default=50, help="rows of one forward pass (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        recipe = load_recipe(str(arguments.recipe), arguments.overrides)
        cells = list(measure(recipe, arguments.documents, arguments.batch_rows))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    path = arguments.recipe.with_name(f"{recipe.name}_kept.json")
    path.write_text(json.dumps({"name": recipe.name, "cells": cells}, indent=1) + "\n")
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
