"""Warnings before a run: settings without effect, finished results that differ in precision alone."""

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pos2distill.config import Recipe, Study
from pos2distill.config.inference_table import INFERENCE_METHODS
from pos2distill.config.model import checkpoint_of
from pos2distill.errors import UserError, warn_once
from pos2distill.store.artifacts import Artifact, other_fingerprints

from ..artifact_names import CHECKPOINT, SCORES
from ..provenance import read_provenance
from ..stages.stage import Stage

# Below it, even after a hundred steps in one direction rounding changes a third of the merged update: in bfloat16, a
# weight of 0.02 has steps of 1e-4.
_LOW_RATE = 2e-5
_HIGH_RATE = 1e-2  # ten times the highest that fine-tuning is usually done with


def warn_of_settings(recipe: Recipe, pending: Sequence[Stage]) -> None:
    """Print what a user would want to know before the stages run that are not finished."""
    warnings = itertools.chain(
        _unused_method_settings(recipe.study),
        _unused_sampling(recipe.study),
        _unused_inference(recipe.study, pending),
        _unused_server_settings(recipe),
        _other_precision_results(recipe, pending),
        _prompt_mismatches(recipe),
        _training_warnings(recipe, pending),
        _template_mismatch(recipe.study),
    )
    for warning in warnings:
        warn_once(warning)


def _unused_method_settings(study: Study) -> Iterator[str]:
    """Settings of a method that is not chosen, and what is chosen instead."""
    inference, method = study.inference, study.method
    defaults = type(inference).model_fields
    for user in INFERENCE_METHODS.values():
        for name in user.settings:
            is_default = getattr(inference, name) == defaults[name].default
            if not is_default and name not in inference.spec.settings:
                yield f"inference.{name}: has no effect, since inference.method is {inference.method}, not {user.name}"
    if inference.method == "lpes" and inference.scales and inference.search != defaults["search"].default:
        yield "inference.search: has no effect, since inference.scales are given"
    if method.view not in ("skip", "cyclic") and method.view_weight != type(method).model_fields["view_weight"].default:
        yield f"method.view_weight: has no effect, since method.view is {method.view}"


def _unused_sampling(study: Study) -> Iterator[str]:
    """A choice of tokens where the most likely one is taken."""
    if study.sampling.top_p < 1 and not study.sampling.temperature:
        yield "sampling.top_p: has no effect, since sampling.temperature is 0"


def _unused_inference(study: Study, pending: Sequence[Stage]) -> Iterator[str]:
    """A method of evaluations where nothing is evaluated."""
    inference = study.inference
    if inference.spec.only_evaluated and pending and not any(stage.artifact.name in SCORES for stage in pending):
        yield (
            f"inference.method: {inference.method} changes only evaluations; samples and training are those of the "
            f"plain model"
        )


def _unused_server_settings(recipe: Recipe) -> Iterator[str]:
    """Settings of a model on a server where the engine runs it here."""
    engine, runtime = recipe.study.model.engine, recipe.runtime
    if engine == "openai":
        at_once, batch = runtime.endpoint.concurrency, runtime.samplers.batch_size
        is_chosen = at_once != type(runtime.endpoint).model_fields["concurrency"].default
        if runtime.executor == "local" and is_chosen and at_once > batch:
            yield (
                f"runtime.endpoint.concurrency: {at_once}, but in one process a batch ends before the next one begins, "
                f"so at most {batch} requests are under way (runtime.samplers.batch_size); raise that too"
            )
        return
    if recipe.runtime.endpoint.base_url is not None:
        yield f"runtime.endpoint.base_url: has no effect, since model.engine is {engine}, not openai"
    if recipe.study.model.api != type(recipe.study.model).model_fields["api"].default:
        yield f"model.api: has no effect, since model.engine is {engine}, not openai"
    if recipe.study.model.extra_body:
        yield f"model.extra_body: has no effect, since model.engine is {engine}, not openai"


def _training_warnings(recipe: Recipe, pending: Sequence[Stage]) -> Iterator[str]:
    """Rates that are too high, or so low that adapters change no digit of a weight; workers without rows."""
    if all(stage.artifact.name != CHECKPOINT for stage in pending):
        return
    study, trainers = recipe.study, recipe.runtime.trainers
    rate = study.training.learning_rate
    if rate > _HIGH_RATE:
        yield f"training.learning_rate: {rate:g} is very high; usual rates are 1e-6 to 1e-4, of adapters 1e-4 to 1e-3"
    if study.training.lora is not None and study.model.dtype == "bfloat16" and rate < _LOW_RATE:
        yield (
            f"training.learning_rate: {rate:g} is a rate for all weights; adapters (training.lora) usually need about "
            f"1e-4, and rounding to bfloat16 would take most of so small an update from the merged model"
        )
    workers = trainers.max_workers or trainers.workers
    # A batch has rows at all: a checkpoint is made only of examples.
    _, rows = study.largest_batch
    # As `row_keys_of_rank` divides them: equally many for each rank, as long as there are some.
    useful = math.ceil(rows / math.ceil(rows / workers))
    if useful < workers:
        setting = "max_workers" if trainers.max_workers else "workers"
        yield (
            f"runtime.trainers.{setting}: {workers}, but a global batch has {rows} rows "
            f"(training.global_batch_rows: {study.training.global_batch_rows}), which {useful} workers compute as fast"
            f"; more only share the memory"
        )


def _template_mismatch(study: Study) -> Iterator[str]:
    """A template whose prompts without documents do not ask for what the metric judges."""
    template = study.data.template
    if template is None or not study.evaluation.reference_prompts or study.data.metric != "em":
        return
    if not template.asks_for_conclusion_without_documents:
        yield "data.template.without_documents: does not ask for 'The answer is', which data.metric em judges"


# What makes the text of prompts, and its value where a record has none.
_PROMPT_SETTINGS: Sequence[tuple[str, str, Any]] = (("data", "prompt", None), ("model", "chat_template_kwargs", {}))


def _prompt_mismatches(recipe: Recipe) -> Iterator[str]:
    """The settings of prompts that differ from those which a checkpoint of `study` was trained with."""
    model = recipe.study.model.path
    checkpoint = checkpoint_of(model)
    if checkpoint is None:
        return
    storage, fingerprint = checkpoint
    recorded = _recorded(Artifact(storage, CHECKPOINT, fingerprint), {"data": {}, "model": {}}) or {}
    for section, name, default in _PROMPT_SETTINGS:
        recorded_section = recorded.get(section)
        if not recorded_section:
            continue
        trained = recorded_section.get(name, default)
        chosen = getattr(recipe.study, section).model_dump(mode="json").get(name, default)
        if trained is not None and trained != chosen:
            setting = f"{section}.{name}"
            yield f"{setting}: {_shown(chosen)}, but {model} was trained with {setting}={_shown(trained)}"
    template = (recorded.get("data") or {}).get("template")
    chosen = recipe.study.data.template
    # Where one of them alone has a template, `prompt` says so.
    if template is not None and chosen is not None and template != chosen.model_dump(mode="json"):
        yield f"data.template: another one than {model} was trained with"


def _shown(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _other_precision_results(recipe: Recipe, pending: Sequence[Stage]) -> Iterator[str]:
    """The first finished stage of the same settings in a precision that `auto` chose on another machine."""
    if not recipe.auto_precisions:
        return
    settings = recipe.study.model_dump(mode="json")
    for stage in pending:
        for fingerprint in other_fingerprints(recipe.storage, stage.artifact.name, [stage.fingerprint]):
            theirs = _recorded(Artifact(recipe.storage, stage.artifact.name, fingerprint), settings)
            changed = _changes(settings, theirs) if theirs else {}
            changed.pop("model.revision", None)  # recorded of a hub model is the commit that it had
            if changed and changed.keys() <= set(recipe.auto_precisions):
                words = " ".join(f"{name}={value}" for name, value in changed.items())
                yield (
                    f"{recipe.storage}: holds a finished stage '{stage.name}' made with {words}, which is not used, "
                    f"since auto chooses another precision on this CPU; add {words} to use it"
                )
                return


def _recorded(artifact: Artifact, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The sections that an artifact was made with, by the names of these settings; None if that is not known."""
    try:
        provenance = read_provenance(artifact)
    except UserError:  # the record is corrupt, which must not stop a run that does not need it
        return None
    return {name: provenance.settings.get(name) for name in settings} if provenance else None


def _changes(settings: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that differ, by dotted name, with the other value."""
    changes: dict[str, Any] = {}
    for section, values in settings.items():
        other = others[section]
        if not isinstance(values, dict) or not isinstance(other, dict):
            changes |= {} if other == values else {section: other}
            continue
        for name in {**values, **other}:
            if values.get(name) != other.get(name):
                changes[f"{section}.{name}"] = other.get(name)
    return changes
