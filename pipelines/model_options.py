"""`evaluate --model … --data …`: a model and a file of questions instead of a recipe."""

import argparse

from pos2distill.config import Recipe
from pos2distill.config.evaluation import DEFAULT_EXAMPLES, DEFAULT_SLOTS, evaluation_recipe
from pos2distill.config.load import load_recipe
from pos2distill.config.yaml_reader import parse_value
from pos2distill.errors import UserError

_OPTIONS = ("data", "base_url", "documents", "examples", "slots")


def add_model_options(command: argparse.ArgumentParser) -> None:
    """The options that stand in place of a recipe."""
    group = command.add_argument_group("instead of a RECIPE")
    group.add_argument("--model", metavar="PATH|NAME", help="folder, URL or hub name; with --base-url the served name")
    group.add_argument("--data", metavar="FILE", help="questions as JSON Lines (docs/data.md); all of them can be used")
    group.add_argument("--base-url", metavar="URL", help="of a server with OpenAI's API (docs/evaluate.md)")
    group.add_argument("--documents", type=int, metavar="N", help="documents in a prompt (default 20)")
    group.add_argument(
        "--examples", type=int, metavar="N", help=f"questions, at every slot (default {DEFAULT_EXAMPLES})"
    )
    group.add_argument("--slots", metavar="N|all|[…]", help=f"evaluated slots, spread evenly (default {DEFAULT_SLOTS})")


def load_evaluated_recipe(options: argparse.Namespace, overrides: list[str]) -> Recipe:
    """The recipe that is named, or that of `--model … --data …`.

    Args:
        overrides: settings, `section.field=value`.
    Raises:
        UserError: naming the option that is missing or does not fit.
    """
    if options.model is None:
        if options.recipe is None:
            raise UserError("evaluate: expected a RECIPE, or --model and --data")
        for name in _OPTIONS:
            if getattr(options, name) is not None:
                raise UserError(f"--{name.replace('_', '-')}: goes with --model; of a recipe, change the setting")
        return load_recipe(options.recipe, overrides)
    if options.recipe is not None:
        # Without a recipe, the first override is in its place.
        if "=" not in options.recipe:
            raise UserError(f"evaluate: {options.recipe}: expected either a RECIPE or --model and --data, not both")
        overrides = [options.recipe, *overrides]
    if options.data is None:
        raise UserError("--data: missing; expected the file with the questions")
    given = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None}
    if options.slots is not None:
        try:
            given["slots"] = parse_value(options.slots)
        except ValueError as error:
            raise UserError(f"--slots: cannot read the value: {error}") from None
    return evaluation_recipe(options.model, overrides=overrides, **given)
