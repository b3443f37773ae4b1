"""The connection to Ray, and Ray's settings for pools of actors and training workers."""

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.data import ActorPoolStrategy, DataContext, ExecutionOptions
from ray.util.annotations import RayDeprecationWarning
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pos2distill.config import PoolSection, Runtime, TrainersSection
from pos2distill.environment import names_cluster, set_ray_variables
from pos2distill.errors import TransientError, UserError, warn_once
from pos2distill.hardware import local_cpus
from pos2distill.node_pools import POOLS_LABEL, SAMPLER_UNITS_PER_ACTOR, SAMPLING, TRAINING

from .errors import find_corrupt_part, find_fault, find_user_error


@contextmanager
def connected_to_ray() -> Iterator[None]:
    """Connect to the cluster (RAY_ADDRESS, or the job's own), or start Ray on this machine until the process ends.

    A UserError that was raised inside, in whatever process of Ray, is raised as a UserError.
    """
    connect()
    set_data_context()
    try:
        yield
    except Exception as error:
        user_error = find_user_error(error)
        if user_error is not None:
            raise user_error from None
        corrupt_part = find_corrupt_part(error)
        if corrupt_part is not None:
            # There were more corrupt parts than `runtime.trainers.max_restarts` allows restarts.
            raise TransientError(f"{corrupt_part}; run the same command again to continue") from None
        fault = find_fault(error)
        if fault is not None:
            raise fault from error
        raise


def set_data_context() -> None:
    """Set Ray Data's settings for every dataset that this process makes."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    # A long evaluation, waiting for nodes and a slow trainer are not failures; deadlines are set for the cluster's job.
    context.execution_no_progress_timeout_s = -1
    # Ray Data 2.60 tolerates none by default: one actor that runs out of memory while it loads would fail the run.
    context.max_consecutive_actor_init_deaths = 3
    # For all tasks and actors of all datasets, so that none starts or keeps a trainer's node.
    context.execution_options.label_selector = SAMPLING.labels if _has_pools() else None


def pool_arguments(pool: PoolSection) -> dict[str, Any]:
    """Arguments of `Dataset.map_batches` for a pool of actors."""
    arguments: dict[str, Any] = {
        "batch_size": pool.batch_size,
        "batch_format": "pyarrow",
        "compute": ActorPoolStrategy(
            min_size=pool.min,
            max_size=pool.max,
            max_concurrent_calls_per_actor=pool.concurrent_batches,
            # Ray Data 2.60 adds an actor once the tasks in flight are 1.75 times what the pool runs at once.
            max_tasks_in_flight_per_actor=2 * pool.concurrent_batches,
        ),
    }
    return arguments | _actor_options(pool)


def actor_arguments(pool: PoolSection) -> dict[str, Any]:
    """Options of an actor that is in no dataset, with the resources of a pool's actors."""
    options = _actor_options(pool)
    if _has_pools():
        # Datasets have it from the context (`set_data_context`).
        options["label_selector"] = SAMPLING.labels
    return options


def _actor_options(pool: PoolSection) -> dict[str, Any]:
    """Resources and restarts of one actor of a pool."""
    options: dict[str, Any] = {
        "num_cpus": pool.cpus,
        "num_gpus": pool.gpus,
        # Both are bounded, because by default Ray Data 2.60 repeats a batch that crashes its actor forever.
        "max_restarts": pool.max_restarts,
        "max_task_retries": pool.max_restarts,
    }
    if _has_pools():
        options["resources"] = {SAMPLING.resource: SAMPLER_UNITS_PER_ACTOR}
    return options


def trainer_arguments(trainers: TrainersSection) -> dict[str, Any]:
    """Arguments of `ScalingConfig` for the training workers."""
    resources: dict[str, float] = {"CPU": trainers.cpus}
    if trainers.gpus:
        resources["GPU"] = trainers.gpus
    label_selector = None
    if _has_pools():
        resources[TRAINING.resource] = 1
        label_selector = TRAINING.labels
    # Ray Train 2.60 takes a pair as the bounds of an elastic group of workers.
    workers: int | tuple[int, int] = trainers.workers
    if trainers.max_workers:
        workers = (trainers.workers, trainers.max_workers)
    return {
        "num_workers": workers,
        "use_gpu": trainers.gpus > 0,
        "resources_per_worker": resources,
        "label_selector": label_selector,
    }


def stream_options(*, preserve_order: bool) -> ExecutionOptions:
    """Options of a dataset that Ray Train reads: Ray Train 2.60 uses these instead of the context's."""
    return ExecutionOptions(
        preserve_order=preserve_order, label_selector=DataContext.get_current().execution_options.label_selector
    )


def driver_node() -> NodeAffinitySchedulingStrategy:
    """The node of an actor without resources: on a sampler's node it would keep that node from being released."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def require_resources(label: str, *, cpus: float, gpus: float) -> None:
    """Reject what this machine can never provide, instead of waiting for it forever.

    A cluster may grow, so there it is a warning; none if the cluster has pools, which are made to grow.

    Raises:
        UserError: with the resources that are required and those that exist.
    """
    is_cluster = names_cluster()
    if is_cluster and _has_pools():
        return
    available = ray.cluster_resources()
    for resource, required in {"GPU": gpus, "CPU": cpus}.items():
        if required <= available.get(resource, 0):
            continue
        where = "the cluster has" if is_cluster else "this machine has"
        line = f"{label} needs {required:g} {resource}s at the same time, {where} {available.get(resource, 0):g}"
        less = f"lower the actors, workers or {resource.lower()}s under runtime"
        if is_cluster:
            warn_once(f"{line} and must grow; if it cannot, {less}")
        else:
            raise UserError(f"{line}; {less}, or run on a cluster")


def warn_of_unused_cluster_gpus(runtime: Runtime) -> None:
    """Say if this cluster has GPUs and no pool asks for one. What this machine has is checked before a run."""
    pools = (runtime.samplers, runtime.teachers, runtime.trainers)
    # With an endpoint, a server has the model.
    if not names_cluster() or runtime.endpoint.base_url or any(pool.gpus for pool in pools):
        return
    gpus = ray.cluster_resources().get("GPU", 0)
    if gpus:
        warn_once(
            f"the cluster has {gpus:g} GPUs that this run does not use; add runtime.samplers.gpus=1 "
            f"runtime.teachers.gpus=1 runtime.trainers.gpus=1 (docs/running.md)"
        )


def _has_pools() -> bool:
    """Whether samplers and trainers have nodes of their own in this cluster: a label of the head node says so."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    return any(POOLS_LABEL.items() <= node["Labels"].items() for node in alive)


def connect() -> None:
    """Connect to Ray, or start it on this machine, unless this process is connected already."""
    if ray.is_initialized():
        return
    # What these log as an error they also raise, and we print it once.
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Ray 2.60 has no named parameter for bounded restarts yet; it is pinned to a version that takes them this way.
    warnings.filterwarnings("ignore", message=".*ray_remote_args", category=RayDeprecationWarning)
    # Small inputs leave part of a pool idle, which is expected.
    warnings.filterwarnings("ignore", message="The (minimum|maximum) number of concurrent", category=UserWarning)
    set_ray_variables()
    # Errors of workers reach the driver as exceptions, so their output is hidden unless someone is debugging.
    quiet: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": bool(os.environ.get("POS2DISTILL_DEBUG")),
    }
    previous = signal.getsignal(signal.SIGTERM)  # `ray.init` replaces it by one that ends the process silently
    if names_cluster():
        ray.init(**quiet)
    else:
        # `local` starts a new Ray even if another one is running on this machine with other resources.
        ray.init(address="local", num_cpus=local_cpus(), include_dashboard=False, **quiet)
    # Python sets signal handlers in the main thread only.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, previous)
