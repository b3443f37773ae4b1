from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from pipelines.checks.model_checks import check_context
from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from tests.support.models import HEADS, SMALL


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., ModelSection]:
    """A model folder with a config of 64 positions alone."""

    def model(engine: str, **changes: Any) -> ModelSection:
        LlamaConfig(**{**SMALL, "max_position_embeddings": 64}, **HEADS, **changes).save_pretrained(tmp_path)
        return ModelSection.model_validate({"path": str(tmp_path), "engine": engine, "max_length": 65})

    return model


def test_check_context_warns_of_more_positions_than_the_model_was_made_for(
    model: Callable[..., ModelSection], capsys: pytest.CaptureFixture[str]
) -> None:
    longer = model("hf")
    check_context(longer)
    warning = f"warning: model.max_length: 65, but {longer.path} was made for 64 positions\n"
    assert capsys.readouterr().err == warning
    check_context(longer.model_copy(update={"max_length": 64}))
    assert capsys.readouterr().err == ""
    # vLLM multiplies the positions by this factor.
    check_context(model("vllm", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}))
    assert capsys.readouterr().err == warning


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("changes", [{}, {"rope_parameters": YARN}, {"model_max_length": 64}])
def test_check_context_rejects_more_positions_than_vllm_accepts(
    model: Callable[..., ModelSection], changes: dict[str, Any]
) -> None:
    """The positions of YaRN are those that it was scaled to."""
    longer = model("vllm", **changes)
    with pytest.raises(UserError) as caught:
        check_context(longer)
    assert str(caught.value) == (
        f"model.max_length: 65, but {longer.path} was made for 64 positions, and vLLM accepts no more; lower it, or "
        f"set model.engine to hf"
    )


def test_check_context_leaves_to_vllm_what_its_own_settings_allow(
    model: Callable[..., ModelSection], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check_context(model("vllm", model_max_length=65))
    assert capsys.readouterr().err.startswith("warning: model.max_length: 65")
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    longer = model("vllm")
    check_context(longer)
    assert capsys.readouterr().err == f"warning: model.max_length: 65, but {longer.path} was made for 64 positions\n"
