"""Ray as the stages use it: the connection, and pools of actors from their settings."""

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

from pos2distill.config import PoolSection, TrainersSection
from pos2distill.errors import UserError, find_corrupt_part, find_user_error
from pos2distill.placement import POOLS_LABEL, SAMPLER_SHARE, SAMPLING, TRAINING

# A laptop's cores are shared by small processes that mostly wait; fewer logical CPUs than this starve the pipeline.
_LOCAL_CPUS = 6


@contextmanager
def ray_session() -> Iterator[None]:
    """Connect to the cluster (RAY_ADDRESS, or the job's own), or start Ray on this machine until the process ends.

    Inside, an error that a user can mend is raised as such, however deep in Ray it happened.
    """
    if not ray.is_initialized():
        _connect()
    set_data_context()
    try:
        yield
    except Exception as error:
        if cause := find_user_error(error):
            raise cause from None
        if damage := find_corrupt_part(error):  # more parts than training may be started again for
            raise UserError(f"{damage}; run the same command again to go on") from None
        raise


def set_data_context() -> None:
    """Ray Data's settings for every dataset that this process makes."""
    context = DataContext.get_current()
    context.enable_progress_bars = False
    # A long evaluation, a wait for nodes or a slow trainer is no fault; deadlines are the cluster's business.
    context.execution_no_progress_timeout_s = -1
    context.max_consecutive_actor_init_deaths = 3
    # All tasks and actors of all datasets, so that none wakes or keeps a trainer's node.
    context.execution_options.label_selector = SAMPLING.labels if _has_pools() else None


def pool_arguments(pool: PoolSection) -> dict[str, Any]:
    """Arguments of `Dataset.map_batches` for a pool of actors."""
    return {
        "batch_size": pool.batch_size,
        "batch_format": "pyarrow",
        "compute": ActorPoolStrategy(
            min_size=pool.min,
            max_size=pool.max,
            max_concurrent_calls_per_actor=pool.concurrent_batches,
            # Ray adds an actor once the tasks in flight fill the pool 1.75 times.
            max_tasks_in_flight_per_actor=2 * pool.concurrent_batches,
        ),
        "num_cpus": pool.cpus,
        "num_gpus": pool.gpus,
        "max_restarts": pool.max_restarts,
        "max_task_retries": pool.max_restarts,
        **({"resources": {SAMPLING.resource: SAMPLER_SHARE}} if _has_pools() else {}),
    }


def trainer_arguments(trainers: TrainersSection) -> dict[str, Any]:
    """Arguments of `ScalingConfig` for the training workers."""
    pools = _has_pools()
    own = {"GPU": trainers.gpus} if trainers.gpus else {}
    return {
        "num_workers": (trainers.workers, trainers.max_workers) if trainers.max_workers else trainers.workers,
        "use_gpu": trainers.gpus > 0,
        "resources_per_worker": {"CPU": trainers.cpus, **own, **({TRAINING.resource: 1} if pools else {})},
        "label_selector": TRAINING.labels if pools else None,
    }


def stream_options(*, preserve_order: bool) -> ExecutionOptions:
    """How a dataset runs that Ray Train reads: it takes these in place of the context's."""
    return ExecutionOptions(
        preserve_order=preserve_order, label_selector=DataContext.get_current().execution_options.label_selector
    )


def driver_node() -> NodeAffinitySchedulingStrategy:
    """Where an actor without resources belongs: on a sampler's node it would keep that from being given back."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def require_resources(what: str, *, cpus: float, gpus: float) -> None:
    """Refuse what this machine can never give, instead of waiting for it for ever.

    A cluster may grow, so it is asked for nothing beforehand.

    Raises:
        UserError: naming what is asked for and what there is.
    """
    if os.environ.get("RAY_ADDRESS"):
        return
    there = ray.cluster_resources()
    for kind, asked in {"GPU": gpus, "CPU": cpus}.items():
        if asked > there.get(kind, 0):
            raise UserError(
                f"{what} asks for {asked:g} {kind}s at once, this machine has {there.get(kind, 0):g}; "
                f"lower the actors, workers or {kind.lower()}s under runtime, or run on a cluster"
            )


def device_of(gpus: float) -> str:
    """The torch device of an actor or worker that holds so many GPUs."""
    return "cuda" if gpus else "cpu"


def _has_pools() -> bool:
    """Whether samplers and trainers have nodes of their own here: the head says so."""
    return any(node["Alive"] and POOLS_LABEL.items() <= node["Labels"].items() for node in ray.nodes())


def _connect() -> None:
    # What they log as an error they raise as well, and we tell it once.
    for name in ("ray.data", "ray.train"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # Bounded restarts have no named parameter yet; Ray is pinned to a version that takes them as they are.
    warnings.filterwarnings("ignore", message=".*ray_remote_args", category=RayDeprecationWarning)
    # Small inputs leave part of a pool idle; that is no news.
    warnings.filterwarnings("ignore", message="The (minimum|maximum) number of concurrent", category=UserWarning)
    # Ray's core logs an error line for every restartable actor that a dataset makes (ray#53727).
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    quiet: dict[str, Any] = {
        "logging_level": logging.ERROR,
        "log_to_driver": bool(os.environ.get("POS2DISTILL_DEBUG")),
    }
    before = signal.getsignal(signal.SIGTERM)  # Ray puts its own there, which ends the process without a word
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        cpus = max(_LOCAL_CPUS, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
