"""The commands as functions for scripts and notebooks: `import pos2distill; pos2distill.evaluate(...)`.

They take what the command line takes, print the same progress, use the same storage, and return objects. A function
whose results are stored already returns them at once.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pyarrow as pa

from pos2distill.config import Recipe
from pos2distill.config.evaluation import DEFAULT_SLOTS
from pos2distill.config.load import load_recipe, make_recipe
from pos2distill.errors import UserError
from pos2distill.evaluation.charts import AFTER, BEFORE, curve_chart, loss_chart, to_png
from pos2distill.evaluation.result import Evaluation, Picture
from pos2distill.evaluation.scores import Curve
from pos2distill.scratch import user_folder
from pos2distill.store.artifacts import Artifact, write_bytes
from pos2distill.store.samples import SampleStore
from pos2distill.training.job import MODEL_FOLDER

from . import commands
from .evaluations import read_evaluation
from .hub import push_checkpoint
from .model_options import recipe_of_questions
from .plan import Plan, make_plan
from .stages.distill import read_steps
from .stages.sample import sample_ids_of

if TYPE_CHECKING:
    import pandas as pd

AnyRecipe = str | Path | Recipe | Mapping[str, Any]
Settings = Mapping[str, Any]
Questions = str | Path | Iterable[Mapping[str, Any]]

# Of a sample, without token ids and tensors.
_SAMPLE_COLUMNS = ["example_id", "slots", "text", "truncated_text", "correct", "outcome", "error", "finish_reason"]


@dataclass(frozen=True, slots=True)
class Samples:
    """The sampled answers of the training examples. counts: what became of them."""

    url: str
    counts: Mapping[str, int]
    table: pa.Table = field(repr=False)

    def to_pandas(self) -> "pd.DataFrame":
        """One row for each example: its slots (0-based), the text, whether it is correct and kept."""
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
    *,
    model: str | None = None,
    data: Questions | None = None,
    base_url: str | None = None,
    documents: int | None = None,
    slots: int | str | Sequence[int] = DEFAULT_SLOTS,
    examples: int | None = None,
    settings: Settings | None = None,
) -> Evaluation:
    """Accuracy by slot, without training: of a recipe's checkpoint (of its base model before there is one), or of any
    model with a file of questions.

    Args:
        recipe: a built-in name, the path of a YAML file, a mapping of sections as in a file, or a `Recipe`.
        model, data, base_url, documents, slots, examples: instead of a recipe, see `recipe_of_questions`. data: a file,
            or the records themselves in the format `jsonl` (docs/data.md), such as a list or a `datasets.Dataset`.
        settings: values by dotted name, for example `{"data.prompt": "plain"}`.
    Raises:
        UserError: in one line, naming the setting at fault.
    """
    if model is not None and data is not None and recipe is None:
        loaded = recipe_of_questions(
            model,
            _to_file(data),
            base_url=base_url,
            documents=documents,
            slots=slots,
            examples=examples,
            overrides=_to_overrides(settings),
        )
    elif recipe is not None and model is None and data is None:
        given = (base_url, documents, slots, examples)
        if given != (None, None, DEFAULT_SLOTS, None):
            raise UserError(
                "evaluate: base_url, documents, slots and examples belong to model and data; with a recipe, give them "
                "in settings, for example {'evaluation.slots': 5}"
            )
        loaded = _load(recipe, settings)
    else:
        raise UserError("evaluate: expected either a recipe, or model and data")
    return commands.run_evaluate(loaded)[-1]


def sample(recipe: AnyRecipe, settings: Settings | None = None) -> Samples:
    """Sample the advantaged answers of a recipe's training examples. Arguments and errors: as of `evaluate`."""
    loaded = _load(recipe, settings)
    commands.run_sample(loaded)
    plan = make_plan(loaded)
    store, ids = SampleStore(plan.sample.artifact), sample_ids_of(plan.sample)
    index = store.index(ids)
    # Not all candidates are sampled where fewer are enough.
    table = store.load(index, ids, np.flatnonzero(index.stored), _SAMPLE_COLUMNS)
    return Samples(plan.sample.artifact.url, plan.sample.output().manifest().counts, table)


def distill(recipe: AnyRecipe, settings: Settings | None = None) -> Checkpoint:
    """Train a recipe's checkpoint from its samples. Arguments and errors: as of `evaluate`."""
    loaded = _load(recipe, settings)
    commands.run_distill(loaded)
    return _to_checkpoint(make_plan(loaded).distill.artifact)


def study(recipe: AnyRecipe, settings: Settings | None = None) -> StudyResult:
    """Run the whole chain of a recipe: evaluate, sample, distil, evaluate, report. Arguments: as of `evaluate`.

    Raises:
        UserError: as `evaluate`, and for a sweep, which the command line runs.
    """
    loaded = _load(recipe, settings)
    if loaded.sweep:
        raise UserError(f"{loaded.name}: is a sweep of several studies; call study for each, with its settings")
    commands.run_study(loaded)
    plan: Plan = make_plan(loaded)
    return StudyResult(
        before=read_evaluation(loaded, plan, plan.evaluate_base),
        after=read_evaluation(loaded, plan, plan.evaluate_distilled),
        checkpoint=_to_checkpoint(plan.distill.artifact),
        report=f"{loaded.storage}/report/index.html",
    )


def _load(recipe: AnyRecipe, settings: Settings | None) -> Recipe:
    overrides = _to_overrides(settings)
    if isinstance(recipe, Recipe):
        if overrides:
            raise UserError("settings: a Recipe has its settings already; give its name, file or mapping instead")
        return recipe
    if isinstance(recipe, Mapping):
        # Copied, since loading changes the mapping.
        return make_recipe(json.loads(json.dumps(recipe)), overrides)
    return load_recipe(str(recipe), overrides)


def _to_file(data: Questions) -> str:
    """The path of a data file; of records, a file of them, which stays for later calls in the temporary folder."""
    if isinstance(data, str | Path):
        return str(data)
    lines = []
    if isinstance(data, Mapping):
        raise UserError("data: expected a file or records, got one mapping; of columns, make a list of records")
    for number, record in enumerate(data, start=1):
        if not isinstance(record, Mapping):
            raise UserError(f"data: record {number}: expected a mapping, got {type(record).__name__}")
        try:
            lines.append(json.dumps(dict(record), ensure_ascii=False) + "\n")
        except (TypeError, ValueError) as error:
            raise UserError(f"data: record {number} cannot be written as JSON ({error})") from None
    text = "".join(lines).encode()
    path = user_folder("data") / f"questions-{hashlib.sha256(text).hexdigest()[:16]}.jsonl"
    write_bytes(fsspec.filesystem("file"), str(path), text)
    return str(path)


def _to_overrides(settings: Settings | None) -> list[str]:
    # JSON is YAML, in which overrides are written.
    return [f"{name}={json.dumps(value)}" for name, value in (settings or {}).items()]


def _to_checkpoint(artifact: Artifact) -> Checkpoint:
    return Checkpoint(f"{artifact.url}/{MODEL_FOLDER}", read_steps(artifact))
