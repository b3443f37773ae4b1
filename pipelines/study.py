"""The commands: run the stages whose artifacts are not there yet, in order, and say what happened."""

import json
import time
from collections.abc import Callable

from pipelines.plan import Plan, make_plan
from pos2distill.config import ModelSection, Recipe
from pos2distill.errors import UserError
from pos2distill.evaluation.scores import Curve, to_curve, to_grid
from pos2distill.store.artifacts import Manifest, claim_storage, other_fingerprints
from pos2distill.urls import open_url

Stage = Callable[[Recipe, Plan], Manifest]


def run_study(recipe: Recipe) -> None:
    """The whole chain: examples, base curve, samples, checkpoint, distilled curve, report."""
    plan = _open(recipe)
    _run(recipe, plan, list(plan.artifacts))
    if _reported_fingerprint(recipe.storage) == plan.fingerprint:
        print(f"{'report':<18}  done before")
        _print_paths(recipe, plan)
    else:
        run_report(recipe, plan)


def run_evaluate(recipe: Recipe) -> None:
    """The base model's curve and, once there is a checkpoint, the distilled one's."""
    plan = _open(recipe)
    stages = ["examples", "evaluate base"]
    if plan.checkpoint.manifest():
        stages.append("evaluate distilled")
    _run(recipe, plan, stages)
    settings = recipe.study.evaluation
    for artifact in (plan.base_scores, plan.distilled_scores):
        if artifact.manifest():
            grid = to_grid(artifact.read_table("predictions.parquet"), recipe.study.data.documents)
            _print_curve(artifact.name, to_curve(grid, resamples=settings.resamples, seed=recipe.study.seed))


def run_sample(recipe: Recipe) -> None:
    """Samples and teacher states."""
    _run(recipe, _open(recipe), ["examples", "sample"])


def run_distill(recipe: Recipe) -> None:
    """The checkpoint, from samples that are there."""
    plan = _open(recipe)
    _require(recipe, plan, ["sample"])
    _run(recipe, plan, ["examples", "distill"])


def run_report(recipe: Recipe, plan: Plan | None = None) -> None:
    """The report, from artifacts that are there."""
    from pipelines.report import make_report

    plan = plan or _open(recipe)
    _require(recipe, plan, list(plan.artifacts))
    comparison = make_report(recipe, plan)
    _print_comparison(comparison.before, comparison.after)
    _print_paths(recipe, plan)


def describe(recipe: Recipe) -> str:
    """What `--dry-run` shows below the configuration: fingerprints, and which stages would run."""
    plan = make_plan(recipe)
    lines = [f"# study {plan.fingerprint}, storage {recipe.storage}"]
    for stage, artifact in plan.artifacts.items():
        state = "done" if artifact.manifest() else "to run"
        lines.append(f"#   {stage:<18}  {artifact.fingerprint}  {state}")
    return "\n".join(lines)


def _open(recipe: Recipe) -> Plan:
    plan = make_plan(recipe)
    claim_storage(recipe.storage, recipe.name)
    return plan


def _run(recipe: Recipe, plan: Plan, stages: list[str]) -> None:
    for stage in stages:
        artifact = plan.artifacts[stage]
        if manifest := artifact.manifest():
            print(f"{stage:<18}  done before  {_counts(manifest)}", flush=True)
            continue
        start = time.monotonic()
        manifest = _stage(stage)(recipe, plan)
        print(f"{stage:<18}  {time.monotonic() - start:9.1f} s  {_counts(manifest)}", flush=True)


def _stage(name: str) -> Stage:
    """The function of a stage; its module, and all that this loads, is imported when the stage runs."""
    if name == "examples":
        from pipelines.examples import make_examples

        return make_examples
    if name == "sample":
        from pipelines.sample import make_samples

        return make_samples
    if name == "distill":
        from pipelines.distill import make_checkpoint

        return make_checkpoint
    from pipelines.evaluate import make_scores

    if name == "evaluate base":
        return lambda recipe, plan: make_scores(recipe, plan, plan.base_scores, recipe.study.model, "base")
    return lambda recipe, plan: make_scores(recipe, plan, plan.distilled_scores, _distilled(recipe, plan), "distilled")


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


def _reported_fingerprint(storage: str) -> str | None:
    """The study that the report in this storage tells of; `summary.json` is the last file of a report."""
    fs, path = open_url(f"{storage}/report/summary.json", "runtime.storage")
    return json.loads(fs.cat_file(path))["fingerprint"] if fs.exists(path) else None


def _counts(manifest: Manifest) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in manifest.counts.items())


def _print_paths(recipe: Recipe, plan: Plan) -> None:
    print(f"checkpoint  {plan.checkpoint.url}/model")
    print(f"report      {recipe.storage}/report/index.html")


def _print_comparison(before: Curve, after: Curve) -> None:
    print(f"\naccuracy by position of the gold document among {before.documents}, {before.examples} examples each")
    print("position  before                   after")
    for slot, old, new in zip(before.slots, before.accuracy_by_slot, after.accuracy_by_slot, strict=True):
        print(f"{slot + 1:>8}  {old:.2f} {_bar(old)}  {new:.2f} {_bar(new)}")
    print(f"    mean  {before.mean:.3f}                    {after.mean:.3f}")
    print(f"     GAP  {before.gap:.3f}                    {after.gap:.3f}\n")


def _print_curve(label: str, curve: Curve) -> None:
    print(f"\n{label}: {curve.documents} documents, {curve.examples} examples at each position")
    for slot, accuracy in zip(curve.slots, curve.accuracy_by_slot, strict=True):
        print(f"{slot + 1:>8}  {accuracy:.2f} {_bar(accuracy)}")
    print(f"    mean  {curve.mean:.3f} [{curve.ci95[0]:.3f}, {curve.ci95[1]:.3f}], GAP {curve.gap:.3f}")


def _bar(share: float, width: int = 18) -> str:
    filled = round(share * width)
    return "█" * filled + "·" * (width - filled)
