"""A recipe that the image does not contain: the user's own file, which a ConfigMap brings into the head's pod."""

import hashlib
import json
import re
from dataclasses import dataclass

from pos2distill.config.read import RECIPES, find_yaml, is_built_in
from pos2distill.errors import UserError
from pos2distill.secrets import first_secret_line

FOLDER = "/etc/pos2distill"  # where the file is mounted; a spec cannot mount a volume in /etc
# `kubectl apply` writes the whole object a second time, as JSON, into an annotation; all annotations of an object may
# have 256 KiB. A ConfigMap itself may have 1 MiB.
MAX_JSON_BYTES = 240 << 10
_ESCAPED = re.compile("[<>&]")  # escaped as \u003c, besides what Python's JSON escapes


@dataclass(frozen=True, slots=True)
class RecipeFile:
    """The text of a user's recipe."""

    text: str

    @property
    def digest(self) -> str:
        """A digest of the text; a changed recipe has a different one."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:8]

    @property
    def name(self) -> str:
        """The file's name in the pod. That of a changed recipe differs, so that its job has another command."""
        return f"recipe-{self.digest}.yaml"

    @property
    def path(self) -> str:
        """The file's path in the pod."""
        return f"{FOLDER}/{self.name}"


def own_recipe(recipe_name: str) -> RecipeFile | None:
    """The file of a recipe; None of a recipe of the project, which the image contains.

    Args:
        recipe_name: the name or path of a recipe that `load_recipe` accepts.
    Raises:
        UserError: if the file is too large, or contains a secret.
    """
    path = find_yaml(recipe_name, RECIPES, "recipe")
    if is_built_in(path):
        return None
    text = path.read_text(encoding="utf-8")
    size = len(json.dumps(text, ensure_ascii=False).encode()) + 5 * len(_ESCAPED.findall(text))
    if size > MAX_JSON_BYTES:
        raise UserError(
            f"{recipe_name}: {size} bytes as JSON; a recipe of a job has at most {MAX_JSON_BYTES}, since a ConfigMap "
            f"holds it; shorten it, or copy it to pipelines/recipes/ and rebuild the image"
        )
    # Also in comments, which `load_recipe` does not see.
    number = first_secret_line(text)
    if number is not None:
        raise UserError(
            f"{recipe_name}: line {number} contains what looks like a secret, which a ConfigMap does not protect; "
            f"use pods.secrets instead"
        )
    return RecipeFile(text)
