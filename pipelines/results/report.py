"""The report: everything the artifacts of a study hold, for people and programs.

It is not a stage and has no artifact: `report/` shows the study that was reported last (see `folders`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pos2distill.config import Recipe, Study, fingerprint
from pos2distill.config.defaults import changed_study_settings
from pos2distill.evaluation.page import RunDescription
from pos2distill.evaluation.questions import EvaluatedPrompts, EvaluatedTask
from pos2distill.evaluation.report import (
    Comparison,
    ReportInputs,
    build_summary,
    compare,
    render_analysis,
    render_model_card,
    render_report,
)
from pos2distill.evaluation.sweep import CellResult, SweepRow, render_sweep, summarize_sweep, to_rows
from pos2distill.models.files import is_hub_name, read_license
from pos2distill.models.rope.curves import CONFIG_KEY
from pos2distill.records import Slots
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.checkpoint_layout import MODEL_CARD, MODEL_FOLDER, model_url
from pos2distill.store.files import write_bytes

from ..plan import Plan, PlannedStudy, TaskPlan
from ..provenance import Provenance, package_versions, read_provenance
from ..stages.analyze import ANALYSIS, read_analysis
from ..stages.distill import PEAK_MEMORY, has_adapter, read_steps
from ..stages.evaluate import eval_specs
from ..stages.made_from import is_current
from ..stages.predictions import read_predictions
from ..stages.prepare import EVALUATION_FILE, read_locations, read_prepared
from ..stages.resolve import resolve_auto_settings
from ..stages.stage import Stage
from .folders import ANALYSIS_FOLDER, REPORT_FOLDER, SUMMARY, has_page, read_index, write_folder


def make_report(recipe: Recipe, plan: Plan) -> Comparison:
    """Write `report/` (index.html, summary.json, curves.csv, pictures) and the checkpoint's model card.

    Returns: the comparison at the prompt length of training.
    """
    inputs = report_inputs(recipe, plan)
    _write_model_card(inputs, plan)
    write_folder(recipe.storage, REPORT_FOLDER, render_report(inputs), SUMMARY, build_summary(inputs))
    if inputs.analyses:
        write_analysis(recipe, inputs.analyses)
    return inputs.main


def compare_models(plan: Plan) -> Comparison:
    """The comparison of a finished study at the prompt length of training."""
    study = resolve_auto_settings(plan.study, plan.training_inputs)
    return TaskResults(study, plan.prepare, plan.evaluate_base, plan.evaluate_distilled).comparisons()[0]


def make_sweep_report(recipe: Recipe, studies: Sequence[PlannedStudy]) -> list[SweepRow]:
    """Write `report/` of a sweep (one table and one plot, intervals over seeds), and every checkpoint's model card.

    Returns: the rows of the table.
    """
    results, dates = [], []
    for planned in studies:
        inputs = report_inputs(planned.recipe, planned.plan)
        _write_model_card(inputs, planned.plan)
        dates.append(inputs.run.made_with["date"])
        comparisons = {"as trained": inputs.main}
        for comparison in inputs.others:
            comparisons[f"{comparison.before.documents} documents"] = comparison
        comparisons.update(inputs.other_tasks)
        results.append(CellResult(planned.settings, comparisons))
    files = render_sweep(recipe.name, recipe.description, results, package_versions(recipe))
    summary = summarize_sweep(recipe.name, results)
    summary["fingerprint"] = fingerprint([planned.plan.fingerprint for planned in studies])
    summary["date"] = max(dates)
    write_folder(recipe.storage, REPORT_FOLDER, files, SUMMARY, summary)
    return to_rows(results)


def read_analyses(plan: Plan) -> dict[str, dict[str, Any]]:
    """The finished analyses by model, that of the base model first. Each with its fingerprint."""
    analyses = {}
    for model, stage in (("base", plan.analyze_base), ("distilled", plan.analyze_distilled)):
        if stage is not None and is_current(stage):
            analyses[model] = {**read_analysis(stage), "fingerprint": stage.fingerprint}
    return analyses


def write_analysis(recipe: Recipe, analyses: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `analysis/` (index.html, analysis.json, pictures)."""
    write_folder(recipe.storage, ANALYSIS_FOLDER, render_analysis(recipe.name, analyses), ANALYSIS, analyses)


def report_shows(storage: str, plan: Plan) -> bool:
    """Whether the report in this storage, which all its studies write, shows this one as it is now."""
    summary = read_report(storage) or {}
    # The fingerprint first: it needs no manifests, of which the stages may have none.
    if summary.get("fingerprint") != plan.fingerprint or summary.get("results") != _results_digest(plan):
        return False
    # Of a storage that was copied, the page names the checkpoint of the other one.
    return summary.get("checkpoint") == model_url(plan.distill.artifact) and has_page(storage, REPORT_FOLDER)


def _results_digest(plan: Plan) -> str:
    """A digest of the manifests that a report shows: of a stage that is run again, another one."""
    manifests = [stage.artifact.manifest() for stage in plan.reported_stages()]
    return fingerprint([asdict(manifest) for manifest in manifests if manifest is not None])


def read_report(storage: str) -> dict[str, Any] | None:
    """The summary of the report in this storage, if there is one."""
    return read_index(storage, REPORT_FOLDER, SUMMARY)


def _write_model_card(inputs: ReportInputs, plan: Plan) -> None:
    """Describe the checkpoint by a study of it, but not by one that changes only how it is evaluated."""
    if plan.study.inference.spec.only_evaluated:
        return
    checkpoint = plan.distill.artifact
    card = f"{checkpoint.path}/{MODEL_FOLDER}/{MODEL_CARD}"
    write_bytes(checkpoint.fs, card, render_model_card(inputs).encode())


def _shown_slots(study: Study) -> Slots:
    """The advantageous slots; none if they are random."""
    if study.method.advantageous_slot == "random":
        return ()
    # The curves also show the slots of the examples with the fewest hops (see `Grid`).
    return study.fixed_advantageous_slots(min(study.data.hops))


def report_inputs(recipe: Recipe, plan: Plan) -> ReportInputs:
    """What the report shows of the stages that are finished, which both evaluations and the checkpoint must be."""
    # First: where another driver makes a result again meanwhile, the report counts as of the earlier one.
    results_digest = _results_digest(plan)
    study = resolve_auto_settings(plan.study, plan.training_inputs)
    choice = None
    if "slot" in plan.training_inputs:
        choice = plan.training_inputs["slot"].details("accuracy", "ci95")
    provenance = provenance_or_now(plan.distill.artifact, recipe, plan)
    main = TaskResults(study, plan.prepare, plan.evaluate_base, plan.evaluate_distilled)
    first, *others = main.comparisons()
    other_results = {}
    for name, task in plan.other_tasks.items():
        if is_evaluated(task):
            other_results[name] = TaskResults(task.study, task.prepare, task.evaluate_base, task.evaluate_distilled)
    return ReportInputs(
        run=describe_run(
            recipe,
            plan,
            plan.reported_stages(),
            provenance=provenance,
            settings=_shown_settings(study, plan.distill.artifact) | {"runtime": _shown_runtime(provenance)},
            fingerprint=plan.fingerprint,
            prompt_lengths=main.prompt_lengths,
        ),
        method=study.method.name,
        advantageous=_shown_slots(study),
        choice=choice,
        main=first,
        others=others,
        # Another task is evaluated only at its own training length (see `_plan_task`).
        other_tasks={name: results.comparisons()[0] for name, results in other_results.items()},
        tasks=[results.questions() for results in (main, *other_results.values())],
        steps=_steps(plan),
        checkpoint=model_url(plan.distill.artifact),
        base_model=study.model.path if is_hub_name(study.model.path) else None,
        license=read_license(study.model),
        results_digest=results_digest,
        artifacts={
            "base": plan.evaluate_base.artifact.folder,
            "distilled": plan.evaluate_distilled.artifact.folder,
        },
        analyses=read_analyses(plan),
        has_adapter=has_adapter(plan.distill.artifact),
    )


def describe_run(
    recipe: Recipe,
    plan: Plan,
    stages: Sequence[Stage],
    *,
    provenance: Provenance,
    settings: Mapping[str, Any],
    fingerprint: str,
    prompt_lengths: Mapping[str, Any],
) -> RunDescription:
    """What a page shows of a run besides its results. Args: see `RunDescription`; stages: those that are counted."""
    read = ((stage.name, stage.artifact.manifest()) for stage in stages)
    manifests = {name: manifest for name, manifest in read if manifest is not None}
    memory = {name: manifest.details.get(PEAK_MEMORY) for name, manifest in manifests.items()}
    return RunDescription(
        name=recipe.name,
        description=recipe.description,
        counts={name: manifest.counts for name, manifest in manifests.items()},
        seconds=_seconds(manifests.values()),
        peak_memory_gib={name: gib for name, gib in memory.items() if gib is not None},
        settings=settings,
        changed_settings=changed_study_settings(recipe),
        command=provenance.command,
        made_with=provenance.summary,
        versions=provenance.versions,
        fingerprint=fingerprint,
        prompt_lengths=prompt_lengths,
        search=read_search(plan),
    )


def provenance_or_now(artifact: Artifact, recipe: Recipe, plan: Plan) -> Provenance:
    """How an artifact was made; as this process would make it if that was not recorded."""
    return read_provenance(artifact) or Provenance.now(recipe, plan.study.model)


def read_search(plan: Plan) -> dict[str, Any] | None:
    """What the search of RoPE scales recorded; None if the study has none."""
    if plan.search_scales is None:
        return None
    found = plan.search_scales.output()
    return {**found.manifest().counts, **found.details("scales", "fitness", "unscaled", "best_by_generation")}


def _steps(plan: Plan) -> list[dict[str, Any]]:
    """The step records of all rounds, numbered from the first to the last; none of a checkpoint that was deleted."""
    steps: list[dict[str, Any]] = []
    for each in plan.rounds:
        if not each.distill.artifact.is_finished:
            continue
        start = len(steps)
        for record in read_steps(each.distill.artifact):
            steps.append({**record, "step": start + record["step"]})
    return steps


def is_evaluated(task: TaskPlan) -> bool:
    """Whether the evaluations of both models on another task are finished."""
    return is_current(task.evaluate_base) and is_current(task.evaluate_distilled)


def _seconds(manifests: Iterable[Manifest]) -> dict[str, float]:
    """The seconds that the stages measured, by their name."""
    seconds: dict[str, float] = {}
    for manifest in manifests:
        for name, value in manifest.seconds.items():
            # Several stages can measure under one name, such as all evaluations, so their times are added.
            seconds[name] = seconds.get(name, 0.0) + value
    return seconds


class TaskResults:
    """The evaluations of one model or of both, the base model's first, on one task."""

    def __init__(self, study: Study, prepare: Stage, *evaluations: Stage) -> None:
        self.study = study
        self.examples = prepare.artifact
        self.models = [read_predictions(stage.artifact) for stage in evaluations]
        first = evaluations[0]
        self.specs = eval_specs(study, first.inputs.get("curve"))
        self.evaluation = first.output()

    @property
    def prompt_lengths(self) -> dict[str, Any]:
        """The tokens of prompts and of the model's context."""
        names = ("prompt_tokens", "context_tokens")
        details = self.evaluation.details(*names)
        return {name: details[name] for name in names}

    def comparisons(self) -> list[Comparison]:
        """The comparisons of the two models at every prompt length, the length of training first."""
        before, after = self.models
        return [compare(before, after, documents, self.study) for documents in self.study.prompt_lengths]

    def questions(self) -> EvaluatedTask:
        """The questions, and the answers at every prompt length."""
        prompts = []
        for documents, spec in zip(self.study.prompt_lengths, self.specs, strict=True):
            label = f"{documents} documents"
            prompts.append(EvaluatedPrompts(label, documents, self.models, spec.slot_of_rank))
        data, examples = self.study.data, read_prepared(self.examples, EVALUATION_FILE)
        chat = self.evaluation.details().get("chat")  # not of a server, which applies its own template
        return EvaluatedTask(data.metric, data.wording, examples, read_locations(self.examples), prompts, chat)


def _shown_settings(study: Study, checkpoint: Artifact) -> dict[str, Any]:
    """All settings of the study, with the RoPE scales that the checkpoint has: its base model may bring its own."""
    settings = study.model_dump(mode="json")
    config = checkpoint.read_json(f"{MODEL_FOLDER}/config.json")
    settings["model"]["rope_scales"] = config.get(CONFIG_KEY, [])
    return settings


def _shown_runtime(provenance: Provenance) -> dict[str, object]:
    """That of the training, which the command that writes the report need not have."""
    runtime = provenance.settings["runtime"]
    trainers = runtime["trainers"]
    return {
        **{name: trainers[name] for name in ("strategy", "workers", "micro_batch_tokens")},
        **{pool: {size: runtime[pool][size] for size in ("min", "max")} for pool in ("samplers", "teachers")},
    }
