"""How far training is, in memory and in a checkpoint."""

import base64
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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
    def load(cls, folder: Path) -> "TrainingProgress":
        """Read what `save` wrote."""
        raw = json.loads((folder / _PROGRESS_FILE).read_text())
        bits = np.frombuffer(base64.b64decode(raw["done"]), np.uint8)
        # `packbits` fills the last byte with zeros; `count` removes them.
        return cls(raw["step"], raw["epoch"], np.unpackbits(bits, count=raw["samples"]).astype(bool))

    def save(self, folder: Path) -> None:
        """Write one small JSON file."""
        # One bit for each sample, so that the file stays small with millions of samples.
        bits = base64.b64encode(np.packbits(self.done).tobytes()).decode()
        raw = {"step": self.step, "epoch": self.epoch, "samples": len(self.done), "done": bits}
        (folder / _PROGRESS_FILE).write_text(json.dumps(raw) + "\n")

    def add(self, batch: Batch) -> None:
        """Count a batch that has been trained on."""
        if batch.epoch > self.epoch:
            self.epoch, self.done = batch.epoch, np.zeros_like(self.done)
        self.done[batch.indices] = True
        if batch.samples:
            self.step += 1
