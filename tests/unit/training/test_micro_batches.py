import itertools

from hypothesis import given
from hypothesis import strategies as st

from pos2distill.training.micro_batches import AddedTokens, count_micro_batches, split_into_micro_batches


def alone(lengths: list[int]) -> AddedTokens:
    """Rows of these lengths that share nothing."""
    return lambda _, row: lengths[row]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 120))
def test_count_micro_batches_allows_no_more_than_the_limit_or_one_row(lengths: list[int], limit: int) -> None:
    count = count_micro_batches(alone(lengths), len(lengths), limit)
    sizes = split_into_micro_batches(alone(lengths), len(lengths), count)
    assert (len(sizes), sum(sizes)) == (count, len(lengths))
    coming = iter(lengths)
    for size in sizes:
        micro_rows = [next(coming) for _ in range(size)]
        assert sum(micro_rows) <= limit or len(micro_rows) == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=8), st.data())
def test_split_into_micro_batches_makes_the_largest_as_small_as_possible(
    lengths: list[int], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(lengths)))

    def largest(edges: tuple[int, ...]) -> int:
        return max(sum(lengths[start:end]) for start, end in itertools.pairwise((0, *edges, len(lengths))))

    sizes = split_into_micro_batches(alone(lengths), len(lengths), count)
    assert len(sizes) == count
    assert min(sizes) > 0
    best = min(map(largest, itertools.combinations(range(1, len(lengths)), count - 1)))
    assert largest(tuple(itertools.accumulate(sizes[:-1]))) == best


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=10), st.integers(1, 120))
def test_count_micro_batches_of_rows_that_share_prefixes_keeps_to_the_limit(
    rows: list[tuple[int, int]], limit: int
) -> None:
    """A row has tokens of its own, and some that any earlier row of its micro-batch has too."""

    def tokens(first: int, row: int) -> int:
        own, shared = rows[row]
        return own if first < row else own + shared

    count = count_micro_batches(tokens, len(rows), limit)
    sizes = split_into_micro_batches(tokens, len(rows), count)
    assert (len(sizes), sum(sizes)) == (count, len(rows))
    first = 0
    for size in sizes:
        assert size == 1 or sum(tokens(first, row) for row in range(first, first + size)) <= limit
        first += size


def test_split_into_micro_batches_by_hand() -> None:
    assert count_micro_batches(alone([5] * 9), 9, 16) == 3
    assert split_into_micro_batches(alone([5] * 9), 9, 3) == [3, 3, 3]
    assert split_into_micro_batches(alone([1, 1, 9, 1, 1, 9, 2]), 7, 3) == [3, 3, 1]
    assert count_micro_batches(alone([30, 1, 1]), 3, 16) == 2


def test_count_micro_batches_counts_a_shared_prefix_once() -> None:
    """Rows of 10 tokens, the last 3 of each its own unless it begins a micro-batch."""

    def tokens(first: int, row: int) -> int:
        return 10 if row == first else 3

    assert count_micro_batches(tokens, 6, 16) == 2  # 10 + 3 + 3 each
    assert count_micro_batches(tokens, 6, 25) == 1
    assert count_micro_batches(tokens, 6, 24) == 2
    assert split_into_micro_batches(tokens, 6, 3) == [2, 2, 2]
