"""The spec of a stage whose progress is reported."""

import pyarrow as pa

from pipelines.run_coordinator import ProgressSpec
from pos2distill.sampling.failure_guard import FailureGuard
from tests.support.tables import nothing_known

IDS = 40


def make_spec(label: str = "distill", total: int = 20, stored: dict[str, int] | None = None) -> ProgressSpec:
    """Of 40 examples, of which half may fail."""
    ids = pa.array([f"e{index}" for index in range(IDS)])
    return ProgressSpec("run", label, total, stored or {}, FailureGuard(0.5), ids, nothing_known(IDS, wanted=total))
