import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from pos2distill.config import ModelSection, VllmSection
from pos2distill.config.base import HashableMapping
from pos2distill.errors import UserError
from pos2distill.sampling.engines import vllm_arguments
from pos2distill.sampling.engines.vllm_arguments import argument_names, check_engine_args, engine_arguments


def model_with(path: str, arguments: dict[str, object]) -> ModelSection:
    return ModelSection(path=path, dtype="float32", engine_args=HashableMapping(arguments))


def test_argument_names_are_those_of_vllms_class() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert argument_names() == {name for name in names if not name.startswith("_")}


def test_arguments_that_are_rejected_exist_in_vllm() -> None:
    assert argument_names() >= {*vllm_arguments._REASONS, *vllm_arguments._OF_SEVERAL_NODES}


def test_argument_names_need_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^model.engine_args: vLLM is not installed here, so they cannot be checked"):
        argument_names()


def test_engine_arguments_have_what_settings_and_the_user_give(tiny_model_path: str) -> None:
    nested = {"mode": 0}
    model = model_with(tiny_model_path, {"max_num_batched_tokens": 4096, "compilation_config": nested})
    settings = VllmSection(max_num_seqs=7)
    check_engine_args(model, settings, device="cpu")
    arguments = engine_arguments(model, settings, (), device="cpu")
    assert arguments.max_num_batched_tokens == 4096
    assert arguments.compilation_config.mode == 0
    assert (arguments.max_num_seqs, arguments.dtype, arguments.enable_chunked_prefill) == (7, "float32", False)
    assert model.engine_args["compilation_config"] == {"mode": 0}
    assert arguments.language_model_only  # without it, vLLM 0.32 refuses multimodal models that have no tokenizer


def test_engine_arguments_keep_vllm_from_mistrals_copy_of_the_weights(tiny_model_path: str, tmp_path: Path) -> None:
    """vLLM's default prefers it, even if the model has been trained in its folder since."""
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.transformers_utils.config import get_config

    model = model_with(str(shutil.copytree(tiny_model_path, tmp_path, dirs_exist_ok=True)), {})
    (tmp_path / "consolidated.safetensors").write_bytes(b"old")
    (tmp_path / "params.json").write_text('{"max_position_embeddings": 77}')
    message = r": holds consolidated.safetensors and no model.safetensors.index.json, .*; move consolidated.safetensors"
    with pytest.raises(UserError, match=message):
        engine_arguments(model, VllmSection(), (), device="cuda")
    index = {"weight_map": {"lm_head.weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    arguments = engine_arguments(model, VllmSection(), (), device="cuda")
    loader = DefaultModelLoader(LoadConfig(load_format=arguments.load_format))
    _, files, _, _ = loader._prepare_weights(arguments.model, None, None, True, None)
    assert [Path(file).name for file in files] == ["model.safetensors"]
    config = get_config(arguments.model, False, config_format=arguments.config_format)
    assert config.max_position_embeddings == 512


@pytest.mark.parametrize("trusted", [False, True])
def test_determined_arguments_have_every_setting_of_the_engine(tiny_model_path: str, *, trusted: bool) -> None:
    settings = VllmSection(
        gpu_memory_utilization=0.4,
        tensor_parallel_size=2,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=7,
    )
    model = ModelSection(path=tiny_model_path, trust_remote_code=trusted)
    found = vllm_arguments._determined_arguments(model, settings, (), device="cuda")
    # The cache of CPUs is an environment variable, and the engine itself watches for stalls.
    given = settings.model_dump(exclude={"cpu_kv_cache_gib", "stall_minutes"})
    assert {name: found[name] for name in given} == given
    assert found["trust_remote_code"] is trusted
    assert (found["distributed_executor_backend"], found["generation_config"]) == ("mp", "vllm")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("quantisation", "vLLM has no such argument; did you mean 'quantization'?"),
        ("max_model_len", "is model.max_length; set that"),
        ("dtype", "is model.dtype; set that"),
        ("tensor_parallel_size", "is runtime.vllm.tensor_parallel_size; set that"),
        ("logprobs_mode", "sampling depends on our value of it; leave it out"),
        ("enable_chunked_prefill", "sampling depends on our value of it; leave it out"),
        (
            "load_format",
            "would generate with something else than the model of model.path that was checked; leave it out",
        ),
        ("worker_cls", "would run other code than vLLM's in the engine; leave it out"),
        ("device_ids", "an engine gets its GPUs from runtime.samplers.gpus; set that"),
        ("max_num_queued_reqs", "limits the requests to a server, and prompts beyond it would fail; leave it out"),
        ("hf_token", "settings hold no secrets; set HF_TOKEN in the environment"),
        (
            "nnodes",
            "an engine is divided by runtime.vllm.tensor_parallel_size alone; for more engines set "
            "runtime.samplers.max",
        ),
        (
            "pipeline_parallel_size",
            "an engine is divided by runtime.vllm.tensor_parallel_size alone; for more engines set "
            "runtime.samplers.max",
        ),
    ],
)
def test_check_engine_args_rejects(tiny_model_path: str, name: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_engine_args(model_with(tiny_model_path, {name: 1}), VllmSection(), device="cpu")
    assert str(caught.value) == f"model.engine_args: {name}: {message}"


def test_check_engine_args_leaves_chunked_prefill_to_the_user_on_a_gpu(tiny_model_path: str) -> None:
    check_engine_args(model_with(tiny_model_path, {"enable_chunked_prefill": True}), VllmSection(), device="cuda")
