"""Whether a recipe can run on a cluster: what its pods can open and reach, and whether its pools fit on the nodes."""

import math
import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path, PurePosixPath

from pos2distill.config import PoolSection, Recipe, TrainersSection
from pos2distill.config.commands import COMMAND_FACTS
from pos2distill.config.model import looks_like_hub_name
from pos2distill.config.paths import in_project, project_root
from pos2distill.config.read import recipe_names
from pos2distill.errors import UserError, did_you_mean
from pos2distill.node_pools import TASK_CPUS, TRAINING

from .egress import egress_problem
from .job_command import JobCommand
from .nodes import NodeGroup
from .sections import READABLE, STORES, has_parent_segment
from .spec import ClusterSpec

_RESOURCES = ("gpus", "cpus")
_EXAMPLES = project_root() / "examples"  # the only folder of data and models in the image


def check_recipe(spec: ClusterSpec, job: JobCommand) -> None:
    """Reject a recipe, or a study of its sweep, that cannot work on this cluster, and a baseline that cannot be read.

    Raises:
        UserError: naming the setting, file or pool size.
    """
    recipe = job.recipe
    if recipe.runtime.executor == "local":
        raise UserError(
            f"{recipe.name}: runtime.executor: local would run everything in the head's pod, which has no GPU, and "
            f"nothing on the nodes; set it to ray"
        )
    for name in recipe.study.evaluation.also_evaluate:
        if name not in recipe_names():
            raise UserError(
                f"evaluation.also_evaluate: {name}: not in the image; copy it to pipelines/recipes/ and rebuild the "
                f"image"
            )
    for cell in job.cells:
        _check_command(cell, job.command)
        for field, path in _paths(cell, with_storage=job.storage is not None).items():
            _check_path(spec, cell, field, path)
        _check_hub(spec, cell)
        _check_endpoint(spec, cell)
        _check_pools(spec, cell, job.pools(cell.study))
    if job.gate.baseline is not None:
        _check_path(spec, recipe, "--baseline", job.gate.baseline)


def _check_command(recipe: Recipe, command: str) -> None:
    """Reject training without weights or without training examples, as the checks before a run do."""
    if not COMMAND_FACTS[command].needs_training_data:
        return
    if not recipe.study.has_weights:
        raise UserError(
            f"{recipe.name}: model.engine: 'openai' is for the command evaluate only, got {command}; set model.engine "
            f"to vllm or hf"
        )
    if not recipe.study.data.train_examples:
        raise UserError(f"{recipe.name}: data.train_examples: 0 is for the command evaluate only, got {command}")


def _paths(recipe: Recipe, *, with_storage: bool) -> dict[str, str]:
    """Every path that the pods must be able to open, by the name of its setting."""
    paths = {"data.path": recipe.study.data.path}
    if with_storage:
        paths["runtime.storage"] = recipe.storage
    model = recipe.study.model
    if not (model.uses_chat_api or looks_like_hub_name(model.path)):
        paths["model.path"] = model.path
    for name, other in recipe.other_tasks.items():
        # It is absolute by now, even if its recipe names a file of the project.
        paths[f"evaluation.also_evaluate: {name}: data.path"] = in_project(other.data.path)
    return paths


def _check_hub(spec: ClusterSpec, recipe: Recipe) -> None:
    """A model of the hub must be downloaded, unless a cache may hold it already."""
    model = recipe.study.model
    if model.uses_chat_api or not looks_like_hub_name(model.path) or spec.pods.model_cache:
        return
    problem = egress_problem(spec.network, spec.pods, f"hf://{model.path}")
    if problem:
        raise UserError(
            f"{recipe.name}: model.path: {model.path} would be downloaded from the hub: network.egress: {problem}; or "
            f"set a folder of a mounted volume"
        )


def _check_endpoint(spec: ClusterSpec, recipe: Recipe) -> None:
    """Reject a study that generates with a server which the pods cannot reach."""
    url = recipe.runtime.endpoint.base_url
    if recipe.study.has_weights or url is None:
        return
    # The client is that of openai, which reads proxies, unlike the client of files at http URLs.
    problem = egress_problem(spec.network, spec.pods, url, client_reads_proxies=True)
    if problem:
        raise UserError(f"{recipe.name}: runtime.endpoint.base_url: {url}: network.egress: {problem}")


def _check_path(spec: ClusterSpec, recipe: Recipe, field: str, path: str) -> None:
    """A local file exists in the pods only if the image contains it or the mounted volume holds it."""
    if has_parent_segment(path) and ("://" in path or path.startswith("/")):
        raise UserError(f"{recipe.name}: {field}: {path}: expected a path without '..'")
    scheme, is_url, _ = path.partition("://")
    if is_url:
        schemes = STORES if field == "runtime.storage" else READABLE
        if scheme not in schemes:
            hint = did_you_mean(scheme, schemes)
            raise UserError(f"{recipe.name}: {field}: the image cannot open {scheme}://{hint}")
        problem = egress_problem(spec.network, spec.pods, path)
        if problem:
            raise UserError(f"{recipe.name}: {field}: {path}: network.egress: {problem}")
        return
    mounts = spec.writable_mounts if field == "runtime.storage" else spec.mounts
    if any(PurePosixPath(path).is_relative_to(mount) for mount in mounts):
        return
    # As it was written: `load_recipe` has made local paths absolute on this machine, and the job reads them there.
    if _is_in_image(recipe.written_paths.get(field, path)) and field != "runtime.storage":
        return
    remedies = ["set a URL"]
    holds_data = [mount for mount in mounts if mount in spec.claim_mounts]
    if holds_data:
        remedies.append(f"or a folder below {' or '.join(holds_data)}")
    if Path(path).is_relative_to(_EXAMPLES) and field != "runtime.storage":
        remedies.append(f"or the path relative to the project, {in_project(path)}")
    if field == "runtime.storage":
        remedies.append("or remove it, for a folder of spec.storage.url")
    raise UserError(f"{recipe.name}: {field}: {path} does not exist in the pods; {', '.join(remedies)}")


def _is_in_image(path: str) -> bool:
    """Whether a path leads to the examples from the project's folder, in which the job runs."""
    return (
        not os.path.isabs(path) and not has_parent_segment(path) and (project_root() / path).is_relative_to(_EXAMPLES)
    )


def _check_pools(spec: ClusterSpec, recipe: Recipe, pools: frozenset[str]) -> None:
    """Reject pools whose actors do not fit on one node, or not all of them on the nodes together.

    Args:
        pools: those that the job's command starts (`JobCommand.pools`).
    """
    sampling = list(spec.sampling_groups.values())
    generating = sorted(pools & {"samplers", "teachers"})
    for name in generating:
        _check_pool(recipe, name, "max", "sampling", sampling)
    if "trainers" in pools:
        _check_pool(recipe, "trainers", "workers", "training", [spec.training])
    if generating:
        _check_sum(spec, recipe, generating)
    _check_gpu_use(spec, recipe, pools)


def _check_sum(spec: ClusterSpec, recipe: Recipe, generating: Sequence[str]) -> None:
    """Reject pools that do not fit the nodes of sampling together."""
    sections = [recipe.runtime.sampling_pools[name] for name in generating]
    for resource in _RESOURCES:
        needed = sum(pool.max * _exact(getattr(pool, resource)) for pool in sections)
        available = sum(group.max * _exact(getattr(group.node, resource)) for group in spec.sampling_groups.values())
        who = " and ".join(generating)
        # Without nodes of its own, reading and storing data needs room for a task.
        if resource == "cpus" and spec.data is None:
            needed += _exact(TASK_CPUS)
            who = ", ".join(generating) + " and a task that reads and stores data"
        if needed > available:
            unit = "GPUs" if resource == "gpus" else "CPUs"
            raise UserError(
                f"{recipe.name}: runtime.{generating[0]}.max: {who} need {float(needed):g} {unit}, but sampling has at "
                f"most {float(available):g}; raise spec.sampling.max or lower runtime.{generating[0]}.max"
            )


def _check_gpu_use(spec: ClusterSpec, recipe: Recipe, pools: frozenset[str]) -> None:
    """On nodes with GPUs, all pools use them or none: a toy may run on the CPUs of any cluster."""
    if not spec.training.node.gpus:
        return
    unused = sorted(name for name in pools if not recipe.runtime.pools[name].gpus)
    if recipe.study.model.engine == "vllm" and "samplers" in unused:
        raise UserError(f"{recipe.name}: runtime.samplers.gpus: 0, but vLLM of the image for GPUs needs one; set 1")
    if unused and len(unused) < len(pools):
        used = " and ".join(sorted(pools - {*unused}))
        raise UserError(f"{recipe.name}: runtime.{unused[0]}.gpus: 0, but the nodes have GPUs, which {used} use; set 1")


def _check_pool(recipe: Recipe, pool_name: str, size_field: str, group_name: str, groups: Sequence[NodeGroup]) -> None:
    """One pool of actors on the node groups that it runs on.

    Args:
        pool_name: section of the recipe's runtime.
        size_field: field of that section with the largest number of actors.
    """
    pool = recipe.runtime.pools[pool_name]
    field = f"{recipe.name}: runtime.{pool_name}"
    for resource in _RESOURCES:
        per_actor = getattr(pool, resource)
        per_node = max(getattr(group.node, resource) for group in groups)
        if per_actor > per_node:
            raise UserError(f"{field}.{resource}: {per_actor:g}, but a node of {group_name} has {per_node:g}; lower it")
    actors = getattr(pool, size_field)
    room = sum(group.max * actors_per_node(pool, group, is_trainer=pool_name == "trainers") for group in groups)
    if actors > room:
        raise UserError(
            f"{field}.{size_field}: {actors}, but only {room} fit on the nodes of {group_name}; "
            f"raise spec.{group_name}.max or lower runtime.{pool_name}.{size_field}"
        )


def actors_per_node(pool: PoolSection | TrainersSection, group: NodeGroup, *, is_trainer: bool) -> float:
    """The number of a pool's actors that fit on one node; infinite if they need nothing."""
    fits = [math.inf]
    for resource in _RESOURCES:
        per_actor = getattr(pool, resource)
        if per_actor:
            fits.append(math.floor(_exact(getattr(group.node, resource)) / _exact(per_actor)))
    if is_trainer:
        fits.append(TRAINING.units(group.node.gpus))  # a worker takes one unit of the custom resource
    return min(fits)


def _exact(number: float) -> Fraction:
    """The decimal number as it was written: 0.3 / 0.1 is 3, and numbers of any size do not overflow."""
    return Fraction(str(number))
