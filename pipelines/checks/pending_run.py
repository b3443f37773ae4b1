"""What a command is about to do, for the checks before it begins."""

import math
from collections.abc import Mapping, Sequence
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

    def needed_gpus(self, runtime: Runtime) -> float:
        """The GPUs that the fewest processes which these settings allow need at the same time."""
        gpus = {pool: runtime.pools[pool].gpus for pool in self.model_pools}
        # Of processes with more than half of a GPU, none can share one.
        unshared = {pool: math.ceil(each) if each > 0.5 else 0 for pool, each in gpus.items()}
        return max(self._needed_at_once(runtime, gpus), self._needed_at_once(runtime, unshared))

    def needed_cpus(self, runtime: Runtime) -> float:
        """The CPUs that the fewest processes which these settings allow need at the same time."""
        pools = {*self.model_pools, *(["samplers"] if self.answers else [])}
        # A task makes the prompts beside the samplers.
        return self._needed_at_once(
            runtime,
            {pool: runtime.pools[pool].cpus for pool in pools},
            beside_samplers=TASK_CPUS if self.answers else 0,
        )

    def _needed_at_once(self, runtime: Runtime, amounts: Mapping[str, float], *, beside_samplers: float = 0) -> float:
        """How much of a resource is needed at the same time.

        Args:
            amounts: what one process of a pool needs, by pool; the others need none.
            beside_samplers: what else is needed while samplers answer.
        """
        if runtime.executor == "local":  # one process does one thing after the other
            return max(amounts.values(), default=0)
        samplers = amounts.get("samplers", 0) * runtime.samplers.min + beside_samplers
        teachers = amounts.get("teachers", 0) * runtime.teachers.min
        trainers = amounts.get("trainers", 0) * runtime.trainers.workers
        sampling = samplers + teachers if self.encodes else samplers
        # An analysis has teachers without samplers.
        streamed = runtime.mode == "streamed" and self.samples
        return max(sampling, teachers, trainers + sampling if streamed else trainers)

    @property
    def _without_samplers(self) -> list[Stage]:
        """The stages that read data or train."""
        others = [task.prepare for task in self.plan.other_tasks.values()]
        return [self.plan.prepare, *others, *(each.distill for each in self.plan.rounds)]
