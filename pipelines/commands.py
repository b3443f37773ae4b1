"""The commands: lists of stages, of which those that are not finished run in order."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from pos2distill.config import AnalysisSection, Recipe, Study
from pos2distill.config.fields import replace_section
from pos2distill.config.load import sweep_cells, to_user_error
from pos2distill.errors import TransientError, UserError, warn
from pos2distill.evaluation.gate import Gate
from pos2distill.evaluation.result import Evaluation
from pos2distill.evaluation.scores import count_warnings
from pos2distill.startup import is_program
from pos2distill.store.artifacts import (
    check_storage,
    claim_storage,
    other_fingerprints,
    release_storage,
    remove_if_empty,
)
from pos2distill.store.lease import Lease, exit_immediately, hold_lease
from pos2distill.training.job import MODEL_FOLDER, STATE_FOLDER, STEPS_FOLDER, model_url
from pos2distill.urls import storage_errors

from .artifact_names import CHECKPOINT, EXAMPLES
from .data_checks import check_prompts
from .evaluations import read_evaluations, write_evaluations
from .executors import build_executor
from .executors.leased import LeasedExecutor
from .gate import check_evaluation, read_baseline
from .plan import Plan, make_plans
from .preflight import preflight
from .provenance import Provenance, record_provenance
from .report import (
    Cell,
    compare_models,
    make_report,
    make_sweep_report,
    read_analyses,
    read_report,
    reported_fingerprint,
    write_analysis,
)
from .stages.search_scales import EXPORT_FOLDER
from .stages.stage import RunContext, Stage
from .terminal import (
    format_settings,
    print_analysis,
    print_comparison,
    print_evaluation,
    print_paths,
    summarise_manifest,
)


def plan_command(recipe: Recipe, command: str) -> list[Cell]:
    """What a command runs: the studies of a sweep, or the recipe's only one.

    Functions that run a command take it as `cells`, from callers that read results afterwards: planned anew, the data
    set, the model or what a hub's `main` names may be others by then.

    Raises:
        UserError: for a sweep, if the command takes one study.
    """
    if command not in ("study", "report"):
        _require_one_study(recipe)
    return make_cells(with_analysis(recipe) if command == "analyse" else recipe)


def run_study(recipe: Recipe, cells: Sequence[Cell] | None = None) -> None:
    """The whole chain, up to the report. Of a sweep, every study."""
    cells = cells or plan_command(recipe, "study")
    if recipe.sweep:
        _run_sweep(recipe, cells)
        return
    (plan,) = (cell.plan for cell in cells)
    preflight(recipe, plan, plan.stages)
    with _driver_lease(recipe) as lease:
        _run_stages(recipe, plan, plan.stages, lease)
    # All studies in a storage write the same report folder, so its summary says which study it shows.
    if reported_fingerprint(recipe.storage) == plan.fingerprint:
        print(f"{'report':<18}  cached")
        print_comparison(compare_models(plan))
        print_paths(**_trained_paths(recipe, plan))
    else:
        _report(recipe, plan)


def run_evaluate(
    recipe: Recipe, cells: Sequence[Cell] | None = None, *, gate: Gate | None = None, baseline: str | None = None
) -> list[Evaluation]:
    """The base model's curve and, once there is a checkpoint, the distilled one's; written to `evaluation/` too.

    Args:
        gate: limits for the last of these curves. baseline: URL of the predictions that it compares with.
    Returns: the evaluations of these models, in this order.
    Raises:
        GateError: if the data show that a limit is exceeded, or hardly any answer is right.
    """
    (plan,) = (cell.plan for cell in cells or plan_command(recipe, "evaluate"))
    if plan.other_tasks:
        names = ", ".join(plan.other_tasks)
        print(f"evaluation.also_evaluate: {names}: evaluated by `study`, not by `evaluate`", flush=True)
    # Before anything runs.
    compared = read_baseline(baseline, plan.study) if baseline else None
    preflight(recipe, plan, plan.evaluation_stages)
    with _driver_lease(recipe) as lease:
        _run_stages(recipe, plan, plan.evaluation_stages, lease)
        with storage_errors(recipe.storage, "runtime.storage"):
            evaluations = write_evaluations(recipe, plan)
    method = recipe.study.inference.method
    for name, evaluation in evaluations.items():
        print_evaluation(name if method == "none" else f"{name} with {method}", evaluation)
    if len(evaluations) == 1 and _made_with_other_settings(recipe, plan, plan.distill):
        print("no checkpoint of these settings; the storage has one of others")
    print_paths(page=f"{recipe.storage}/evaluation/index.html", **_scales_path(plan))
    if gate is not None:
        # The last is that of the checkpoint, or of the base model while there is no checkpoint.
        check_evaluation(gate, plan.study, list(evaluations.values())[-1], compared)
    return list(evaluations.values())


def run_analyse(recipe: Recipe, cells: Sequence[Cell] | None = None) -> None:
    """Why answers differ by position: of the base model and, once there is a checkpoint, of the distilled one."""
    (cell,) = cells or plan_command(recipe, "analyse")
    recipe, plan = cell.recipe, cell.plan
    preflight(recipe, plan, plan.analysis_stages)
    with _driver_lease(recipe) as lease:
        _run_stages(recipe, plan, plan.analysis_stages, lease)
        analyses = read_analyses(plan)
        write_analysis(recipe, analyses)
    for model, analysis in analyses.items():
        print_analysis(model, analysis)
    print_paths(analysis=f"{recipe.storage}/analysis/index.html")


def with_analysis(recipe: Recipe) -> Recipe:
    """The recipe with the section `analysis`; with its defaults if it has none.

    Raises:
        UserError: if the rest of the study contradicts it.
    """
    if recipe.study.analysis is not None:
        return recipe
    try:
        study = replace_section(recipe.study, analysis=AnalysisSection())
    except ValidationError as error:
        raise to_user_error(error, Study, recipe.name, []) from None
    return recipe.model_copy(update={"study": study})


def run_sample(recipe: Recipe, cells: Sequence[Cell] | None = None) -> None:
    """Samples, with what the teacher stores beside them."""
    (plan,) = (cell.plan for cell in cells or plan_command(recipe, "sample"))
    preflight(recipe, plan, plan.sampling_stages)
    with _driver_lease(recipe) as lease:
        _run_stages(recipe, plan, plan.sampling_stages, lease)


def run_distill(recipe: Recipe, cells: Sequence[Cell] | None = None) -> None:
    """The checkpoint, from stored samples; in streamed mode, it samples what is missing at the same time."""
    (plan,) = (cell.plan for cell in cells or plan_command(recipe, "distill"))
    preflight(recipe, plan, plan.training_stages)
    with _driver_lease(recipe) as lease:
        # Only in streamed mode does this command make the missing samples; staged runs may have a single GPU for both.
        if recipe.runtime.mode == "staged":
            _require_finished(recipe, plan, [plan.sample])
        _run_stages(recipe, plan, plan.training_stages, lease)
    print_paths(checkpoint=model_url(plan.distill.artifact))


def run_report(recipe: Recipe, cells: Sequence[Cell] | None = None) -> None:
    """The report of a finished study or sweep.

    Raises:
        UserError: with the stage, or the studies of the sweep, that are not finished.
    """
    cells = cells or plan_command(recipe, "report")
    if recipe.sweep:
        _report_sweep(recipe, cells)
        return
    (plan,) = (cell.plan for cell in cells)
    check_storage(recipe.storage, recipe.name)
    _report(recipe, plan)


def command_summary(recipe: Recipe, command: str, cells: Sequence[Cell]) -> dict[str, Any]:
    """What `--json` prints: of every study of the recipe the artifacts that the command makes, and the report."""
    studies = []
    for cell in cells:
        stages = {}
        for stage in stages_of_command(command, cell.plan):
            manifest = stage.artifact.manifest()
            if manifest is not None:
                found = {"artifact": stage.artifact.url, "counts": manifest.counts, "seconds": manifest.seconds}
                stages[stage.name] = found
        studies.append({"settings": cell.settings, "fingerprint": cell.plan.fingerprint, "stages": stages})
    result: dict[str, Any] = {"command": command, "storage": recipe.storage, "studies": studies}
    if command in ("study", "report"):
        result["report"] = read_report(recipe.storage)
    if command == "evaluate":
        evaluations = read_evaluations(recipe, cells[0].plan)
        result["curves"] = {name: asdict(evaluation.curve) for name, evaluation in evaluations.items()}
    return result


def stages_of_command(command: str, plan: Plan) -> list[Stage]:
    """The stages that a command runs, as far as they are not finished."""
    if command == "evaluate":
        return plan.evaluation_stages
    if command == "analyse":
        return plan.analysis_stages
    if command == "sample":
        return plan.sampling_stages
    if command == "distill":
        return plan.training_stages
    return plan.stages


def _run_stages(recipe: Recipe, plan: Plan, stages: Sequence[Stage], lease: Lease) -> None:
    streams = plan.distill in stages and recipe.runtime.mode == "streamed"
    # Built only when a stage must run, so that a finished study imports no Ray.
    context = provenance = None
    checked = False
    for stage in stages:
        manifest = stage.artifact.manifest()
        duration = "cached"
        if manifest is None:
            if stage in plan.sampling and streams:
                continue  # the round's stage `distill` trains on the samples while they are made, and publishes them
            if context is None or provenance is None:
                provenance = Provenance.now(recipe, plan.study.model)
                logged_settings = plan.study.model_dump(mode="json")
                executor = LeasedExecutor(build_executor(recipe.runtime), lease)
                context = RunContext(recipe.name, recipe.storage, logged_settings, recipe.runtime, executor, lease)
            # Once the data of all tasks is prepared, and before anything expensive starts.
            if not checked and stage.artifact.name != EXAMPLES:
                checked = True
                check_prompts(recipe, plan, stages)
            lease.check()
            start = time.monotonic()
            try:
                manifest = stage.run(stage, context)
            except BaseException:
                # Of what a stopped stage has finished, too: later it is found finished, and nothing records it.
                with contextlib.suppress(Exception):
                    lease.check()
                    _record_provenance(plan, stage, provenance)
                raise
            _record_provenance(plan, stage, provenance)
            duration = f"{time.monotonic() - start:9.1f} s"
        elif stage.artifact.name == CHECKPOINT:
            stage.artifact.require(MODEL_FOLDER, STEPS_FOLDER)
            # A run that was killed once it had published the checkpoint could leave it; it is several times as large.
            stage.artifact.remove(STATE_FOLDER)
        print(f"{stage.name:<18}  {duration}  {summarise_manifest(manifest)}", flush=True)
        for warning in count_warnings(manifest.counts):
            warn(f"{stage.name}: {warning}")
    # What the command writes beside artifacts, too.
    lease.check()


def _run_sweep(recipe: Recipe, cells: Sequence[Cell]) -> None:
    """Every study in the same storage, where studies share the artifacts that their settings do not change."""
    # All of them first: the last study should not be refused hours after the first one has started.
    for cell in cells:
        preflight(cell.recipe, cell.plan, cell.plan.stages)
    for number, cell in enumerate(cells, start=1):
        print(f"--- study {number} of {len(cells)}{format_settings(cell.settings)}", flush=True)
        with _driver_lease(recipe) as lease:
            _run_stages(cell.recipe, cell.plan, cell.plan.stages, lease)
    _report_sweep(recipe, cells)  # takes little time beside the studies, so it is always written


def make_cells(recipe: Recipe) -> list[Cell]:
    """The studies of a sweep; of another recipe the only one."""
    pairs = sweep_cells(recipe)
    plans = make_plans([cell for _, cell in pairs])
    return [Cell(settings, cell, plan) for (settings, cell), plan in zip(pairs, plans, strict=True)]


def _report(recipe: Recipe, plan: Plan) -> None:
    _require_finished(recipe, plan, plan.reported_stages)
    with storage_errors(recipe.storage, "runtime.storage"):
        comparison = make_report(recipe, plan)
    print_comparison(comparison)
    print_paths(**_trained_paths(recipe, plan))


def _trained_paths(recipe: Recipe, plan: Plan) -> dict[str, str]:
    report = f"{recipe.storage}/report/index.html"
    return {"checkpoint": model_url(plan.distill.artifact), "report": report, **_scales_path(plan)}


def _scales_path(plan: Plan) -> dict[str, str]:
    """The config with the scales that a search has found, if there was one."""
    search = plan.search_scales
    return {} if search is None else {"scales": f"{search.artifact.url}/{EXPORT_FOLDER}"}


def _report_sweep(recipe: Recipe, cells: Sequence[Cell]) -> None:
    unfinished = []
    for cell in cells:
        if any(not stage.artifact.is_finished for stage in cell.plan.reported_stages):
            unfinished.append(format_settings(cell.settings).removeprefix(", "))
    if unfinished:
        # Named by their settings, since the storage holds many fingerprints.
        raise UserError(
            f"{recipe.storage}: {len(unfinished)} of {len(cells)} studies are not finished: {'; '.join(unfinished)}; "
            f"run `study` again"
        )
    with storage_errors(recipe.storage, "runtime.storage"):
        make_sweep_report(recipe, cells)
    print_paths(report=f"{recipe.storage}/report/index.html")


def _record_provenance(plan: Plan, stage: Stage, provenance: Provenance) -> None:
    provenance = provenance.dated()
    for name, task in plan.other_tasks.items():
        if stage in (task.prepare, task.evaluate_base, task.evaluate_distilled):
            provenance = provenance.of_task(name, task.study)
    for made in (stage, *stage.streams.values()):
        inputs = {name: each.artifact for name, each in made.inputs.items()}
        record_provenance(made.artifact, provenance, made.name, inputs)


def _require_one_study(recipe: Recipe) -> None:
    if recipe.sweep:
        raise UserError(
            f"{recipe.name}: is a sweep of several studies; this command takes one study (study and report take sweeps)"
        )


def _require_finished(recipe: Recipe, plan: Plan, stages: Sequence[Stage]) -> None:
    for stage in stages:
        artifact = stage.artifact
        if artifact.is_finished:
            continue
        others = _made_with_other_settings(recipe, plan, stage)
        hint = f"; it holds {', '.join(others)}, made with other settings" if others else ""
        command = "`study` first (or `sample`)" if stage is plan.sample else "`study` first"
        raise UserError(
            f"{recipe.storage}: no finished {artifact.name} of fingerprint {artifact.fingerprint}{hint}; run {command}"
        )


def _made_with_other_settings(recipe: Recipe, plan: Plan, stage: Stage) -> list[str]:
    """The fingerprints of the artifacts of a stage that no round of this study makes."""
    own = [each.artifact.fingerprint for each in (stage, *plan.stages)]
    return other_fingerprints(recipe.storage, stage.artifact.name, own)


@contextmanager
def _driver_lease(recipe: Recipe) -> Iterator[Lease]:
    """The right to make artifacts in the storage, which one driver at a time has.

    If it is lost, the program ends at once. A process that only calls these functions, such as a notebook, is not
    ended, but the call.

    Raises:
        TransientError: if the lease is lost in such a process.
    """
    # Another recipe's storage is refused now, not after waiting for its driver to end.
    is_new = claim_storage(recipe.storage, recipe.name)
    try:
        with hold_lease(recipe.storage, on_lost=exit_immediately if is_program() else None) as lease:
            claim_storage(recipe.storage, recipe.name)  # again: the previous driver may have released it
            try:
                yield lease
            except Exception as error:
                # What failed after the loss may have failed because of it.
                if not isinstance(error, TransientError):
                    lease.check()
                raise
            finally:
                # The body's own outcome counts. A storage that stays claimed is this recipe's.
                with contextlib.suppress(Exception):
                    lease.check()
                    release_storage(recipe.storage)
    finally:
        if is_new:
            remove_if_empty(recipe.storage)
