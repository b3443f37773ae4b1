"""Model folders that are accepted, and the message for each error of a folder that is rejected."""

import functools
import json
import shutil
import struct
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models import check
from pos2distill.models.check import check_weights
from pos2distill.models.stored_tensors import DTYPES, StoredTensor

DOWN = "model.layers.1.mlp.down_proj.weight"

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD = {"head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": HEAD,
    "Gemma2": HEAD,
    "Gemma3Text": HEAD,
    "Mistral": {},
    "Phi3": {},
    "Olmo2": {},
    "Cohere": {},
    "GPTNeoX": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    # Their experts are stored one by one and merged when they are loaded.
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {**HEAD, "num_experts": 4, "moe_intermediate_size": 16},
    "GptOss": {**HEAD, "num_local_experts": 4},
}


@pytest.fixture
def model(tiny_model_path: str, tmp_path: Path) -> ModelSection:
    """A copy of the tiny Llama, in one file."""
    return ModelSection(path=str(shutil.copytree(tiny_model_path, tmp_path / "model")), dtype="float32")


def make_config(family: str, **settings: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**SIZES, **settings)


def rewrite(model: ModelSection, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Save the weights again after `change(tensors)`."""
    file = Path(model.path, "model.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def configure(model: ModelSection, **settings: object) -> None:
    file = Path(model.path, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def save_sharded(model: ModelSection) -> list[Path]:
    """The same model in several files. Returns them."""
    lm = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    Path(model.path, "model.safetensors").unlink()
    lm.save_pretrained(model.path, max_shard_size="40KB")
    shards = sorted(Path(model.path).glob("*.safetensors"))
    assert len(shards) > 2
    return shards


def rejected(model: ModelSection) -> str:
    """The message, without the folder that it starts with."""
    with pytest.raises(UserError) as caught:
        check_weights(model)
    message = str(caught.value)
    assert message.startswith(model.path)
    assert "\n" not in message
    return message.removeprefix(model.path)


def test_check_weights_accepts_a_whole_model(model: ModelSection, capfd: pytest.CaptureFixture[str]) -> None:
    check_weights(model)
    check_weights(model.model_copy(update={"dtype": "bfloat16"}))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


@pytest.mark.parametrize("family", FAMILIES)
def test_check_weights_accepts_every_family_and_names_what_it_lacks(
    family: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = make_config(family, **FAMILIES[family])
    lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    lm.save_pretrained(tmp_path)
    model = ModelSection(path=str(tmp_path))
    capfd.readouterr()
    check_weights(model)
    assert "warning" not in capfd.readouterr().err
    names = load_file(tmp_path / "model.safetensors").keys()
    layer = next(name for name in sorted(names) if ".1." in name and name.endswith("weight"))
    rewrite(model, lambda tensors: tensors.pop(layer))
    message = rejected(model)
    if family in ("Mixtral", "Qwen3Moe"):
        assert "(experts) are incomplete" in message or "(1 tensor); some of the tensors that are merged" in message
    else:
        assert message.startswith(f": tensor {layer} of shape [")
        assert "] is missing (1 tensor of " in message


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_check_weights_follows_tied_embeddings(family: str, tmp_path: Path) -> None:
    """A tied head is not stored, and not missing; an untied one must be stored."""
    config = make_config(family, head_dim=8, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = ModelSection(path=str(tmp_path))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    check_weights(model)
    configure(model, tie_word_embeddings=False)
    assert rejected(model).startswith(": tensor lm_head.weight of shape [300, 32] is missing (1 tensor of ")


@pytest.mark.parametrize("index", [0, 5000, 9599])
def test_check_weights_rejects_tied_weights_that_are_stored_and_differ(tmp_path: Path, index: int) -> None:
    """transformers would use both, ZeRO-3 and vLLM one of them."""
    AutoModelForCausalLM.from_config(make_config("Llama", tie_word_embeddings=True)).save_pretrained(tmp_path)
    model = ModelSection(path=str(tmp_path), dtype="float32")

    def store_head(tensors: dict[str, Tensor], *, change: float) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head.view(-1)[index] += change
        tensors["lm_head.weight"] = head

    rewrite(model, functools.partial(store_head, change=0.0))
    check_weights(model)
    rewrite(model, functools.partial(store_head, change=1.0))
    assert rejected(model) == (
        ": lm_head.weight and model.embed_tokens.weight are stored with different values, but config.json ties them; "
        "set tie_word_embeddings to false in config.json to use both"
    )
    configure(model, tie_word_embeddings=False)
    check_weights(model)


def test_check_weights_finds_tied_weights_of_another_type_and_in_another_file(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(make_config("Llama", tie_word_embeddings=True)).save_pretrained(tmp_path)
    model = ModelSection(path=str(tmp_path), dtype="float32")
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"]
    index = {"weight_map": {**dict.fromkeys(tensors, "a.safetensors"), "lm_head.weight": "b.safetensors"}}
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for stored, is_accepted in ((head, True), (head + 1, False), (head.bfloat16(), False)):
        save_file({"lm_head.weight": stored.contiguous()}, tmp_path / "b.safetensors", metadata={"format": "pt"})
        if is_accepted:
            check_weights(model)
        else:
            assert rejected(model).startswith(
                ": lm_head.weight and model.embed_tokens.weight are stored with different"
            )


def test_check_weights_accepts_shards(model: ModelSection) -> None:
    save_sharded(model)
    check_weights(model)


def test_check_weights_rejects_a_missing_tensor(model: ModelSection) -> None:
    rewrite(model, lambda tensors: tensors.pop(DOWN))
    assert rejected(model) == (
        f": tensor {DOWN} of shape [32, 64] is missing (1 tensor of 21); copy the whole model, or correct config.json"
    )


def test_check_weights_rejects_a_missing_layer(model: ModelSection) -> None:
    configure(model, num_hidden_layers=3, layer_types=None)
    assert ": tensor model.layers.2.input_layernorm.weight of shape [32] is missing (9 tensors of 30" in rejected(model)


def test_check_weights_rejects_another_shape(model: ModelSection) -> None:
    configure(model, intermediate_size=80)
    assert rejected(model) == (
        "/model.safetensors: tensor model.layers.0.mlp.down_proj.weight has shape [32, 64], config.json describes "
        "[32, 80] (6 tensors); the weights and config.json are of different models"
    )


def test_check_weights_rejects_another_architecture(model: ModelSection) -> None:
    rewrite(model, rename_all)
    assert rejected(model) == (
        ": none of its 21 tensors (first encoder.0) belongs to the LlamaForCausalLM that config.json describes; "
        "the weights and config.json are of different models"
    )


def rename_all(tensors: dict[str, Tensor]) -> None:
    values = list(tensors.values())
    tensors.clear()
    tensors.update({f"encoder.{number}": value for number, value in enumerate(values)})


def test_check_weights_rejects_integers(model: ModelSection) -> None:
    rewrite(model, lambda tensors: tensors.update({DOWN: tensors[DOWN].to(torch.int8)}))
    assert rejected(model) == (
        f"/model.safetensors: tensor {DOWN} is stored as I8, expected a floating-point type; "
        "a quantized model must say so in config.json (quantization_config)"
    )


def test_check_weights_leaves_names_of_quantized_models_alone(model: ModelSection) -> None:
    rewrite(model, lambda tensors: tensors.update({DOWN: tensors[DOWN].to(torch.int8)}))
    configure(model, quantization_config={"quant_method": "gptq", "bits": 8})
    check_weights(model)


def test_check_weights_warns_of_extra_tensors(model: ModelSection, capsys: pytest.CaptureFixture[str]) -> None:
    rewrite(model, lambda tensors: tensors.update({"value_head.weight": torch.ones(3)}))
    check_weights(model)
    assert capsys.readouterr().err == (
        f"warning: {model.path}: 1 tensor (first value_head.weight) not part of the LlamaForCausalLM that config.json "
        "describes, ignored\n"
    )


@pytest.mark.parametrize(
    ("dtype", "value", "shown"),
    [
        (torch.float32, "nan", "NaN"),
        (torch.bfloat16, "nan", "NaN"),
        (torch.float16, "inf", "infinite values"),
        (torch.bfloat16, "-inf", "infinite values"),
    ],
)
@pytest.mark.parametrize("index", [0, 1000, 2047])
def test_check_weights_rejects_values_that_are_not_finite(
    model: ModelSection, dtype: torch.dtype, value: str, shown: str, index: int
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[DOWN] = tensors[DOWN].to(dtype)
        tensors[DOWN].view(-1)[index] = float(value)

    rewrite(model, change)
    assert rejected(model) == (
        f"/model.safetensors: tensor {DOWN} holds {shown}, expected finite weights; "
        "the training that wrote it diverged or the file is corrupt: take another checkpoint"
    )


def test_check_weights_samples_every_tensor_of_a_large_model(
    model: ModelSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the limit: a tensor that is NaN throughout is found, wherever it is."""
    monkeypatch.setattr(check, "MAX_VALUE_BYTES", 4096)
    monkeypatch.setattr(check, "_MIN_SAMPLE_BYTES", 16)
    check_weights(model)
    original = Path(model.path, "model.safetensors").read_bytes()
    for name in load_file(Path(model.path, "model.safetensors")):
        rewrite(model, functools.partial(fill_with_nan, name=name))
        assert f"tensor {name} holds NaN" in rejected(model)
        Path(model.path, "model.safetensors").write_bytes(original)


def fill_with_nan(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name].fill_(float("nan"))


@given(
    size=st.integers(0, 5000),
    fraction=st.sampled_from([0.0, 0.01, 0.3, 0.99, 1.0]),
    start=st.sampled_from([0, 8, 1000]),
    dtype=st.sampled_from(["BF16", "F32", "F64"]),
)
def test_blocks_cover_a_tensor_or_a_fraction_of_it(size: int, fraction: float, start: int, dtype: str) -> None:
    itemsize = DTYPES[dtype].itemsize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "_BLOCK_BYTES", 256)
        patch.setattr(check, "_MIN_SAMPLE_BYTES", 64)
        end = start + size * itemsize
        blocks = list(check.blocks_to_read(StoredTensor("file", "name", dtype, (size,), start, end), fraction))
    assert all(start <= first < last <= end for first, last in blocks)
    assert all((first - start) % itemsize == (last - start) % itemsize == 0 for first, last in blocks)
    read = {byte for first, last in blocks for byte in range(first, last)}
    assert len(read) >= min(size * itemsize, max(64, fraction * size * itemsize)) - 256 * (fraction < 1)
    if size:
        assert blocks[0][0] == start
    if fraction == 1:
        assert read == set(range(start, end))


def test_check_weights_rejects_a_git_lfs_pointer(model: ModelSection) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 71576\n"
    Path(model.path, "model.safetensors").write_text(text)
    assert rejected(model) == (
        f"/model.safetensors: is a git-lfs pointer of {len(text)} bytes, not the weights; "
        "run `git lfs pull` in the model folder"
    )


@pytest.mark.parametrize("kept", [0.99, 0.5, 0.001])
def test_check_weights_rejects_a_truncated_file(model: ModelSection, kept: float) -> None:
    """Within the values, and within the header."""
    file = Path(model.path, "model.safetensors")
    content = file.read_bytes()
    (header,) = struct.unpack("<Q", content[:8])
    size = int(kept * len(content))
    file.write_bytes(content[:size])
    expected = f"at least {8 + header}" if size < 8 + header else str(len(content))
    assert rejected(model) == (
        f"/model.safetensors: its header describes {expected} bytes, the file has {size}; copy or download it again"
    )


HEADER = b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 6]}}'
HALF_A_NUMBER = struct.pack("<Q", len(HEADER)) + HEADER + bytes(6)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\1\2",
        b"<html>not found</html>",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b'{"a"',
        HALF_A_NUMBER,
    ],
)
def test_check_weights_rejects_a_file_of_another_kind(model: ModelSection, content: bytes) -> None:
    Path(model.path, "model.safetensors").write_bytes(content)
    assert rejected(model) == (
        f"/model.safetensors: is not a safetensors file of {len(content)} bytes; copy or download it again"
    )


def test_check_weights_rejects_a_missing_shard(model: ModelSection) -> None:
    shard = save_sharded(model)[1]
    shard.unlink()
    assert rejected(model) == (
        f"/model.safetensors.index.json: names {shard.name}, which is not in the folder; copy or download it again"
    )


def test_check_weights_rejects_a_folder_of_two_models(model: ModelSection) -> None:
    """As `save_pretrained` leaves it, if a sharded model is saved again as one file."""
    single = Path(model.path, "model.safetensors").read_bytes()
    save_sharded(model)
    Path(model.path, "model.safetensors").write_bytes(single)
    assert rejected(model) == (
        ": holds model.safetensors and model.safetensors.index.json, which names other files, so it may hold two "
        "models; remove one of the two"
    )
    Path(model.path, "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    check_weights(model)


def test_check_weights_names_the_truncated_shard(model: ModelSection) -> None:
    shard = save_sharded(model)[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    assert rejected(model).startswith(f"/{shard.name}: its header describes ")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}'])
def test_check_weights_rejects_an_index_without_a_weight_map(model: ModelSection, content: str) -> None:
    save_sharded(model)
    Path(model.path, "model.safetensors.index.json").write_text(content)
    assert rejected(model) == ("/model.safetensors.index.json: expected JSON with a weight_map of tensors to files")


def test_check_weights_rejects_shards_without_an_index(model: ModelSection) -> None:
    save_sharded(model)
    Path(model.path, "model.safetensors.index.json").unlink()
    assert rejected(model) == (
        ": expected model.safetensors or model.safetensors.index.json, found neither; copy the missing file too"
    )


def test_check_weights_rejects_other_formats(model: ModelSection) -> None:
    Path(model.path, "model.safetensors").rename(Path(model.path, "pytorch_model.bin"))
    assert rejected(model) == (
        ": holds no weights in safetensors format; a model in another format is converted by loading it in "
        "transformers and save_pretrained"
    )


def test_check_weights_rejects_a_missing_folder(tmp_path: Path) -> None:
    assert rejected(ModelSection(path=str(tmp_path / "nowhere"))) == ": no such model folder (model.path)"


def test_check_weights_rejects_tensors_that_cannot_be_merged(tmp_path: Path) -> None:
    """Experts of different shapes, which no single tensor holds."""
    config = make_config("Mixtral", num_local_experts=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = ModelSection(path=str(tmp_path))
    names = load_file(tmp_path / "model.safetensors").keys()
    expert = next(name for name in sorted(names) if "experts" in name)
    rewrite(model, lambda tensors: tensors.update({expert: torch.zeros(3, 5, dtype=torch.bfloat16)}))
    assert rejected(model) == (
        ": tensors that a MixtralForCausalLM holds as one (experts) are incomplete or of different shapes; "
        "copy the whole model, or correct config.json"
    )


def test_check_weights_leaves_hub_names_to_the_download() -> None:
    check_weights(ModelSection(path="nobody/nothing"))


def test_check_weights_reads_a_url_without_copying_it(
    model: ModelSection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"memory://{uuid.uuid4().hex}/model"
    fs = fsspec.filesystem("memory")
    fs.put(model.path, url.removeprefix("memory:/"), recursive=True)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    remote = model.model_copy(update={"path": url})
    check_weights(remote)
    assert not (tmp_path / "pos2distill-models").exists()
    rewrite(model, lambda tensors: tensors.pop(DOWN))
    fs.put(f"{model.path}/model.safetensors", f"{url.removeprefix('memory:/')}/model.safetensors")
    assert rejected(remote).startswith(f": tensor {DOWN} of shape [32, 64] is missing")
