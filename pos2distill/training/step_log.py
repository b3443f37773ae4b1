"""The log of training steps: to the progress display, the trackers and the checkpoint artifact."""

import contextlib
import json
import threading
from pathlib import Path

import pydantic

from pos2distill.errors import UserError, one_line
from pos2distill.literal_paths import list_matching, make_folder
from pos2distill.store.checkpoint_layout import STEPS_FOLDER
from pos2distill.store.files import read_if_any, write_bytes
from pos2distill.store.retry import retry_while_unreachable
from pos2distill.training.job import TrainingJob
from pos2distill.training.session import WorkerSession
from pos2distill.training.step_record import StepRecord
from pos2distill.training.trackers import ExperimentTracker, TrackedRun, open_tracker

_TRACKERS_FILE = "trackers.json"
_IDS = pydantic.TypeAdapter(dict[str, str])


class StepLog:
    """Writes step records; one file in the artifact from checkpoint to checkpoint. Exists on rank 0 only.

    Args:
        step: the step at which training starts; records of later steps, made after the checkpoint, are removed, since
            those steps are made again.
        samples: how many samples are trained on if enough are kept.
    """

    def __init__(self, job: TrainingJob, session: WorkerSession, step: int, samples: int) -> None:
        self.artifact = job.checkpoint
        self.session = session
        self.samples = samples * job.study.training.epochs
        self.lines: list[str] = []
        self.start = step
        self.folder = f"{self.artifact.path}/{STEPS_FOLDER}"
        self._remove_later_steps()
        self.trackers = self._open_trackers(job)

    def __call__(self, record: StepRecord) -> None:
        """Log one step."""
        self.lines.append(json.dumps(record.as_dict()))
        self.session.report_step(round(record.fraction * self.samples), record.step + 1, record.loss)
        for tracker in list(self.trackers):
            try:
                tracker.log(record)
            except Exception as error:  # whatever its library raises, once it has tried again by itself
                self._drop(tracker, error)

    def flush(self) -> None:
        """Write the steps since the last call, in a file named after the first of them."""
        if self.lines:
            # Zeros in front, so that the files sorted by name are in the order of their steps.
            path = f"{self.folder}/{self.start:08d}.jsonl"
            content = ("\n".join(self.lines) + "\n").encode()
            retry_while_unreachable(lambda: write_bytes(self.artifact.fs, path, content), self.session.warn)
            self.start += len(self.lines)
            self.lines = []

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception as error:
                self.session.warn(
                    f"runtime.trackers: {tracker.name} could not be closed ({_reason(error)}), so that it may lack the "
                    f"last steps"
                )

    def _drop(self, tracker: ExperimentTracker, error: Exception) -> None:
        """Continue without a tracker that failed: what it shows is in the artifact, and training has taken hours."""
        self.trackers.remove(tracker)
        self.session.warn(
            f"runtime.trackers: {tracker.name} failed ({_reason(error)}); training continues without it; a run that is "
            f"resumed logs to it again"
        )

        def close() -> None:
            with contextlib.suppress(Exception):
                tracker.close()

        # So that it can be opened again in this process. Not waited for: its server may not answer for minutes, for
        # which the other workers would wait too.
        threading.Thread(target=close, name="close tracker", daemon=True).start()

    def _open_trackers(self, job: TrainingJob) -> list[ExperimentTracker]:
        """The trackers, in which a run that resumes continues: its ids there are stored with the checkpoint.

        Raises:
            UserError: if a tracker of a new run cannot be opened. A run that resumes continues without it.
        """
        known = self._known_runs()
        run = TrackedRun(
            name=f"{job.name}-{self.artifact.fingerprint}",
            folder=f"{self.artifact.storage}/tensorboard/{self.artifact.fingerprint}",
            settings=job.logged_settings,
            step=self.start,
            ids=dict(known or {}),
        )
        trackers = []
        for name in job.runtime.trackers:
            try:
                trackers.append(open_tracker(name, run))
            except Exception as error:  # whatever its library raises
                reason = f"runtime.trackers: {name} cannot be opened ({_reason(error)})"
                if known is None and not self.start:
                    for opened in trackers:
                        with contextlib.suppress(Exception):
                            opened.close()
                    raise UserError(reason) from error
                self.session.warn(f"{reason}; training continues without it")
        if run.ids:
            self.artifact.write_json(_TRACKERS_FILE, run.ids)
        return trackers

    def _known_runs(self) -> dict[str, str] | None:
        """The ids of this run in its trackers, by their names; None if no tracker has been opened yet.

        Raises:
            UserError: if the file with them is corrupt.
        """
        content = read_if_any(self.artifact.fs, f"{self.artifact.path}/{_TRACKERS_FILE}")
        if content is None:
            return None
        try:
            return _IDS.validate_json(content)
        except ValueError:
            raise UserError(
                f"{self.artifact.url}/{_TRACKERS_FILE}: corrupt; delete this file: training continues, with a new run "
                f"in each tracker (runtime.trackers)"
            ) from None

    def _remove_later_steps(self) -> None:
        """Remove the records of steps that are trained again.

        Raises:
            UserError: if records of earlier steps are missing: the finished log would lack them too.
        """
        fs = self.artifact.fs
        make_folder(fs, self.folder)
        records = 0
        for path in list_matching(fs, self.folder, "*.jsonl"):
            # A file holds the steps from one checkpoint to the next.
            if int(Path(path).stem) >= self.start:
                fs.rm_file(path)
            else:
                records += len(fs.cat_file(path).splitlines())
        if records != self.start:
            raise UserError(
                f"{self.artifact.url}/{STEPS_FOLDER}: holds {records} records of the {self.start} steps before the "
                f"last checkpoint; delete {self.artifact.url} to train again from the samples"
            )


def _reason(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")[:300]
