"""The command that `submit` and `cluster` run as a job: `[COMMAND] RECIPE settings`, and the options of the gate."""

import os

from pos2distill.config.commands import COMMAND_FACTS
from pos2distill.config.gate import NO_GATE, Gate
from pos2distill.config.read import recipe_names
from pos2distill.errors import UserError, did_you_mean


def split_command(caller: str, words: list[str], *, needs_recipe: bool = True) -> tuple[str, list[str]]:
    """The command of a job, `study` if the words begin with none, and the words after it.

    Args:
        caller: the command that submits the job, for errors.
        needs_recipe: whether a recipe must follow if no command is named.
    Raises:
        UserError: for a command that does not exist, or one without a recipe.
    """
    first = words[0] if words else ""
    is_command = first in COMMAND_FACTS
    # The command may be left out, so a misspelled one would be read as a recipe and the recipe as a setting.
    precedes_recipe = bool(words[1:]) and (words[1] in recipe_names() or os.path.isfile(words[1]))
    if not is_command and precedes_recipe and "=" not in first:
        raise UserError(f"{caller}: {first}: no such command{did_you_mean(first, COMMAND_FACTS)}")
    rest = words[1:] if is_command else words
    if (is_command or needs_recipe) and (not rest or "=" in rest[0]):
        raise UserError(f"{caller}: expected [COMMAND] RECIPE [section.field=value ...]; the recipe is missing")
    return first if is_command else "study", rest


def check_gate_options(gate: Gate, command: str) -> None:
    """Reject the gate's options for a job of another command than `evaluate`.

    Raises:
        UserError: naming the first option.
    """
    if gate != NO_GATE and not COMMAND_FACTS[command].takes_gate:
        option = next(iter(gate.given()))
        raise UserError(f"{option}: is an option of evaluate, not of {command}")
