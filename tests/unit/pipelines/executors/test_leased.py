"""An executor whose lease may be lost."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pipelines.executors.leased import LeasedExecutor
from pos2distill.errors import TransientError
from pos2distill.store.lease import Lease


class Numbers:
    """An executor whose results are numbers."""

    stalled_hint = ""

    def __init__(self) -> None:
        self.reported: list[object] = []

    @contextmanager
    def coordinate(self, spec: object) -> Iterator[Any]:
        yield SimpleNamespace(report_fatal=self.reported.append)

    def map(
        self, blocks: Sequence[int], operators: object, *, label: str, coordinator: object = None
    ) -> Generator[int, None, None]:
        try:
            yield from blocks
        finally:
            self.reported.append("closed")

    @contextmanager
    def actors(self, create: object, pool: object, *, label: str) -> Iterator[Callable[[Sequence[int]], Iterator[int]]]:
        yield iter

    def train(self, job: Lease, stream: object, coordinator: object) -> bool:
        return job._work.locked()


@pytest.fixture
def lease() -> Lease:
    return Lease()


@pytest.fixture
def executor(lease: Lease) -> Any:
    return LeasedExecutor(Numbers(), lease)  # type: ignore[arg-type]


def test_leased_executor_passes_on_what_another_makes(executor: Any, lease: Lease) -> None:
    assert list(executor.map([1, 2], (), label="numbers")) == [1, 2]
    with executor.actors(None, None, label="numbers") as call_all:
        assert list(call_all([1, 2])) == list(call_all([1, 2])) == [1, 2]
    assert executor.train(lease, None, None), "the lease is kept while training runs"
    assert not lease._work.locked()


def test_leased_executor_returns_no_result_after_the_loss(executor: Any, lease: Lease) -> None:
    results = executor.map([1, 2, 3], (), label="numbers")
    at_the_end = pytest.raises(TransientError, match=r"^lost$")
    with at_the_end, executor.actors(None, None, label="numbers") as call_all:
        calls = call_all([1, 2, 3])
        assert (next(results), next(calls)) == (1, 1)
        lease.mark_lost("lost")
        for each in (results, calls):
            with pytest.raises(TransientError, match=r"^lost$"):
                next(each)
    assert executor.executor.reported == ["closed"]


def test_leased_executor_does_not_end_as_finished_after_the_loss(executor: Any, lease: Lease) -> None:
    """What follows would publish the results."""
    results = executor.map([1], (), label="numbers")
    assert next(results) == 1
    lease.mark_lost("lost")
    with pytest.raises(TransientError, match=r"^lost$"):
        next(results)
    with pytest.raises(TransientError, match=r"^lost$"):
        executor.train(lease, None, None)


def test_leased_executor_reports_the_loss_to_the_coordinator(executor: Any, lease: Lease) -> None:
    with executor.coordinate(None):
        lease.mark_lost("lost")
    (error,) = executor.executor.reported
    assert isinstance(error, TransientError)
    assert str(error) == "lost"


def test_leased_executor_closes_what_is_left_of_a_map(executor: Any) -> None:
    results = executor.map([1, 2, 3], (), label="numbers")
    next(results)
    results.close()
    assert executor.executor.reported == ["closed"]
