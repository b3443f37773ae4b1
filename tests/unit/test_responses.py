import numpy as np
import pytest
import torch

from pos2distill.config import ModelSection
from pos2distill.models.load import load_model
from pos2distill.models.responses import collate, hidden_from_bytes, hidden_to_bytes, predicting_hidden
from pos2distill.records import Tokens


def tokens(*ids: int) -> Tokens:
    return np.asarray(ids, np.int32)


PROMPTS = [tokens(11, 12, 13), tokens(21), tokens(31, 32, 33, 34, 35)]
RESPONSES = [tokens(14, 15), tokens(22, 23, 24), tokens(36)]


def test_prompt_and_response_are_joined_by_their_ids() -> None:
    batch = collate(PROMPTS, RESPONSES)
    assert batch.input_ids_BL.tolist() == [
        [11, 12, 13, 14, 15, 0],
        [21, 22, 23, 24, 0, 0],
        [31, 32, 33, 34, 35, 36],
    ]
    assert batch.attention_mask_BL.tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0], [1] * 6]


@pytest.mark.parametrize(
    ("alignment", "positions"),
    [("shifted", [2, 3, 0, 1, 2, 4]), ("official", [3, 4, 1, 2, 3, 5])],
)
def test_where_each_response_token_is_predicted(alignment: str, positions: list[int]) -> None:
    batch = collate(PROMPTS, RESPONSES, alignment=alignment)  # type: ignore[arg-type]
    assert batch.row_T.tolist() == [0, 0, 1, 1, 1, 2]
    assert batch.position_T.tolist() == positions


def test_shifted_positions_stand_one_before_their_tokens() -> None:
    batch = collate(PROMPTS, RESPONSES)
    predicted = batch.input_ids_BL[batch.row_T, batch.position_T + 1]
    assert predicted.tolist() == np.concatenate(RESPONSES).tolist()


def test_prompts_and_responses_come_in_pairs() -> None:
    with pytest.raises(ValueError, match="shorter"):
        collate(PROMPTS, RESPONSES[:2])


def test_a_padded_batch_equals_each_row_alone(tiny_model_path: str) -> None:
    lm = load_model(ModelSection(path=tiny_model_path, dtype="float32"))
    random = np.random.default_rng(0)
    prompts = [random.integers(5, 250, size).astype(np.int32) for size in (3, 40, 17)]
    responses = [random.integers(5, 250, size).astype(np.int32) for size in (9, 2, 5)]
    with torch.no_grad():
        together = predicting_hidden(lm, collate(prompts, responses))
        alone = [predicting_hidden(lm, collate([p], [r])) for p, r in zip(prompts, responses, strict=True)]
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


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
