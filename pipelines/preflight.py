"""Checks before the first stage, also by `--dry-run`: what would end a run later is refused here, within seconds.

Each check is a function of what a command is about to do. Ray is not imported, and nothing is left behind.
"""

import glob
import os
import shutil
import socket
import tempfile
import time
import urllib.parse
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from pos2distill import hardware
from pos2distill.config import PoolSection, Recipe, Study, TrainersSection
from pos2distill.environment import names_cluster
from pos2distill.errors import UserError, warn
from pos2distill.faults import reason
from pos2distill.models.files import files_version, is_hub_name
from pos2distill.store.artifacts import check_storage
from pos2distill.training.trackers import check_trackers
from pos2distill.urls import open_url, storage_errors

from .model_checks import (
    check_against_model,
    check_gold_responses,
    check_tokenizer,
    check_weights_once,
    count_parameters,
)
from .plan import Plan
from .setting_warnings import warn_of_settings, warn_of_unused_gpus
from .stages.distill import check_executor
from .stages.stage import Stage

_CONNECT_SECONDS = 8.0  # with all else that a refusal takes, less than 10

_STATE_BYTES = 12  # of one trained parameter: its value and two moments of Adam, in float32
_GIB = 1 << 30


@dataclass(frozen=True)
class Task:
    """What a command is about to do. pending: those of its stages that are not finished."""

    recipe: Recipe
    plan: Plan
    pending: Sequence[Stage]

    @property
    def study(self) -> Study:
        """The study that is run."""
        return self.plan.study

    @property
    def trains(self) -> bool:
        """Whether the student is trained."""
        return self.plan.distill in self.pending


def preflight(recipe: Recipe, plan: Plan, stages: Sequence[Stage]) -> None:
    """Run all checks, unless all stages are finished. `check_prompts` follows when the examples are prepared.

    Raises:
        UserError: of the first check that fails.
    """
    check_storage(recipe.storage, recipe.name)
    pending = [stage for stage in stages if not stage.artifact.is_finished]
    # Not if all is cached: to import transformers takes longer than to show the results.
    if not pending:
        return
    task = Task(recipe, plan, pending)
    for check in CHECKS:
        check(task)
    warn_of_settings(recipe, pending)


def check_needs_weights(task: Task) -> None:
    """A study that can only be evaluated is not trained, sampled or analysed."""
    evaluation = task.plan.evaluation_stages
    if all(stage in evaluation for stage in task.pending):
        return
    if not task.study.data.train_examples:
        raise UserError("data.train_examples: 0 is for the command evaluate only: there is nothing to train on")
    if not task.study.has_weights:
        raise UserError(
            "model.engine: 'openai' is for the command evaluate only: a server returns text, without the token ids and "
            "the weights that training needs; set model.engine to vllm or hf"
        )


def check_ray(task: Task) -> None:
    """RAY_ADDRESS names a cluster that answers. Ray 2.60 itself tries for minutes, or without end."""
    address = os.environ.get("RAY_ADDRESS", "")
    if task.recipe.runtime.executor != "ray" or address in ("", "auto", "local"):
        return
    try:
        target = urllib.parse.urlsplit(address if "://" in address else f"gcs://{address}")
        host, port = target.hostname, target.port
    except ValueError:
        host, port = None, None
    if not host or not port or target.scheme not in ("gcs", "ray") or " " in address:
        raise UserError(f"RAY_ADDRESS: expected HOST:PORT, ray://HOST:PORT, auto or local, got '{address}'")
    deadline = time.monotonic() + _CONNECT_SECONDS
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no host can have
        why = reason(error)
    else:
        if _answers_as_ray(target, max(1.0, deadline - time.monotonic())):
            return
        why = "what listens there does not answer as Ray does"
    raise UserError(
        f"RAY_ADDRESS: no Ray cluster answers at {address} ({why}); start it, correct the address, or unset "
        f"RAY_ADDRESS to run on this machine"
    )


def _answers_as_ray(target: urllib.parse.SplitResult, seconds: float) -> bool:
    """Whether the server is a cluster's control store (GCS), or for `ray://` any server of gRPC.

    A cluster with TLS is not asked: its certificates are Ray's to read.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return True
    # Imported where needed: few commands run on a cluster.
    import grpc

    options = [("grpc.enable_http_proxy", 0)]  # as Ray 2.60
    with grpc.insecure_channel(target.netloc, options=options) as channel:
        # The first call of every client of Ray 2.60. Its request is empty, and it needs no token.
        get_cluster_id = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetClusterId")
        try:
            get_cluster_id(b"", timeout=seconds, wait_for_ready=True)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return target.scheme == "ray"  # the server of Ray Client has other calls
            # Whatever else the server says, it is there, and Ray says what it lacks.
            return error.code() not in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    return True


def check_executors(task: Task) -> None:
    """No training that is to be continued was begun by the other executor."""
    for each in task.plan.rounds:
        if each.distill in task.pending:
            check_executor(each.distill, task.recipe.runtime.executor)


def check_installed(task: Task) -> None:
    """The trackers that the settings name are installed and can be logged in to."""
    if task.trains:
        check_trackers(task.recipe.runtime.trackers)


def check_placement(task: Task) -> None:
    """Settings of the study can be carried out where the runtime settings place them."""
    runtime, model = task.recipe.runtime, task.study.model
    if model.attention == "flash_attention_2" and not (runtime.samplers.gpus or runtime.trainers.gpus):
        raise UserError(
            "model.attention: flash_attention_2 runs on GPUs, and runtime.samplers.gpus and runtime.trainers.gpus "
            "are 0; set it to auto"
        )
    if task.recipe.storage.startswith("memory://"):
        raise UserError(f"{task.recipe.storage}: ends with this process; set runtime.storage to a folder or URL")
    # For a name on a server, a revision only distinguishes models that had it at different times.
    has_revisions = model.is_served_name or is_hub_name(model.path)
    if model.revision is not None and not has_revisions:
        raise UserError(f"model.revision: {model.path} is no hub name and has no revisions; set model.revision=null")


def check_folder_names(task: Task) -> None:
    """vLLM 0.32 finds weights by a pattern that begins with their folder, so that in some folders it finds none."""
    if task.study.model.engine != "vllm":
        return
    folders = {"model.path": task.study.model.path}
    if task.trains or task.plan.evaluate_distilled in task.pending:
        folders["runtime.storage"] = task.recipe.storage
    for setting, folder in folders.items():
        if "://" not in folder and glob.escape(folder) != folder:
            raise UserError(
                f"{setting}: vLLM loads no model from {folder}, since it takes [, * and ? for a pattern; rename the "
                f"folder, or set model.engine to hf"
            )


def check_rights(task: Task) -> None:
    """The storage and the folder for temporary files can be written to. What is written is removed at once."""
    storage = task.recipe.storage
    fs, path = open_url(storage, "runtime.storage")
    with storage_errors(storage, "runtime.storage"):
        if isinstance(fs, LocalFileSystem):
            _probe_folder(_existing(path))
        else:
            probe = f"{path}/probe-{uuid.uuid4().hex}"
            fs.pipe_file(probe, b"x")
            fs.rm_file(probe)
    with storage_errors("the folder for temporary files", "TMPDIR"):
        _probe_folder(tempfile.gettempdir())


def _probe_folder(folder: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        # The name of the probe would mean nothing to the reader.
        raise OSError(error.errno, error.strerror, folder) from None


def check_model(task: Task) -> None:
    """The config can be read and fits the settings, the weights fit the config, the tokenizer has a chat template.

    A server must have the model; nothing of it, or its config and tokenizer alone, are here.
    """
    if not task.study.has_weights:
        from pos2distill.sampling.engines.openai import check_endpoint

        check_endpoint(task.study.model, task.recipe.runtime.endpoint)
        if not task.study.model.is_served_name:
            check_tokenizer(task.study, files_version(task.study.model))
        return
    # Listed once, which is a request for a model at a URL.
    version = files_version(task.study.model)
    check_against_model(task.study)
    check_weights_once(task.study.model, version)
    runtime = task.recipe.runtime
    # Where the model computes packed rows: teachers and analyses read hidden states as training does.
    pools: list[PoolSection | TrainersSection] = []
    if task.trains:
        pools.append(runtime.trainers)
    if _encodes(task) or _analyses(task):
        pools.append(runtime.teachers)
    for on_gpu in {pool.gpus > 0 for pool in pools}:
        from pos2distill.models.check import check_trainable

        check_trainable(task.study.model, on_gpu=on_gpu)
    # In float32, it rounds nothing.
    if task.trains and runtime.trainers.strategy == "zero3" and task.study.training.precision == "bfloat16":
        from pos2distill.models.check import check_sharded

        check_sharded(task.study.model)
    check_tokenizer(task.study, version)
    if task.trains and task.study.method.spec.target == "gold":
        check_gold_responses(task.study)


def _encodes(task: Task) -> bool:
    """Whether actors with the frozen model store its hidden states."""
    return task.study.method.teacher == "cached" and task.plan.sample in task.pending


def _analyses(task: Task) -> bool:
    """Whether the model's answers are compared token by token."""
    return any(stage in (task.plan.analyse_base, task.plan.analyse_distilled) for stage in task.pending)


def _without_samplers(plan: Plan) -> list[Stage]:
    """The stages that read data or train."""
    others = [task.prepare for task in plan.other_tasks.values()]
    return [plan.prepare, *others, *(each.distill for each in plan.rounds)]


def _model_pools(task: Task) -> list[str]:
    """The pools that run a model here."""
    pools = []
    others = _without_samplers(task.plan)
    if task.study.model.engine in ("vllm", "hf") and any(stage not in others for stage in task.pending):
        pools.append("samplers")
    if _encodes(task) or _analyses(task):
        pools.append("teachers")
    if task.trains:
        pools.append("trainers")
    return pools


def check_gpus(task: Task) -> None:
    """A warning if what is to run asks for GPUs and this machine has none: it would end only once it needs them.

    Another one if this machine has GPUs and nothing asks for them.

    Raises:
        UserError: instead of the first warning, where no cluster can have the GPUs (`executor: local`).
    """
    runtime = task.recipe.runtime
    if runtime.executor == "ray" and names_cluster():
        return
    pools = _model_pools(task)
    warn_of_unused_gpus(task.recipe, pools, hardware.visible_gpus())
    wanted = [f"runtime.{name}.gpus" for name in pools if getattr(runtime, name).gpus > 0]
    if not wanted:
        return
    import torch

    if torch.cuda.device_count():
        return
    problem = f"{', '.join(wanted)}: this machine has no GPU that torch can use"
    if runtime.executor == "local":
        raise UserError(f"{problem}; set 0, or install torch for GPUs (docs/running.md)")
    warn(f"{problem}; run on a cluster (RAY_ADDRESS), or set 0")


def check_space(task: Task) -> None:
    """The disk of a local storage has room for the model that is saved; a warning if not also for training states."""
    fs, path = open_url(task.recipe.storage, "runtime.storage")
    if not task.trains or not isinstance(fs, LocalFileSystem):
        return
    study, runtime = task.study, task.recipe.runtime
    # Every round saves one.
    model = count_parameters(study.model) * (4 if study.model.dtype == "float32" else 2) * study.method.rounds
    # One state more than is kept exists while it is written.
    states = _state_bytes(study) * (runtime.checkpoints.keep + 1)
    free = shutil.disk_usage(_existing(path)).free
    if free < model:
        raise UserError(
            f"{task.recipe.storage}: {free / _GIB:.3g} GiB are free, the distilled model takes {model / _GIB:.3g}; "
            f"free space there, or choose another runtime.storage"
        )
    if free < model + states:
        warn(
            f"{task.recipe.storage}: {free / _GIB:.3g} GiB are free; the distilled model and "
            f"{runtime.checkpoints.keep + 1} training states take up to {(model + states) / _GIB:.3g} "
            f"(runtime.checkpoints)"
        )


def check_temporary_space(task: Task) -> None:
    """A warning if the folder for temporary files has no room for a training state, which is written there first."""
    # On a cluster, it is that of the machines which train.
    if not task.trains or names_cluster():
        return
    state = _state_bytes(task.study)
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < state:
        warn(
            f"{folder}: {free / _GIB:.3g} GiB are free; a training state takes up to {state / _GIB:.3g} and is "
            f"written there first; set TMPDIR to a folder on a larger disk"
        )


def _state_bytes(study: Study) -> int:
    # With adapters, only they have a state.
    return 0 if study.training.lora else count_parameters(study.model) * _STATE_BYTES


CHECKS: tuple[Callable[[Task], None], ...] = (
    check_needs_weights,
    check_placement,
    check_folder_names,
    check_installed,
    check_ray,
    check_rights,
    check_executors,
    check_model,
    check_gpus,
    check_space,
    check_temporary_space,
)


def _existing(path: str) -> str:
    """The folder itself, or the nearest one above it that exists."""
    folder = Path(path)
    while True:
        try:
            os.lstat(folder)  # of a broken link itself: nothing can be made in its place
            return str(folder)
        except FileNotFoundError:
            folder = folder.parent
