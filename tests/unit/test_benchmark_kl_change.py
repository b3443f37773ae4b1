"""`benchmarks.real.kl_change`: the paired change of the KL by position, by hand."""

import pyarrow as pa
import pytest

from benchmarks.real.kl_change import changes
from pos2distill.errors import UserError


def passes(kl: dict[str, list[list[float]]], slots: tuple[int, ...] = (0, 4)) -> pa.Table:
    """Of each question the KL by position and token."""
    placements = [[slot] for slot in slots]
    rows = [{"example_id": name, "placement_slots": placements, "kl": values} for name, values in kl.items()]
    return pa.Table.from_pylist(rows)


def test_changes_are_those_of_the_mean_kl_of_each_question() -> None:
    before = passes({"a": [[0.4, 0.2], [0.0, 0.0]], "b": [[0.1], [0.3]]})
    after = passes({"b": [[0.0], [0.3]], "a": [[0.2, 0.2], [0.1, 0.1]]})
    first, second = changes(before, after)
    assert first["slots"] == [0]
    assert (first["questions"], first["base"], first["distilled"]) == pytest.approx((2, 0.2, 0.1))
    assert first["change"] == pytest.approx(-0.1)  # by .1 in both
    assert first["ci95"][0] < -0.1 < first["ci95"][1]
    assert (second["base"], second["distilled"], second["change"]) == pytest.approx((0.15, 0.2, 0.05))


@pytest.mark.parametrize("after", [passes({"b": [[0.1], [0.3]]}), passes({"a": [[0.1], [0.3]]}, slots=(0, 5))])
def test_changes_rejects_analyses_of_other_questions_or_positions(after: pa.Table) -> None:
    with pytest.raises(UserError, match="the analyses have different questions or positions"):
        changes(passes({"a": [[0.1], [0.3]]}), after)
