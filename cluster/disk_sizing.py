"""The disk that the pods of a node group need, for models, training states and what Ray spills. Units: bytes."""

import math
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from pos2distill.config import Study
from pos2distill.config.base import WEIGHT_BYTES
from pos2distill.config.training import STATE_BYTES
from pos2distill.errors import UserError

from .job_command import JobCommand
from .known_models import known_model
from .model_size import ADAPTER_PERCENT, parameter_count
from .nodes import NodeSection, quantity_bytes
from .spec import ClusterSpec

OBJECT_STORE_FRACTION = 0.9  # fraction of /dev/shm for Ray's object store; the remainder is for NCCL

Disks = dict[str, dict[str, int]]
"""For each node group, bytes by what they hold."""


def node_disks(spec: ClusterSpec, job: JobCommand | None = None) -> Disks:
    """For each node group what its pods write besides `scratch`, by what it is.

    A training node downloads the model, and the whole last checkpoint when it resumes; later it has at most one
    checkpoint that is uploaded, and at the end the trained model. A sampling node has the model, and the trained model
    of each study of a sweep and each round (`method.rounds`). On a mounted volume all of them are read and written in
    place.

    Args:
        job: what the job runs; None: the cluster is for any study of `model_billions` parameters.
    Raises:
        UserError: if the number of parameters is neither set nor known; if a pod needs more than `disk`.
    """
    disks: Disks = {name: {} for name in spec.groups}
    storage = job.storage if job is not None else None
    remote = "://" in (storage or spec.storage.url)
    if job is not None:
        studies = [cell.study for cell in job.cells]
        for name in spec.groups:
            if name != "data":  # data tasks read config and tokenizer only
                disks[name] = _largest([_study_disk(spec, study, name, len(studies), remote) for study in studies])
    elif spec.model_billions is not None:
        whole = round(spec.model_billions * 1e9)
        for name in spec.groups:
            if name != "data":
                trained_model = 2 * whole if remote else 0
                disks[name] = _disk_parts(name, copy=2 * whole, trained_model=trained_model, state=STATE_BYTES * whole)
    _check_disk("head", spec.head, {})
    for name, parts in disks.items():
        _check_disk(f"{name}.node", spec.groups[name].node, parts)
    return disks


def hidden_state_bytes(spec: ClusterSpec, study: Study) -> float:
    """The teacher's hidden states of all kept samples, (tokens, width) each; 0 for a model of unknown shape.

    No more of them can be in Ray's object store at a time, whatever part of them is in flight. Prompts and responses
    are less than a percent of them.
    """
    model = known_model(study.model.path)
    if model is None or spec.model_billions is not None or study.method.teacher != "cached":
        return 0
    tokens = study.wanted_samples * study.sampling.max_new_tokens
    return float(WEIGHT_BYTES[study.model.dtype]) * tokens * model.width


def disk_of(scratch: str, parts: dict[str, int]) -> str:
    """The disk of a pod as a quantity: `scratch`, and the parts that `node_disks` returns."""
    return _gibibytes(math.ceil(quantity_bytes(scratch)) + sum(parts.values()))


def _gibibytes(size: int) -> str:
    return f"{-(-size // 2**30)}Gi"  # rounded up


def _study_disk(spec: ClusterSpec, study: Study, group: str, studies: int, remote: bool) -> dict[str, int]:
    if not study.has_weights:
        return {}  # a server has the model
    parameters = parameter_count(spec, study.model.path)
    weights = WEIGHT_BYTES[study.model.dtype] * parameters
    trained = parameters if study.training.lora is None else parameters * ADAPTER_PERCENT // 100
    if not remote:
        trained_models = 0  # read and written in place
    elif group == "training":
        # Trainers begin a later round with the model of the one before.
        trained_models = min(study.method.rounds, 2)
    else:
        # Samplers generate with the models of all rounds.
        trained_models = studies * study.method.rounds
    copy = weights if _is_copied(spec, study.model.path) else 0
    return _disk_parts(group, copy=copy, trained_model=trained_models * weights, state=STATE_BYTES * trained)


def _disk_parts(group: str, *, copy: int, trained_model: int, state: int) -> dict[str, int]:
    parts = {"model": copy, "trained model": trained_model}
    if group == "training":
        # Also with storage on a volume, since workers write a checkpoint to their own disk first.
        parts["checkpoint"] = state
    return {name: size for name, size in parts.items() if size}


def _is_copied(spec: ClusterSpec, path: str) -> bool:
    """Whether pods copy a model to their own disk: not from the image, and not from a mounted volume."""
    if Path(path).is_dir():
        return False
    if spec.pods.model_cache and "://" not in path:
        return False  # it is a model of the hub
    is_mounted = any(PurePosixPath(path).is_relative_to(mount) for mount in spec.mounts)
    return not is_mounted


def _largest(choices: Sequence[dict[str, int]]) -> dict[str, int]:
    return max(choices, key=lambda parts: sum(parts.values()))


def _check_disk(section: str, node: NodeSection, parts: dict[str, int]) -> None:
    needed = disk_of(node.scratch, parts)
    if node.disk is None or quantity_bytes(needed) <= quantity_bytes(node.disk):
        return
    named = [f"scratch {node.scratch}"]
    named += [f"{name} {_gibibytes(size)}" for name, size in parts.items()]
    raise UserError(
        f"{section}.disk: {node.disk}, but a pod writes up to {needed} ({', '.join(named)}); use machines with "
        f"larger disks"
    )
