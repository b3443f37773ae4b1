"""When a training state is due, and how it is written.

A training state is what a resumed run needs: weights in float32, Adam's moments, progress. It is in the folder
`training/` of the checkpoint artifact while training runs. The distilled model is written once, at the end.
"""

import contextlib
import tempfile
import time
from pathlib import Path

from pos2distill.training.job import TrainingJob
from pos2distill.training.loop import Action
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.session import WorkerSession
from pos2distill.training.step_log import StepLog
from pos2distill.training.strategies.protocol import Strategy

_UPLOAD_POLL_SECONDS = 0.2


class Checkpointer:
    """Decides when a training state is due, and saves it.

    Args:
        log: on rank 0; it is written before each training state, so that both name the same steps.
        step: the step at which training starts.
        scratch: folder of the run on this node.
    """

    def __init__(
        self,
        job: TrainingJob,
        session: WorkerSession,
        strategy: Strategy,
        log: StepLog | None,
        step: int,
        scratch: Path,
    ) -> None:
        self.settings = job.runtime.checkpoints
        self.session = session
        self.strategy = strategy
        self.log = log
        self.scratch = scratch / f"rank-{session.dist.rank}"
        self.scratch.mkdir(parents=True)
        self.last_step, self.last_time = step, time.monotonic()
        # By this process: the step, the epoch and how many of its samples were done.
        self.saved: tuple[int, int, int] | None = None
        self.preemption_handled = False

    def requested_action(self, step: int, in_step: bool) -> Action:
        """What this rank requests after `step` steps. Within the next step only what is urgent."""
        action = Action.CONTINUE
        # Clocks of ranks differ, so only rank 0 measures time. The greatest action of all ranks counts.
        if self.session.dist.rank == 0 and not in_step and self._is_due(step):
            action = Action.CHECKPOINT
        # Whichever rank it is, in `save` all others would wait for it.
        if not in_step and self._is_uploading():
            action = Action.POSTPONE
        # Ray notifies all ranks, but not at the same time: one that is later finds the state saved already.
        if self.session.is_preempted() and not self.preemption_handled:
            self.preemption_handled = True
            if self.saved is None or step != self.saved[0]:
                action = Action.CHECKPOINT_NOW
        if self.session.dist.rank == 0 and self.session.stop_requested():
            action = Action.STOP
        return action

    def save(self, progress: TrainingProgress) -> None:
        """Write a training state; every rank writes its own files."""
        # A state that is saved for any reason restarts the interval, so that a regular one does not follow at once.
        self.last_step, self.last_time = progress.step, time.monotonic()
        progressed = (progress.step, progress.epoch, int(progress.done.sum()))
        # A stop that follows a notice within the same step: there may be no time to upload the same state again.
        if progressed == self.saved:
            return
        is_first, self.saved = self.saved is None, progressed
        # A state takes 12 bytes per parameter of disk, so that there is room for one. Ray Train uploads one after
        # the other, so that a second one would not be in the storage earlier.
        while self._is_uploading():
            time.sleep(_UPLOAD_POLL_SECONDS)
        folder = Path(tempfile.mkdtemp(prefix=f"{progress.step}-", dir=self.scratch))
        self.strategy.save_state(folder)
        # A run that is killed before it has a list of states begins again, which must not cost more than one state.
        if self.session.dist.rank == 0 and not is_first:
            self.session.wait_until_listed()
        # The progress is the same on all ranks, so one copy suffices. Only rank 0 has a log.
        if self.log is not None:
            progress.save(folder)
            self.log.flush()
        self.session.save_state(progress.step, folder)

    def close(self) -> None:
        """Remove the scratch folder, unless uploads still read from it."""
        if not self._is_uploading():
            self.scratch.rmdir()
            # The last worker of this node removes the run's folder too.
            with contextlib.suppress(OSError):
                self.scratch.parent.rmdir()

    def _is_uploading(self) -> bool:
        """Whether the last state is still on this machine; its folder is removed once it is uploaded."""
        return any(self.scratch.iterdir())

    def _is_due(self, step: int) -> bool:
        steps = step - self.last_step
        # Without a step since the last state, the weights are unchanged.
        if steps == 0:
            return False
        minutes = (time.monotonic() - self.last_time) / 60
        if self.settings.steps is not None and steps >= self.settings.steps:
            return True
        return minutes >= self.settings.minutes
