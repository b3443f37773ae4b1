"""Settings of `runtime` with which a run fits the GPUs that there are."""

import math
from collections.abc import Collection

from pos2distill.config import PoolSection, Runtime, TrainersSection

from .pending_run import PendingRun

_SECTIONS = ("samplers", "teachers", "trainers", "vllm")


def fitting_runtime(run: PendingRun, pools: Collection[str], gpus: int | None) -> Runtime:
    """Settings with which these pools run on GPUs, that change as little as necessary.

    In this order, until they fit: staged mode, fewer processes, engines of fewer GPUs, a sampler and a teacher that
    share an only GPU.

    Args:
        gpus: how many there are, at least one; None: as many as they ask for.
    """
    runtime = _on_gpus(run, pools)
    if gpus is None:
        return runtime
    mode, fitted = runtime.mode, runtime
    if not _fits(run, fitted, gpus):
        fitted = fitted.replace(mode="staged")
    if not _fits(run, fitted, gpus):
        fitted = _with_fewer_processes(run, fitted, gpus)
    if not _fits(run, fitted, gpus):
        fitted = _with_smaller_engines(run, fitted, gpus)
    if not _fits(run, fitted, gpus):
        fitted = _with_shared_gpu(run.recipe.runtime, fitted)
    if _fits(run, fitted.replace(mode=mode), gpus):
        fitted = fitted.replace(mode=mode)
    return _with_memory_for_all(run, fitted)


def changed_settings(before: Runtime, after: Runtime) -> list[str]:
    """The settings of pools and mode that differ, as the command line takes them."""
    old, new = before.model_dump(), after.model_dump()
    changed = []
    for section in _SECTIONS:
        for name, value in new[section].items():
            if value != old[section][name]:
                shown = f"{value:g}" if isinstance(value, float) else value
                changed.append(f"runtime.{section}.{name}={shown}")
    if before.mode != after.mode:
        changed.append(f"runtime.mode={after.mode}")
    return changed


def _fits(run: PendingRun, runtime: Runtime, gpus: int) -> bool:
    """Whether so many GPUs are enough for the run with these settings."""
    return run.needed_gpus(runtime) <= gpus


def _on_gpus(run: PendingRun, pools: Collection[str]) -> Runtime:
    """Each of these pools that has no GPU with one for each process, or an engine's."""
    runtime = run.recipe.runtime
    engine_gpus = runtime.vllm.tensor_parallel_size if run.study.model.engine == "vllm" else 1
    changed: dict[str, PoolSection | TrainersSection] = {}
    for pool in pools:
        if not runtime.pools[pool].gpus:
            changed[pool] = runtime.pools[pool].replace(gpus=float(engine_gpus if pool == "samplers" else 1))
    return runtime.replace(**changed)


def _with_fewer_processes(run: PendingRun, runtime: Runtime, gpus: int) -> Runtime:
    samplers, teachers, trainers = runtime.samplers, runtime.teachers, runtime.trainers
    beside_samplers = teachers.gpus if run.encodes else 0
    samplers = samplers.replace(min=_at_most(samplers.min, samplers.gpus, gpus - beside_samplers))
    beside_teachers = samplers.min * samplers.gpus if run.encodes else 0
    teachers = teachers.replace(min=_at_most(teachers.min, teachers.gpus, gpus - beside_teachers))
    trainers = trainers.replace(workers=_at_most(trainers.workers, trainers.gpus, gpus))
    return runtime.replace(samplers=samplers, teachers=teachers, trainers=trainers)


def _at_most(count: int, gpus_of_each: float, gpus: float) -> int:
    """How many processes have room, at least one."""
    if not gpus_of_each:
        return count
    # Of processes with more than half of a GPU, none can share one.
    each = 1 if 0.5 < gpus_of_each < 1 else gpus_of_each
    return max(1, min(count, int(gpus / each)))


def _with_smaller_engines(run: PendingRun, runtime: Runtime, gpus: int) -> Runtime:
    """Engines with a power of two of GPUs, since vLLM divides the attention heads among them."""
    room = max(1, int(gpus - (runtime.teachers.gpus if run.encodes else 0)))
    size = min(runtime.vllm.tensor_parallel_size, 2 ** int(math.log2(room)))
    if size == runtime.vllm.tensor_parallel_size:
        return runtime
    samplers = runtime.samplers.replace(gpus=float(size))
    return runtime.replace(samplers=samplers, vllm=runtime.vllm.replace(tensor_parallel_size=size))


def _with_shared_gpu(before: Runtime, runtime: Runtime) -> Runtime:
    """A sampler and a teacher with a part of a GPU each. before: the settings that a user has written."""
    samplers, teachers = before.samplers.gpus, before.teachers.gpus
    if 0 < samplers < 1 and not teachers:
        teachers = 1 - samplers
    elif 0 < teachers < 1 and not samplers:
        samplers = 1 - teachers
    else:
        samplers = teachers = 0.5
    return runtime.replace(
        samplers=runtime.samplers.replace(gpus=samplers), teachers=runtime.teachers.replace(gpus=teachers)
    )


def _with_memory_for_all(run: PendingRun, runtime: Runtime) -> Runtime:
    """An engine of vLLM takes its part of a GPU's memory when it starts: no more than others leave."""
    if run.study.model.engine != "vllm" or "samplers" not in run.model_pools:
        return runtime
    part = min(1.0, runtime.samplers.gpus)
    if runtime.executor == "local":
        # All that this process runs is on its first GPU, in streamed mode the student too.
        if run.samples and run.trains:
            runtime = runtime.replace(mode="staged")
        if run.encodes:
            part = min(part, 0.5)
    if runtime.vllm.gpu_memory_utilization <= part:
        return runtime
    return runtime.replace(vllm=runtime.vllm.replace(gpu_memory_utilization=part))
