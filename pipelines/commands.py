"""The commands: lists of stages, of which those that are not finished run in order. `COMMANDS` has them all.

What each of them does is said in `pos2distill.config.commands`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from pos2distill.config import AnalysisSection, Recipe, Study
from pos2distill.config.commands import COMMAND_FACTS
from pos2distill.config.gate import NO_GATE, Gate
from pos2distill.config.sweep import sweep_cells
from pos2distill.config.validation import to_user_error
from pos2distill.errors import UserError
from pos2distill.evaluation.result import Evaluation
from pos2distill.store.artifacts import other_fingerprints
from pos2distill.store.checkpoint_layout import model_url
from pos2distill.store.lease import Lease
from pos2distill.store.storage import check_storage
from pos2distill.urls import storage_errors

from .checks.preflight import preflight
from .plan import Plan, PlannedStudy, StageSelection, make_plans
from .results.evaluations import read_evaluations, write_evaluations
from .results.folders import ANALYSIS_FOLDER, EVALUATION_FOLDER, REPORT_FOLDER, page_url
from .results.gate import check_evaluation, read_baseline
from .results.report import (
    compare_models,
    make_report,
    make_sweep_report,
    read_analyses,
    read_report,
    report_shows,
    write_analysis,
)
from .scaled_config import SCALED_CONFIG_FOLDER
from .stage_runner import driver_lease, run_stages
from .stages.made_from import is_current, reject_changed_input
from .stages.stage import Stage
from .terminal import (
    format_settings,
    print_analysis,
    print_comparison,
    print_evaluation,
    print_paths,
    print_sweep,
)


@dataclass(frozen=True, slots=True)
class Command:
    """One command. Its functions take the recipe and its studies, of which there are several only for a sweep.

    Attributes:
        stages: which stages of a study it runs, finished or not.
        run: runs those that are not finished and shows the results. Of `evaluate` it also takes the gate.
        require: refuses to run while results of other commands are missing.
    """

    stages: StageSelection
    run: Callable[..., object]
    require: Callable[[Recipe, Sequence[PlannedStudy]], None] = lambda *_: None


def plan_command(recipe: Recipe, command: str) -> list[PlannedStudy]:
    """What a command runs: the studies of a sweep, or the recipe's only one.

    A command is planned once, and its results are read with the same plan: the data file, the model, or the commit that
    a hub's `main` names may change in the meantime.

    Raises:
        UserError: for a sweep, if the command takes one study.
    """
    facts = COMMAND_FACTS[command]
    if recipe.sweep and not facts.takes_sweeps:
        raise UserError(
            f"{recipe.name}: is a sweep of several studies; this command takes one study (study and report take "
            f"sweeps); add 'sweep={{}}' and its settings"
        )
    return _plan_studies(_with_analysis(recipe) if facts.adds_analysis else recipe)


def run_study(recipe: Recipe, studies: Sequence[PlannedStudy]) -> None:
    """Run the whole chain, up to the report. Of a sweep, every study, which share what their settings do not change."""
    # All of them first: the last study should not be rejected hours after the first one has started.
    checked = [_check(planned, STUDY) for planned in studies]
    for number, (planned, stages) in enumerate(zip(studies, checked, strict=True), start=1):
        if recipe.sweep:
            print(f"--- study {number} of {len(studies)}{format_settings(planned.settings)}", flush=True)
        with driver_lease(recipe) as lease:
            _run(planned, STUDY, stages, lease)
            # With the lease: two drivers that write the report's folder at the same time would lose one of them.
            if not recipe.sweep:
                _report_unless_shown(recipe, planned.plan)
            elif number == len(studies):
                _report_sweep(recipe, studies)  # takes little time beside the studies, so it is always written


def _report_unless_shown(recipe: Recipe, plan: Plan) -> None:
    """Write the report, or print what it says if it shows this study already."""
    if report_shows(recipe.storage, plan):
        print(f"{'report':<18}  cached")
        print_comparison(compare_models(plan))
        print_paths(**_trained_paths(recipe, plan))
    else:
        _report(recipe, plan)


def run_evaluate(recipe: Recipe, studies: Sequence[PlannedStudy], *, gate: Gate = NO_GATE) -> list[Evaluation]:
    """Measure the base model's curve and, once there is a checkpoint, the distilled one's; also write `evaluation/`.

    Args:
        gate: limits for the last of these curves.
    Returns: the evaluations of these models, in this order.
    Raises:
        GateError: if the data show that a limit is exceeded, or hardly any answer is correct.
    """
    (planned,) = studies
    plan = planned.plan
    if plan.other_tasks:
        names = ", ".join(plan.other_tasks)
        print(f"evaluation.also_evaluate: {names}: evaluated by `study`, not by `evaluate`", flush=True)
    # Before anything runs.
    compared = read_baseline(gate.baseline, plan.study) if gate.baseline is not None else None
    with _finished_stages(recipe, studies, EVALUATE), storage_errors(recipe.storage, "runtime.storage"):
        evaluations = write_evaluations(recipe, plan)
    inference = recipe.study.inference
    method = "" if inference.method == "none" else f" with {inference.method}"
    ranks = " (positions are ranks)" if inference.reorders else ""
    for name, evaluation in evaluations.items():
        print_evaluation(f"{name}{method}{ranks}", evaluation)
    if len(evaluations) == 1 and _made_with_other_settings(recipe, plan, plan.distill):
        print("no checkpoint of these settings; the storage has one of others")
    folder = f"{recipe.storage}/{EVALUATION_FOLDER}"
    scales = {"scales": f"{folder}/{SCALED_CONFIG_FOLDER}"} if plan.study.inference.scales else _scales_path(plan)
    print_paths(page=page_url(recipe.storage, EVALUATION_FOLDER), **scales)
    if gate != NO_GATE:
        # The last is that of the checkpoint, or of the base model while there is no checkpoint.
        check_evaluation(gate, plan.study, list(evaluations.values())[-1], compared)
    return list(evaluations.values())


def run_analyze(recipe: Recipe, studies: Sequence[PlannedStudy]) -> None:
    """Analyze why answers differ by position: of the base model and, once there is a checkpoint, the distilled one."""
    with _finished_stages(recipe, studies, ANALYZE) as planned:
        analyses = read_analyses(planned.plan)
        write_analysis(planned.recipe, analyses)
    for model, analysis in analyses.items():
        print_analysis(model, analysis)
    print_paths(analysis=page_url(recipe.storage, ANALYSIS_FOLDER))


def _with_analysis(recipe: Recipe) -> Recipe:
    """The recipe with the section `analysis`; with its defaults if it has none.

    Raises:
        UserError: if the rest of the study contradicts it.
    """
    if recipe.study.analysis is not None:
        return recipe
    try:
        study = recipe.study.replace(analysis=AnalysisSection())
    except ValidationError as error:
        raise to_user_error(error, Study, recipe.name, []) from None
    return recipe.replace(study=study)


def run_sample(recipe: Recipe, studies: Sequence[PlannedStudy]) -> None:
    """Make the samples, with what the teacher stores beside them."""
    with _finished_stages(recipe, studies, SAMPLE):
        pass  # nothing is written beside them


def run_distill(recipe: Recipe, studies: Sequence[PlannedStudy]) -> None:
    """Train the checkpoint from stored samples; in streamed mode, sample what is missing at the same time."""
    with _finished_stages(recipe, studies, DISTILL) as planned:
        checkpoint = model_url(planned.plan.distill.artifact)
    print_paths(checkpoint=checkpoint)


def _require_samples(recipe: Recipe, studies: Sequence[PlannedStudy]) -> None:
    """Reject `distill` in staged mode without finished samples, unless it has trained on them already.

    Only in streamed mode does it make the missing ones; staged runs may have a single GPU for both.
    """
    (planned,) = studies
    if recipe.runtime.mode == "staged" and not is_current(planned.plan.rounds[0].distill):
        _require_finished(recipe, planned.plan, [planned.plan.first_sample])


def run_report(recipe: Recipe, studies: Sequence[PlannedStudy]) -> None:
    """Write the report of a finished study or sweep.

    It does not wait for the lease, which a driver that trains in this storage may hold for hours.

    Raises:
        UserError: with the stage, or the studies of the sweep, that are not finished.
    """
    _require_results(recipe, studies)
    if recipe.sweep:
        _report_sweep(recipe, studies)
        return
    (planned,) = studies
    _report(recipe, planned.plan)


def _require_results(recipe: Recipe, studies: Sequence[PlannedStudy]) -> None:
    """Reject `report` while results are missing that it shows.

    Raises:
        UserError: with the stage, or the studies of the sweep, that are not finished.
    """
    check_storage(recipe.storage, recipe.name)
    if not recipe.sweep:
        (planned,) = studies
        _require_finished(recipe, planned.plan, planned.plan.reported_stages())
        return
    unfinished = []
    for planned in studies:
        if not all(map(is_current, planned.plan.reported_stages())):
            unfinished.append(format_settings(planned.settings).removeprefix(", "))
    if unfinished:
        # Named by their settings, since the storage holds many fingerprints.
        raise UserError(
            f"{recipe.storage}: {len(unfinished)} of {len(studies)} studies are not finished: {'; '.join(unfinished)}; "
            f"run `study` again"
        )


def command_summary(recipe: Recipe, command: str, studies: Sequence[PlannedStudy]) -> dict[str, Any]:
    """What `--json` prints: of every study of the recipe the artifacts that the command makes, and the report."""
    summaries = []
    for planned in studies:
        stages = {}
        for stage in planned.stages(COMMANDS[command].stages):
            manifest = stage.artifact.manifest()
            if manifest is not None:
                found = {"artifact": stage.artifact.url, "counts": manifest.counts, "seconds": manifest.seconds}
                stages[stage.name] = found
        summaries.append({"settings": planned.settings, "fingerprint": planned.plan.fingerprint, "stages": stages})
    result: dict[str, Any] = {"command": command, "storage": recipe.storage, "studies": summaries}
    if COMMAND_FACTS[command].reports:
        result["report"] = read_report(recipe.storage)
    if command == "evaluate":
        evaluations = read_evaluations(recipe, studies[0].plan)
        result["curves"] = {name: asdict(evaluation.curve) for name, evaluation in evaluations.items()}
    return result


STUDY = Command(lambda plan: plan.stages, run_study)
EVALUATE = Command(Plan.stages_for_evaluate, run_evaluate)
ANALYZE = Command(Plan.stages_for_analyze, run_analyze)
SAMPLE = Command(Plan.stages_for_sample, run_sample)
DISTILL = Command(Plan.stages_for_distill, run_distill, require=_require_samples)
REPORT = Command(Plan.reported_stages, run_report, require=_require_results)

COMMANDS = {
    "study": STUDY,
    "evaluate": EVALUATE,
    "analyze": ANALYZE,
    "sample": SAMPLE,
    "distill": DISTILL,
    "report": REPORT,
}
"""By their names, see `pos2distill.config.commands`."""


@contextmanager
def _finished_stages(recipe: Recipe, studies: Sequence[PlannedStudy], command: Command) -> Iterator[PlannedStudy]:
    """The body runs once the stages of a command for one study are finished, still as the storage's only driver."""
    (planned,) = studies
    checked = _check(planned, command)
    with driver_lease(recipe) as lease:
        command.require(recipe, studies)
        _run(planned, command, checked, lease)
        yield planned


def _check(planned: PlannedStudy, command: Command) -> list[Stage]:
    """Check everything that a command needs before its first stage. Returns its stages."""
    stages = planned.stages(command.stages)
    preflight(planned.recipe, planned.plan, stages)
    return stages


def _run(planned: PlannedStudy, command: Command, checked: Sequence[Stage], lease: Lease) -> None:
    """Run the stages of a command that are not finished.

    Args:
        checked: what `_check` returned. While this command waited for the lease, the driver that had it may have
            finished a checkpoint, whose stages are checked too.
    """
    stages = planned.stages(command.stages)
    if stages != checked:
        preflight(planned.recipe, planned.plan, stages)
    run_stages(planned.recipe, planned.plan, stages, lease)


def _plan_studies(recipe: Recipe) -> list[PlannedStudy]:
    """The studies of a sweep; of another recipe the only one."""
    cells = sweep_cells(recipe)
    plans = make_plans([cell for _, cell in cells])
    return [PlannedStudy(settings, cell, plan) for (settings, cell), plan in zip(cells, plans, strict=True)]


def _report(recipe: Recipe, plan: Plan) -> None:
    with storage_errors(recipe.storage, "runtime.storage"):
        comparison = make_report(recipe, plan)
    print_comparison(comparison)
    print_paths(**_trained_paths(recipe, plan))


def _trained_paths(recipe: Recipe, plan: Plan) -> dict[str, str]:
    report = page_url(recipe.storage, REPORT_FOLDER)
    return {"checkpoint": model_url(plan.distill.artifact), "report": report, **_scales_path(plan)}


def _scales_path(plan: Plan) -> dict[str, str]:
    """The config with the scales that a search has found, if there was one."""
    search = plan.search_scales
    return {} if search is None else {"scales": f"{search.artifact.url}/{SCALED_CONFIG_FOLDER}"}


def _report_sweep(recipe: Recipe, studies: Sequence[PlannedStudy]) -> None:
    with storage_errors(recipe.storage, "runtime.storage"):
        rows = make_sweep_report(recipe, studies)
    print_sweep(rows)
    for planned in studies:
        print(f"checkpoint  {model_url(planned.plan.distill.artifact)}{format_settings(planned.settings)}")
    print_paths(report=page_url(recipe.storage, REPORT_FOLDER))


def _require_finished(recipe: Recipe, plan: Plan, stages: Sequence[Stage]) -> None:
    for stage in stages:
        artifact = stage.artifact
        if is_current(stage):
            continue
        if artifact.is_finished:
            reject_changed_input(stage)
            raise UserError(
                f"{recipe.storage}: stage `{stage.name}` was made from an earlier result, which has been deleted or "
                f"made again; run `study`"
            )
        others = _made_with_other_settings(recipe, plan, stage)
        hint = f"; the storage holds {', '.join(others)}, made with other settings" if others else ""
        command = "`study` first (or `sample`)" if stage is plan.first_sample else "`study` first"
        raise UserError(
            f"{recipe.storage}: stage `{stage.name}` has not finished (fingerprint {artifact.fingerprint}){hint}; "
            f"run {command}"
        )


def _made_with_other_settings(recipe: Recipe, plan: Plan, stage: Stage) -> list[str]:
    """The fingerprints of the artifacts of a stage that no round of this study makes."""
    own = [each.artifact.fingerprint for each in (stage, *plan.stages)]
    return other_fingerprints(recipe.storage, stage.artifact.name, own)
