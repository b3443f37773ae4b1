"""Checks of the GPUs of this machine before the first stage: which are used, and whether there are enough."""

from collections.abc import Mapping, Sequence

from pos2distill import hardware
from pos2distill.environment import names_cluster
from pos2distill.errors import UserError, warn, warn_once

from .pending_run import PendingRun


def check_gpus(run: PendingRun) -> None:
    """Warn if GPUs are unused, if not every pool has one, or if there are too few: the run would end at that stage.

    Raises:
        UserError: instead of the last warning, where no cluster can have the GPUs (`executor: local`).
    """
    runtime, pools = run.recipe.runtime, run.model_pools
    on_gpus = [pool for pool in pools if runtime.pools[pool].gpus]
    on_cpus = [pool for pool in pools if pool not in on_gpus]
    is_cluster = runtime.executor == "ray" and names_cluster()
    gpus = None if is_cluster else hardware.visible_gpus()
    if on_gpus and on_cpus and gpus != 0:
        warn_once(
            f"{' and '.join(on_cpus)} run the model on CPUs, while {' and '.join(on_gpus)} use GPUs; for GPUs, "
            f"{_advice(run, gpus)}"
        )
    if on_cpus and not on_gpus and gpus:
        unused = "a GPU" if gpus == 1 else f"{gpus} GPUs"
        install = "install the packages for GPUs and " if hardware.torch_is_for_cpus() else ""
        warn_once(
            f"this machine has {unused} that this run does not use; {install}{_advice(run, gpus)} (docs/running.md)"
        )
    if not on_gpus or is_cluster:
        return
    import torch

    found = torch.cuda.device_count()
    if not found:
        _warn_of_no_gpu(run, on_gpus)
    elif not on_cpus:  # otherwise the advice above counts all pools
        _warn_of_too_few(run, found)


def _warn_of_no_gpu(run: PendingRun, pools: Sequence[str]) -> None:
    asked = ", ".join(f"runtime.{pool}.gpus" for pool in pools)
    problem = f"{asked}: this machine has no GPU that torch can use"
    if run.recipe.runtime.executor == "local":
        raise UserError(f"{problem}; set 0, or install torch for GPUs (docs/running.md)")
    warn(f"{problem}; run on a cluster (RAY_ADDRESS), or set 0")


def _warn_of_too_few(run: PendingRun, found: int) -> None:
    runtime = run.recipe.runtime
    asked = {pool: runtime.pools[pool].gpus for pool in run.model_pools}
    needed = run.needed_at_once(asked, runtime.mode)
    if needed <= found:
        return
    is_enough_staged = run.needed_at_once(asked, "staged") <= found
    remedy = "set runtime.mode=staged" if is_enough_staged else _lower(run, asked, found)
    problem = f"this run needs {needed:g} GPUs at the same time, this machine has {found}"
    if runtime.executor == "local":
        raise UserError(f"{problem}; {remedy}")
    warn(f"{problem}; run on a cluster (RAY_ADDRESS), or {remedy}")


def _advice(run: PendingRun, gpus: int | None) -> str:
    """The settings to add so that all pools run on GPUs, or which are too high for so few.

    Args:
        gpus: the number that they have together; None if there are as many as they ask for.
    """
    runtime = run.recipe.runtime
    wanted = _wanted(run, gpus)
    settings = [f"runtime.{pool}.gpus={each:g}" for pool, each in wanted.items() if each != runtime.pools[pool].gpus]
    if run.study.model.engine == "vllm" and "samplers" in wanted:
        # An engine takes this fraction of the whole GPU when it starts. In a local run, the teacher is in its process.
        part = 0.5 if gpus == 1 and run.encodes and wanted["samplers"] == 1 else wanted["samplers"]
        if runtime.vllm.gpu_memory_utilization > part:
            settings.append(f"runtime.vllm.gpu_memory_utilization={part:g}")
    if gpus is not None and run.needed_at_once(wanted, runtime.mode) > gpus:
        needed = run.needed_at_once(wanted, "staged")
        if needed > gpus:
            return f"they need {needed:g} at the same time: {_lower(run, wanted, gpus)}"
        settings.append("runtime.mode=staged")
    return f"add {' '.join(settings)}"


def _wanted(run: PendingRun, gpus: int | None) -> dict[str, float]:
    """The GPUs of one process of each pool, so that all run on GPUs; those that have some keep them if they can."""
    runtime = run.recipe.runtime
    engine_gpus = runtime.vllm.tensor_parallel_size if run.study.model.engine == "vllm" else 1
    wanted = {
        pool: runtime.pools[pool].gpus or float(engine_gpus if pool == "samplers" else 1) for pool in run.model_pools
    }
    # Samplers and teachers run at the same time, so they share an only GPU.
    sampling = {pool: each for pool, each in wanted.items() if pool != "trainers"}
    if gpus == 1 and engine_gpus == 1 and run.needed_at_once(sampling, "staged") > 1:
        samplers, teachers = runtime.samplers.gpus, runtime.teachers.gpus
        if 0 < samplers < 1 and not teachers:
            wanted["teachers"] = 1 - samplers
        elif 0 < teachers < 1 and not samplers:
            wanted["samplers"] = 1 - teachers
        else:
            wanted |= dict.fromkeys(sampling, 0.5)
    return wanted


def _lower(run: PendingRun, amounts: Mapping[str, float], gpus: int) -> str:
    """Which settings to lower, so that so many GPUs are enough in staged mode.

    Args:
        amounts: the GPUs of one process of each pool.
    """
    runtime = run.recipe.runtime
    counts = {
        "samplers": ("min", runtime.samplers.min),
        "teachers": ("min", runtime.teachers.min),
        "trainers": ("workers", runtime.trainers.workers),
    }
    names = []
    for group in (["samplers", "teachers"], ["trainers"]):
        asked = {pool: amounts[pool] for pool in group if pool in amounts}
        if run.needed_at_once(asked, "staged") <= gpus:
            continue
        several = [f"runtime.{pool}.{counts[pool][0]}" for pool in asked if counts[pool][1] > 1]
        engines = ["runtime.vllm.tensor_parallel_size"] if asked.get("samplers", 0) > 1 else []
        names += several + engines or [f"runtime.{pool}.gpus" for pool in asked]
    return f"lower {' or '.join(names)}"
