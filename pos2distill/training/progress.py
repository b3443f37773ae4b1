"""How far training is, in memory and in a checkpoint."""

import base64
import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pos2distill.errors import CorruptState, UserError
from pos2distill.records import Bools
from pos2distill.training.batches import Batch

_PROGRESS_FILE = "progress.json"


@dataclass
class TrainingProgress:
    """How far training is: the next step, the epoch, and which of its samples are done.

    Attributes:
        done: (N,) bool, the samples that the epoch has processed, whether trained on or not kept.
    """

    step: int
    epoch: int
    done: Bools

    @classmethod
    def at_start(cls, samples: int) -> "TrainingProgress":
        """The progress of a run that has not begun, over `samples` samples."""
        return cls(0, 0, np.zeros(samples, bool))

    @classmethod
    def load(cls, folder: Path, samples: int, url: str) -> "TrainingProgress":
        """Read what `save` wrote.

        Args:
            samples: the number of samples of the run.
            url: where the training state is stored, for messages.
        Raises:
            CorruptState: if the file is missing or corrupt.
            UserError: if it is of another number of samples.
        """
        file = f"{url}/{_PROGRESS_FILE}"
        try:
            raw = json.loads((folder / _PROGRESS_FILE).read_text())
            done = base64.b64decode(raw["done"], validate=True)
            step, epoch, stored = int(raw["step"]), int(raw["epoch"]), int(raw["samples"])
            checksum = raw["checksum"]
        except FileNotFoundError:
            raise CorruptState(f"{file}: missing") from None
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptState(f"{file}: corrupt ({error})") from None
        if checksum != _checksum(step, epoch, stored, done):
            raise CorruptState(f"{file}: corrupt (it does not match its checksum)")
        if stored != samples:
            raise UserError(f"{file}: is of a run with {stored} samples, expected {samples}")
        # `packbits` fills the last byte with zeros; `count` removes them.
        return cls(step, epoch, np.unpackbits(np.frombuffer(done, np.uint8), count=stored).astype(bool))

    def save(self, folder: Path) -> None:
        """Write one small JSON file."""
        # One bit for each sample, so that the file stays small with millions of samples.
        done = np.packbits(self.done).tobytes()
        raw = {
            "step": self.step,
            "epoch": self.epoch,
            "samples": len(self.done),
            "done": base64.b64encode(done).decode(),
            "checksum": _checksum(self.step, self.epoch, len(self.done), done),
        }
        (folder / _PROGRESS_FILE).write_text(json.dumps(raw) + "\n")

    def add(self, batch: Batch) -> None:
        """Count a batch that has been trained on."""
        if batch.epoch > self.epoch:
            self.epoch, self.done = batch.epoch, np.zeros_like(self.done)
        self.done[batch.indices] = True
        if batch.samples:
            self.step += 1


def _checksum(step: int, epoch: int, samples: int, done: bytes) -> str:
    return f"{zlib.crc32(f'{step} {epoch} {samples} '.encode() + done):08x}"
