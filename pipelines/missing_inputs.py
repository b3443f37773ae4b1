"""A hint for a built-in recipe whose model or data is not there yet."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from pos2distill.config.read import recipe_names
from pos2distill.errors import reworded


@contextmanager
def with_input_source_hint(recipe: Recipe) -> Iterator[None]:
    """While the body reads a recipe's model and data, say where the built-in recipe's own ones come from."""

    def with_source(message: str) -> str:
        if recipe.name not in recipe_names():
            return message
        own = load_recipe(recipe.name).study
        # A relative path that leads nowhere could also be a hub's name, so that of the model is not absolute yet.
        paths = (own.data.path, os.path.abspath(own.model.path))
        if not message.startswith(tuple(f"{path}: no such " for path in paths)):
            return message
        return f"{message}; `recipes {recipe.name}` says where it comes from"

    with reworded(with_source):
        yield
