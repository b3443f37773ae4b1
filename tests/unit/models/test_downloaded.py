"""Models of the hub, whose weights are checked when they have been downloaded."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models import downloaded
from pos2distill.models.check import check_weights_in
from pos2distill.models.downloaded import checked_folder
from pos2distill.models.load import load_model
from tests.support.hub_server import Hub, hub_server, use_hub

DOWN = "model.layers.1.mlp.down_proj.weight"
MODEL = ModelSection(path="me/a-model", dtype="float32")


@pytest.fixture
def hub(tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the tiny model."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with hub_server() as server:
        server.files[MODEL.path] = {path.name: path.read_bytes() for path in Path(tiny_model_path).iterdir()}
        use_hub(monkeypatch, server.address, tmp_path / "cache")
        yield server


def change(hub: Hub, edit: Callable[[dict[str, Tensor]], object], folder: Path) -> None:
    file = folder / "changed.safetensors"
    file.write_bytes(hub.files[MODEL.path]["model.safetensors"])
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    hub.files[MODEL.path]["model.safetensors"] = file.read_bytes()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda tensors: tensors[DOWN].fill_(torch.nan),
            f"me/a-model/model.safetensors: tensor {DOWN} holds NaN, expected finite weights; the training",
        ),
        (
            lambda tensors: tensors.update({DOWN: torch.zeros(32, 60)}),
            f"me/a-model/model.safetensors: tensor {DOWN} has shape [32, 60], config.json describes [32, 64]",
        ),
        (
            lambda tensors: tensors.pop(DOWN),
            f"me/a-model: tensor {DOWN} of shape [32, 64] is missing (1 tensor of 21); copy the whole model",
        ),
    ],
    ids=["NaN", "mismatched", "missing"],
)
def test_load_model_checks_the_weights_of_a_hub_model(
    hub: Hub, tmp_path: Path, edit: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    change(hub, edit, tmp_path)
    # A failed check is not remembered as passed.
    for _ in range(2):
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            load_model(MODEL)


def test_checked_folder_rejects_truncated_weights_of_a_hub_model(hub: Hub) -> None:
    hub.files[MODEL.path]["model.safetensors"] = hub.files[MODEL.path]["model.safetensors"][:-100]
    with pytest.raises(
        UserError, match=r"^me/a-model/model\.safetensors: its header describes \d+ bytes, the file has"
    ):
        checked_folder(MODEL)


def test_checked_folder_checks_a_snapshot_once(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = []

    def record(folder: str, model: ModelSection) -> None:
        checks.append(folder)
        check_weights_in(folder, model)

    monkeypatch.setattr(downloaded, "check_weights_in", record)
    folder = checked_folder(MODEL)
    assert checked_folder(MODEL) == folder
    assert load_model(MODEL).config.num_hidden_layers == 2
    assert checks == [folder]
    # Another file, as after an interrupted download that was repeated.
    weights = Path(folder, "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(UserError, match="its header describes"):
        checked_folder(MODEL)


def test_checked_folder_leaves_folders_to_the_check_before_a_run(tmp_path: Path) -> None:
    assert checked_folder(ModelSection(path=str(tmp_path))) == str(tmp_path)
