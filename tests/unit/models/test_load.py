import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from pos2distill.config import ModelSection
from pos2distill.errors import UserError
from pos2distill.models.architecture import (
    context_length,
    empty_model,
    load_config,
    resolve_attention,
    weight_dtypes,
)
from pos2distill.models.load import load_model, load_tokenizer
from scripts.model_families import save_tiny


def test_load_model_uses_the_given_dtype(tiny_model_path: str) -> None:
    model = ModelSection(path=tiny_model_path, dtype="bfloat16")
    assert load_model(model).dtype == torch.bfloat16
    lm = load_model(model, dtype=torch.float32)
    assert lm.dtype == torch.float32
    assert not lm.training


@pytest.mark.parametrize(
    ("family", "kept"),
    [
        ("deepseek_v3", {"e_score_correction_bias"}),
        ("dots1", {"e_score_correction_bias"}),
        ("ernie4_5_moe", {"weight", "e_score_correction_bias"}),
        ("exaone_moe", {"e_score_correction_bias"}),
        ("gemma3", set()),
        ("glm4_moe", {"e_score_correction_bias"}),
        ("llama", set()),
    ],
)
def test_weight_dtypes_are_those_of_the_loaded_model(family: str, kept: set[str], tmp_path: Path) -> None:
    model = save_tiny(family, tmp_path).model_copy(update={"dtype": "bfloat16"})
    dtypes = weight_dtypes(model)
    assert dtypes == {name: weight.dtype for name, weight in load_model(model).state_dict().items()}
    in_float32 = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    assert {name.rpartition(".")[2] for name in in_float32} == kept
    assert all(".gate." in name for name in in_float32)
    assert set(weight_dtypes(model.model_copy(update={"dtype": "float32"})).values()) == {torch.float32}


@pytest.mark.parametrize(
    ("config", "pieces"),
    [
        ({"model_type": "mistral", "transformers_version": "4.57.0"}, ["ĠMc", "Donald", "Ġ", "1", "9", "3", "9"]),
        ({"model_type": "llama", "transformers_version": "4.57.0"}, ["ĠMcDonald", "Ġ", "1939"]),
        ({"model_type": "llama"}, ["ĠMcDonald", "Ġ", "1939"]),
    ],
)
def test_load_tokenizer_corrects_mistrals(tmp_path: Path, config: dict[str, str], pieces: list[str]) -> None:
    """How Mistral's own tokenizer splits words, which the files of its models say wrongly."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"unused{number}" for number in range(100_001))]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    wrong = pre_tokenizers.Split(Regex(r" ?\p{L}+|\p{N}+"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [wrong, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template="{{ messages[0].content }}")
    fast.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded: Any = load_tokenizer(ModelSection(path=str(tmp_path)))
    split = loaded.backend_tokenizer.pre_tokenizer.pre_tokenize_str(" McDonald 1939")
    assert [piece for piece, _ in split] == pieces


def test_load_tokenizer_rejects_a_model_that_writes_into_channels(copy_model: Callable[..., ModelSection]) -> None:
    model = copy_model()
    tokenizer = load_tokenizer(model)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|channel|>"]})
    tokenizer.save_pretrained(model.path)
    with pytest.raises(UserError, match=r"writes thoughts and answers into channels \(<\|channel\|>\), which are not"):
        load_tokenizer(model)


def test_context_length_is_that_of_the_config_unless_set(copy_model: Callable[..., ModelSection]) -> None:
    model = copy_model()
    assert context_length(model) == 512
    assert context_length(model.model_copy(update={"max_length": 100})) == 100


@pytest.mark.parametrize(
    ("missing", "use", "message"),
    [
        ("tokenizer.json", load_tokenizer, r"holds no tokenizer \(tokenizer.json, tokenizer.model or vocab.json\)"),
        ("chat_template.jinja", load_tokenizer, "its tokenizer has no chat template; use the model's chat or instruct"),
        ("config.json", load_config, "holds no config.json"),
    ],
)
def test_load_names_the_file_that_a_model_folder_lacks(
    copy_model: Callable[..., ModelSection], missing: str, use: Callable[[ModelSection], object], message: str
) -> None:
    model = copy_model(missing)
    with pytest.raises(UserError, match=message) as caught:
        use(model)
    assert str(caught.value).startswith(f"{model.path}: ")
    assert "\n" not in str(caught.value)


def test_load_tokenizer_silences_the_length_that_the_tokenizer_knows(
    copy_model: Callable[..., ModelSection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are compared with the model's context."""
    model = copy_model()
    path = Path(model.path, "tokenizer_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 10}))
    warnings: list[str] = []
    monkeypatch.setattr("transformers.tokenization_utils_base.logger.warning", warnings.append)
    tokenizer = load_tokenizer(model)
    assert tokenizer.model_max_length == 10
    assert len(tokenizer("a text of more than ten tokens")["input_ids"]) > 10
    assert warnings == []


def test_load_tokenizer_prefers_the_tokenizer_of_transformers_to_that_of_mistral(
    copy_model: Callable[..., ModelSection],
) -> None:
    """Models of Mistral's come with both, and only one of them has a chat template."""
    model = copy_model()
    expected = load_tokenizer(model).apply_chat_template([{"role": "user", "content": "a question"}])
    path = Path(model.path, "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "mistral"}))
    Path(model.path, "tekken.json").write_text("{}")
    assert load_tokenizer(model).apply_chat_template([{"role": "user", "content": "a question"}]) == expected


def test_no_code_of_a_model_folder_runs_unless_asked(copy_model: Callable[..., ModelSection], tmp_path: Path) -> None:
    model, ran = copy_model(), tmp_path / "ran"
    config = Path(model.path, "config.json")
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | own))
    code = f"open({str(ran)!r}, 'w').close()\nfrom transformers import LlamaConfig as Config\n"
    Path(model.path, "mine.py").write_text(code)
    with pytest.raises(UserError, match=r"no usable config\.json"):
        load_config(model)
    assert not ran.exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_loaders_pass_on_whether_code_of_the_folder_is_trusted(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch, *, trusted: bool
) -> None:
    passed: list[tuple[str, bool]] = []

    def spy(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            passed.append((name, settings["trust_remote_code"]))
            return function(*args, **settings)

        return call

    for cls, name in (
        (AutoConfig, "from_pretrained"),
        (AutoTokenizer, "from_pretrained"),
        (AutoModelForCausalLM, "from_pretrained"),
        (AutoModelForCausalLM, "from_config"),
    ):
        monkeypatch.setattr(cls, name, spy(getattr(cls, name), f"{cls.__name__}.{name}"))
    model = ModelSection(path=tiny_model_path, dtype="float32", trust_remote_code=trusted)
    load_tokenizer(model)
    load_model(model)
    empty_model(model)
    assert {name for name, _ in passed} >= {
        "AutoConfig.from_pretrained",
        "AutoTokenizer.from_pretrained",
        "AutoModelForCausalLM.from_pretrained",
        "AutoModelForCausalLM.from_config",
    }
    assert {value for _, value in passed} == {trusted}


def test_load_model_rejects_a_folder_without_safetensors(copy_model: Callable[..., ModelSection]) -> None:
    with pytest.raises(UserError, match="safetensors"):
        load_model(copy_model("model.safetensors"))


def test_load_model_rejects_weights_that_transformers_would_fill_with_random_numbers(
    copy_model: Callable[..., ModelSection],
) -> None:
    """Of a hub name nothing else looks: its files are not checked before a run."""
    model = copy_model()
    file = Path(model.path, "model.safetensors")
    weights = load_file(file)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lack 1 weights of the model, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(model)


def test_context_length_must_be_set_if_the_config_has_none(copy_model: Callable[..., ModelSection]) -> None:
    model = copy_model()
    Path(model.path, "config.json").write_text(json.dumps({"model_type": "bloom"}))
    with pytest.raises(UserError, match=r"has no max_position_embeddings; set model.max_length"):
        context_length(model)


def test_resolve_attention_falls_back_to_sdpa_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flash_attn")
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert resolve_attention("auto", torch.bfloat16, gpu) == "flash_attention_2"
    assert resolve_attention("auto", torch.float32, gpu) == "sdpa"  # flash-attn takes 16 bits only
    assert resolve_attention("auto", torch.bfloat16, cpu) == "sdpa"
    assert resolve_attention("eager", torch.bfloat16, gpu) == "eager"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert resolve_attention("auto", torch.bfloat16, gpu) == "sdpa"


def test_load_model_rejects_stateful_layers_for_packed_rows(
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
        ({"attention_chunk_size": 64}, r"its attention is chunked by position, which packing rows would shift"),
        (
            {
                "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
                | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
            },
            r"beyond 64 tokens its position encoding depends on the longest row of a batch; set model.max_length to 64",
        ),
    ],
)
def test_load_model_rejects_attention_that_packing_would_change(
    tiny_model_path: str, tmp_path: Path, setting: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | setting))
    model = ModelSection(path=str(folder), dtype="float32")
    load_model(model)
    with pytest.raises(UserError, match=message):
        load_model(model, packed=True)


@pytest.mark.parametrize("packed", [False, True])
def test_load_model_rejects_kernels_that_leave_out_soft_caps(*, packed: bool, tmp_path: Path) -> None:
    model = save_tiny("gemma2", tmp_path)
    with pytest.raises(UserError, match=r"soft-capped, .*; set model.attention to flash_attention_2 or eager"):
        load_model(model.model_copy(update={"attention": "sdpa"}), packed=packed)
    load_model(model.model_copy(update={"attention": "eager"}), packed=packed)


def test_load_model_accepts_dynamic_rope_up_to_its_fixed_length(tiny_model_path: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model_path, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    load_model(ModelSection(path=str(folder), dtype="float32", max_length=512), packed=True)
    with pytest.raises(UserError, match="beyond 512 tokens"):
        load_model(ModelSection(path=str(folder), dtype="float32", max_length=513), packed=True)


def test_load_model_rejects_models_outside_the_attention_interface(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers marks those that do not use its attention interface."""
    monkeypatch.setattr(LlamaForCausalLM, "_supports_attention_backend", False)
    with pytest.raises(UserError, match="LlamaForCausalLM does not use transformers' attention interface"):
        load_model(ModelSection(path=tiny_model_path, dtype="float32"), packed=True)


def test_load_model_rejects_flash_attn_for_attention_it_does_not_support(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers marks models with attention sinks."""
    monkeypatch.setattr(LlamaForCausalLM, "_compatible_flash_implementations", ["flash_attention_4"], raising=False)
    model = ModelSection(path=tiny_model_path, dtype="float32", attention="flash_attention_2")
    with pytest.raises(
        UserError, match=r"flash-attn 2 does not support all of its attention; set model\.attention to eager"
    ):
        load_model(model, packed=True)


def test_load_model_rejects_flash_attn_if_it_is_not_installed(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: object, version: int) -> None:
        raise ImportError("FlashAttention2 is not installed.\nMore of it.")

    monkeypatch.setattr(LlamaForCausalLM, "_flash_attn_can_dispatch", refuse)
    model = ModelSection(path=tiny_model_path, dtype="bfloat16", attention="flash_attention_2")
    with pytest.raises(UserError, match=r"model.attention=flash_attention_2: FlashAttention2 is not installed\.$"):
        load_model(model, packed=True)


def test_load_model_resolves_attention_by_the_dtype_of_autocast(
    tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes: list[torch.dtype] = []

    def pick(attention: str, dtype: torch.dtype, device: torch.device) -> str:
        dtypes.append(dtype)
        return "sdpa"

    monkeypatch.setattr("pos2distill.models.load.resolve_attention", pick)
    model = ModelSection(path=tiny_model_path, dtype="bfloat16")
    load_model(model, dtype=torch.float32, compute_dtype=torch.bfloat16, packed=True)
    load_model(model, dtype=torch.float32, packed=True)
    assert dtypes == [torch.bfloat16, torch.float32]


def test_load_config_names_the_model_in_the_folder_of_a_run(tiny_model_path: str, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model_path, tmp_path / "checkpoint-f1a0" / "model")
    for folder in (tmp_path, model.parent):
        with pytest.raises(UserError, match=f"^{folder}: holds no config.json; did you mean '{model}'\\?$"):
            load_config(ModelSection(path=str(folder)))
    with pytest.raises(UserError, match=r"holds no config.json$"):
        load_config(ModelSection(path=str(tmp_path.parent)))
