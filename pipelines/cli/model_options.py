"""`evaluate --model … --data …`: a model and a file of questions instead of a recipe."""

import argparse
import os
from collections.abc import Iterable
from typing import Any

from pos2distill.config import Recipe
from pos2distill.config.evaluation_recipe import DEFAULT_EVALUATED_SLOTS, DEFAULT_EXAMPLES
from pos2distill.config.load import load_recipe
from pos2distill.config.overrides import overrides_setting
from pos2distill.config.yaml_reader import parse_value
from pos2distill.errors import UserError, reworded

from ..model_recipe import SETTINGS_OF_ARGUMENTS, recipe_of_questions

# The options besides --model, and the settings that they stand for.
_OPTIONS = {name: setting for name, setting in SETTINGS_OF_ARGUMENTS.items() if name != "model"}


def add_model_options(command: argparse.ArgumentParser) -> None:
    """Add the options that stand in place of a recipe."""
    group = command.add_argument_group("instead of a RECIPE")
    group.add_argument(
        "--model",
        metavar="PATH|NAME",
        help="folder, URL or hub name of a model; with --base-url, its name on the server (with model.api=completions, "
        "the folder of its tokenizer; runtime.endpoint.served_model is the name then)",
    )
    group.add_argument(
        "--data", metavar="FILE", help="file with questions as JSON Lines (docs/data.md); none is reserved for training"
    )
    group.add_argument(
        "--base-url", metavar="URL", help="URL of a server with OpenAI's API that runs the model (docs/evaluate.md)"
    )
    group.add_argument("--documents", type=int, metavar="N", help="documents in each prompt (default: 20)")
    group.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help=f"questions to ask, each at every slot (default: {DEFAULT_EXAMPLES}, or all if the file has fewer)",
    )
    group.add_argument(
        "--slots",
        metavar="N|all|[…]",
        help=f"number of slots to evaluate, spread evenly, or a list of slots counted from 0 (default: "
        f"{DEFAULT_EVALUATED_SLOTS}, or all if there are fewer)",
    )


def load_evaluated_recipe(options: argparse.Namespace) -> Recipe:
    """The recipe that is named, or that of `--model … --data …`.

    Args:
        options: its words are settings, `section.field=value`.
    Raises:
        UserError: naming the option that is missing or does not fit.
    """
    overrides = options.words
    if options.model is None:
        if options.recipe is None:
            raise UserError("evaluate: expected a RECIPE, or --model and --data")
        for name, setting in _OPTIONS.items():
            if getattr(options, name) is not None:
                raise UserError(f"{_option(name)}: goes with --model; with a recipe, set {setting}=VALUE")
        return load_recipe(options.recipe, overrides)
    if options.recipe is not None:
        # Without a recipe, the first override is in its place.
        if "=" not in options.recipe:
            # The shell has replaced a pattern by several files.
            is_data = os.path.isfile(options.recipe) and not options.recipe.endswith((".yaml", ".yml"))
            quote = "; put a pattern of several files in quotes" if is_data else ""
            raise UserError(
                f"evaluate: {options.recipe}: expected either a RECIPE or --model and --data, not both{quote}"
            )
        overrides = [options.recipe, *overrides]
    if options.data is None:
        instead = ""
        if any(overrides_setting(override, "data.path") for override in overrides):
            instead = " instead of data.path"
        raise UserError(f"--data: missing; expected the file with the questions{instead}")
    given = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    if options.slots is not None:
        given["slots"] = _parse_slots(options.slots)
    given["model"] = options.model
    with reworded(lambda message: _name_options(message, given)):
        return recipe_of_questions(overrides=overrides, **given)


def _parse_slots(text: str) -> Any:
    """The value of --slots.

    Raises:
        UserError: if there is none, which would mean the default.
    """
    try:
        slots = parse_value(text)
    except ValueError as error:
        raise UserError(f"--slots: cannot read the value: {error}") from None
    if slots is None:
        raise UserError("--slots: no value; expected a number of slots, all, or a list, for example [0, 9]")
    return slots


def _name_options(message: str, given: Iterable[str]) -> str:
    """An error with these options as they were typed, instead of the arguments or settings that they stand for."""
    for name in given:
        setting = SETTINGS_OF_ARGUMENTS[name]
        message = message.replace(f"{name}: {setting} ", f"{_option(name)}: {setting} ")
        message = message.replace(f"evaluate: {setting}: ", f"{_option(name)}: ")
    return message


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
