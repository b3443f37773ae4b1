import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pos2distill.models.packing import collate, count_own_tokens, pack_rows
from pos2distill.records import Tokens


def tokens(*ids: int) -> Tokens:
    return np.asarray(ids, np.int32)


PROMPTS = [tokens(11, 12, 13), tokens(21), tokens(31, 32, 33, 34, 35)]
RESPONSES = [tokens(14, 15), tokens(22, 23, 24), tokens(36)]


def test_collate_concatenates_prompts_and_responses_by_their_ids() -> None:
    batch = collate(PROMPTS, RESPONSES)
    assert batch.input_ids_S.tolist() == [11, 12, 13, 14, 15, 21, 22, 23, 24, 31, 32, 33, 34, 35, 36]
    assert batch.position_S.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert batch.packed.start_B1.tolist() == [0, 5, 9, 15]
    assert batch.packed.start_B1.dtype == batch.packed.key_start_B1.dtype == torch.int32  # as flash-attn takes them
    assert (batch.row_count, batch.packed.longest) == (3, 6)


def test_collate_stores_a_shared_prefix_once() -> None:
    prompts = [tokens(1, 2, 3, 4, 5, 6), tokens(1, 2, 3, 4, 7), tokens(1, 2, 3, 4, 7, 8), tokens(9, 2)]
    responses = [tokens(50), tokens(51), tokens(52, 53), tokens(54)]
    batch = collate(prompts, responses, group_ids="aaaa")
    assert batch.input_ids_S.tolist() == [1, 2, 3, 4, 5, 6, 50, 7, 51, 8, 52, 53, 9, 2, 54]
    assert batch.position_S.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 5, 6, 7, 0, 1, 2]
    packed = batch.packed
    assert packed.shared_lengths == (0, 4, 5, 0)
    assert packed.span_lengths == (4, 3, 1, 1, 3, 3)
    assert packed.row_spans == ((0, 1), (0, 2, 3), (0, 2, 4), (5,))
    assert packed.start_B1.tolist() == [0, 7, 9, 12, 15]
    assert packed.key_start_B1.tolist() == [0, 7, 13, 21, 24]
    assert (packed.longest, batch.logit_index_T.tolist()) == (8, [5, 7, 9, 10, 13])


def test_collate_never_shares_the_token_that_predicts_a_response() -> None:
    batch = collate([tokens(1, 2, 3), tokens(1, 2, 3)], [tokens(50), tokens(51)], group_ids=[7, 7])
    assert batch.input_ids_S.tolist() == [1, 2, 3, 50, 3, 51]
    assert batch.logit_index_T.tolist() == [2, 4]


def test_collate_does_not_share_a_short_prefix() -> None:
    prompts = [np.asarray([1, *range(start, start + 9)], np.int32) for start in (20, 40)]
    assert collate(prompts, [tokens(50)] * 2, group_ids=[7, 7]).packed.shared_lengths == (0, 0)


@pytest.mark.parametrize(("common", "shared"), [(1, 0), (2, 2)])
def test_collate_shares_a_prefix_of_an_eighth_of_its_row(common: int, shared: int) -> None:
    """Of rows of 16 tokens, the response included."""
    opening = list(range(1, 1 + common))
    prompts = [np.asarray([*opening, *range(start, start + 15 - common)], np.int32) for start in (20, 40)]
    assert collate(prompts, [tokens(50)] * 2, group_ids=[7, 7]).packed.shared_lengths == (0, shared)


def test_collate_shares_nothing_between_groups() -> None:
    prompts, responses = [tokens(1, 2, 3, 4, 5)] * 5, [tokens(50)] * 5
    assert collate(prompts, responses).packed.shared_lengths == (0,) * 5
    assert collate(prompts, responses, group_ids="abbac").packed.shared_lengths == (0, 0, 4, 0, 0)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 3)), min_size=1, max_size=7)
)
def test_whole_rows_restore_every_row(rows: list[tuple[list[int], int]]) -> None:
    prompts = [np.asarray(prompt, np.int32) for prompt, _ in rows]
    responses = [np.arange(50, 50 + length, dtype=np.int32) for _, length in rows]
    batch = collate(prompts, responses, group_ids=[0] * len(rows))
    for what, expected in (
        (batch.input_ids_S, [[*p.tolist(), *r.tolist()] for p, r in zip(prompts, responses, strict=True)]),
        (batch.position_S, [list(range(len(p) + len(r))) for p, r in zip(prompts, responses, strict=True)]),
    ):
        states = what[None, None, :, None]
        assert [row.flatten().tolist() for row in batch.packed.whole_rows(states)] == expected
        assert batch.packed.concatenated_rows(states).flatten().tolist() == [each for row in expected for each in row]
    assert sum(batch.packed.query_lengths) == len(batch.input_ids_S) <= batch.packed.key_start_B1[-1]
    assert batch.input_ids_S[batch.logit_index_T + 1].tolist() == np.concatenate(responses).tolist()


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(0, 1)), min_size=1, max_size=6)
)
def test_count_own_tokens_is_what_each_row_adds_to_any_pack(rows: list[tuple[list[int], int]]) -> None:
    prompts = [np.asarray(prompt, np.int32) for prompt, _ in rows]
    groups = [group for _, group in rows]
    lengths = [len(prompt) + 2 for prompt in prompts]
    for first in range(len(rows)):
        for end in range(first + 1, len(rows) + 1):
            packed = pack_rows(prompts[first:end], lengths[first:end], groups[first:end])
            added = [count_own_tokens(prompts, lengths, groups, first, row) for row in range(first, end)]
            assert added == list(packed.query_lengths)


@pytest.mark.parametrize(
    ("alignment", "indices"),
    [("shifted", [2, 3, 5, 6, 7, 13]), ("official", [3, 4, 6, 7, 8, 14])],
)
def test_collate_finds_where_each_response_token_is_predicted(alignment: str, indices: list[int]) -> None:
    batch = collate(PROMPTS, RESPONSES, alignment=alignment)  # type: ignore[arg-type]
    assert batch.row_T.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.logit_index_T.tolist() == indices


def test_collate_shifted_indices_are_one_before_their_tokens() -> None:
    batch = collate(PROMPTS, RESPONSES)
    assert batch.input_ids_S[batch.logit_index_T + 1].tolist() == np.concatenate(RESPONSES).tolist()


def test_collate_requires_as_many_responses_as_prompts() -> None:
    with pytest.raises(ValueError, match="shorter"):
        collate(PROMPTS, RESPONSES[:2])
