"""What a command is about to do, for the checks before it begins."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from pos2distill.config import Recipe, Runtime, Study
from pos2distill.node_pools import TASK_CPUS

from ..plan import Plan
from ..stages.stage import Stage


@dataclass(frozen=True)
class PendingRun:
    """A recipe, its plan, and those of the command's stages that are not finished."""

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

    @property
    def samples(self) -> bool:
        """Whether samples are made."""
        return any(stage in self.pending for stage in self.plan.sample_stages)

    @property
    def encodes(self) -> bool:
        """Whether actors with the base model store its hidden states, while samples are made."""
        return self.study.method.teacher == "cached" and self.samples

    @property
    def analyses(self) -> bool:
        """Whether the model's answers are compared token by token."""
        return any(stage in (self.plan.analyze_base, self.plan.analyze_distilled) for stage in self.pending)

    @property
    def model_pools(self) -> list[str]:
        """The sections of `runtime` whose pools run a model here."""
        pools = []
        if self.study.model.engine in ("vllm", "hf") and self.answers:
            pools.append("samplers")
        if self.encodes or self.analyses:
            pools.append("teachers")
        if self.trains:
            pools.append("trainers")
        return pools

    @property
    def answers(self) -> bool:
        """Whether samplers answer prompts, whatever their engine."""
        return any(stage not in self._without_samplers for stage in self.pending)

    @property
    def needs_streamed_mode(self) -> bool:
        """Whether this is `distill` without samples, which it makes in streamed mode only."""
        return self.samples and self.trains and self.plan.evaluate_distilled not in self.pending

    def advice(self, settings: Collection[str]) -> str:
        """What the user can do to run with these settings, as the command line takes them."""
        listed = " ".join(settings)
        if self.needs_streamed_mode and "runtime.mode=staged" in settings:
            return f"run `sample` first, with {listed} for both"
        return f"add {listed}"

    def needed_gpus(self, runtime: Runtime, pools: Collection[str] | None = None) -> int:
        """The GPUs that the fewest processes which these settings allow need at the same time.

        Args:
            pools: those that count; None: all that run a model.
        """
        counted = [pool for pool in self.model_pools if pools is None or pool in pools]
        needed = 0
        for group in self._groups(runtime):
            parts = [runtime.pools[pool].gpus for pool, count in group.items() if pool in counted for _ in range(count)]
            needed = max(needed, _gpus_for(parts))
        return needed

    def needed_cpus(self, runtime: Runtime) -> float:
        """The CPUs that the fewest processes which these settings allow need at the same time."""
        # Samplers need CPUs with any engine.
        counted = [*self.model_pools, *(["samplers"] if self.answers else [])]
        needed = 0.0
        for group in self._groups(runtime):
            cpus = sum(count * runtime.pools[pool].cpus for pool, count in group.items() if pool in counted)
            # A task makes the prompts beside them.
            needed = max(needed, cpus + (TASK_CPUS if "samplers" in group and self.answers else 0))
        return needed

    def _groups(self, runtime: Runtime) -> list[dict[str, int]]:
        """The pools that run at the same time, and their fewest processes: one group for each kind of work."""
        if runtime.executor == "local":  # one process does one thing after the other
            return [{pool: 1} for pool in runtime.pools]
        sampling = {"samplers": runtime.samplers.min}
        if self.encodes:
            sampling["teachers"] = runtime.teachers.min
        training = {"trainers": runtime.trainers.workers}
        if runtime.mode == "streamed" and self.samples:
            training |= sampling
        # An analysis has teachers without samplers.
        return [sampling, {"teachers": runtime.teachers.min}, training]

    @property
    def _without_samplers(self) -> list[Stage]:
        """The stages that read data or train."""
        others = [task.prepare for task in self.plan.other_tasks.values()]
        return [self.plan.prepare, *others, *(each.distill for each in self.plan.rounds)]


def _gpus_for(parts: Iterable[float]) -> int:
    """How many GPUs these processes need; those with a part of one share it where their parts fit, largest first."""
    whole, left = 0, list[float]()
    for part in sorted(parts, reverse=True):
        if part >= 1:
            whole += math.ceil(part)
        elif part > 0:
            place = next((i for i, room in enumerate(left) if part <= room + 1e-9), None)
            if place is None:
                left.append(1 - part)
            else:
                left[place] -= part
    return whole + len(left)
