import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.config import ModelSection, Recipe
from pos2distill.errors import UserError
from pos2distill.losses.objectives import ANCHOR
from pos2distill.models.load import load_tokenizer
from pos2distill.tasks.permutations import draw_trivial_slots
from pos2distill.training.rows import _slot_id, decode_samples, row_keys_of_rank
from tests.support.samples import Source

Make = Callable[..., Source]


def test_row_builder_keys_are_the_anchor_row_and_k_trivial_rows(make: Make) -> None:
    source = make(method={"k": 2, "advantageous_slot": "last"}, seed=4)
    for index, example in enumerate(source.examples):
        trivial = draw_trivial_slots(example.example_id, documents=4, advantageous=(3,), k=2, seed=4)
        assert [slots for _, slots in source.build.keys(source.sample(index))] == [(3,), *trivial]


def test_row_builder_keys_have_no_anchor_row_without_anchor_weight(make: Make) -> None:
    with_anchor, without = make(), make(method={"name": "kl"})
    assert [key[1] for key in with_anchor.row_keys() if key[1] != (0,)] == [key[1] for key in without.row_keys()]


@pytest.mark.parametrize(
    ("global_batch_rows", "k", "examples"), [(32, 4, 6), (20, 4, 4), (8, 3, 2), (5, 4, 1), (32, 0, 32)]
)
def test_samples_per_batch_counts_whole_examples(
    make_recipe: Callable[..., Recipe], global_batch_rows: int, k: int, examples: int
) -> None:
    method = {"name": "r1" if k else "seqkd", "anchor_weight": 1, "k": k}
    training = {"global_batch_rows": global_batch_rows}
    assert make_recipe(training=training, method=method, data={"documents": 8}).study.samples_per_batch == examples


def test_samples_per_batch_on_policy_are_one_for_each_row(make_recipe: Callable[..., Recipe]) -> None:
    method = {"name": "r1-on-policy", "k": 3}
    study = make_recipe(training={"global_batch_rows": 11}, method=method).study
    assert study.samples_per_batch == 8  # two examples, as in `r1`
    study = make_recipe(training={"global_batch_rows": 11}, method={**method, "anchor_weight": 0}).study
    assert study.samples_per_batch == 6  # also two examples


def test_row_builder_keys_on_policy_are_the_slots_that_were_answered_at(make: Make) -> None:
    source = make(method={"name": "r1-on-policy", "k": 3})
    for slots in ((0,), (2,)):
        sample = replace(source.sample(1), slots=slots)
        ((_, found),) = source.build.keys(sample)
        assert found == slots
    row = source.build.row((sample, found))
    assert (row.slot_id, row.prompt_ids.tolist()) == (2, source.row(1, (2,)).prompt_ids.tolist())
    anchor = replace(source.sample(1), slots=(0,))
    assert source.build.row(source.build.keys(anchor)[0]).slot_id == ANCHOR


@pytest.mark.parametrize(("anchor_weight", "examples"), [(0, 8), (1, 6)])
def test_samples_per_batch_of_r2_fill_the_batch(
    make_recipe: Callable[..., Recipe], anchor_weight: float, examples: int
) -> None:
    """The paper's R2: 32 rows of 8 examples, K = 4. With an anchor, as R1."""
    method = {"name": "r2", "k": 4, "anchor_weight": anchor_weight}
    study = make_recipe(training={"global_batch_rows": 32}, method=method, data={"documents": 8}).study
    assert study.samples_per_batch == examples


def test_decode_samples_are_none_for_other_outcomes(make: Make) -> None:
    table = make().table
    outcomes = ["kept", "wrong", "empty", "kept", "failed", "wrong", "wrong", "wrong"]
    table = table.set_column(table.column_names.index("outcome"), "outcome", [outcomes])
    assert [sample is not None for sample in decode_samples(table)] == [outcome == "kept" for outcome in outcomes]


def test_row_builder_puts_the_gold_document_at_the_rows_slot(make: Make) -> None:
    source = make()
    example = source.examples[2]
    for slot in range(4):
        row = source.row(2, (slot,))
        text = str(source.build.build_prompt.tokenizer.decode(row.prompt_ids))
        index = sorted(text.index(document.text) for document in example.documents[:4]).index(
            text.index(example.golds[0].text)
        )
        assert (row.slots, row.slot_id, index) == ((slot,), slot if slot else ANCHOR, slot)


def test_row_builder_uses_the_advantageous_prompt_for_anchor_rows(make: Make) -> None:
    """Also with reshuffled distractors: the teacher answered that very prompt."""
    source = make(method={"distractor_order": "reshuffled"})
    anchor, trivial = source.row(0, (0,)), source.row(0, (1,))
    assert (
        anchor.prompt_ids.tolist()
        == anchor.sample.teacher_prompt_ids.tolist()
        == trivial.sample.teacher_prompt_ids.tolist()
    )
    assert trivial.prompt_ids.tolist() != anchor.prompt_ids.tolist()


def test_decode_samples_have_none_for_null_columns(make: Make) -> None:
    source = make()
    table = source.table.set_column(source.table.column_names.index("hidden"), "hidden", [[None] * 8])
    (sample, *_) = decode_samples(table)
    assert sample is not None
    assert (sample.hidden, sample.top_ids, sample.top_logprobs) == (None, None, None)


def test_row_builder_ends_responses_where_top_k_logprobs_end(make: Make) -> None:
    """The first two positions of a longer response, three tokens at each."""
    source = make(method={"teacher": "topk", "teacher_topk": 3})
    sample = source.sample(0)
    assert len(sample.response_ids) > 2
    shorter = replace(sample, top_ids=np.arange(6, dtype=np.int32), top_logprobs=np.full(6, -2, np.float32))
    row = source.build.row((shorter, (1,)))
    assert row.response_ids.tolist() == sample.response_ids[:2].tolist()
    assert row.sample.response_ids is sample.response_ids


def test_row_builder_requires_top_k_logprobs(make: Make) -> None:
    source = make(method={"teacher": "topk"})
    lacking = replace(source.sample(0), top_ids=None)
    with pytest.raises(
        UserError,
        match=r"^the sample of example \S+ has no top-k log-probabilities; delete the samples and sample again with",
    ):
        source.build.row((lacking, (1,)))


@given(st.integers(1, 70), st.integers(1, 9))
def test_row_keys_of_rank_divide_a_batch_equally_and_exactly_once(rows: int, world_size: int) -> None:
    keys: list[Any] = [(index, (0,)) for index in range(rows)]
    by_rank = [row_keys_of_rank(keys, rank, world_size) for rank in range(world_size)]
    assert len({len(rows_of_one) for rows_of_one in by_rank}) == 1
    assert [key for rows_of_one in by_rank for key, padding in rows_of_one if not padding] == keys
    assert all(key == keys[0] for rows_of_one in by_rank for key, padding in rows_of_one if padding)


def test_row_keys_of_rank_divide_seventeen_rows_between_two_ranks() -> None:
    keys: list[Any] = [(index, (1,)) for index in range(17)]
    first, second = (row_keys_of_rank(keys, rank, 2) for rank in (0, 1))
    assert first == [(key, False) for key in keys[:9]]
    assert second == [(key, False) for key in keys[9:]] + [(keys[0], True)]


def test_row_builder_for_sft_uses_the_data_sets_answer(make: Make) -> None:
    source = make(method={"name": "sft"})
    text = source.build.build_prompt.tokenizer.decode(source.row(2, (1,)).response_ids)
    assert text == f"{source.examples[2].answers[0]}<|end|>"


def test_row_builder_for_sft_ends_answers_as_the_model_does(make: Make, tiny_model_path: str, tmp_path: Path) -> None:
    """As with GLM: its template closes no turn, and its generation ends with the opening of the user's next one."""
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    tokenizer: Any = load_tokenizer(ModelSection(path=str(folder)))
    user, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, user]}))
    source = make(method={"name": "sft"}, model={"path": str(folder)})
    assert source.row(0, (1,)).response_ids[-1] == user


def test_row_builder_for_sft_gives_the_answer_as_a_chain_of_thought_ends(make: Make) -> None:
    source = make(method={"name": "sft"}, data={"metric": "em"})
    text = source.build.build_prompt.tokenizer.decode(source.row(2, (1,)).response_ids)
    assert isinstance(text, str)
    assert text.startswith("The answer is: ")


def test_slot_id_differs_between_tuples_of_different_lengths() -> None:
    ids = [_slot_id(slots, 4) for hops in (1, 2, 3) for slots in itertools.permutations(range(4), hops)]
    assert ids == list(range(4 + 12 + 24))
