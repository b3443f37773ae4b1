"""Checks of this machine, its disks and the cluster, before the first stage."""

import os
import shutil
import socket
import tempfile
import time
import urllib.parse
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from pos2distill.config import Study
from pos2distill.config.base import WEIGHT_BYTES
from pos2distill.config.training import STATE_BYTES
from pos2distill.environment import names_cluster
from pos2distill.errors import UserError, warn
from pos2distill.faults import error_text
from pos2distill.hardware import local_cpus
from pos2distill.store.storage import probe_storage
from pos2distill.urls import open_url, storage_errors

from .model_checks import count_parameters
from .pending_run import PendingRun

_CONNECT_SECONDS = 8.0  # so that the whole check takes less than 10 seconds
_GIB = 1 << 30


def check_ray(run: PendingRun) -> None:
    """Raise if no cluster answers at RAY_ADDRESS. Ray 2.60 itself tries for minutes, or without end."""
    address = os.environ.get("RAY_ADDRESS", "")
    if run.recipe.runtime.executor != "ray" or address in ("", "auto", "local"):
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
        why = error_text(error)
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


def check_rights(run: PendingRun) -> None:
    """Raise if the storage or the folder for temporary files cannot be written to.

    What is written for this is removed at once.
    """
    storage = run.recipe.storage
    fs, path = open_url(storage, "runtime.storage")
    with storage_errors(storage, "runtime.storage"):
        if isinstance(fs, LocalFileSystem):
            _probe_folder(_existing(path))
        else:
            probe_storage(fs, path)
    with storage_errors("the folder for temporary files", "TMPDIR"):
        _probe_folder(tempfile.gettempdir())


def _probe_folder(folder: str) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        # The name of the probe would mean nothing to the reader.
        raise OSError(error.errno, error.strerror, folder) from None


def check_cpus(run: PendingRun) -> None:
    """Warn if pools ask for more CPUs than Ray has on this machine: the run would end at that stage."""
    runtime = run.recipe.runtime
    if runtime.executor != "ray" or names_cluster():
        return
    needed, cpus = run.needed_cpus(runtime), local_cpus()
    if needed <= cpus:
        return
    remedy = "lower the actors, workers or cpus under runtime"
    if run.needed_cpus(runtime.replace(mode="staged")) <= cpus:
        remedy = run.advice(["runtime.mode=staged"])
    warn(
        f"this run needs {needed:g} CPUs at the same time, Ray is started with {cpus} on this machine; run on a "
        f"cluster (RAY_ADDRESS), or {remedy}"
    )


def check_space(run: PendingRun) -> None:
    """Raise if the disk of a local storage has no room for the model that is saved; warn if not for training states."""
    fs, path = open_url(run.recipe.storage, "runtime.storage")
    if not run.trains or not isinstance(fs, LocalFileSystem):
        return
    study, runtime = run.study, run.recipe.runtime
    # Every round saves one.
    model = count_parameters(study.model) * WEIGHT_BYTES[study.model.dtype] * study.method.rounds
    # One state more than is kept exists while it is written.
    states = _state_bytes(study) * (runtime.checkpoints.keep + 1)
    free = shutil.disk_usage(_existing(path)).free
    if free < model:
        raise UserError(
            f"{run.recipe.storage}: {free / _GIB:.3g} GiB are free, the distilled model takes {model / _GIB:.3g}; "
            f"free space there, or choose another runtime.storage"
        )
    if free < model + states:
        warn(
            f"{run.recipe.storage}: {free / _GIB:.3g} GiB are free; the distilled model and "
            f"{runtime.checkpoints.keep + 1} training states take up to {(model + states) / _GIB:.3g} "
            f"(runtime.checkpoints)"
        )


def check_temporary_space(run: PendingRun) -> None:
    """Warn if the folder for temporary files has no room for a training state, which is written there first."""
    # On a cluster, it is that of the machines which train.
    if not run.trains or names_cluster():
        return
    state = _state_bytes(run.study)
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    if free < state:
        warn(
            f"{folder}: {free / _GIB:.3g} GiB are free; a training state takes up to {state / _GIB:.3g} and is "
            f"written there first; set TMPDIR to a folder on a larger disk"
        )


def _state_bytes(study: Study) -> int:
    # With adapters, only they have a state.
    return 0 if study.training.lora else count_parameters(study.model) * STATE_BYTES


def _existing(path: str) -> str:
    """The folder itself, or the nearest one above it that exists."""
    folder = Path(path)
    while True:
        try:
            os.lstat(folder)  # does not follow a broken link: nothing can be created in its place
            return str(folder)
        except FileNotFoundError:
            folder = folder.parent
