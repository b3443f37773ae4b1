import itertools
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.config import Recipe, Study
from pos2distill.errors import UserError
from pos2distill.losses.objectives import ANCHOR
from pos2distill.records import Slots
from pos2distill.tasks.permutations import draw_trivial_slots
from pos2distill.training.rows import RowKey, RowSource, _slot_id, rank_share

Make = Callable[..., RowSource]


@pytest.fixture
def make(make_recipe: Callable[..., Recipe], make_source: Callable[[Study], RowSource]) -> Make:
    return lambda **overrides: make_source(make_recipe(**overrides).study)


def test_every_row_stands_in_an_epoch_once(make: Make) -> None:
    source = make(training={"batch_rows": 5})
    batches = list(source.global_batches(0))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 5, 5, 2]
    assert source.rows_per_epoch == 32
    # 8 examples at the advantageous slot and at all 3 trivial ones, since k is 3 of 3.
    assert Counter(key for batch in batches for key in batch) == Counter(
        (index, (slot,)) for index in range(8) for slot in range(4)
    )


def test_rows_of_an_example_stay_together(make: Make) -> None:
    keys = [key for batch in make(method={"k": 2}).global_batches(0) for key in batch]
    indices = [index for index, _ in keys]
    assert all(len(set(indices[start : start + 3])) == 1 for start in range(0, 24, 3))


def test_trivial_slots_are_those_of_the_permutations(make: Make) -> None:
    source = make(method={"k": 2, "advantageous_slot": "last"}, seed=4)
    slots: dict[int, list[Slots]] = {}
    for index, slot in (key for batch in source.global_batches(0) for key in batch):
        slots.setdefault(index, []).append(slot)
    for index, drawn in slots.items():
        trivial = draw_trivial_slots(source.example_ids[index], documents=4, advantageous=(3,), k=2, seed=4)
        assert drawn == [(3,), *trivial]


def test_the_order_is_a_pure_function_of_seed_and_epoch(make: Make) -> None:
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    assert list(first.global_batches(3)) == list(again.global_batches(3))
    assert list(first.global_batches(3)) != list(first.global_batches(4))
    assert first.example_ids == again.example_ids
    assert [key for b in first.global_batches(0) for key in b] != [key for b in other.global_batches(0) for key in b]


def test_one_order_is_pinned(make: Make) -> None:
    """Changing this value changes every training run."""
    keys = next(make(training={"batch_rows": 6}, method={"k": 2}).global_batches(0))
    assert keys == [(4, (0,)), (4, (1,)), (4, (3,)), (6, (0,)), (6, (1,)), (6, (3,))]


def test_total_steps_count_short_batches(make: Make) -> None:
    assert make(training={"batch_rows": 5, "epochs": 3}).total_steps == 3 * 7


def test_only_kept_samples_are_trained_on(make: Make) -> None:
    source = make()
    outcomes = ["kept", "wrong", "empty", "kept", "wrong", "wrong", "wrong", "wrong"]
    samples = source.samples.set_column(source.samples.column_names.index("outcome"), "outcome", [outcomes])
    kept = RowSource(source.examples, samples, source.build_prompt, source.study)
    assert kept.example_ids == [source.example_ids[0], source.example_ids[3]]
    with pytest.raises(UserError, match="no sample was kept, so there is nothing to train on"):
        RowSource(source.examples, samples.slice(1, 2), source.build_prompt, source.study)


def test_the_gold_document_stands_at_the_rows_slot(make: Make) -> None:
    source = make()
    for slot in range(4):
        row = source.row((2, (slot,)))
        example = source.examples[row.example_id]
        text = str(source.build_prompt.tokenizer.decode(row.prompt_ids))
        place = sorted(text.index(document.text) for document in example.documents[:4]).index(
            text.index(example.golds[0].text)
        )
        assert (row.slots, row.slot_id, place) == ((slot,), slot if slot else ANCHOR, slot)
        assert row.teacher_TH is not None
        assert row.teacher_TH.shape == (len(row.response_ids), 32)


def test_an_anchor_row_is_the_advantageous_prompt_itself(make: Make) -> None:
    """Also with reshuffled distractors: the teacher answered that very prompt."""
    source = make(method={"distractors": "reshuffled"})
    anchor, trivial = source.row((0, (0,))), source.row((0, (1,)))
    assert anchor.prompt_ids.tolist() == anchor.teacher_prompt_ids.tolist() == trivial.teacher_prompt_ids.tolist()
    assert trivial.prompt_ids.tolist() != anchor.prompt_ids.tolist()


def test_a_resident_teacher_needs_no_stored_states(make: Make) -> None:
    source = make()
    column = source.samples.column_names.index("hidden")
    samples = source.samples.set_column(column, "hidden", [[None] * len(source.samples)])
    bare = RowSource(source.examples, samples, source.build_prompt, source.study)
    assert bare.row((0, (0,))).teacher_TH is None


@given(st.integers(1, 70), st.integers(1, 9))
def test_ranks_share_a_batch_equally_and_exactly_once(rows: int, world: int) -> None:
    keys: list[RowKey] = [(index, (0,)) for index in range(rows)]
    shares = [rank_share(keys, rank, world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert [key for share in shares for key, filler in share if not filler] == keys
    assert all(key == keys[0] for share in shares for key, filler in share if filler)


def test_seventeen_rows_on_two_ranks() -> None:
    keys: list[RowKey] = [(index, (1,)) for index in range(17)]
    first, second = (rank_share(keys, rank, 2) for rank in (0, 1))
    assert first == [(key, False) for key in keys[:9]]
    assert second == [(key, False) for key in keys[9:]] + [(keys[0], True)]


def test_methods_without_an_anchor_keep_the_steps_and_leave_its_rows_out(make: Make) -> None:
    with_anchor, without = make(training={"batch_rows": 5}), make(training={"batch_rows": 5}, method={"name": "kl"})
    assert with_anchor.total_steps == without.total_steps == 7
    assert (with_anchor.rows_per_epoch, without.rows_per_epoch) == (32, 24)
    for one, other in zip(with_anchor.global_batches(0), without.global_batches(0), strict=True):
        assert [key for key in one if key[1] != (0,)] == other


def test_sft_trains_on_the_data_sets_answer(make: Make) -> None:
    source = make(method={"name": "sft"})
    row = source.row((2, (1,)))
    text = source.build_prompt.tokenizer.decode(row.response_ids)
    assert text == f"{source.examples[row.example_id].answers[0]}<|end|>"


def test_sft_of_a_chain_says_the_answer_as_the_chain_ends(make: Make) -> None:
    source = make(method={"name": "sft"}, data={"metric": "em"})
    row = source.row((2, (1,)))
    assert source.build_prompt.tokenizer.decode(row.response_ids).startswith("The answer is: ")


def test_tuples_of_different_lengths_have_different_ids() -> None:
    ids = [_slot_id(slots, 4) for hops in (1, 2, 3) for slots in itertools.permutations(range(4), hops)]
    assert ids == list(range(4 + 12 + 24))
