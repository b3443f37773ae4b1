"""`recipes [NAME]`: the recipes that come with the project."""

import argparse
import json

from pos2distill.config.load import load_recipe
from pos2distill.config.read import RECIPES, recipe_names
from pos2distill.errors import UserError, did_you_mean

from .command_parsers import OF_READING, CommandParsers


def add_recipes(commands: CommandParsers) -> None:
    """Add the command to the command line."""
    recipes = commands.add(
        "recipes",
        _run,
        "list the recipes that come with the project, or print one to begin your own from",
        examples=("recipes", "recipes quickstart > my_recipe.yaml"),
        ending=OF_READING,
    )
    recipes.add_argument("name", nargs="?", metavar="NAME", help="print this recipe's file instead of the list")
    recipes.add_argument("--json", action="store_true", help="print the list as JSON")


def _run(options: argparse.Namespace) -> int:
    if options.name is None:
        _list_recipes(as_json=options.json)
        return 0
    if options.json:
        raise UserError("--json: is an option of the list; leave it out to print a recipe")
    names = recipe_names()
    if options.name not in names:
        raise UserError(f"{options.name}: no recipe of the project{did_you_mean(options.name, names)}")
    print((RECIPES / f"{options.name}.yaml").read_text(encoding="utf-8"), end="")
    return 0


def _list_recipes(*, as_json: bool) -> None:
    descriptions = {name: load_recipe(name).description for name in recipe_names()}
    if as_json:
        listed = [{"name": name, "description": description} for name, description in descriptions.items()]
        print(json.dumps(listed, ensure_ascii=False))
        return
    width = max(map(len, descriptions))
    for name, description in descriptions.items():
        print(f"{name:<{width}}  {description}")
