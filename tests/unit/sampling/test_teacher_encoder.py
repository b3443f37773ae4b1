import numpy as np
import pytest
import torch

from pos2distill.config import ModelSection
from pos2distill.models.load import load_model
from pos2distill.sampling.teacher_encoder import TeacherEncoder


@pytest.mark.parametrize(("alignment", "lag"), [("shifted", 1), ("official", 0)])
def test_teacher_encoder_equals_the_decoders_hidden_states(tiny_model_path: str, alignment: str, lag: int) -> None:
    model = ModelSection(path=tiny_model_path, dtype="float32")
    random = np.random.default_rng(0)
    prompts, responses = (
        [random.integers(5, 250, size).astype(np.int32) for size in sizes] for sizes in ((20, 7), (2, 6))
    )
    states = TeacherEncoder(model, alignment=alignment)(prompts, responses)  # type: ignore[arg-type]
    decoder = load_model(model).get_decoder()
    for prompt, response, hidden_TH in zip(prompts, responses, states, strict=True):
        with torch.no_grad():
            all_LH = decoder(torch.tensor([[*prompt, *response]])).last_hidden_state[0]
        start = len(prompt) - lag
        torch.testing.assert_close(hidden_TH, all_LH[start : start + len(response)], rtol=0, atol=1e-5)
    half = model.model_copy(update={"dtype": "bfloat16"})
    assert {hidden_TH.dtype for hidden_TH in TeacherEncoder(half)(prompts, responses)} == {torch.bfloat16}
