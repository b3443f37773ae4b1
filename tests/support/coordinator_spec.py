"""What a coordinator begins with."""

from typing import Literal

import pyarrow as pa

from pipelines.run_coordinator import CoordinatorSpec
from pos2distill.sampling.failure_guard import FailureGuard
from tests.support.tables import nothing_known

IDS = 40


def make_spec(label: str = "distill", total: int = 20, stored: dict[str, int] | None = None) -> CoordinatorSpec:
    """Of 40 examples, of which half may fail."""
    ids = pa.array([f"e{index}" for index in range(IDS)])
    counts: Literal["kept", "trained"] = "kept" if label == "sample" else "trained"
    known = nothing_known(IDS, wanted=total)
    return CoordinatorSpec("run", label, counts, total, stored or {}, FailureGuard(0.5), ids, known)
