"""Which stages of a command are still to run."""

from collections.abc import Sequence

from pos2distill.config import Runtime

from .plan import Plan
from .stages import sample
from .stages.made_from import is_current
from .stages.stage import Stage


def is_pending(stage: Stage, plan: Plan, stages: Sequence[Stage], runtime: Runtime) -> bool:
    """Whether a stage is to run: it is not finished, or its samples were, but some are corrupt or missing by now.

    A finished checkpoint needs no samples: they may have been deleted, or be those of another study of its sweep.

    Args:
        stages: all stages of the command.
    """
    trained = _training_on(stage, plan, stages)
    if trained is not None and is_current(trained):
        return False
    if not is_current(stage):
        return True
    if stage not in plan.sample_stages:
        return False
    # In streamed mode training makes the missing samples while it runs; in staged mode there may be one GPU for both.
    must_be_whole = trained is None or runtime.mode == "staged"
    return must_be_whole and sample.lacks_samples(stage)


def _training_on(stage: Stage, plan: Plan, stages: Sequence[Stage]) -> Stage | None:
    """The stage of the command that trains on these samples; None if there is none, or these are no samples."""
    return next((each.distill for each in plan.rounds if stage == each.sample and each.distill in stages), None)
