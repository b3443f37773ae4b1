"""Which artifacts a recipe leads to, each named by a fingerprint of all that it depends on.

A changed setting changes the fingerprints from its stage on; a changed data file or model changes them all.
"""

from dataclasses import dataclass

from pos2distill.config import Recipe, fingerprint
from pos2distill.models.load import model_digest
from pos2distill.records import SCHEMA_VERSION
from pos2distill.store.artifacts import Artifact
from pos2distill.tasks.readers import file_digest


@dataclass(frozen=True, slots=True)
class Plan:
    """The artifacts of one study, in the order they are made."""

    examples: Artifact
    base_scores: Artifact
    samples: Artifact
    checkpoint: Artifact
    distilled_scores: Artifact
    fingerprint: str

    @property
    def artifacts(self) -> dict[str, Artifact]:
        """Stage by stage, by the names that people see."""
        return {
            "examples": self.examples,
            "evaluate base": self.base_scores,
            "sample": self.samples,
            "distill": self.checkpoint,
            "evaluate distilled": self.distilled_scores,
        }


def make_plan(recipe: Recipe) -> Plan:
    """Read data and model once for their digests, and derive every artifact's fingerprint.

    Raises:
        UserError: if the data file or the model cannot be read.
    """
    study = recipe.study
    data = study.data.model_dump(mode="json", exclude={"path"}) | {"digest": file_digest(study.data.path)}
    model = study.model.model_dump(mode="json", exclude={"path"}) | {"digest": model_digest(study.model)}

    lengths = sorted({study.data.documents, *study.evaluation.other_documents})
    examples = fingerprint(SCHEMA_VERSION, data, lengths[-1], study.seed)
    # How many examples are trained on does not change which are evaluated.
    asked = {key: value for key, value in data.items() if key != "train_examples"}
    shown = study.evaluation.model_dump(mode="json", exclude={"resamples"})
    evaluation = fingerprint(SCHEMA_VERSION, asked, shown, study.seed)
    base_scores = fingerprint(evaluation, model)
    method = study.method
    # And how many are evaluated, or over how many documents, does not change which are trained on.
    trained = {key: value for key, value in data.items() if key != "evaluation_examples"}
    states = method.alignment if method.teacher == "cached" else None
    samples = fingerprint(SCHEMA_VERSION, trained, model, study.sampling, study.advantageous_slot, states, study.seed)
    # Only weights of a micro-batch depend on how the global batch is cut.
    trainers = recipe.runtime.trainers
    cut = (trainers.workers, trainers.micro_batch_rows) if method.weights_scope == "micro" else None
    checkpoint = fingerprint(samples, method, study.training, cut)
    distilled_scores = fingerprint(evaluation, checkpoint)
    storage = recipe.storage
    return Plan(
        examples=Artifact(storage, "examples", examples),
        base_scores=Artifact(storage, "base-scores", base_scores),
        samples=Artifact(storage, "samples", samples),
        checkpoint=Artifact(storage, "checkpoint", checkpoint),
        distilled_scores=Artifact(storage, "distilled-scores", distilled_scores),
        fingerprint=fingerprint(base_scores, distilled_scores, study.evaluation.resamples),
    )
