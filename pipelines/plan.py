"""Which artifacts a recipe leads to, each named by a fingerprint of all that it depends on.

A changed setting changes the fingerprints from its stage on; a changed data file or model changes them all.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pos2distill.config import MethodSection, Recipe, Study, fingerprint
from pos2distill.errors import UserError
from pos2distill.models.files import model_digest
from pos2distill.records import SCHEMA_VERSION
from pos2distill.store.artifacts import Artifact
from pos2distill.tasks.readers import file_digest

# In a checkpoint: the model in Hugging Face format, and what each step did.
MODEL_FOLDER, STEPS_FOLDER, STATE_FOLDER = "model", "steps", "training"


@dataclass(frozen=True, slots=True)
class Transfer:
    """Another task that both models are asked too (`evaluation.also_evaluate`)."""

    recipe: Recipe
    examples: Artifact
    base_scores: Artifact
    distilled_scores: Artifact


@dataclass(frozen=True, slots=True)
class Plan:
    """The artifacts of one study, in the order they are made. slot_scores: where the advantageous slot is measured."""

    examples: Artifact
    base_scores: Artifact
    slot_scores: Artifact | None
    samples: Artifact
    checkpoint: Artifact
    distilled_scores: Artifact
    transfers: dict[str, Transfer]
    fingerprint: str

    @property
    def artifacts(self) -> dict[str, Artifact]:
        """Stage by stage, by the names that people heartbeat."""
        # All data is read and checked before anything expensive starts, and all bases are measured before training.
        stages = {"examples": self.examples}
        stages |= {f"{name}: examples": each.examples for name, each in self.transfers.items()}
        stages["evaluate base"] = self.base_scores
        stages |= {f"{name}: evaluate base": each.base_scores for name, each in self.transfers.items()}
        if self.slot_scores:
            stages["choose slot"] = self.slot_scores
        stages |= {"sample": self.samples, "distill": self.checkpoint, "evaluate distilled": self.distilled_scores}
        return stages | {f"{name}: evaluate distilled": each.distilled_scores for name, each in self.transfers.items()}


def make_plan(recipe: Recipe) -> Plan:
    """Read data and model once for their digests, and derive every artifact's fingerprint.

    Raises:
        UserError: if the data file or the model cannot be read.
    """
    study, storage = recipe.study, recipe.storage
    model = study.model.model_dump(mode="json", exclude={"path"}) | {"digest": model_digest(study.model)}
    data = _data_identity(study)
    method = study.method
    # How many examples are eval_specs does not change which are trained on.
    trained = {key: value for key, value in data.items() if key != "eval_examples"}
    if study.data.spec.skips_unusable and study.data.distractors == "given":
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


@contextmanager
def naming_task(name: str) -> Iterator[None]:
    """What is wrong with another task's data is told with its name: this recipe has a data.path too."""
    try:
        yield
    except UserError as error:
        raise UserError(f"evaluation.also_evaluate: {name}: {error}") from None


def _samples(storage: str, drawn: str, method: MethodSection) -> Artifact:
    """The samples with what the method wants of its teacher.

    Responses are the same with and without it, so a method that wants nothing takes finished samples that have states.
    """
    if method.teacher_topk:
        return Artifact(storage, "samples", fingerprint(drawn, "topk", method.teacher_topk))
    stamps = (fingerprint(drawn, states) for states in (None, method.alignment))
    plain, with_states = (Artifact(storage, "samples", stamp) for stamp in stamps)
    if method.teacher == "cached":
        return with_states
    return with_states if with_states.manifest() and not plain.manifest() else plain


def _plan_transfer(recipe: Recipe, other: Study, model: dict[str, Any], checkpoint: str) -> Transfer:
    """The other study's data and evaluation, asked of this recipe's models."""
    # At the length of its own training alone: that is what is compared.
    evaluation = other.evaluation.model_copy(update={"other_documents": ()})
    study = recipe.study.model_copy(update={"data": other.data, "evaluation": evaluation})
    data = _data_identity(study)
    identity = _evaluation_identity(study, data)
    return Transfer(
        recipe.model_copy(update={"study": study}),
        _examples(study, data, recipe.storage),
        Artifact(recipe.storage, "base-scores", fingerprint(identity, model)),
        Artifact(recipe.storage, "distilled-scores", fingerprint(identity, checkpoint)),
    )


def _examples(study: Study, data: dict[str, Any], storage: str) -> Artifact:
    return Artifact(storage, "examples", fingerprint(SCHEMA_VERSION, data, _longest(study), study.seed))


def _longest(study: Study) -> int:
    """The longest prompt that is asked for, in documents."""
    return max(study.data.documents, *study.evaluation.other_documents, 0)


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
