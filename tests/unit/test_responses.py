from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from pos2distill.config import ModelSection
from pos2distill.models.load import load_model
from pos2distill.models.responses import collate, hidden_from_bytes, hidden_to_bytes, predicting_hidden
from pos2distill.records import Tokens


def tokens(*ids: int) -> Tokens:
    return np.asarray(ids, np.int32)


PROMPTS = [tokens(11, 12, 13), tokens(21), tokens(31, 32, 33, 34, 35)]
RESPONSES = [tokens(14, 15), tokens(22, 23, 24), tokens(36)]


def test_prompts_and_responses_are_laid_end_to_end_by_their_ids() -> None:
    batch = collate(PROMPTS, RESPONSES)
    assert batch.input_ids_S.tolist() == [11, 12, 13, 14, 15, 21, 22, 23, 24, 31, 32, 33, 34, 35, 36]
    assert batch.position_S.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert batch.start_B1.tolist() == [0, 5, 9, 15]
    assert batch.start_B1.dtype == torch.int32  # as flash-attn takes it
    assert (batch.rows, batch.longest) == (3, 6)


@pytest.mark.parametrize(
    ("alignment", "places"),
    [("shifted", [2, 3, 5, 6, 7, 13]), ("official", [3, 4, 6, 7, 8, 14])],
)
def test_where_each_response_token_is_predicted(alignment: str, places: list[int]) -> None:
    batch = collate(PROMPTS, RESPONSES, alignment=alignment)  # type: ignore[arg-type]
    assert batch.row_T.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.place_T.tolist() == places


def test_shifted_places_stand_one_before_their_tokens() -> None:
    batch = collate(PROMPTS, RESPONSES)
    assert batch.input_ids_S[batch.place_T + 1].tolist() == np.concatenate(RESPONSES).tolist()


def test_prompts_and_responses_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        collate(PROMPTS, RESPONSES[:2])


def draw(sizes: tuple[int, ...], seed: int) -> list[Tokens]:
    random = np.random.default_rng(seed)
    return [random.integers(5, 250, size).astype(np.int32) for size in sizes]


@pytest.fixture(params=["packed_sdpa", "sdpa", "eager", "window"])
def lm(request: pytest.FixtureRequest, tiny_model_path: str, tmp_path: Path) -> PreTrainedModel:
    """The tiny model by every way to attend; one like it whose layers look back 8 tokens only."""
    if request.param != "window":
        attention = "eager" if request.param == "eager" else "sdpa"
        model = ModelSection(path=tiny_model_path, dtype="float32", attention=attention)
        return load_model(model, packed=request.param == "packed_sdpa")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    MistralForCausalLM(
        MistralConfig(vocab_size=300, num_key_value_heads=2, sliding_window=8, initializer_range=0.25, **small)
    ).save_pretrained(tmp_path / "window")
    return load_model(ModelSection(path=str(tmp_path / "window"), dtype="float32", attention="sdpa"), packed=True)


def padded_hidden(lm: PreTrainedModel, prompts: list[Tokens], responses: list[Tokens]) -> Tensor:
    """The plain way: rows padded on the right, with a mask."""
    rows = [torch.tensor([*p.tolist(), *r.tolist()]) for p, r in zip(prompts, responses, strict=True)]
    ids_BL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask_BL = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    lm.set_attn_implementation("eager")
    hidden_BLH = lm.get_decoder()(input_ids=ids_BL, attention_mask=mask_BL).last_hidden_state
    return torch.cat(
        [
            hidden_BLH[i, len(p) - 1 : len(p) + len(r) - 1]
            for i, (p, r) in enumerate(zip(prompts, responses, strict=True))
        ]
    )


def test_packed_rows_equal_padded_ones(lm: PreTrainedModel) -> None:
    prompts, responses = draw((3, 40, 17), 0), draw((9, 2, 5), 1)
    with torch.no_grad():
        packed = predicting_hidden(lm, collate(prompts, responses))
        torch.testing.assert_close(packed, padded_hidden(lm, prompts, responses), rtol=0, atol=1e-5)


def test_no_row_sees_another(lm: PreTrainedModel) -> None:
    """A row whose tokens are others and whose length is another leaves the states of its neighbours as they are."""
    prompts, responses = draw((20, 30, 11), 0), draw((4, 3, 5), 1)
    (other,) = draw((13,), 2)
    with torch.no_grad():
        before = predicting_hidden(lm, collate(prompts, responses))
        after = predicting_hidden(lm, collate([prompts[0], other, prompts[2]], responses))
    torch.testing.assert_close(after[:4], before[:4], rtol=0, atol=2e-6)
    torch.testing.assert_close(after[7:], before[7:], rtol=0, atol=2e-6)
    assert (after[4:7] - before[4:7]).abs().max() > 0.01


def test_the_first_token_of_a_row_moves_its_last_state(tiny_model_path: str) -> None:
    """Rows are cut from each other, and nowhere inside."""
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"), packed=True)
    prompts, responses = draw((20, 30), 0), draw((4, 3), 1)
    with torch.no_grad():
        before = predicting_hidden(lm, collate(prompts, responses))
        prompts[1][0] += 1
        after = predicting_hidden(lm, collate(prompts, responses))
    assert (after[-1] - before[-1]).abs().max() > 1e-4
    assert torch.equal(after[:4], before[:4])


def test_packed_attention_is_not_for_rows_of_which_nobody_says_where_they_begin(tiny_model_path: str) -> None:
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"), packed=True)
    with pytest.raises(TypeError, match="cu_seq_lens_q"):
        lm(torch.tensor([[11, 12, 13]]))


def test_states_are_those_that_enter_lm_head(tiny_model_path: str) -> None:
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"))
    with torch.no_grad():
        logits_BLV = lm(torch.tensor([[11, 12, 13, 14, 15]])).logits
        hidden_TH = predicting_hidden(lm, collate(PROMPTS[:1], RESPONSES[:1]))
        torch.testing.assert_close(lm.lm_head(hidden_TH), logits_BLV[0, 2:4], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_states_survive_their_bytes_exactly(dtype: str) -> None:
    hidden_TH = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    data = hidden_to_bytes(hidden_TH)
    assert len(data) == 5 * 7 * hidden_TH.element_size()
    back = hidden_from_bytes(data, dtype, 5)
    assert back.dtype == hidden_TH.dtype
    assert torch.equal(back, hidden_TH)
    # A part of a larger tensor is written row by row.
    assert torch.equal(hidden_from_bytes(hidden_to_bytes(hidden_TH[:, 2:5]), dtype, 5), hidden_TH[:, 2:5])
