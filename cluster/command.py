"""`run.py cluster`: what each action does with a spec, a recipe and their settings."""

import sys
from collections.abc import Sequence
from pathlib import Path

from cluster import rayjob as submit
from cluster.render import Manifest, render, to_yaml
from cluster.spec import ClusterSpec, load_cluster
from cluster.validate import check, load_manifests
from pos2distill.errors import UserError


def run_cluster(
    action: str, source: str, words: Sequence[str], *, out: str | None = None, crds: str | None = None
) -> int:
    """Run one action. Returns the exit code.

    Args:
        action: render, validate, submit, status, logs or delete.
        source: a cluster spec; to validate, also a file of manifests.
        words: a recipe, its overrides, and `spec.section.field=value` for the spec.
        out: render: a folder for NAME.yaml; None: print. crds: validate: file or folder with KubeRay's CRDs.
    Raises:
        UserError: for a spec or recipe that cannot be used.
    """
    if action in ("status", "logs", "delete"):
        act = {"status": submit.status, "logs": submit.logs, "delete": submit.delete}[action]
        return act(_spec(source, words))
    if action == "submit" and _split(words)[0] is None:
        raise UserError("submit: a job of which recipe? A cluster without one is made by `render` and kubectl apply")
    manifests = _manifests(action, source, words)
    if faults := check(manifests, crds):
        for fault in faults:
            print(f"error: {fault}", file=sys.stderr)
        return 2
    if action == "submit":
        return submit.submit(_spec(source, words), manifests)
    if action == "validate":
        against = "the schema and the rules" if crds else "the rules; the schema only with --crds"
        print(f"{len(manifests)} manifests are well, by {against}")
    elif out is None:
        print(to_yaml(manifests), end="")
    else:
        path = Path(out) / f"{manifests[-1]['metadata']['name']}.yaml"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(to_yaml(manifests))
        except OSError as error:
            raise UserError(f"--out: {path} cannot be written ({error.strerror}); give another folder") from None
        print(path)
    return 0


def _manifests(action: str, source: str, words: Sequence[str]) -> list[Manifest]:
    path = Path(source)
    if action == "validate" and path.is_file() and (found := load_manifests(path)) is not None:
        if words:
            raise UserError(f"{words[0]}: {source} holds manifests, which take no recipe and no settings")
        return found
    recipe, of_recipe = _split(words)
    return render(_spec(source, words), recipe, of_recipe)


def _spec(source: str, words: Sequence[str]) -> ClusterSpec:
    return load_cluster(source, [word.removeprefix("spec.") for word in words if word.startswith("spec.")])


def _split(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe, if one is named, and its settings."""
    recipe = words[0] if words and "=" not in words[0] else None
    of_recipe = [word for word in words[1 if recipe else 0 :] if not word.startswith("spec.")]
    if recipe is None and of_recipe:
        raise UserError(f"{of_recipe[0]}: a setting of which recipe? Name one, or write spec.{of_recipe[0]}")
    return recipe, of_recipe
