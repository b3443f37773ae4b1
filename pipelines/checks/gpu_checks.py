"""Checks of the GPUs of this machine before the first stage: which are used, and whether there are enough."""

from collections.abc import Collection, Sequence

from pos2distill import hardware
from pos2distill.environment import names_cluster
from pos2distill.errors import UserError, warn, warn_once

from .fitting_runtime import changed_settings, fitting_runtime
from .pending_run import PendingRun


def check_gpus(run: PendingRun) -> None:
    """Warn if there are too few GPUs, which would end the run at that stage, or if none or only some pools use them.

    Raises:
        UserError: instead of the first warning, where no cluster can have the GPUs (`executor: local`).
    """
    runtime, pools = run.recipe.runtime, run.model_pools
    on_gpus = [pool for pool in pools if runtime.pools[pool].gpus]
    on_cpus = [pool for pool in pools if pool not in on_gpus]
    if runtime.executor == "ray" and names_cluster():
        _warn_of_pools_on_cpus(run, on_cpus, on_gpus, None)
        return
    if not on_gpus:
        _warn_of_unused(run, hardware.visible_gpus())
        return
    import torch

    found = torch.cuda.device_count()
    if not found:
        _warn_of_no_gpu(run, on_gpus)
    elif run.needed_gpus(runtime) > found:
        _warn_of_too_few(run, on_gpus, found)
    else:
        _warn_of_pools_on_cpus(run, on_cpus, on_gpus, found)


def _warn_of_unused(run: PendingRun, gpus: int) -> None:
    """Print with which settings the run would use the GPUs of this machine."""
    if not gpus or not run.model_pools:
        return
    found = "a GPU" if gpus == 1 else f"{gpus} GPUs"
    install = "install the packages for GPUs and " if hardware.torch_is_for_cpus() else ""
    settings = _settings(run, run.model_pools, gpus)
    warn_once(f"this machine has {found} that this run does not use; {install}{settings} (docs/running.md)")


def _warn_of_pools_on_cpus(run: PendingRun, on_cpus: Sequence[str], on_gpus: Sequence[str], gpus: int | None) -> None:
    """Print which pools run the model on CPUs while others use GPUs, and with which settings none would."""
    if on_cpus and on_gpus:
        warn_once(
            f"{' and '.join(on_cpus)} run the model on CPUs, while {' and '.join(on_gpus)} use GPUs; for GPUs, "
            f"{_settings(run, run.model_pools, gpus)}"
        )


def _warn_of_no_gpu(run: PendingRun, pools: Sequence[str]) -> None:
    asked = ", ".join(f"runtime.{pool}.gpus" for pool in pools)
    problem = f"{asked}: this machine has no GPU that torch can use; install torch for GPUs (docs/running.md)"
    if run.recipe.runtime.executor == "local":
        raise UserError(f"{problem}, or set 0")
    warn(f"{problem}, run on a cluster (RAY_ADDRESS), or set 0")


def _warn_of_too_few(run: PendingRun, pools: Collection[str], found: int) -> None:
    runtime = run.recipe.runtime
    problem = f"this run needs {run.needed_gpus(runtime)} GPUs at the same time, this machine has {found}"
    settings = _settings(run, pools, found)
    if runtime.executor == "local":
        raise UserError(f"{problem}; {settings}")
    warn_once(f"{problem}; run on a cluster (RAY_ADDRESS), or {settings}")


def _settings(run: PendingRun, pools: Collection[str], gpus: int | None) -> str:
    """What to add so that these pools run on so many GPUs; None: as many as they ask for."""
    before, after = run.recipe.runtime, fitting_runtime(run, pools, gpus)
    return run.advice(changed_settings(before, after))
