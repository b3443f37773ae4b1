"""Which stages a recipe leads to. Planning reads the data file and the model for their digests, and no storage.

A changed setting changes the fingerprints of the stages that declare it, and of the stages that read their results.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pos2distill.config import Recipe, Study, fingerprint
from pos2distill.config.restrict import replace_section, validate_evaluated
from pos2distill.errors import UserError
from pos2distill.models.files import model_digest, with_commit
from pos2distill.tasks.readers import file_digest
from pos2distill.urls import storage_errors

from .stages import analyse, choose_slot, distill, evaluate, prepare, sample, search_scales
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

    study: the whole. search_scales, choose_slot: where settings ask for them. resolved: what sampling and training take
    from these two. rounds: one, but for on-policy methods (`method.rounds`). other_tasks: by name.
    fingerprint: of the report, which shows the results of all stages.
    """

    study: Study
    prepare: Stage
    search_scales: Stage | None
    choose_slot: Stage | None
    resolved: Mapping[str, Input]
    evaluate_base: Stage
    rounds: Sequence[Round]
    evaluate_distilled: Stage
    analyse_base: Stage | None
    analyse_distilled: Stage | None
    other_tasks: Mapping[str, TaskPlan]
    fingerprint: str

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
        stages += [stage for stage in (self.analyse_base, self.analyse_distilled) if stage is not None]
        return stages

    @property
    def measurements(self) -> list[Stage]:
        """The stages that measure what later settings are taken from."""
        return [stage for stage in (self.search_scales, self.choose_slot) if stage is not None]

    @property
    def stages_for_evaluate(self) -> list[Stage]:
        """The stages of the command `evaluate`; of the distilled model, if there is one."""
        stages = [self.prepare, *self._measurements_for(self.evaluate_base), self.evaluate_base]
        if self.distill.artifact.is_finished:
            stages.append(self.evaluate_distilled)
        return stages

    @property
    def stages_for_analyse(self) -> list[Stage]:
        """The stages of the command `analyse`; none without the section. The distilled model's too, if there is one."""
        if self.analyse_base is None or self.analyse_distilled is None:
            return []
        used = (*self._measurements_for(self.evaluate_base), *self._measurements_for(self.analyse_base))
        measurements = [stage for stage in self.measurements if stage in used]
        stages = [self.prepare, *measurements, self.evaluate_base, self.analyse_base]
        if self.distill.artifact.is_finished:
            stages += [self.evaluate_distilled, self.analyse_distilled]
        return stages

    @property
    def stages_for_sample(self) -> list[Stage]:
        """The stages of the command `sample`."""
        return [self.prepare, *self._measurements_for(self.first_sample), self.first_sample]

    def _measurements_for(self, stage: Stage) -> list[Stage]:
        """The measurements that a stage reads."""
        read = [each.artifact for each in stage.inputs.values()]
        return [measurement for measurement in self.measurements if measurement.artifact in read]

    @property
    def stages_for_distill(self) -> list[Stage]:
        """The stages of the command `distill`."""
        return [self.prepare, *self._measurements_for(self.first_sample), *self._rounds]

    @property
    def _rounds(self) -> list[Stage]:
        return [stage for each in self.rounds for stage in (each.sample, each.distill)]

    @property
    def reported_stages(self) -> list[Stage]:
        """The stages whose results the report shows.

        Once a checkpoint is finished, the report does not need its samples: another study of a sweep, whose samples
        have the same responses, may have made it.
        """
        sample_stages = self.sample_stages
        return [stage for stage in self.stages if stage not in sample_stages or stage.artifact.is_finished]


@dataclass(frozen=True, slots=True)
class _ResolvedInputs:
    """The stages before the first evaluation, and what later stages take from them."""

    study: Study
    prepare: Stage
    search_scales: Stage | None
    choose_slot: Stage | None

    @property
    def for_training(self) -> dict[str, Input]:
        """Inputs of sampling and training: the searched RoPE scales, the advantageous slot."""
        inputs = self._scales()
        if self.choose_slot is not None and self.study.method.advantageous_slot == "auto":
            inputs["slot"] = self.choose_slot.output()
        return inputs

    @property
    def for_evaluation(self) -> dict[str, Input]:
        """Inputs of evaluations: the searched RoPE scales, the curve that documents are reordered by."""
        inputs = self._scales()
        if self.choose_slot is not None and self.study.inference.method == "reorder":
            inputs["curve"] = self.choose_slot.output()
        return inputs

    def _scales(self) -> dict[str, Input]:
        return {} if self.search_scales is None else {"scales": self.search_scales.output()}


@dataclass(frozen=True, slots=True)
class _Sampling:
    """The stages of a study up to its samples, and what they were planned from."""

    study: Study
    digests: Digests
    resolved: _ResolvedInputs
    sample: Stage


@dataclass(frozen=True, slots=True)
class Cell:
    """One study of a sweep: the values of the swept settings, its recipe and its plan."""

    settings: dict[str, Any]
    recipe: Recipe
    plan: Plan


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
    samplings = [_plan_sampling(recipe) for recipe in recipes]
    with_teacher: dict[str, Stage] = {}
    for sampling in samplings:
        if sample.stores_teacher(sampling.sample):
            # The first such study is taken, so that the choice depends on the recipe alone.
            responses = sample.responses(sampling.sample, sampling.digests)
            with_teacher.setdefault(responses.fingerprint, sampling.sample)
    return [_make_plan(recipe, each, with_teacher) for recipe, each in zip(recipes, samplings, strict=True)]


def _make_plan(recipe: Recipe, sampling: _Sampling, with_teacher: Mapping[str, Stage]) -> Plan:
    study, storage, digests, resolved = sampling.study, recipe.storage, sampling.digests, sampling.resolved
    rounds = _plan_rounds(storage, sampling, with_teacher)
    distill_stage = rounds[-1].distill
    evaluate_base = evaluate.plan(study, storage, digests, resolved.prepare, resolved.for_evaluation)
    evaluate_distilled = evaluate.plan(
        study, storage, digests, resolved.prepare, resolved.for_evaluation, distill=distill_stage
    )
    analyse_base = analyse_distilled = None
    if study.analysis is not None:
        plan_analysis = functools.partial(
            analyse.plan, study, storage, digests, resolved.prepare, resolved.for_training
        )
        analyse_base = plan_analysis(evaluate_base)
        analyse_distilled = plan_analysis(evaluate_distilled, distill=distill_stage, base_analysis=analyse_base)
    other_tasks = {}
    for name, other in recipe.other_tasks.items():
        with prepare.prefix_task_errors(name):
            other_tasks[name] = _plan_task(recipe, name, other, digests, resolved, distill_stage)
    # The fingerprint of a distilled evaluation covers the checkpoint, and with it the stages before.
    shown: list[Any] = [evaluate_base.fingerprint, evaluate_distilled.fingerprint]
    if analyse_distilled is not None:
        shown.append(analyse_distilled.fingerprint)
    for task in other_tasks.values():
        shown += [task.evaluate_distilled.fingerprint, task.study.evaluation.bootstrap_samples]
    # Only where they are used; otherwise they would change fingerprints without changing a report.
    for each in (study, *(task.study for task in other_tasks.values())):
        if each.evaluation.retriever_ranks:
            shown.append(list(each.evaluation.retriever_ranks))
    return Plan(
        study=study,
        prepare=resolved.prepare,
        search_scales=resolved.search_scales,
        choose_slot=resolved.choose_slot,
        resolved=resolved.for_training,
        evaluate_base=evaluate_base,
        rounds=rounds,
        evaluate_distilled=evaluate_distilled,
        analyse_base=analyse_base,
        analyse_distilled=analyse_distilled,
        other_tasks=other_tasks,
        fingerprint=fingerprint(shown, study.evaluation.bootstrap_samples),
    )


def _plan_rounds(storage: str, sampling: _Sampling, with_teacher: Mapping[str, Stage]) -> list[Round]:
    study, digests, prepare_stage = sampling.study, sampling.digests, sampling.resolved.prepare
    resolved = sampling.resolved.for_training
    sample_stage = sampling.sample
    if not study.method.needs_teacher:
        responses = sample.responses(sample_stage, digests)
        sample_stage = with_teacher.get(responses.fingerprint, sample_stage)
    rounds = [Round(sample_stage, distill.plan(study, storage, digests, prepare_stage, resolved, sample_stage))]
    for number in range(2, study.method.rounds + 1):
        name, student = f" {number}", rounds[-1].distill
        sample_stage = sample.plan(study, storage, digests, prepare_stage, resolved, round_name=name, student=student)
        distill_stage = distill.plan(
            study, storage, digests, prepare_stage, resolved, sample_stage, round_name=name, student=student
        )
        rounds.append(Round(sample_stage, distill_stage))
    return rounds


def _plan_sampling(recipe: Recipe) -> _Sampling:
    study, storage = with_canonical_slot(recipe.study), recipe.storage
    # Only here: an error that a worker meets later may be passing, and a restart may fix it.
    with storage_errors(study.model.path, "model.path"):
        model = model_digest(study.model)
    study = study.model_copy(update={"model": with_commit(study.model, model)})
    # The name on the server decides which model answers.
    if study.model.engine == "openai" and recipe.runtime.endpoint.served_model:
        model = f"{model}, asked as {recipe.runtime.endpoint.served_model}"
    digests = Digests(model, file_digest(study.data.path))
    resolved = _plan_resolved(study, storage, digests)
    sample_stage = sample.plan(study, storage, digests, resolved.prepare, resolved.for_training)
    return _Sampling(study, digests, resolved, sample_stage)


def _plan_resolved(study: Study, storage: str, digests: Digests) -> _ResolvedInputs:
    prepare_stage = prepare.plan(study, storage, digests)
    search_stage = choose_stage = None
    scales = {}
    if study.inference.searches_scales:
        search_stage = search_scales.plan(study, storage, digests, prepare_stage)
        scales["scales"] = search_stage.output()
    if study.method.advantageous_slot == "auto" or study.inference.method == "reorder":
        choose_stage = choose_slot.plan(study, storage, digests, prepare_stage, scales)
    return _ResolvedInputs(study, prepare_stage, search_stage, choose_stage)


def _plan_task(
    recipe: Recipe, name: str, other: Study, digests: Digests, resolved: _ResolvedInputs, distill_stage: Stage
) -> TaskPlan:
    """The data and evaluation of another recipe, with this recipe's models, inference and seeds.

    Raises:
        UserError: if the other recipe's questions cannot be reordered, but this recipe's method does.
    """
    inference = recipe.study.inference
    if inference.method == "reorder":
        _require_reorderable(name, other)
    # Dumped and validated again, so that the replaced sections are checked against the others.
    raw = other.model_dump(mode="json")
    raw["model"] = resolved.study.model.model_dump(mode="json")
    raw["seed"] = recipe.study.seed
    raw["evaluation"]["seed"] = recipe.study.evaluation.seed
    # Only at the prompt length of the other recipe's own training: that is what is compared.
    raw["evaluation"]["other_documents"] = ()
    # Searched scales reach the other task as those of the main one, without a search of its own.
    raw["inference"] = {} if inference.searches_scales else inference.model_dump(mode="json")
    study = validate_evaluated(raw)
    own_digests = Digests(digests.model, file_digest(other.data.path))
    storage = recipe.storage
    prepare_stage = prepare.plan(study, storage, own_digests, task=name)
    return TaskPlan(
        study,
        prepare_stage,
        evaluate.plan(study, storage, own_digests, prepare_stage, resolved.for_evaluation, task=name),
        evaluate.plan(
            study, storage, own_digests, prepare_stage, resolved.for_evaluation, distill=distill_stage, task=name
        ),
    )


def _require_reorderable(name: str, other: Study) -> None:
    """Refuse questions that cannot be reordered.

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
    raw = study.method.model_dump(mode="json")
    for name in ("first", "last"):
        raw["advantageous_slot"] = name
        candidate = replace_section(study, method=type(study.method).model_validate(raw))
        if all(candidate.advantageous(hops) == study.advantageous(hops) for hops in study.data.hops):
            return candidate
    return study
