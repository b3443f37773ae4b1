"""Warnings before a run: settings without effect, and finished results that differ in precision alone."""

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from pos2distill.config import Recipe, Study
from pos2distill.store.artifacts import Artifact, other_fingerprints

from .provenance import read_provenance
from .stages.stage import Stage

# What `auto` may choose differently on another machine.
_PRECISIONS = (("model", "dtype"), ("training", "precision"))


def warn_of_settings(recipe: Recipe, study: Study, pending: Sequence[Stage]) -> None:
    """Print what a user would want to know before the stages run that are not finished."""
    for name, condition in _without_effect(study):
        _warn(f"{name}: has no effect, since {condition}")
    if difference := _other_precision(recipe, study, pending):
        _warn(difference)


def _without_effect(study: Study) -> Iterator[tuple[str, str]]:
    """Settings of a method that is not chosen, and what is chosen instead."""
    inference, defaults = study.inference, type(study.inference).model_fields
    for name, method in (("search", "lpes"), ("ms_poe", "ms_poe"), ("bases", "attention_buckets")):
        if getattr(inference, name) == defaults[name].default:
            continue
        if inference.method != method:
            yield f"inference.{name}", f"inference.method is {inference.method}, not {method}"
        elif name == "search" and inference.scales:
            yield "inference.search", "inference.scales are given"
    if (
        study.method.view == "none"
        and study.method.view_weight != type(study.method).model_fields["view_weight"].default
    ):
        yield "method.view_weight", "method.view is none"


def _other_precision(recipe: Recipe, study: Study, pending: Sequence[Stage]) -> str | None:
    """Results of the same settings, but for the precision, that this run does not use."""
    settings = study.model_dump(mode="json")
    for stage in pending:
        for fingerprint in other_fingerprints(recipe.storage, stage.artifact.name, stage.fingerprint):
            provenance = read_provenance(Artifact(recipe.storage, stage.artifact.name, fingerprint))
            if provenance is None:
                continue
            theirs = {name: provenance.settings.get(name, {}) for name in settings}
            changed = [
                f"{section}.{name}={theirs[section].get(name)}"
                for section, name in _PRECISIONS
                if theirs[section].get(name) != settings[section][name]
            ]
            if changed and _with_precision_of(settings, theirs) == theirs:
                return (
                    f"{recipe.storage}: holds a finished stage '{stage.name}' made with {', '.join(changed)}, which is "
                    f"not used; auto may choose another precision on another CPU; add {' '.join(changed)} to use it"
                )
    return None


def _with_precision_of(settings: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    changed = dict(settings)
    for section, name in _PRECISIONS:
        changed[section] = {**changed[section], name: other[section].get(name)}
    return changed


@functools.cache
def _warn(text: str) -> None:
    """Once in a process: the studies of a sweep share most settings."""
    print(f"warning: {text}", file=sys.stderr, flush=True)
