"""The command that a RayJob runs: a study, checked here against the cluster that is to run it."""

import shlex
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from cluster.spec import READABLE, STORES, ClusterSpec
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe, recipe_names
from pos2distill.errors import UserError, did_you_mean
from pos2distill.placement import TRAINING
from pos2distill.secrets import looks_secret

_KINDS = ("gpus", "cpus")
_CHECKOUT = Path(__file__).parent.parent


def make_entrypoint(spec: ClusterSpec, recipe_name: str, overrides: Sequence[str] = ()) -> str:
    """The shell command of the job: `run.py study` in the image, with storage that all pods share.

    Args:
        recipe_name: a recipe that comes with the project, and so with the image.
        overrides: of the recipe, `section.field=value`.
    Raises:
        UserError: for a recipe, setting, file or pool size that cannot work on this cluster.
    """
    if recipe_name not in recipe_names() and Path(recipe_name).is_file():
        raise UserError(f"{recipe_name}: not in the image; put it into pipelines/recipes/ and build the image anew")
    if any(looks_secret(override) for override in overrides):
        raise UserError("command line: an override holds what looks like a secret; name it in pods.secrets instead")
    recipe = load_recipe(recipe_name, overrides)
    if away := next((name for name in recipe.study.evaluation.also_evaluate if name not in recipe_names()), None):
        raise UserError(f"evaluation.also_evaluate: {away}: not in the image; put it into pipelines/recipes/")
    stored = any(override.startswith("runtime.storage=") for override in overrides)
    paths = {"data.path": recipe.study.data.path, **({"runtime.storage": recipe.storage} if stored else {})}
    if "://" in recipe.study.model.path or recipe.study.model.path.startswith(("/", ".", "~")):  # else a hub's name
        paths["model.path"] = recipe.study.model.path
    paths |= {
        f"evaluation.also_evaluate: {name}: data.path": other.data.path for name, other in recipe.transfers.items()
    }
    _check_paths(spec, recipe, paths, overrides)
    _check_pools(spec, recipe)
    words = ["python", "run.py", "study", recipe_name, *overrides]
    if not stored:
        words.append(f"runtime.storage={spec.storage.url.rstrip('/')}/{recipe.name}")
    # The driver's folder is not that of the image by itself; `cd` would end at the submitter's shell.
    return shlex.join(["env", f"--chdir={spec.pods.project}", *words])


def _check_paths(spec: ClusterSpec, recipe: Recipe, paths: dict[str, str], overrides: Sequence[str]) -> None:
    """Local files are in the pods only if the image carries them or the claim holds them."""
    for field, path in paths.items():
        scheme, remote, _ = path.partition("://")
        if remote and scheme not in (schemes := STORES if field == "runtime.storage" else READABLE):
            raise UserError(f"{recipe.name}: {field}: the image cannot open {scheme}://{did_you_mean(scheme, schemes)}")
        mounted = spec.storage.claim and PurePosixPath(path).is_relative_to(spec.storage.mount)
        # The image's project lies elsewhere, so that an absolute path, if one was given, leads nowhere.
        given = any(path in override for override in overrides)
        in_image = not given and field != "runtime.storage" and Path(path).is_relative_to(_CHECKOUT / "examples")
        if not (remote or mounted or in_image):
            remedy = f", or a folder below {spec.storage.mount}" if spec.storage.claim else ""
            raise UserError(
                f"{recipe.name}: {field}: {path} is not there in the pods; give a URL{remedy}"
                + (", or the path from the project on" if given else "")
            )


def _check_pools(spec: ClusterSpec, recipe: Recipe) -> None:
    """What would wait for ever: more for one actor than a node has, or more actors than the nodes have room for."""
    runtime, sampling = recipe.runtime, spec.sampling
    for name, pool, most, group_name, group in (
        ("samplers", runtime.samplers, "max", "sampling", sampling),
        ("teachers", runtime.teachers, "max", "sampling", sampling),
        ("trainers", runtime.trainers, "workers", "training", spec.training),
    ):
        field, fits = f"{recipe.name}: runtime.{name}", []
        for kind in _KINDS:
            each, there = getattr(pool, kind), getattr(group.node, kind)
            if each > there:
                raise UserError(f"{field}.{kind}: {each:g}, but a node of {group_name} has {there:g}; lower it")
            fits += [int(there / each + 1e-9)] if each else []
        if name == "trainers":
            fits.append(TRAINING.units(group.node.gpus))  # of which a worker takes one
        wanted = getattr(pool, most)
        if fits and wanted > (room := group.max * min(fits)):
            raise UserError(
                f"{field}.{most}: {wanted}, but the nodes of {group_name} have room for {room}; "
                f"raise spec.{group_name}.max or lower runtime.{name}.{most}"
            )
    for kind in _KINDS:
        needed = sum(pool.max * getattr(pool, kind) for pool in (runtime.samplers, runtime.teachers))
        if needed > (there := sampling.max * getattr(sampling.node, kind)):
            raise UserError(
                f"{recipe.name}: runtime.samplers.max: with the teachers they want {needed:g} {kind[:-1].upper()}s, "
                f"but sampling has at most {there:g}; raise spec.sampling.max or lower runtime.samplers.max"
            )
