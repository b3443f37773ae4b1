"""The commands: run the stages whose artifacts are not there yet, in order, and say what happened."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pipelines.plan import Plan, make_plan, naming_task
from pos2distill.config import ModelSection, Recipe, Study
from pos2distill.config.load import sweep_cells
from pos2distill.errors import GateError, UserError
from pos2distill.evaluation.scores import Curve, format_slots, to_curve, to_grid, truncation_warning
from pos2distill.store.artifacts import (
    Artifact,
    Manifest,
    check_storage,
    claim_storage,
    other_fingerprints,
    release_storage,
)
from pos2distill.store.lease import hold_lease
from pos2distill.training.trackers import check_trackers
from pos2distill.urls import open_url

Stage = Callable[[Recipe, Plan], Manifest]


def run_study(recipe: Recipe) -> None:
    """The whole chain: examples, base curve, samples, checkpoint, distilled curve, report; of a sweep, every cell's."""
    if recipe.sweep:
        _run_sweep(recipe)
        return
    with _writing(recipe) as plan:
        _run(recipe, plan, _stages("study", plan))
    if _reported_fingerprint(recipe.storage) == plan.fingerprint:
        print(f"{'report':<18}  done before")
        _print_comparison(_curve(recipe, plan.base_scores), _curve(recipe, plan.distilled_scores))
        _print_paths(recipe, plan)
    else:
        run_report(recipe, plan)


def run_evaluate(recipe: Recipe, fail_if_gap_above: float | None = None) -> None:
    """The base model's curve and, once there is a checkpoint, the distilled one's.

    Args:
        fail_if_gap_above: in points of 100.
    Raises:
        GateError: if the last of these curves has a larger GAP than that, or no right answer at all.
    """
    with _writing(_one_study(recipe)) as plan:
        _run(recipe, plan, _stages("evaluate", plan))
    curve = _curve(recipe, plan.base_scores)
    _print_curve(plan.base_scores.name, curve)
    if plan.distilled_scores.manifest():
        curve = _curve(recipe, plan.distilled_scores)
        _print_curve(plan.distilled_scores.name, curve)
    if fail_if_gap_above is not None:
        _judge(curve, fail_if_gap_above)


def _judge(curve: Curve, highest_gap: float) -> None:
    if not curve.mean:
        raise GateError("no answer is right (mean 0.0), so that GAP 0 says nothing")
    # Rounded, since 0.2 - 0.15 is more than 0.05 in floating point.
    if (gap := round(100 * curve.gap, 6)) > highest_gap:
        raise GateError(f"GAP {gap:g} is above {highest_gap:g} (mean {100 * curve.mean:.1f})")


def run_sample(recipe: Recipe) -> None:
    """Samples and teacher states."""
    with _writing(_one_study(recipe)) as plan:
        _run(recipe, plan, _stages("sample", plan))


def run_distill(recipe: Recipe) -> None:
    """The checkpoint, from samples that are there; streamed, sampling what is missing meanwhile."""
    with _writing(_one_study(recipe)) as plan:
        if recipe.runtime.mode == "staged":
            _require(recipe, plan, ["sample"])
        _run(recipe, plan, _stages("distill", plan))


def run_report(recipe: Recipe, plan: Plan | None = None) -> None:
    """The report, from artifacts that are there."""
    from pipelines.stages.report import make_report, make_sweep_report

    if recipe.sweep:
        cells = [(settings, cell, make_plan(cell)) for settings, cell in sweep_cells(recipe)]
        _require_finished(recipe, cells)
        make_sweep_report(recipe, cells)
        print(f"report      {recipe.storage}/report/index.html")
        return
    plan = plan or make_plan(recipe)
    check_storage(recipe.storage, recipe.name)
    _require(recipe, plan, list(plan.artifacts))
    comparison = make_report(recipe, plan)
    _print_comparison(comparison.before, comparison.after)
    _print_paths(recipe, plan)


def describe(recipe: Recipe, command: str = "study") -> str:
    """What `--dry-run` shows below the configuration: fingerprints, and which stages the command would run."""
    lines = []
    absent = "missing" if command == "report" else "to run"
    for settings, cell in sweep_cells(recipe):
        plan = make_plan(cell)
        _check_against_model(cell.study)
        lines.append(f"# study {plan.fingerprint}, storage {cell.storage}{_shown_settings(settings)}")
        for stage in _stages(command, plan):
            artifact = plan.artifacts[stage]
            state = "done" if artifact.manifest() else absent
            lines.append(f"#   {stage:<18}  {artifact.fingerprint}  {state}")
    return "\n".join(lines)


def _stages(command: str, plan: Plan) -> list[str]:
    """The stages that a command runs, or for `report` wants, in order."""
    sampled = ["examples", *(["choose slot"] if plan.slot_scores else []), "sample"]
    measured = ["examples", "evaluate base"]
    return {
        "evaluate": [*measured, "evaluate distilled"] if plan.checkpoint.manifest() else measured,
        "sample": sampled,
        "distill": [*sampled, "distill"],
    }.get(command, list(plan.artifacts))


def _run_sweep(recipe: Recipe) -> None:
    """Every cell in the same storage, where cells share the artifacts that their settings do not change."""
    cells = sweep_cells(recipe)
    for number, (settings, cell) in enumerate(cells, start=1):
        print(f"--- study {number} of {len(cells)}{_shown_settings(settings)}", flush=True)
        with _writing(cell) as plan:
            _run(cell, plan, _stages("study", plan))
    run_report(recipe)  # cheap beside the studies, so it is made every time


def _shown_settings(settings: Mapping[str, Any]) -> str:
    return "".join(f", {name}={value}" for name, value in settings.items())


def _one_study(recipe: Recipe) -> Recipe:
    if recipe.sweep:
        raise UserError(
            f"{recipe.name}: is a sweep of several studies; this command wants one (study and report take it)"
        )
    return recipe


@contextmanager
def _writing(recipe: Recipe) -> Iterator[Plan]:
    """The plan, for making artifacts: by one driver at a time. A report is the same whoever writes it."""
    plan = make_plan(recipe)
    claim_storage(recipe.storage, recipe.name)
    with hold_lease(recipe.storage):
        claim_storage(recipe.storage, recipe.name)  # again: who held it before may have given it back
        try:
            yield plan
        finally:
            release_storage(recipe.storage)


def _run(recipe: Recipe, plan: Plan, stages: list[str]) -> None:
    _check_against_model(recipe.study)
    if "distill" in stages and not plan.checkpoint.manifest():
        check_trackers(recipe.runtime.trackers)
    for stage in stages:
        artifact = plan.artifacts[stage]
        if manifest := artifact.manifest():
            took = "done before"
        elif stage == "sample" and "distill" in stages and recipe.runtime.mode == "streamed":
            continue  # the samples go straight into training, and are published there
        else:
            start = time.monotonic()
            manifest = _stage(stage)(recipe, plan)
            took = f"{time.monotonic() - start:9.1f} s"
        print(f"{stage:<18}  {took}  {_told(manifest)}", flush=True)
        if warning := truncation_warning(manifest.counts):
            print(f"warning: {stage}: {warning}", file=sys.stderr, flush=True)


def _check_against_model(study: Study) -> None:
    """Refuse settings that only the model's config can refuse, before anything expensive starts."""
    if k := study.method.teacher_topk:
        from pos2distill.models.load import load_config

        if k > (vocabulary := load_config(study.model).get_text_config().vocab_size):
            raise UserError(f"method.teacher_topk: {k}, but {study.model.path} has {vocabulary} tokens in all")
    if lora := study.training.lora:
        from pos2distill.models.lora import check_targets

        check_targets(study.model, lora)


def _stage(name: str) -> Stage:
    """The function of a stage; its module, and all that this loads, is imported when the stage runs."""
    task, _, own = name.rpartition(": ")
    if task:
        return lambda recipe, plan: _transfer_stage(own, recipe, plan, task)
    return {
        "examples": _examples_stage,
        "evaluate base": _evaluate_stage,
        "choose slot": _choose_stage,
        "sample": _sample_stage,
        "distill": _distill_stage,
        "evaluate distilled": _evaluate_distilled_stage,
    }[name]


def _examples_stage(recipe: Recipe, plan: Plan) -> Manifest:
    from pipelines.stages.prepare import make_examples

    return make_examples(recipe, plan.examples)


def _choose_stage(recipe: Recipe, plan: Plan) -> Manifest:
    from pipelines.stages.choose_slot import make_choice

    return make_choice(recipe, plan)


def _sample_stage(recipe: Recipe, plan: Plan) -> Manifest:
    from pipelines.stages.choose_slot import with_choice
    from pipelines.stages.sample import make_samples

    return make_samples(with_choice(recipe, plan), plan)


def _distill_stage(recipe: Recipe, plan: Plan) -> Manifest:
    from pipelines.stages.choose_slot import with_choice
    from pipelines.stages.distill import make_checkpoint

    return make_checkpoint(with_choice(recipe, plan), plan)


def _evaluate_stage(recipe: Recipe, plan: Plan) -> Manifest:
    from pipelines.stages.evaluate import make_scores

    return make_scores(recipe, plan.examples, plan.base_scores, recipe.study.model, "evaluate base")


def _evaluate_distilled_stage(recipe: Recipe, plan: Plan) -> Manifest:
    from pipelines.stages.evaluate import make_scores

    model = _distilled(recipe, plan)
    return make_scores(recipe, plan.examples, plan.distilled_scores, model, "evaluate distilled")


def _transfer_stage(own: str, recipe: Recipe, plan: Plan, task: str) -> Manifest:
    """A stage of another task, asked of this recipe's models."""
    from pipelines.stages.evaluate import make_scores
    from pipelines.stages.prepare import make_examples

    transfer = plan.transfers[task]
    if own == "examples":
        with naming_task(task):
            return make_examples(transfer.recipe, transfer.examples)
    scores, model = transfer.base_scores, recipe.study.model
    if own == "evaluate distilled":
        scores, model = transfer.distilled_scores, _distilled(recipe, plan)
    return make_scores(transfer.recipe, transfer.examples, scores, model, f"{task}: {own}")


def _distilled(recipe: Recipe, plan: Plan) -> ModelSection:
    return recipe.study.model.model_copy(update={"path": f"{plan.checkpoint.url}/model", "revision": None})


def _require(recipe: Recipe, plan: Plan, stages: list[str]) -> None:
    for stage in stages:
        artifact = plan.artifacts[stage]
        if artifact.manifest():
            continue
        others = other_fingerprints(recipe.storage, artifact.name, artifact.fingerprint)
        held = f"; it holds {', '.join(others)}, made with other settings" if others else ""
        raise UserError(
            f"{recipe.storage}: no finished {artifact.name} of fingerprint {artifact.fingerprint}{held}; "
            f"run `study` first{' (or `sample`)' if stage == 'sample' else ''}"
        )


def _require_finished(recipe: Recipe, cells: Sequence[tuple[dict[str, Any], Recipe, Plan]]) -> None:
    """Every study of a sweep; what is not done is named by its settings, since the storage holds many fingerprints."""
    unfinished = [
        _shown_settings(settings).removeprefix(", ")
        for settings, _, plan in cells
        if not all(artifact.manifest() for artifact in plan.artifacts.values())
    ]
    if unfinished:
        raise UserError(
            f"{recipe.storage}: {len(unfinished)} of {len(cells)} studies are not finished: {'; '.join(unfinished)}; "
            f"run `study` again"
        )


def _reported_fingerprint(storage: str) -> str | None:
    """The study that the report in this storage tells of; `summary.json` is the last file of a report."""
    fs, path = open_url(f"{storage}/report/summary.json", "runtime.storage")
    return json.loads(fs.cat_file(path)).get("fingerprint") if fs.exists(path) else None


def _told(manifest: Manifest) -> str:
    """What a stage came to in a line: the slots that it chose, or its counts."""
    if "slots" in (choice := manifest.details):
        low, high = choice["ci95"]
        where = f"position {format_slots(tuple(choice['slots']))} of {choice['curve']['documents']} documents"
        return f"{where}, {choice['accuracy']:.2f} [{low:.2f}, {high:.2f}]"
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in manifest.counts.items())


def _curve(recipe: Recipe, artifact: Artifact) -> Curve:
    study = recipe.study
    grid = to_grid(artifact.read_table("predictions.parquet"), study.data.documents)
    return to_curve(grid, bootstrap_samples=study.evaluation.bootstrap_samples, seed=study.seed)


def _print_paths(recipe: Recipe, plan: Plan) -> None:
    print(f"checkpoint  {plan.checkpoint.url}/model")
    print(f"report      {recipe.storage}/report/index.html")


def _print_comparison(before: Curve, after: Curve) -> None:
    print(f"\naccuracy by position of the gold document among {before.documents}, {before.examples} examples each")
    print("position  before                   after")
    for slot, old, new in zip(before.slots, before.accuracy_by_slot, after.accuracy_by_slot, strict=True):
        print(f"{format_slots(slot):>8}  {old:.2f} {_bar(old)}  {new:.2f} {_bar(new)}")
    for group, old in before.by_group.items():
        print(f"{group:>12}  {old:.3f}                {after.by_group[group]:.3f}")
    print(f"    mean  {before.mean:.3f}                    {after.mean:.3f}")
    print(f"     GAP  {before.gap:.3f}                    {after.gap:.3f}\n")


def _print_curve(label: str, curve: Curve) -> None:
    print(f"\n{label}: {curve.documents} documents, {curve.examples} examples at each position")
    for slot, accuracy in zip(curve.slots, curve.accuracy_by_slot, strict=True):
        print(f"{format_slots(slot):>8}  {accuracy:.2f} {_bar(accuracy)}")
    for group, accuracy in curve.by_group.items():
        print(f"{group:>12}  {accuracy:.3f}")
    print(
        f"    mean  {curve.mean:.3f} [{curve.ci95[0]:.3f}, {curve.ci95[1]:.3f}], GAP {curve.gap:.3f}, F1 {curve.f1:.3f}"
    )


def _bar(share: float, width: int = 18) -> str:
    filled = round(share * width)
    return "█" * filled + "·" * (width - filled)
