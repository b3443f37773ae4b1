import json
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from pipelines.api import Checkpoint
from pipelines.cli import command_line
from pipelines.plan import make_plan
from pos2distill.config import Recipe
from tests.support.commands import Command, run_study
from tests.support.hub_server import hub_server, use_hub
from tests.support.paths import ODD_NAME


def read_task(folder: Path) -> str | None:
    """The other task that an artifact is of."""
    task: str | None = json.loads((folder / "provenance.json").read_text())["settings"].get("task")
    return task


def test_push_uploads_the_checkpoint_with_its_card(
    recipe: Recipe, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_plan(recipe).distill.artifact
    folder = Path(checkpoint.path) / "model"
    with hub_server() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        assert command("push", recipe.storage, "me/a-model", "--private") == [f"{hub.address}/me/a-model"]
        assert hub.private == {"me/a-model": True}
        assert hub.files["me/a-model"] == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert b"## How it was made" in hub.files["me/a-model"]["README.md"]
        assert command("push", checkpoint.url, "me/again", "--json") == [json.dumps({"url": f"{hub.address}/me/again"})]
        assert hub.private["me/again"] is False
        result = Checkpoint(f"{checkpoint.url}/model", []).push_to_hub("me/by-api")
        assert (result, hub.files["me/by-api"]) == (f"{hub.address}/me/by-api", hub.files["me/a-model"])
        # It exists, as a model in several files, of which vLLM would load those that the index names, and with
        # adapters, of which transformers would load the base model.
        earlier = ["model-00001-of-00002.safetensors", "model.safetensors-00001-of-00002.safetensors"]
        earlier += ["model.safetensors.index.json", "pytorch_model.bin", "model_fp8.safetensors"]
        earlier += ["adapter_config.json", "adapter_model.safetensors"]
        others = dict.fromkeys(["LICENSE", "onnx/model.onnx", "model_v1/model.safetensors"], b"x")
        hub.files["me/a-model"] = {**dict.fromkeys([*earlier, "model.safetensors"], b"old"), **others}
        assert command("push", recipe.storage, "me/a-model") == [f"{hub.address}/me/a-model"]
        assert hub.files["me/a-model"] == {**hub.files["me/again"], **others}
        assert command("push", recipe.storage, "me/again", "--private", code=2) == [
            "error: me/again: is public already; make it private on the hub, or choose another name"
        ]
        monkeypatch.setenv("HF_TOKEN", "another")
        assert command("push", recipe.storage, "me/a-model", code=2) == [
            f"error: {hub.address}: refuses this token, or it may not write there (401); set HF_TOKEN, or log in with "
            f"`hf auth login`"
        ]


def test_push_lists_what_it_would_upload(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    storage = shutil.copytree(recipe.storage, tmp_path / ODD_NAME)
    (model,) = storage.glob("checkpoint-*/model")
    (model.parent / "adapter").mkdir()
    (model.parent / "adapter" / "adapter_config.json").write_text("{}")
    sizes = {path.name: path.stat().st_size for path in sorted(model.iterdir())} | {"adapter/adapter_config.json": 2}
    (line,) = command("push", str(storage), "me/a-model", "--dry-run", "--json")
    assert json.loads(line) == {"files": sizes}
    *lines, total = command("push", str(storage), "me/a-model", "--dry-run")
    assert lines == [f"{size / 1e6:12,.3f} MB  {name}" for name, size in sizes.items()]
    assert total == f"{sum(sizes.values()) / 1e6:12,.3f} MB  in {len(sizes)} files, to me/a-model"
    assert command("push", str(storage), "a-model", "--dry-run", code=2) == [
        "error: a-model: expected OWNER/NAME on the hub (it has no '/', or several)"
    ]


def test_several_checkpoints_of_a_storage_are_told_apart(
    recipe: Recipe, command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of a sweep: `push` takes none without its folder, the others say which one they show."""
    storage = shutil.copytree(recipe.storage, tmp_path / ODD_NAME)
    for kind in ("checkpoint", "distilled-scores"):
        (folder,) = (path for path in storage.glob(f"{kind}-*") if read_task(path) is None)
        shutil.copytree(folder, storage / f"{kind}-0123")
    (checkpoint,) = (path for path in storage.glob("checkpoint-*") if path.name != "checkpoint-0123")
    (rejected,) = command("push", str(storage), "me/a-model", code=2)
    assert rejected.startswith(
        f"error: {storage}: expected the folder of one checkpoint, found 2 in it, the newest first: checkpoint-"
    )
    assert checkpoint.name in rejected
    assert "checkpoint-0123" in rejected
    assert command_line.main(["inspect", str(storage), "--limit", "1"]) == 0
    (note, _) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"{re.escape(str(storage))}/distilled-scores-\w+: the newest finished one of 2 in .+; name a folder .+", note
    )
    # A checkpoint that a later round of an on-policy method began with is no second one, unless it is reported too.
    later = checkpoint / "provenance.json"
    made = json.loads(later.read_text())
    made["inputs"]["student"] = "checkpoint-0123"
    later.write_text(json.dumps(made))
    assert command("push", str(storage), "me/a-model", code=2) == [rejected]
    for folder in storage.glob("checkpoint-*"):
        (folder / "model" / "README.md").unlink()
    (line,) = command("push", str(storage), "me/a-model", code=2)
    assert line == f"error: {checkpoint}: has no model card yet; run `report` with its recipe first"


def test_push_uploads_from_another_storage(
    recipe: Recipe, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_plan(recipe).distill.artifact
    url = f"memory://runs/{tmp_path.name}/{ODD_NAME}/checkpoint-{checkpoint.fingerprint}"
    fs, path = fsspec.url_to_fs(url)
    for file in Path(checkpoint.path).rglob("*.*"):
        fs.pipe_file(f"{path}/{file.relative_to(checkpoint.path)}", file.read_bytes())
    with hub_server() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        command("push", url, "me/a-model")
    (listed,) = command("push", url, "me/a-model", "--dry-run", "--json")
    assert json.loads(listed) == {"files": {name: len(content) for name, content in hub.files["me/a-model"].items()}}
    folder = Path(checkpoint.path) / "model"
    assert hub.files["me/a-model"] == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_push_uploads_the_adapter_that_lora_trained_too(
    make_recipe: Callable[..., Recipe], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(training={"lora": {"rank": 2}}, runtime={"executor": "local"})
    run_study(recipe)
    checkpoint = make_plan(recipe).distill.artifact
    url = f"memory://runs/{tmp_path.name}/checkpoint-{checkpoint.fingerprint}"
    fs, path = fsspec.url_to_fs(url)
    fs.put(f"{checkpoint.path}/", f"{path}/", recursive=True)
    model, adapter = (Path(checkpoint.path) / name for name in ("model", "adapter"))
    expected = {file.name: file.read_bytes() for file in model.iterdir()}
    expected |= {f"adapter/{file.name}": file.read_bytes() for file in adapter.iterdir()}
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} < expected.keys()
    with hub_server() as hub:
        use_hub(monkeypatch, hub.address, tmp_path / "cache")
        command("push", recipe.storage, "me/a-model")
        command("push", url, "me/from-a-url")
        assert hub.files == {"me/a-model": expected, "me/from-a-url": expected}
        # A model without an adapter takes its place.
        shutil.rmtree(adapter)
        command("push", recipe.storage, "me/a-model")
        assert not any(path.startswith("adapter/") for path in hub.files["me/a-model"])
    assert "in the folder `adapter`, as a LoRA adapter of rank 2" in expected["README.md"].decode()


def test_push_rejects(recipe: Recipe, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("push", str(tmp_path), "me/a-model", code=2) == [
        f"error: {tmp_path}: is neither the storage of a run nor one of its artifacts"
    ]
    assert command("push", recipe.storage, "a model", code=2) == [
        "error: a model: expected OWNER/NAME on the hub (it has no '/', or several)"
    ]
    (line,) = command("push", recipe.storage, "me/a model", code=2)
    assert line.startswith("error: me/a model: expected OWNER/NAME on the hub (")
    checkpoint = make_plan(recipe).distill.artifact
    copy = tmp_path / f"checkpoint-{checkpoint.fingerprint}"
    shutil.copytree(checkpoint.path, copy)
    (copy / "model" / "README.md").unlink()
    assert command("push", str(copy), "me/a-model", code=2) == [
        f"error: {copy}: has no model card yet; run `report` with its recipe first"
    ]
    with socket.socket() as closed:  # bound, but it does not listen
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        use_hub(monkeypatch, address, tmp_path / "cache")
        (line,) = command("push", recipe.storage, "me/a-model", code=2)
    assert line.startswith(f"error: {address}: cannot be used (")
    assert "(HF_ENDPOINT); check the network" in line
