"""Which stages of a command are still to run."""

from collections.abc import Sequence

from pos2distill.config import Runtime

from .plan import Plan
from .stages import sample
from .stages.made_from import is_current
from .stages.stage import Stage


def is_pending(stage: Stage, plan: Plan, stages: Sequence[Stage], runtime: Runtime) -> bool:
    """Whether a stage is to run: it is not finished, or its samples were, but some are corrupt or missing by now.

    Args:
        stages: all stages of the command.
    """
    if not is_current(stage):
        return True
    return _must_be_whole(stage, plan, stages, runtime) and sample.lacks_samples(stage)


def _must_be_whole(stage: Stage, plan: Plan, stages: Sequence[Stage], runtime: Runtime) -> bool:
    """Whether nothing else makes the missing samples, or can do without them.

    In streamed mode training makes them while it runs; in staged mode there may be one GPU for both. A finished
    checkpoint needs no samples.
    """
    for each in plan.rounds:
        if stage == each.sample:
            return each.distill not in stages or (runtime.mode == "staged" and not is_current(each.distill))
    return False
