import numpy as np
import pytest
import torch
from torch import Tensor

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.load import load_model
from pos2distill.records import Tokens
from pos2distill.sampling.teacher_encoder import TeacherEncoder


@pytest.mark.parametrize(("alignment", "lag"), [("shifted", 1), ("official", 0)])
def test_teacher_encoder_equals_the_decoders_hidden_states(tiny_model_path: str, alignment: str, lag: int) -> None:
    model = ModelSection(path=tiny_model_path, dtype="float32")
    random = np.random.default_rng(0)
    prompts, responses = (
        [random.integers(5, 250, size).astype(np.int32) for size in sizes] for sizes in ((20, 7), (2, 6))
    )
    states = TeacherEncoder(model, alignment=alignment).encode(prompts, responses)  # type: ignore[arg-type]
    decoder = load_model(model).get_decoder()
    for prompt, response, hidden_TH in zip(prompts, responses, states, strict=True):
        with torch.no_grad():
            all_LH = decoder(torch.tensor([[*prompt, *response]])).last_hidden_state[0]
        start = len(prompt) - lag
        torch.testing.assert_close(hidden_TH, all_LH[start : start + len(response)], rtol=0, atol=1e-5)
    half = model.model_copy(update={"dtype": "bfloat16"})
    assert {hidden_TH.dtype for hidden_TH in TeacherEncoder(half).encode(prompts, responses)} == {torch.bfloat16}


def test_teacher_encoder_divides_rows_that_need_too_much_memory(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(5, 250, size).astype(np.int32) for size in (20, 7, 9, 4, 30)]
    responses = [random.integers(5, 250, size).astype(np.int32) for size in (2, 6, 3, 1, 2)]
    encoder = TeacherEncoder(ModelSection(path=tiny_model_path, dtype="float32"))
    expected = encoder.encode(prompts, responses)
    forward, most = encoder._forward, 2

    def fit(prompts: list[Tokens], responses: list[Tokens]) -> list[Tensor]:
        if len(prompts) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(prompts, responses)

    monkeypatch.setattr(encoder, "_forward", fit)
    for hidden_TH, expected_TH in zip(encoder.encode(prompts, responses), expected, strict=True):
        torch.testing.assert_close(hidden_TH, expected_TH, rtol=0, atol=1e-5)
    most = 0
    with pytest.raises(
        UserError, match=r"^the teacher has too little memory for one row of 22 tokens; give it a larger "
    ):
        encoder.encode(prompts, responses)
