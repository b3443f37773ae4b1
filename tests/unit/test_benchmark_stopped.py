"""`benchmarks.real.stopped`: which questions of a stopped evaluation are compared."""

import pyarrow as pa

from benchmarks.real.stopped import compare, finished_by_both, lengths
from tests.support.predictions import predictions


def test_finished_by_both_leaves_out_questions_with_an_unanswered_prompt() -> None:
    """Three questions at two slots; the evaluation was stopped before the third one's second slot."""
    before = predictions(3, [[1, 0], [1, 0], [1, 0]])
    after = predictions(3, [[1, 1], [1, 0], [1, 1]])
    finished = finished_by_both(before, after.slice(0, 5))
    assert [sorted(set(table["example_id"].to_pylist())) for table in finished] == [["e0", "e1"], ["e0", "e1"]]
    assert [table.num_rows for table in finished] == [4, 4]
    (row,) = compare(*finished)
    assert (row["documents"], row["mean_difference"]) == (3, 0.25)
    assert finished_by_both(before, pa.concat_tables([after]))[0].num_rows == 6


def test_lengths_are_those_at_which_position_can_matter() -> None:
    """Evaluations also have prompts with the gold document alone, and without documents."""
    alone, none = predictions(1, [[1], [0]]), predictions(0, [[0], [0]], slots=[[]])
    table = pa.concat_tables([predictions(3, [[1, 0], [1, 0]]), predictions(5, [[1, 0], [1, 0]]), alone, none])
    assert lengths(table) == [3, 5]
