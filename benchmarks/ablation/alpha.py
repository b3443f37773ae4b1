"""The sum of alpha in a batch, and the number of slots with a single row, on the toy. Run:

  python -m benchmarks.ablation.alpha     # a minute of CPU time; writes alpha.json

The training is that of `examples/r1_in_one_file.py` with its defaults (batches of three examples, K = 4, 30 documents,
a rate of 1e-3), for one epoch of 90 examples: 30 steps. Shapes: M trivial rows.
"""

import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from torch import Tensor

from benchmarks.circumstances import circumstances
from examples import r1_in_one_file as r1

EXAMPLES = 90


def single_row_fraction(examples: int, k: int, slots: int) -> float:
    """The expected number of slots with exactly one row in a batch, divided by that of slots with any row.

        n p (1 - p)^(n - 1) / (1 - (1 - p)^n),   p = k / slots

    Each of n examples draws k distinct slots of `slots`, so the number of its rows at one slot is 1 with probability p.
    """
    p = k / slots
    return examples * p * (1 - p) ** (examples - 1) / (1 - (1 - p) ** examples)


def main() -> None:
    """Train, record every batch, and write the report to this folder."""
    sums: list[float] = []
    single: list[int] = []
    present: list[int] = []
    position_weights = r1.position_weights

    def recorded_weights(kl_M: Tensor, slot_M: Tensor) -> Tensor:
        alpha_M = position_weights(kl_M, slot_M)
        rows_at_slot = slot_M.unique(return_counts=True)[1]
        sums.append(float(alpha_M.sum()))
        single.append(int((rows_at_slot == 1).sum()))
        present.append(len(rows_at_slot))
        return alpha_M

    r1.position_weights = recorded_weights
    # Skip everything except the training.
    r1.TRAIN_EXAMPLES, r1.EPOCHS, r1.EVAL_EXAMPLES, r1.EVAL_SLOTS = EXAMPLES, 1, 1, 1
    start = time.monotonic()
    with TemporaryDirectory() as folder:
        r1.main(**{**r1.DEFAULTS, "out": folder})  # type: ignore[arg-type]
    report = {
        "examples": EXAMPLES,
        "examples_per_batch": r1.EXAMPLES_PER_BATCH,
        "k": r1.K,
        "steps": len(sums),
        "sum_of_alpha": sums,
        "smallest": min(sums),
        "mean": float(np.mean(sums)),
        "largest": max(sums),
        "single_row_fraction": sum(single) / sum(present),
        "single_row_fraction_expected": single_row_fraction(r1.EXAMPLES_PER_BATCH, r1.K, 29),
        "seconds": round(time.monotonic() - start),
    }
    report |= circumstances("torch", "transformers")
    Path(__file__).with_name("alpha.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: value for name, value in report.items() if name != "sum_of_alpha"}))


if __name__ == "__main__":
    main()
