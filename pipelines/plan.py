"""Which stages a recipe leads to. Planning reads the data file and the model for their digests, and no storage.

A changed setting changes the fingerprints of the stages that declare it, and of the stages that read their results.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pos2distill.config import Recipe, Study, fingerprint
from pos2distill.models.files import model_digest
from pos2distill.tasks.readers import file_digest

from .stages import choose_slot, distill, evaluate, prepare, sample
from .stages.stage import Digests, Stage


@dataclass(frozen=True, slots=True)
class TaskPlan:
    """Another task that both models are evaluated on (`evaluation.also_evaluate`)."""

    study: Study
    prepare: Stage
    evaluate_base: Stage
    evaluate_distilled: Stage


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages of one study.

    study: the whole. choose_slot: where the advantageous slot is measured. other_tasks: by name.
    fingerprint: of the report, which shows the results of all stages.
    """

    study: Study
    prepare: Stage
    evaluate_base: Stage
    choose_slot: Stage | None
    sample: Stage
    distill: Stage
    evaluate_distilled: Stage
    other_tasks: Mapping[str, TaskPlan]
    fingerprint: str

    @property
    def stages(self) -> list[Stage]:
        """All stages in the order in which they run.

        All data is read and checked before anything expensive starts, and the base model is evaluated on all tasks
        before training.
        """
        others = list(self.other_tasks.values())
        stages = [self.prepare, *(task.prepare for task in others)]
        stages += [self.evaluate_base, *(task.evaluate_base for task in others)]
        stages += [*self.sampling_stages[1:], self.distill]
        stages += [self.evaluate_distilled, *(task.evaluate_distilled for task in others)]
        return stages

    @property
    def sampling_stages(self) -> list[Stage]:
        """The stages of the command `sample`."""
        if self.choose_slot is None:
            return [self.prepare, self.sample]
        return [self.prepare, self.choose_slot, self.sample]

    @property
    def training_stages(self) -> list[Stage]:
        """The stages of the command `distill`."""
        return [*self.sampling_stages, self.distill]

    @property
    def base_evaluation_stages(self) -> list[Stage]:
        """The stages of the command `evaluate` while there is no checkpoint."""
        return [self.prepare, self.evaluate_base]

    def stage(self, name: str) -> Stage:
        """The stage of a name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)


def make_plan(recipe: Recipe) -> Plan:
    """The plan of one study.

    Raises:
        UserError: if the data file or the model cannot be read.
    """
    study, storage = recipe.study, recipe.storage
    model = study.model.model_dump(mode="json", exclude={"path"}) | {"digest": model_digest(study.model)}
    data = _data_identity(study)
    method = study.method
    # How many examples are eval_specs does not change which are trained on.
    trained = {key: value for key, value in data.items() if key != "eval_examples"}
    if study.data.format in PUBLISHED and study.data.distractors == "given":
        trained["longest"] = _longest(study)  # rows with fewer documents are passed over
    where: Any
    slot_scores = None
    if method.advantageous_slot == "auto":
        asked = (method.auto_slots, method.auto_examples, study.evaluation.max_new_tokens)
        slot_scores = Artifact(storage, "slot-scores", fingerprint(SCHEMA_VERSION, trained, model, asked, study.seed))
        where = slot_scores.fingerprint
    else:
        where = [study.advantageous(hops) for hops in study.data.hops]
    drawn = fingerprint(SCHEMA_VERSION, trained, model, study.sampling, where, study.seed)
    samples = _samples(storage, drawn, method)
    measured = {"advantageous_slot", "auto_slots", "auto_examples"}  # in the samples' fingerprint
    checkpoint = fingerprint(drawn, method.model_dump(mode="json", exclude=measured), study.training)
    identity = _evaluation_identity(study, data)
    base_scores, distilled_scores = fingerprint(identity, model), fingerprint(identity, checkpoint)
    transfers = {}
    for name, other in recipe.transfers.items():
        with naming_task(name):
            transfers[name] = _plan_transfer(recipe, other, model, checkpoint)
    shown = [each.distilled_scores.fingerprint for each in transfers.values()]
    return Plan(
        examples=_examples(study, data, storage),
        base_scores=Artifact(storage, "base-scores", base_scores),
        slot_scores=slot_scores,
        samples=samples,
        checkpoint=Artifact(storage, "checkpoint", checkpoint),
        distilled_scores=Artifact(storage, "distilled-scores", distilled_scores),
        transfers=transfers,
        fingerprint=fingerprint(base_scores, distilled_scores, study.evaluation.bootstrap_samples, *shown),
    )


def make_plans(recipes: Sequence[Recipe]) -> list[Plan]:
    """The plans of the studies of one sweep.

    Studies with the same responses share one sample store. If any of them stores its teacher with the samples, those
    whose method needs no teacher use that store too, instead of sampling the same responses once more.

    Raises:
        UserError: if a data file or a model cannot be read.
    """
    if method.teacher_topk:
        return Artifact(storage, "samples", fingerprint(drawn, "topk", method.teacher_topk))
    stamps = (fingerprint(drawn, states) for states in (None, method.alignment))
    plain, with_states = (Artifact(storage, "samples", stamp) for stamp in stamps)
    if method.teacher == "cached":
        return with_states
    return with_states if with_states.manifest() and not plain.manifest() else plain


def _make_plan(recipe: Recipe, digests: Digests, with_teacher: Mapping[str, Stage]) -> Plan:
    study, storage = recipe.study, recipe.storage
    prepare_stage, choose_stage, sample_stage = _plan_sampling(recipe, digests)
    if not study.method.needs_teacher:
        responses = sample.responses(sample_stage, digests)
        sample_stage = with_teacher.get(responses.fingerprint, sample_stage)
    distill_stage = distill.plan(study, storage, digests, prepare_stage, choose_stage, sample_stage)
    evaluate_base = evaluate.plan(study, storage, digests, prepare_stage)
    evaluate_distilled = evaluate.plan(study, storage, digests, prepare_stage, distill_stage)
    other_tasks = {}
    for name, other in recipe.transfers.items():
        with prepare.naming_task(name):
            other_tasks[name] = _plan_task(recipe, name, other, digests, distill_stage)
    shown: list[Any] = [evaluate_base.fingerprint, evaluate_distilled.fingerprint]
    shown += [task.evaluate_distilled.fingerprint for task in other_tasks.values()]
    return Plan(
        study=study,
        prepare=prepare_stage,
        evaluate_base=evaluate_base,
        choose_slot=choose_stage,
        sample=sample_stage,
        distill=distill_stage,
        evaluate_distilled=evaluate_distilled,
        other_tasks=other_tasks,
        fingerprint=fingerprint(shown, study.evaluation.bootstrap_samples),
    )


def _plan_sampling(recipe: Recipe, digests: Digests) -> tuple[Stage, Stage | None, Stage]:
    """The stages up to the samples: prepare, choose slot (or None), sample."""
    study, storage = recipe.study, recipe.storage
    prepare_stage = prepare.plan(study, storage, digests)
    choose_stage = None
    if study.method.advantageous_slot == "auto":
        choose_stage = choose_slot.plan(study, storage, digests, prepare_stage)
    return prepare_stage, choose_stage, sample.plan(study, storage, digests, prepare_stage, choose_stage)


def _plan_task(recipe: Recipe, name: str, other: Study, digests: Digests, distill_stage: Stage) -> TaskPlan:
    """The data and evaluation of another recipe, with this recipe's models and seed."""
    raw = other.model_dump(mode="json")
    raw["model"] = recipe.study.model.model_dump(mode="json")
    raw["seed"] = recipe.study.seed
    # Only at the prompt length of the other recipe's own training: that is what is compared.
    raw["evaluation"]["other_documents"] = ()
    study = Study.model_validate(raw)
    own_digests = Digests(digests.model, file_digest(other.data.path))
    storage = recipe.storage
    prepare_stage = prepare.plan(study, storage, own_digests, task=name)
    return TaskPlan(
        study,
        prepare_stage,
        evaluate.plan(study, storage, own_digests, prepare_stage, task=name),
        evaluate.plan(study, storage, own_digests, prepare_stage, distill_stage, task=name),
    )


def _data_identity(study: Study) -> dict[str, Any]:
    """The data section with the file's digest in place of its path."""
    return study.data.model_dump(mode="json", exclude={"path"}) | {"digest": file_digest(study.data.path)}


def _evaluation_identity(study: Study, data: dict[str, Any]) -> str:
    """What is asked. How many examples are trained on does not change which are eval_specs."""
    asked = {key: value for key, value in data.items() if key != "train_examples"}
    shown = study.evaluation.model_dump(mode="json", exclude={"bootstrap_samples", "also_evaluate"})
    if not study.evaluation.other_documents:
        del shown["other_slots"]
    return fingerprint(SCHEMA_VERSION, asked, shown, study.seed)
