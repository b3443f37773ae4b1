import json
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from transformers import LlamaForCausalLM

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.files import local_folder, model_digest
from pos2distill.models.load import (
    context_length,
    end_of_turn_id,
    load_config,
    load_model,
    load_tokenizer,
    resolve_attention,
    stop_token_ids,
)


@pytest.fixture
def copy(tiny_model_path: str, tmp_path: Path) -> Callable[..., ModelSection]:
    """A copy of the tiny model, without some of its files."""

    def copy(*without: str) -> ModelSection:
        folder = tmp_path / "copy"
        shutil.copytree(tiny_model_path, folder)
        for name in without:
            (folder / name).unlink()
        return ModelSection(path=str(folder), dtype="float32")

    return copy


def test_weights_come_in_the_dtype_asked_for(tiny_model_path: str) -> None:
    model = ModelSection(path=tiny_model_path, dtype="bfloat16")
    assert load_model(model).dtype == torch.bfloat16
    lm = load_model(model, dtype=torch.float32)
    assert lm.dtype == torch.float32
    assert not lm.training


def test_the_end_of_turn_is_read_off_the_template(tiny_model_path: str) -> None:
    tokenizer = load_tokenizer(ModelSection(path=tiny_model_path))
    tokenizer.eos_token = "<s>"
    assert tokenizer.convert_ids_to_tokens(end_of_turn_id(tokenizer)) == "<|end|>"


def test_a_template_that_closes_no_turn_falls_back_to_the_end_of_sequence(tiny_model_path: str) -> None:
    tokenizer = load_tokenizer(ModelSection(path=tiny_model_path))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert tokenizer.convert_ids_to_tokens(end_of_turn_id(tokenizer)) == "<|end|>"
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="closes no assistant turn and the tokenizer has no eos_token"):
        end_of_turn_id(tokenizer)


@pytest.mark.parametrize("listed", [7, [7, 4], None])
def test_every_token_that_stops(copy: Callable[..., ModelSection], listed: object) -> None:
    model = copy()
    Path(model.path, "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    tokenizer = load_tokenizer(model)
    end = end_of_turn_id(tokenizer)
    assert end == 4
    tokenizer.eos_token = "<s>"
    assert stop_token_ids(model, tokenizer) == ([1, 4] if listed is None else [1, 4, 7])


def test_context_length(copy: Callable[..., ModelSection]) -> None:
    model = copy()
    assert context_length(model) == 512
    assert context_length(model.model_copy(update={"max_length": 100})) == 100


@pytest.mark.parametrize(
    ("missing", "use", "message"),
    [
        ("tokenizer.json", load_tokenizer, r"holds no tokenizer \(tokenizer.json, tokenizer.model or vocab.json\)"),
        ("chat_template.jinja", load_tokenizer, "its tokenizer has no chat template; use the model's chat or instruct"),
        ("config.json", load_config, "no usable config.json: "),
    ],
)
def test_what_a_model_folder_lacks_is_told(
    copy: Callable[..., ModelSection], missing: str, use: Callable[[ModelSection], object], message: str
) -> None:
    model = copy(missing)
    with pytest.raises(UserError, match=message) as caught:
        use(model)
    assert str(caught.value).startswith(f"{model.path}: ")
    assert "\n" not in str(caught.value)


def test_a_folder_without_weights_is_told(copy: Callable[..., ModelSection]) -> None:
    with pytest.raises(UserError, match="safetensors"):
        load_model(copy("model.safetensors"))


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "no-such-model", "a/b/c"])
def test_a_missing_folder_is_told(path: str) -> None:
    with pytest.raises(UserError, match=f"^{path}: no such model folder \\(model.path\\)$"):
        local_folder(ModelSection(path=path))


def test_a_hub_name_that_cannot_be_had_is_told() -> None:
    with pytest.raises(UserError, match=r"^nobody/nothing: neither a folder nor a model the hub gives us") as caught:
        local_folder(ModelSection(path="nobody/nothing"))
    assert "\n" not in str(caught.value)


def test_a_config_without_a_context_asks_for_one(copy: Callable[..., ModelSection]) -> None:
    model = copy()
    Path(model.path, "config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(UserError, match=r"states no max_position_embeddings; set model.max_length"):
        context_length(model)


@pytest.fixture
def remote(tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSection:
    """The tiny model in memory, as if on an object store; local copies go to `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = f"memory://{uuid.uuid4().hex}/model"
    for file in Path(tiny_model_path).iterdir():
        with fsspec.open(f"{url}/{file.name}", "wb") as target:
            target.write(file.read_bytes())
    return ModelSection(path=url)


def test_a_url_is_copied_once(remote: ModelSection, tiny_model_path: str) -> None:
    folder = Path(local_folder(remote))
    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in Path(tiny_model_path).iterdir())
    assert all((folder / name).read_bytes() == Path(tiny_model_path, name).read_bytes() for name in names)
    assert local_folder(remote) == str(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # no partial copy is left


def test_a_url_with_nothing_there_is_told(remote: ModelSection, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such model folder \(model.path\)"):
        local_folder(remote.model_copy(update={"path": f"{remote.path}-gone"}))
    assert not list(tmp_path.glob("pos2distill-models/*"))  # and no half a copy is left


def test_a_url_whose_model_changed_is_copied_anew(remote: ModelSection) -> None:
    local_folder(remote)
    with fsspec.open(f"{remote.path}/config.json", "w") as file:
        file.write('{"model_type": "changed"}')
    assert json.loads(Path(local_folder(remote), "config.json").read_text()) == {"model_type": "changed"}


def test_the_digest_is_of_content_not_of_place(
    copy: Callable[..., ModelSection], remote: ModelSection, tiny_model_path: str
) -> None:
    model = copy()
    digest = model_digest(model)
    assert digest == model_digest(ModelSection(path=tiny_model_path)) == model_digest(remote)
    Path(model.path, "README.md").write_text("a note")
    assert model_digest(model) == digest
    weights = bytearray(Path(model.path, "model.safetensors").read_bytes())
    weights[-1] ^= 1
    Path(model.path, "model.safetensors").write_bytes(weights)
    assert model_digest(model) != digest


def test_a_changed_template_changes_the_digest(copy: Callable[..., ModelSection]) -> None:
    model = copy()
    digest = model_digest(model)
    Path(model.path, "chat_template.jinja").write_text("{{ messages }}")
    assert model_digest(model) != digest


def test_a_hub_name_stands_for_itself_and_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache, laid out by hand: `main` is a name that moves, a commit is not."""
    commits = {"main": "a" * 40, "v2": "b" * 40}
    cached = tmp_path / "models--org--name"
    for name, commit in commits.items():
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "config.json").write_text("{}")
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert model_digest(ModelSection(path="org/name")) == f"org/name@{commits['main']}"
    assert model_digest(ModelSection(path="org/name", revision="v2")) == f"org/name@{commits['v2']}"


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_the_digest_tells_trained_weights_apart_wherever_they_differ(tmp_path: Path, place: float) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    weights = bytearray(40 << 20)
    (folder / "model.safetensors").write_bytes(weights)
    before = model_digest(ModelSection(path=str(folder)))
    start = int(place * (38 << 20))
    weights[start : start + (2 << 20)] = b"\1" * (2 << 20)  # one small matrix of many
    (folder / "model.safetensors").write_bytes(weights)
    assert model_digest(ModelSection(path=str(folder))) != before


def test_any_byte_of_a_tokenizer_counts(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"a" * (3 << 20))
    before = model_digest(ModelSection(path=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_bytes(b"a" * (1 << 20) + b"b" + b"a" * ((2 << 20) - 1))
    assert model_digest(ModelSection(path=str(tmp_path))) != before


def test_attention_falls_back_to_sdpa_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flash_attn")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_attention("auto", torch.bfloat16, gpu) == "flash_attention_2"
    assert resolve_attention("auto", torch.float32, gpu) == "sdpa"  # flash-attn takes 16 bits only
    assert resolve_attention("auto", torch.bfloat16, cpu) == "sdpa"
    assert resolve_attention("eager", torch.bfloat16, gpu) == "eager"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_attention("auto", torch.bfloat16, gpu) == "sdpa"


def test_a_model_whose_rows_would_leak_into_each_other_is_told(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers marks those with recurrent layers."""
    monkeypatch.setattr(LlamaForCausalLM, "_is_stateful", True)
    model = ModelSection(path=tiny_model_path, dtype="float32")
    load_model(model)
    with pytest.raises(UserError, match=r"carry a state from token to token; only attention can be trained"):
        load_model(model, packed=True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"attn_logit_softcapping": 50.0}, r"scores are capped, .*; set model.attention to flash_attention_2 or eager"),
        ({"attention_chunk_size": 64}, r"its attention is cut into chunks, which rows laid end to end would shift"),
        (
            {
                "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
                | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
            },
            r"beyond 64 tokens its position encoding depends on the longest row of a batch; set model.max_length to 64",
        ),
    ],
)
def test_attention_that_packed_rows_would_change_is_refused(
    tiny_model_path: str, tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | setting))
    model = ModelSection(path=str(folder), dtype="float32")
    load_model(model)
    with pytest.raises(UserError, match=message):
        load_model(model, packed=True)


def test_a_position_encoding_that_depends_on_the_batch_is_taken_as_far_as_it_does_not(
    tiny_model_path: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    load_model(ModelSection(path=str(folder), dtype="float32", max_length=512), packed=True)
    with pytest.raises(UserError, match="beyond 512 tokens"):
        load_model(ModelSection(path=str(folder), dtype="float32", max_length=513), packed=True)


def test_a_model_with_attention_of_its_own_is_refused(tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers marks those that never ask its attention interface."""
    monkeypatch.setattr(LlamaForCausalLM, "_supports_attention_backend", False)
    with pytest.raises(
        UserError, match="LlamaForCausalLM has attention of its own, which knows no rows laid end to end"
    ):
        load_model(ModelSection(path=tiny_model_path, dtype="float32"), packed=True)


def test_flash_attn_is_refused_where_it_leaves_something_out(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers marks models with attention sinks."""
    monkeypatch.setattr(LlamaForCausalLM, "_compatible_flash_implementations", ["flash_attention_4"], raising=False)
    model = ModelSection(path=tiny_model_path, dtype="float32", attention="flash_attention_2")
    with pytest.raises(UserError, match=r"leaves out part of its attention; set model\.attention to eager"):
        load_model(model, packed=True)


def test_flash_attn_is_refused_where_it_is_not_installed(tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, version: int) -> None:
        raise ImportError("FlashAttention2 is not installed.\nMore of it.")

    monkeypatch.setattr(LlamaForCausalLM, "_flash_attn_can_dispatch", refuse)
    model = ModelSection(path=tiny_model_path, dtype="bfloat16", attention="flash_attention_2")
    with pytest.raises(UserError, match=r"model.attention=flash_attention_2: FlashAttention2 is not installed\.$"):
        load_model(model, packed=True)


def test_autocast_decides_for_flash_attn(tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.dtype] = []

    def pick(wanted: str, dtype: torch.dtype, device: torch.device) -> str:
        asked.append(dtype)
        return "sdpa"

    monkeypatch.setattr("pos2distill.models.load.resolve_attention", pick)
    model = ModelSection(path=tiny_model_path, dtype="bfloat16")
    load_model(model, dtype=torch.float32, computing=torch.bfloat16, packed=True)
    load_model(model, dtype=torch.float32, packed=True)
    assert asked == [torch.bfloat16, torch.float32]
