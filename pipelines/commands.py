"""The commands: lists of stages, of which those that are not finished run in order."""

import functools
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pos2distill.config import ModelSection, Recipe, Study
from pos2distill.config.load import sweep_cells
from pos2distill.errors import GateError, UserError
from pos2distill.evaluation.scores import Curve, to_curve, to_grid, truncation_warning
from pos2distill.store.artifacts import (
    check_storage,
    claim_storage,
    other_fingerprints,
    release_storage,
)
from pos2distill.store.lease import hold_lease
from pos2distill.training.job import MODEL_FOLDER
from pos2distill.training.trackers import check_trackers

from .executors import build_executor
from .plan import Plan, make_plan, make_plans
from .report import Cell, make_report, make_sweep_report, reported_fingerprint
from .stages.evaluate import PREDICTIONS
from .stages.stage import RunContext, Stage
from .terminal import (
    format_settings,
    print_comparison,
    print_curve,
    print_paths,
    summarise_manifest,
)


def run_study(recipe: Recipe) -> None:
    """The whole chain, up to the report. Of a sweep, every study."""
    if recipe.sweep:
        _run_sweep(recipe)
        return
    plan = make_plan(recipe)
    with _driver_lease(recipe):
        _run_stages(recipe, plan, plan.stages)
    # All studies in a storage write the same report folder, so its summary says which study it shows.
    if reported_fingerprint(recipe.storage) == plan.fingerprint:
        print(f"{'report':<18}  cached")
        print_comparison(_curve(plan.study, plan.evaluate_base), _curve(plan.study, plan.evaluate_distilled))
        print_paths(_model_url(plan), recipe.storage)
    else:
        _report(recipe, plan)


def run_evaluate(recipe: Recipe, fail_if_gap_above: float | None = None) -> None:
    """The base model's curve and, once there is a checkpoint, the distilled one's.

    Args:
        fail_if_gap_above: in percentage points.
    Raises:
        GateError: if the last of these curves has a larger GAP than that, or no right answer at all.
    """
    _require_one_study(recipe)
    plan = make_plan(recipe)
    with _driver_lease(recipe):
        stages = plan.evaluation_stages
        _run_stages(recipe, plan, stages)
    for stage in stages:
        if stage not in (plan.evaluate_base, plan.evaluate_distilled):
            continue
        curve = _curve(plan.study, stage)
        print_curve(stage.artifact.name, curve)
    # `curve` is that of the last stage: the checkpoint's, or the base model's while there is no checkpoint.
    if fail_if_gap_above is not None:
        _check_gap(curve, fail_if_gap_above)


def run_sample(recipe: Recipe) -> None:
    """Samples, with what the teacher stores beside them."""
    _require_one_study(recipe)
    plan = make_plan(recipe)
    with _driver_lease(recipe):
        _run_stages(recipe, plan, plan.sampling_stages)


def run_distill(recipe: Recipe) -> None:
    """The checkpoint, from stored samples; in streamed mode, it samples what is missing at the same time."""
    _require_one_study(recipe)
    plan = make_plan(recipe)
    with _driver_lease(recipe):
        # Only in streamed mode does this command make the missing samples; staged runs may have a single GPU for both.
        if recipe.runtime.mode == "staged":
            _require_finished(recipe, [plan.sample])
        _run_stages(recipe, plan, plan.training_stages)
    print(f"checkpoint  {_model_url(plan)}")


def run_report(recipe: Recipe) -> None:
    """The report of a finished study or sweep.

    Raises:
        UserError: with the stage, or the studies of the sweep, that are not finished.
    """
    if recipe.sweep:
        _report_sweep(recipe, _make_cells(recipe))
        return
    plan = make_plan(recipe)
    check_storage(recipe.storage, recipe.name)
    _report(recipe, plan)


def describe(recipe: Recipe, command: str = "study") -> str:
    """What `--dry-run` shows below the settings: fingerprints, and which stages the command would run."""
    lines = []
    # `report` runs no stage, so it cannot make an unfinished result.
    unfinished = "missing" if command == "report" else "to run"
    for cell in _make_cells(recipe):
        check_against_model(cell.recipe.study)
        plan = cell.plan
        lines.append(f"# study {plan.fingerprint}, storage {cell.recipe.storage}{format_settings(cell.settings)}")
        for stage in _stages_of_command(command, plan):
            state = "cached" if stage.artifact.manifest() is not None else unfinished
            lines.append(f"#   {stage.name:<18}  {stage.fingerprint}  {state}")
    return "\n".join(lines)


def check_against_model(study: Study) -> None:
    """Refuse a model with incomplete weights, and settings that its config contradicts, before a stage starts."""
    if study.method.teacher == "topk":
        # Imported where needed: torch and transformers take longer to import than a cached study takes to show.
        from pos2distill.models.load import load_config

        vocabulary = load_config(study.model).get_text_config().vocab_size
        if study.method.teacher_topk > vocabulary:
            raise UserError(
                f"method.teacher_topk: {study.method.teacher_topk}, but {study.model.path} has {vocabulary} tokens"
            )
    if study.training.lora:
        from pos2distill.models.lora import check_targets

        check_targets(study.model, study.training.lora)
    if study.method.view != "none":
        from pos2distill.models.load import require_position_room
        from pos2distill.training.views import POSITIONS

        require_position_room(study.model, POSITIONS[study.method.view])
    if study.inference.method != "none":
        from pos2distill.models.rope import check_inference

        check_inference(study.model, study.inference)
    _check_weights(study.model)


@functools.cache
def _check_weights(model: ModelSection) -> None:
    """Once for each model: the studies of a sweep share it."""
    from pos2distill.models.check import check_weights

    check_weights(model)


def _stages_of_command(command: str, plan: Plan) -> list[Stage]:
    if command == "evaluate":
        return plan.evaluation_stages
    if command == "sample":
        return plan.sampling_stages
    if command == "distill":
        return plan.training_stages
    return plan.stages


def _run_stages(recipe: Recipe, plan: Plan, stages: Sequence[Stage]) -> None:
    # Not if all is cached: to import transformers takes longer than to show the results.
    if any(stage.artifact.manifest() is None for stage in stages):
        check_against_model(plan.study)
    trains = plan.distill in stages
    # Checked before the first stage: a missing package should not be reported only after sampling.
    if trains and plan.distill.artifact.manifest() is None:
        check_trackers(recipe.runtime.trackers)
    streams = trains and recipe.runtime.mode == "streamed"
    # Built only when a stage must run, so that a finished study imports no Ray.
    context = None
    for stage in stages:
        manifest = stage.artifact.manifest()
        duration = "cached"
        if manifest is None:
            if stage is plan.sample and streams:
                continue  # the stage `distill` trains on the samples while they are made, and publishes them
            if context is None:
                logged_settings = plan.study.model_dump(mode="json")
                executor = build_executor(recipe.runtime)
                context = RunContext(recipe.name, recipe.storage, logged_settings, recipe.runtime, executor)
            start = time.monotonic()
            manifest = stage.run(stage, context)
            duration = f"{time.monotonic() - start:9.1f} s"
        print(f"{stage.name:<18}  {duration}  {summarise_manifest(manifest)}", flush=True)
        warning = truncation_warning(manifest.counts)
        if warning:
            print(f"warning: {stage.name}: {warning}", file=sys.stderr, flush=True)


def _run_sweep(recipe: Recipe) -> None:
    """Every study in the same storage, where studies share the artifacts that their settings do not change."""
    cells = _make_cells(recipe)
    for number, cell in enumerate(cells, start=1):
        print(f"--- study {number} of {len(cells)}{format_settings(cell.settings)}", flush=True)
        with _driver_lease(recipe):
            _run_stages(cell.recipe, cell.plan, cell.plan.stages)
    _report_sweep(recipe, cells)  # takes little time beside the studies, so it is always written


def _make_cells(recipe: Recipe) -> list[Cell]:
    """The studies of a sweep; of another recipe the only one."""
    pairs = sweep_cells(recipe)
    plans = make_plans([cell for _, cell in pairs])
    return [Cell(settings, cell, plan) for (settings, cell), plan in zip(pairs, plans, strict=True)]


def _report(recipe: Recipe, plan: Plan) -> None:
    _require_finished(recipe, plan.reported_stages)
    comparison = make_report(recipe, plan)
    print_comparison(comparison.before, comparison.after)
    print_paths(_model_url(plan), recipe.storage)


def _report_sweep(recipe: Recipe, cells: Sequence[Cell]) -> None:
    unfinished = []
    for cell in cells:
        if any(stage.artifact.manifest() is None for stage in cell.plan.reported_stages):
            unfinished.append(format_settings(cell.settings).removeprefix(", "))
    if unfinished:
        # Named by their settings, since the storage holds many fingerprints.
        raise UserError(
            f"{recipe.storage}: {len(unfinished)} of {len(cells)} studies are not finished: {'; '.join(unfinished)}; "
            f"run `study` again"
        )
    make_sweep_report(recipe, cells)
    print(f"report      {recipe.storage}/report/index.html")


def _require_one_study(recipe: Recipe) -> None:
    if recipe.sweep:
        raise UserError(
            f"{recipe.name}: is a sweep of several studies; this command takes one study (study and report take sweeps)"
        )


def _require_finished(recipe: Recipe, stages: Sequence[Stage]) -> None:
    for stage in stages:
        artifact = stage.artifact
        if artifact.manifest() is not None:
            continue
        hint = ""
        others = other_fingerprints(recipe.storage, artifact.name, artifact.fingerprint)
        if others:
            hint = f"; it holds {', '.join(others)}, made with other settings"
        command = "`study` first (or `sample`)" if stage.name == "sample" else "`study` first"
        raise UserError(
            f"{recipe.storage}: no finished {artifact.name} of fingerprint {artifact.fingerprint}{hint}; run {command}"
        )


@contextmanager
def _driver_lease(recipe: Recipe) -> Iterator[None]:
    """The right to make artifacts in the storage, which one driver at a time has."""
    # Another recipe's storage is refused now, not after waiting for its driver to end.
    claim_storage(recipe.storage, recipe.name)
    with hold_lease(recipe.storage):
        claim_storage(recipe.storage, recipe.name)  # again: the previous driver may have released it
        try:
            yield
        finally:
            release_storage(recipe.storage)


def _check_gap(curve: Curve, highest_gap: float) -> None:
    if not curve.mean:
        raise GateError("no answer is right (mean 0.0), so a GAP of 0 means nothing")
    # Rounded, since 0.2 - 0.15 is more than 0.05 in floating point.
    gap = round(100 * curve.gap, 6)
    if gap > highest_gap:
        raise GateError(f"GAP {gap:g} is above {highest_gap:g} (mean {100 * curve.mean:.1f})")


def _curve(study: Study, stage: Stage) -> Curve:
    # The same bootstrap as in the report, so that both show equal intervals.
    grid = to_grid(stage.artifact.read_table(PREDICTIONS), study.data.documents)
    return to_curve(grid, bootstrap_samples=study.evaluation.bootstrap_samples, seed=study.evaluation.seed)


def _model_url(plan: Plan) -> str:
    return f"{plan.distill.artifact.url}/{MODEL_FOLDER}"
