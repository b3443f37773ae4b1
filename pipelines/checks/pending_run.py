"""What a command is about to do, for the checks before it begins."""

from collections.abc import Sequence
from dataclasses import dataclass

from pos2distill.config import Recipe, Study

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
    def encodes(self) -> bool:
        """Whether actors with the base model store its hidden states."""
        return self.study.method.teacher == "cached" and any(stage in self.pending for stage in self.plan.sample_stages)

    @property
    def analyses(self) -> bool:
        """Whether the model's answers are compared token by token."""
        return any(stage in (self.plan.analyze_base, self.plan.analyze_distilled) for stage in self.pending)

    @property
    def model_pools(self) -> list[str]:
        """The sections of `runtime` whose pools run a model here."""
        pools = []
        if self.study.model.engine in ("vllm", "hf") and any(
            stage not in self._without_samplers for stage in self.pending
        ):
            pools.append("samplers")
        if self.encodes or self.analyses:
            pools.append("teachers")
        if self.trains:
            pools.append("trainers")
        return pools

    @property
    def _without_samplers(self) -> list[Stage]:
        """The stages that read data or train."""
        others = [task.prepare for task in self.plan.other_tasks.values()]
        return [self.plan.prepare, *others, *(each.distill for each in self.plan.rounds)]
