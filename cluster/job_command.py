"""The command of `run.py` that a job runs, with the recipe that it names."""

from collections.abc import Sequence
from dataclasses import dataclass

from pos2distill.config import Recipe, Study
from pos2distill.config.commands import COMMAND_FACTS, CommandFacts
from pos2distill.config.gate import NO_GATE, Gate
from pos2distill.config.load import load_recipe
from pos2distill.config.read import RECIPES, find_yaml
from pos2distill.config.sweep import sweep_cells
from pos2distill.errors import UserError
from pos2distill.secrets import looks_secret

from .recipe_file import RecipeFile, own_recipe


@dataclass(frozen=True, slots=True)
class JobCommand:
    """`run.py COMMAND RECIPE OVERRIDES`, with the options of a gate, as a job runs it, and what `load_job` read of it.

    Attributes:
        recipe: loaded, with the overrides applied.
        recipe_in_pod: its name in the image, or the path of the user's own.
        cells: the recipe of each study of its sweep; the recipe alone if it has none.
        own_recipe: the user's own recipe, which a ConfigMap brings into the pod; None for a recipe of the image.
        storage: the storage that the recipe or an override sets in place of the spec's; None if neither does.
    """

    command: str
    recipe_in_pod: str
    overrides: tuple[str, ...]
    gate: Gate
    recipe: Recipe
    cells: tuple[Recipe, ...]
    own_recipe: RecipeFile | None
    storage: str | None

    @property
    def facts(self) -> CommandFacts:
        """What the command does."""
        return COMMAND_FACTS[self.command]

    def pools(self, study: Study) -> frozenset[str]:
        """The pools of actors that the command may start for a study of its recipe: `samplers`, `teachers`, `trainers`.

        Named as the sections of `runtime`.
        """
        facts = self.facts
        analyzes = facts.adds_analysis or (facts.analyzes and study.analysis is not None)
        pools = set()
        if study.model.engine != "openai" and not facts.only_reads:  # a server answers by itself
            pools.add("samplers")
        if (facts.samples and study.method.teacher == "cached") or analyzes:
            pools.add("teachers")
        if facts.trains:
            pools.add("trainers")
        return frozenset(pools)


def load_job(
    recipe_name: str, overrides: Sequence[str] = (), *, command: str = "study", gate: Gate = NO_GATE
) -> JobCommand:
    """Load the recipe of a job's command, as it is written on the command line.

    Args:
        recipe_name: a recipe of the project, or the path of the user's own (see `recipe_file`).
        overrides: `section.field=value`, applied to the recipe.
        command: the `run.py` command that the job runs.
        gate: its options.
    Raises:
        UserError: for a secret in the command, and for a recipe that cannot be loaded or brought into a pod.
    """
    _reject_secrets(overrides, gate.words())
    recipe = load_recipe(recipe_name, overrides)
    own = own_recipe(recipe_name)
    name_in_image = find_yaml(recipe_name, RECIPES, "recipe").resolve().stem
    return JobCommand(
        command=command,
        recipe_in_pod=own.path if own else name_in_image,
        overrides=tuple(overrides),
        gate=gate,
        recipe=recipe,
        cells=tuple(cell for _, cell in sweep_cells(recipe)),
        own_recipe=own,
        storage=recipe.storage if "runtime.storage" in recipe.written_paths else None,
    )


def _reject_secrets(overrides: Sequence[str], options: Sequence[str]) -> None:
    """Reject secrets in the command, which the RayJob stores in clear text."""
    for kind, words in (("an override", overrides), ("an option", options)):
        if any(looks_secret(word) for word in words):
            raise UserError(f"command line: {kind} contains what looks like a secret; use pods.secrets instead")
