import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from pos2distill.config import ModelSection
from pos2distill.config.inference import InferenceSection
from pos2distill.errors import UserError
from pos2distill.models.hidden_states import hidden_to_bytes
from pos2distill.models.load import load_model
from pos2distill.records import RESPONSE_SCHEMA, Tokens
from pos2distill.sampling import teacher_encoder
from pos2distill.sampling.engines import hf
from pos2distill.sampling.engines.hf import HfEngine
from pos2distill.sampling.teacher_encoder import TeacherEncoder


def encoder(model: ModelSection, alignment: str = "shifted") -> TeacherEncoder:
    return TeacherEncoder(model, alignment=alignment, threads=1, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize(("alignment", "lag"), [("shifted", 1), ("official", 0)])
def test_teacher_encoder_equals_the_decoders_hidden_states(tiny_model_path: str, alignment: str, lag: int) -> None:
    model = ModelSection(path=tiny_model_path, dtype="float32")
    random = np.random.default_rng(0)
    prompts, responses = (
        [random.integers(5, 250, size).astype(np.int32) for size in sizes] for sizes in ((20, 7), (2, 6))
    )
    states = encoder(model, alignment).encode(prompts, responses)
    decoder = load_model(model).get_decoder()
    for prompt, response, hidden_TH in zip(prompts, responses, states, strict=True):
        with torch.no_grad():
            all_LH = decoder(torch.tensor([[*prompt, *response]])).last_hidden_state[0]
        start = len(prompt) - lag
        torch.testing.assert_close(hidden_TH, all_LH[start : start + len(response)], rtol=0, atol=1e-5)
    half = model.model_copy(update={"dtype": "bfloat16"})
    assert {hidden_TH.dtype for hidden_TH in encoder(half, alignment).encode(prompts, responses)} == {torch.bfloat16}


def test_teacher_encoder_names_a_gpu_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_model(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 28 GiB")

    monkeypatch.setattr(teacher_encoder, "load_model", load_model)
    with pytest.raises(UserError, match=r"^me/large: the teacher does not fit in the memory of one GPU, or in its"):
        encoder(ModelSection(path="me/large"))
    monkeypatch.setattr(hf, "load_model", load_model)
    with pytest.raises(UserError, match=r"^me/large: does not fit in the memory of one GPU, or in its part of it"):
        HfEngine(ModelSection(path="me/large"), InferenceSection(), threads=1, device="cpu")


def test_teacher_encoder_divides_rows_that_need_too_much_memory(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(5, 250, size).astype(np.int32) for size in (20, 7, 9, 4, 30)]
    responses = [random.integers(5, 250, size).astype(np.int32) for size in (2, 6, 3, 1, 2)]
    teacher = encoder(ModelSection(path=tiny_model_path, dtype="float32"))
    expected = teacher.encode(prompts, responses)
    forward, most = teacher._forward, 2

    def fit(prompts: list[Tokens], responses: list[Tokens]) -> list[Tensor]:
        if len(prompts) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(prompts, responses)

    monkeypatch.setattr(teacher, "_forward", fit)
    for hidden_TH, expected_TH in zip(teacher.encode(prompts, responses), expected, strict=True):
        torch.testing.assert_close(hidden_TH, expected_TH, rtol=0, atol=1e-5)
    most = 0
    with pytest.raises(
        UserError, match=r"^the teacher has too little memory for one row of 22 tokens; give it a larger "
    ):
        teacher.encode(prompts, responses)


def test_teacher_encoder_adds_the_states_of_kept_responses(tiny_model_path: str) -> None:
    teacher = encoder(ModelSection(path=tiny_model_path, dtype="bfloat16"))
    answers = pa.Table.from_pylist(
        [
            {"outcome": "wrong", "prompt_ids": [7, 8], "response_ids": [9]},
            {"outcome": "kept", "prompt_ids": [11, 12, 13], "response_ids": [14, 15]},
            {"outcome": "failed", "prompt_ids": [], "response_ids": []},
        ],
        schema=pa.schema([RESPONSE_SCHEMA.field(name) for name in ("outcome", "prompt_ids", "response_ids")]),
    )
    (expected_TH,) = teacher.encode([np.asarray([11, 12, 13], np.int32)], [np.asarray([14, 15], np.int32)])
    encoded = teacher(answers)
    assert encoded.drop_columns(["hidden", "hidden_dtype"]).equals(answers)
    assert encoded["hidden"].to_pylist() == [None, hidden_to_bytes(expected_TH), None]
    assert encoded["hidden_dtype"].to_pylist() == ["bfloat16"] * 3
    assert teacher(answers.slice(0, 1))["hidden"].to_pylist() == [None]
