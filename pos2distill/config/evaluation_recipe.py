"""The recipe of one evaluation, from a model and a data file instead of a YAML file."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from pos2distill import hardware
from pos2distill.config.formats import data_name, stem
from pos2distill.config.load import make_recipe
from pos2distill.config.model import checkpoint_of
from pos2distill.config.overrides import override_value
from pos2distill.config.recipe import Recipe

DEFAULT_EXAMPLES, DEFAULT_EVALUATED_SLOTS = 100, 5  # 500 answers


def evaluation_recipe(
    model: str,
    data: str,
    *,
    base_url: str | None = None,
    documents: int | None = None,
    slots: int | str | Sequence[int] | None = None,
    examples: int = DEFAULT_EXAMPLES,
    overrides: Sequence[str] = (),
) -> Recipe:
    """A recipe that evaluates one model on all questions of a file, in one process without Ray.

    The model is run by transformers, on a GPU in bfloat16 if torch finds one and on all cores otherwise (`overrides`
    name another engine, device or precision), or asked on a server.

    Args:
        model: folder, URL or hub name; with `base_url` the model's name on the server.
        data: file in the format `jsonl`, unless `overrides` name another one.
        documents: number of documents in a prompt. Default: that of `data.documents`.
        slots: `evaluation.slots`. Default: 5, or as many as there are.
        examples: `data.eval_examples`.
        overrides: further settings, `section.field=value`.
    Raises:
        UserError: naming the setting at fault.
    """
    samplers: dict[str, Any]
    if base_url is not None:
        # The precision is the server's. Not `auto`, so that fingerprints are the same on every machine.
        engine, dtype = "openai", "bfloat16"
        # Larger than the number of requests at a time, so that few of them wait for the last of a batch.
        samplers = {"batch_size": 64}
    elif override_value(overrides, "runtime.samplers.gpus") != 0 and hardware.torch_has_gpu():
        engine, dtype = "hf", "bfloat16"
        samplers = {"gpus": 1}
    else:
        engine, dtype = "hf", "auto"
        # Smaller batches than the default show progress earlier, where a batch takes a minute.
        samplers = {"batch_size": 8, "threads": hardware.available_cpus()}
    raw: dict[str, Any] = {
        "name": _name(model, data),
        "description": f"Accuracy by slot of {model} on {data}.",
        "model": {"path": model, "engine": engine, "dtype": dtype},
        # No question is kept for training.
        "data": {"format": "jsonl", "path": data, "train_examples": 0, "eval_examples": examples, "eval_fraction": 1},
        "method": {"k": 1},  # unused; the default would need five documents
        "runtime": {"executor": "local", "samplers": samplers},
    }
    if documents is not None:
        raw["data"]["documents"] = documents
    if base_url is not None:
        raw["runtime"]["endpoint"] = {"base_url": base_url}
    if slots is None:
        # From the whole recipe, since an override may set the number of documents.
        study = make_recipe(raw, overrides, source="evaluate").study
        slots = min(DEFAULT_EVALUATED_SLOTS, study.data.documents)
    raw["evaluation"] = {"slots": slots}
    return make_recipe(raw, overrides, source="evaluate")


def _name(model: str, data: str) -> str:
    """A recipe's name, and so the folder of the results: `MODEL-FILE` in its characters."""
    parts = []
    # The folders of all checkpoints are called `model`.
    checkpoint = checkpoint_of(model)
    if checkpoint is not None:
        storage, fingerprint = checkpoint
        model = f"{storage}-{fingerprint[:8]}"
    for name in (PurePosixPath(model).name, data_name(data)):
        parts.append(re.sub(r"[^a-z0-9_.-]+", "-", stem(name)).strip("-_."))
    return "-".join(part for part in parts if part) or "evaluation"
