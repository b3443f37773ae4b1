"""Settings of `runtime` with which a run fits the GPUs that there are."""

from collections.abc import Collection

from pos2distill.config import PoolSection, Runtime, TrainersSection

from .pending_run import PendingRun

_SECTIONS = ("samplers", "teachers", "trainers", "vllm")
_LARGEST_PART = 0.75  # of a GPU that one model may have and leave the other enough for its weights; an estimate


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
        fitted = _with_shared_gpu(fitted)
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
    """Training and sampling with as many processes as have room, at least one of each pool."""
    fitted = runtime
    for workers in range(runtime.trainers.workers, 0, -1):
        fitted = fitted.replace(trainers=runtime.trainers.replace(workers=workers))
        if run.needed_gpus(fitted, ["trainers"]) <= gpus:
            break
    # Of teachers first: they pass over an answer once, samplers generate it token by token.
    sampling = runtime.sampling_pools
    if run.needed_gpus(fitted, sampling) > gpus and "teachers" in run.model_pools:
        fitted = fitted.replace(teachers=runtime.teachers.replace(min=1))
    if "samplers" in run.model_pools:
        for count in range(runtime.samplers.min, 0, -1):
            fitted = fitted.replace(samplers=runtime.samplers.replace(min=count))
            if run.needed_gpus(fitted, sampling) <= gpus:
                break
    return fitted


def _with_smaller_engines(run: PendingRun, runtime: Runtime, gpus: int) -> Runtime:
    """Engines with a divisor of their GPUs, since vLLM divides the attention heads among them."""
    beside = runtime.teachers.gpus if run.encodes and runtime.executor == "ray" else 0
    room, size = max(1, int(gpus - beside)), runtime.vllm.tensor_parallel_size
    smaller = max(each for each in range(1, room + 1) if size % each == 0)
    if smaller == size:
        return runtime
    samplers = runtime.samplers.replace(gpus=float(smaller))
    return runtime.replace(samplers=samplers, vllm=runtime.vllm.replace(tensor_parallel_size=smaller))


def _with_shared_gpu(runtime: Runtime) -> Runtime:
    """A sampler and a teacher with a part of a GPU each: the part that one of them has, and the rest."""
    samplers, teachers = runtime.samplers.gpus, runtime.teachers.gpus
    if samplers <= _LARGEST_PART and teachers >= 1:
        teachers = 1 - samplers
    elif teachers <= _LARGEST_PART and samplers >= 1:
        samplers = 1 - teachers
    else:
        samplers = teachers = 0.5
    return runtime.replace(
        samplers=runtime.samplers.replace(gpus=samplers), teachers=runtime.teachers.replace(gpus=teachers)
    )


def _with_memory_for_all(run: PendingRun, runtime: Runtime) -> Runtime:
    """An engine of vLLM takes its part of a GPU's memory when it starts: no more than others leave."""
    if run.study.model.engine != "vllm" or "samplers" not in run.model_pools or not runtime.samplers.gpus:
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
