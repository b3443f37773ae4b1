"""The commands as functions for scripts and notebooks: `import pos2distill; pos2distill.evaluate(...)`.

They take what the command line takes, print the same progress, use the same storage, and return objects. A function
whose results are stored already returns them at once.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from pos2distill.config import Recipe
from pos2distill.errors import CorruptPart, TransientError, UserError
from pos2distill.evaluation.charts import AFTER, BEFORE, curve_chart, loss_chart, to_png
from pos2distill.evaluation.result import Evaluation, Picture
from pos2distill.evaluation.scores import Curve
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import MODEL_FOLDER, model_url
from pos2distill.store.samples import SampleStore, UnreadablePartError

from . import commands
from .api_input import (
    AnyRecipe,
    Questions,
    Settings,
    errors_name_arguments,
    questions_file,
    to_overrides,
    to_plain_value,
    to_recipe,
    to_text,
)
from .model_recipe import recipe_of_questions
from .results.evaluations import read_evaluations
from .results.folders import REPORT_FOLDER, page_url
from .results.hub import push_checkpoint
from .stage_runner import driver_lease
from .stages.distill import read_steps
from .stages.sample import sample_ids_of
from .stages.stage import Stage

if TYPE_CHECKING:
    import pandas as pd

# The columns of a sample without token ids and tensors.
_SAMPLE_COLUMNS = [
    "sample_id",
    "example_id",
    "slots",
    "text",
    "truncated_text",
    "correct",
    "outcome",
    "error",
    "finish_reason",
]
_ATTEMPTS = 3  # to read samples, of which some are corrupt


@dataclass(frozen=True, slots=True)
class Samples:
    """The sampled answers of the training examples. counts: what became of them."""

    url: str
    counts: Mapping[str, int]
    table: pa.Table = field(repr=False)

    def to_pandas(self) -> "pd.DataFrame":
        """One row for each sample: its slots (0-based), the text, whether it is correct and kept."""
        return self.table.to_pandas()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A distilled model in Hugging Face format. path: its folder or URL. steps: the records of its training steps."""

    path: str
    steps: Sequence[Mapping[str, Any]] = field(repr=False)

    def push_to_hub(self, repository: str, *, private: bool = False) -> str:
        """Upload the model with its model card, which a study writes, to OWNER/NAME on the hub. Returns its URL."""
        return push_checkpoint(self.path.removesuffix(f"/{MODEL_FOLDER}"), repository, private=private)

    def plot(self) -> Picture:
        """The objective by optimizer step."""
        return Picture(to_png(loss_chart(self.steps)))

    def to_pandas(self) -> "pd.DataFrame":
        """One row for each optimizer step."""
        import pandas as pd

        return pd.DataFrame(list(self.steps))


@dataclass(frozen=True, slots=True)
class StudyResult:
    """A finished study. before, after: evaluations of the base model and of the checkpoint. report: the HTML page."""

    before: Evaluation
    after: Evaluation
    checkpoint: Checkpoint
    report: str

    @property
    def curve(self) -> Curve:
        """Accuracy of the checkpoint by slot, at the prompt length of training."""
        return self.after.curve

    def plot(self) -> Picture:
        """Accuracy by position, before and after."""
        return Picture(to_png(curve_chart({BEFORE: self.before.curve, AFTER: self.after.curve})))

    def to_pandas(self) -> "pd.DataFrame":
        """One row for each answer, of both models; the column `model` is `before` or `after`."""
        import pandas as pd

        before, after = self.before.to_pandas(), self.after.to_pandas()
        return pd.concat([before.assign(model="before"), after.assign(model="after")], ignore_index=True)


def evaluate(
    recipe: AnyRecipe | None = None,
    settings: Settings | None = None,
    *,
    data: Questions | None = None,
    model: str | Path | None = None,
    base_url: str | None = None,
    documents: int | None = None,
    slots: int | str | Sequence[int] | None = None,
    examples: int | None = None,
) -> Evaluation:
    """Accuracy by slot, without training, of a recipe's checkpoint (of its base model before there is one), or of any
    model with a file of questions.

    Args:
        recipe: a built-in name, the path of a YAML file, a mapping of sections as in a file, or a `Recipe`.
        settings: values by dotted name, for example `{"data.prompt": "plain"}`.
        data: questions, with a model or instead of the recipe's `data.path`: a file, or the records themselves, such as
            a list or a `datasets.Dataset`. Records are in the format `jsonl` (docs/data.md), or in the recipe's.
        model, base_url, documents, slots, examples: instead of a recipe, see `recipe_of_questions`.
    Raises:
        UserError: in one line, naming the setting at fault.
    """
    if model is None and recipe is not None:
        given = (base_url, documents, examples)
        # Not by one comparison: an array of slots has no single truth value.
        if given != (None, None, None) or slots is not None:
            raise UserError(
                "evaluate: base_url, documents, slots and examples belong to model and data; with a recipe, give them "
                "in settings, for example {'evaluation.slots': 5}"
            )
        with _loaded(recipe, settings, data) as loaded:
            return _run_evaluate(loaded)
    if model is None or data is None or recipe is not None:
        raise UserError("evaluate: expected either a recipe, or model and data")
    options = {"base_url": base_url, "documents": documents, "slots": slots, "examples": examples}
    with questions_file(data) as file:
        with errors_name_arguments(settings):
            loaded = recipe_of_questions(
                to_text(model, "model"),
                file,
                overrides=to_overrides(settings),
                **{name: to_plain_value(value, name) for name, value in options.items()},
            )
        return _run_evaluate(loaded)


def sample(recipe: AnyRecipe, settings: Settings | None = None, *, data: Questions | None = None) -> Samples:
    """Sample answers to a recipe's training examples. Arguments and errors: as in `evaluate`."""
    with _loaded(recipe, settings, data) as loaded:
        studies = commands.plan_command(loaded, "sample")
        (planned,) = studies
        stage = planned.plan.first_sample
        for attempt in range(_ATTEMPTS):
            commands.run_sample(loaded, studies)
            try:
                table = _read_samples(stage, read_only=True)
            except UnreadablePartError as error:
                if attempt == _ATTEMPTS - 1:
                    raise TransientError(str(error)) from None
                # Moves the corrupt part away, so that the next attempt makes its samples again.
                with driver_lease(loaded), contextlib.suppress(CorruptPart):
                    _read_samples(stage, read_only=False)
                continue
            return Samples(stage.artifact.url, stage.output().manifest().counts, table)
        raise AssertionError("the last attempt returns or raises")


def _read_samples(stage: Stage, *, read_only: bool) -> pa.Table:
    """The samples of a finished stage. Not all candidates are sampled where fewer are enough.

    Args:
        read_only: as `SampleStore`; otherwise the lease is needed.
    """
    store = SampleStore(stage.artifact, read_only=read_only)
    index = store.index(sample_ids_of(stage))
    return store.load(index, np.flatnonzero(index.stored), _SAMPLE_COLUMNS)


def distill(recipe: AnyRecipe, settings: Settings | None = None, *, data: Questions | None = None) -> Checkpoint:
    """Train a recipe's checkpoint from its samples. Arguments and errors: as in `evaluate`."""
    with _loaded(recipe, settings, data) as loaded:
        studies = commands.plan_command(loaded, "distill")
        (planned,) = studies
        commands.run_distill(loaded, studies)
        return _to_checkpoint(planned.plan.distill.artifact)


def study(recipe: AnyRecipe, settings: Settings | None = None, *, data: Questions | None = None) -> StudyResult:
    """Run the whole chain of a recipe: evaluate, sample, distill, evaluate, report. Arguments: as in `evaluate`.

    Raises:
        UserError: as `evaluate`, and for a sweep, which the command line runs.
    """
    with _loaded(recipe, settings, data) as loaded:
        if loaded.sweep:
            raise UserError(
                f"{loaded.name}: is a sweep of several studies; call study for each, with {{'sweep': {{}}}} and its "
                f"settings"
            )
        studies = commands.plan_command(loaded, "study")
        (planned,) = studies
        commands.run_study(loaded, studies)
        plan = planned.plan
        evaluations = read_evaluations(loaded, plan)
        return StudyResult(
            before=evaluations["base"],
            after=evaluations["distilled"],
            checkpoint=_to_checkpoint(plan.distill.artifact),
            report=page_url(loaded.storage, REPORT_FOLDER),
        )


@contextmanager
def _loaded(recipe: AnyRecipe, settings: Settings | None, data: Questions | None) -> Iterator[Recipe]:
    """The recipe, while the file of its questions exists."""
    if data is None:
        yield to_recipe(recipe, settings)
        return
    with questions_file(data) as file:
        yield to_recipe(recipe, settings, file)


def _run_evaluate(recipe: Recipe) -> Evaluation:
    """The evaluation of the checkpoint, or of the base model if there is none."""
    return commands.run_evaluate(recipe, commands.plan_command(recipe, "evaluate"))[-1]


def _to_checkpoint(artifact: Artifact) -> Checkpoint:
    return Checkpoint(model_url(artifact), read_steps(artifact))
