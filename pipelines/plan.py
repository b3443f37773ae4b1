"""The plan of a recipe: its stages, their inputs and fingerprints.

Planning reads the data file and the model for their digests. It does not read the storage; only the choice of a
command's stages depends on what is finished there.

A changed setting changes the fingerprints of the stages that declare it, and of the stages that read their results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from pos2distill.config import Recipe, Study, fingerprint
from pos2distill.config.load import validate_evaluated
from pos2distill.errors import UserError
from pos2distill.models.files import model_digest, with_commit
from pos2distill.tasks.data_files import file_digest
from pos2distill.urls import storage_errors

from .missing_inputs import with_input_source_hint
from .stages import analyze, choose_slot, distill, evaluate, prepare, sample, search_scales
from .stages.plan_context import PlanContext
from .stages.stage import Digests, Input, Stage


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Another task that both models are evaluated on (`evaluation.also_evaluate`)."""

    study: Study
    prepare: Stage
    evaluate_base: Stage
    evaluate_distilled: Stage


@dataclass(frozen=True, slots=True)
class Round:
    """Sampling, and training on the samples. Each round but the first begins with the checkpoint of the one before."""

    sample: Stage
    distill: Stage


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages of one study.

    Attributes:
        study: the whole study.
        search_scales, choose_slot: where settings ask for them.
        training_inputs: what sampling and training take from these two.
        rounds: one, but for on-policy methods (`method.rounds`).
        sampled_study: the study that the first round samples for; in a sweep, perhaps another one (`make_plans`).
        other_tasks: by name.
        fingerprint: the report's fingerprint; the report shows the results of all stages.
        model_digest: that of the model when the study was planned.
    """

    study: Study
    prepare: Stage
    search_scales: Stage | None
    choose_slot: Stage | None
    training_inputs: Mapping[str, Input]
    evaluate_base: Stage
    rounds: Sequence[Round]
    sampled_study: Study
    evaluate_distilled: Stage
    analyze_base: Stage | None
    analyze_distilled: Stage | None
    other_tasks: Mapping[str, TaskPlan]
    fingerprint: str
    model_digest: str

    @property
    def first_sample(self) -> Stage:
        """The sampling of the first round, which needs no training."""
        return self.rounds[0].sample

    @property
    def distill(self) -> Stage:
        """The training of the last round, which makes the checkpoint."""
        return self.rounds[-1].distill

    @property
    def sample_stages(self) -> list[Stage]:
        """The sampling of every round."""
        return [each.sample for each in self.rounds]

    @property
    def stages(self) -> list[Stage]:
        """All stages in the order in which they run.

        All data is read and checked before anything expensive starts, and the base model is evaluated on all tasks
        before training.
        """
        others = list(self.other_tasks.values())
        stages = [self.prepare, *(task.prepare for task in others), *self.measurements]
        stages += [self.evaluate_base, *(task.evaluate_base for task in others)]
        stages += self._rounds
        stages += [self.evaluate_distilled, *(task.evaluate_distilled for task in others)]
        # Last, so that no other result waits for them.
        stages += [stage for stage in (self.analyze_base, self.analyze_distilled) if stage is not None]
        return stages

    @property
    def measurements(self) -> list[Stage]:
        """The stages that measure what later settings are taken from."""
        return [stage for stage in (self.search_scales, self.choose_slot) if stage is not None]

    def stages_for_evaluate(self) -> list[Stage]:
        """The stages of the command `evaluate`; of the distilled model, if there is one."""
        stages = [self.prepare, *self._measurements_for(self.evaluate_base), self.evaluate_base]
        if self.distill.artifact.is_finished:
            stages.append(self.evaluate_distilled)
        return stages

    def stages_for_analyze(self) -> list[Stage]:
        """The stages of the command `analyze`; none without the section. The distilled model's too, if there is one."""
        if self.analyze_base is None or self.analyze_distilled is None:
            return []
        used = (*self._measurements_for(self.evaluate_base), *self._measurements_for(self.analyze_base))
        measurements = [stage for stage in self.measurements if stage in used]
        stages = [self.prepare, *measurements, self.evaluate_base, self.analyze_base]
        if self.distill.artifact.is_finished:
            stages += [self.evaluate_distilled, self.analyze_distilled]
        return stages

    def stages_for_sample(self) -> list[Stage]:
        """The stages of the command `sample`."""
        return [self.prepare, *self._measurements_for(self.first_sample), self.first_sample]

    def _measurements_for(self, stage: Stage) -> list[Stage]:
        """The measurements that a stage reads."""
        read = [each.artifact for each in stage.inputs.values()]
        return [measurement for measurement in self.measurements if measurement.artifact in read]

    def stages_for_distill(self) -> list[Stage]:
        """The stages of the command `distill`."""
        return [self.prepare, *self._measurements_for(self.first_sample), *self._rounds]

    @property
    def _rounds(self) -> list[Stage]:
        return [stage for each in self.rounds for stage in (each.sample, each.distill)]

    def reported_stages(self) -> list[Stage]:
        """The stages whose results the report shows.

        Once a checkpoint is finished, the report does not need its samples: another study of a sweep, whose samples
        have the same responses, may have made it.
        """
        sample_stages = self.sample_stages
        return [stage for stage in self.stages if stage not in sample_stages or stage.artifact.is_finished]


StageSelection: TypeAlias = Callable[[Plan], list[Stage]]
"""Which stages of a study a command runs, finished or not."""


@dataclass(frozen=True, slots=True)
class PlannedStudy:
    """What a command runs: a recipe's study, or one of its sweep. settings: the values of the swept settings."""

    settings: dict[str, Any]
    recipe: Recipe
    plan: Plan

    def stages(self, select: StageSelection) -> list[Stage]:
        """The stages of a command. Some depend on what the storage holds.

        Raises:
            UserError: if the storage cannot be used.
        """
        with storage_errors(self.recipe.storage, "runtime.storage"):
            return select(self.plan)


def make_plan(recipe: Recipe) -> Plan:
    """The plan of one study.

    Raises:
        UserError: if the data file or the model cannot be read.
    """
    return make_plans([recipe])[0]


def make_plans(recipes: Sequence[Recipe]) -> list[Plan]:
    """The plans of the studies of one sweep.

    Studies with the same responses share one sample store. If any of them stores its teacher with the samples, those
    whose method needs no teacher use that store too, instead of sampling the same responses once more.

    Raises:
        UserError: if a data file or a model cannot be read.
    """
    # Two passes, since a study can use the store of a study that comes after it in the sweep.
    contexts = []
    for recipe in recipes:
        with with_input_source_hint(recipe):
            contexts.append(_make_context(recipe))
    first_samples = [sample.plan(context) for context in contexts]
    with_teacher: dict[str, tuple[Stage, Study]] = {}
    for context, first_sample in zip(contexts, first_samples, strict=True):
        if sample.stores_teacher(first_sample):
            # The first such study is taken, so that the choice depends on the recipe alone.
            responses = sample.responses(first_sample, context.digests)
            with_teacher.setdefault(responses.fingerprint, (first_sample, context.study))
    plans = []
    for recipe, context, first_sample in zip(recipes, contexts, first_samples, strict=True):
        shared = (first_sample, context.study)
        if not context.study.method.needs_teacher:
            responses = sample.responses(first_sample, context.digests)
            shared = with_teacher.get(responses.fingerprint, shared)
        plans.append(_make_plan(recipe, context, *shared))
    return plans


def _make_context(recipe: Recipe) -> PlanContext:
    """What a recipe's stages are planned from, with the stages before the first evaluation.

    Raises:
        UserError: if the data file or the model cannot be read.
    """
    study, storage = with_canonical_slot(recipe.study), recipe.storage
    # Only here: an error that a worker meets later may be passing, and a restart may fix it.
    with storage_errors(study.model.path, "model.path"):
        model = model_digest(study.model)
    study = study.replace(model=with_commit(study.model, model))
    # The name on the server decides which model answers.
    if study.model.engine == "openai" and recipe.runtime.endpoint.served_model:
        model = f"{model}, asked as {recipe.runtime.endpoint.served_model}"
    digests = Digests(model, file_digest(study.data.path))
    context = PlanContext(study, storage, digests, prepare.plan(study, storage, digests))
    if study.inference.searches_scales:
        context = replace(context, search_scales=search_scales.plan(context))
    if study.method.advantageous_slot == "auto" or study.inference.reorders:
        context = replace(context, choose_slot=choose_slot.plan(context))
    return context


def _make_plan(recipe: Recipe, context: PlanContext, first_sample: Stage, sampled_study: Study) -> Plan:
    study = context.study
    rounds = _plan_rounds(context, first_sample)
    distill_stage = rounds[-1].distill
    evaluate_base = evaluate.plan(context)
    evaluate_distilled = evaluate.plan(context, distill_stage=distill_stage)
    analyze_base = analyze_distilled = None
    if study.analysis is not None:
        analyze_base = analyze.plan(context, evaluate_base)
        analyze_distilled = analyze.plan(
            context, evaluate_distilled, distill_stage=distill_stage, base_analysis=analyze_base
        )
    other_tasks = {}
    for name, other in recipe.other_tasks.items():
        with prepare.prefix_task_errors(name):
            other_tasks[name] = _plan_task(recipe, context, name, other, distill_stage)
    return Plan(
        study=study,
        prepare=context.prepare,
        search_scales=context.search_scales,
        choose_slot=context.choose_slot,
        training_inputs=context.training_inputs,
        evaluate_base=evaluate_base,
        rounds=rounds,
        sampled_study=sampled_study,
        evaluate_distilled=evaluate_distilled,
        analyze_base=analyze_base,
        analyze_distilled=analyze_distilled,
        other_tasks=other_tasks,
        fingerprint=_report_fingerprint(study, evaluate_base, evaluate_distilled, analyze_distilled, other_tasks),
        model_digest=context.digests.model,
    )


def _report_fingerprint(
    study: Study,
    evaluate_base: Stage,
    evaluate_distilled: Stage,
    analyze_distilled: Stage | None,
    other_tasks: Mapping[str, TaskPlan],
) -> str:
    # The fingerprint of a distilled evaluation covers the checkpoint, and with it the stages before.
    shown: list[Any] = [evaluate_base.fingerprint, evaluate_distilled.fingerprint]
    if analyze_distilled is not None:
        shown.append(analyze_distilled.fingerprint)
    for task in other_tasks.values():
        shown += [task.evaluate_distilled.fingerprint, task.study.evaluation.bootstrap_samples]
    # Only where they are used; otherwise they would change fingerprints without changing a report.
    for each in (study, *(task.study for task in other_tasks.values())):
        if each.evaluation.retriever_ranks:
            shown.append(list(each.evaluation.retriever_ranks))
    return fingerprint(shown, study.evaluation.bootstrap_samples)


def _plan_rounds(context: PlanContext, first_sample: Stage) -> list[Round]:
    rounds = [Round(first_sample, distill.plan(context, first_sample))]
    for number in range(2, context.study.method.rounds + 1):
        previous = rounds[-1].distill
        sample_stage = sample.plan(context, round_number=number, previous=previous)
        distill_stage = distill.plan(context, sample_stage, round_number=number, previous=previous)
        rounds.append(Round(sample_stage, distill_stage))
    return rounds


def _plan_task(recipe: Recipe, context: PlanContext, name: str, other: Study, distill_stage: Stage) -> TaskPlan:
    """The data and evaluation of another recipe, with this recipe's models, inference and seeds.

    Raises:
        UserError: if the other recipe's questions cannot be reordered, but this recipe's method does.
    """
    inference = recipe.study.inference
    if inference.reorders:
        _require_reorderable(name, other)
    # Dumped and validated again, so that the replaced sections are checked against the others.
    raw = other.model_dump(mode="json")
    raw["model"] = context.study.model.model_dump(mode="json")
    raw["seed"] = recipe.study.seed
    raw["evaluation"]["seed"] = recipe.study.evaluation.seed
    # Only at the prompt length of the other recipe's own training: that is what is compared.
    raw["evaluation"]["other_documents"] = ()
    # Searched scales reach the other task as those of the main one, without a search of its own.
    raw["inference"] = {} if inference.searches_scales else inference.model_dump(mode="json")
    study = validate_evaluated(raw)
    digests = Digests(context.digests.model, file_digest(other.data.path))
    prepare_stage = prepare.plan(study, context.storage, digests, task=name)
    task = replace(context, study=study, digests=digests, prepare=prepare_stage, task=name)
    return TaskPlan(study, prepare_stage, evaluate.plan(task), evaluate.plan(task, distill_stage=distill_stage))


def _require_reorderable(name: str, other: Study) -> None:
    """Reject questions that cannot be reordered.

    Raises:
        UserError: with the setting that contradicts.
    """
    if len(other.data.hops) > 1:
        raise UserError(
            f"evaluation.also_evaluate: {name}: inference.method 'reorder' requires one number of hops (data.hops)"
        )
    if other.evaluation.distractor_orders > 1:
        raise UserError(
            f"evaluation.also_evaluate: {name}: has {other.evaluation.distractor_orders} orders of distractors "
            f"(evaluation.distractor_orders), but inference.method 'reorder' orders them"
        )


def with_canonical_slot(study: Study) -> Study:
    """Replace a numeric advantageous slot by the equivalent `first` or `last`."""
    slot = study.method.advantageous_slot
    if isinstance(slot, str):
        return study
    # Both spellings give the same prompts, so they must have the same fingerprint.
    for name in ("first", "last"):
        candidate = study.replace(method=study.method.replace(advantageous_slot=name))
        candidate_slots = [candidate.fixed_advantageous_slots(hops) for hops in study.data.hops]
        if candidate_slots == [study.fixed_advantageous_slots(hops) for hops in study.data.hops]:
            return candidate
    return study
