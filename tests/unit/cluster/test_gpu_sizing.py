import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.gpu_sizing import GPU_BYTES, GPU_RESERVE, tight_memory, worker_bytes, zero3_bytes
from cluster.job_command import load_job
from cluster.render import render
from cluster.spec import load_cluster
from pos2distill.config import Recipe, Study
from pos2distill.config.load import load_recipe
from pos2distill.config.training import STATE_BYTES
from pos2distill.errors import UserError
from pos2distill.training.micro_batches import pack
from tests.support.samples import Source

ROOT = Path(__file__).parents[3]
DATA = "data.path=gs://bucket/nq.jsonl.gz"
EIGHT = "runtime.trainers.workers=8"
ADAPTERS = ["training.lora={rank: 16}", "model.dtype=float32"]
NOT_RECOMPUTED = ["runtime.trainers.strategy=torch", "runtime.trainers.gradient_checkpointing=false"]


def test_gpu_bytes_are_those_of_zero3() -> None:
    import torch

    from pos2distill.training.strategies.zero3 import _deepspeed_config

    config = _deepspeed_config(load_recipe("nq_mistral_7b").study, torch.device("cpu"))
    assert config["bf16"]["enabled"]
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["optimizer"]["type"] == "AdamW"
    assert GPU_BYTES == {"bfloat16": 2 + 4 + STATE_BYTES, "float32": 4 + STATE_BYTES}


def test_deepspeed_gets_the_optimizer_of_the_study() -> None:
    import torch

    from pos2distill.training.strategies.zero3 import _deepspeed_config

    settings = ["learning_rate=2e-4", "betas=[0.8, 0.9]", "weight_decay=0.3", "max_grad_norm=0.25"]
    study = load_recipe("nq_mistral_7b", [f"training.{each}" for each in settings]).study
    config = _deepspeed_config(study, torch.device("cpu"))
    optimizer = {"lr": 2e-4, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.3, "torch_adam": True}
    assert config["optimizer"]["params"] == optimizer
    assert config["gradient_clipping"] == 0.25


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["training.node.disk=150Gi"],
            "training.node.disk: 150Gi, but a pod writes up to 159Gi (scratch 50Gi, model 14Gi, trained model 14Gi, "
            "checkpoint 82Gi); use machines with larger disks",
        ),
        (
            ["model.path=gs://bucket/mine"],
            "model.path: gs://bucket/mine: the size of this model is not known here; set spec.model_billions, the",
        ),
        (
            ["model_billions=32"],
            "nq_mistral_7b: runtime.trainers.workers: 8 workers need 78 GB of GPU memory each and activations, but a "
            "GPU of a2-highgpu-8g has 40 GB; set 17 or more",
        ),
        (
            ["sampling.node.instance_type=g2-standard-16", "runtime.vllm.gpu_memory_utilization=0.5"],
            "nq_mistral_7b: runtime.vllm.tensor_parallel_size: the weights take 14 GB of a GPU, but vLLM has 10 GB of "
            "a GPU of sampling, g2-standard-16; set 2 or more, and runtime.samplers.gpus to the same",
        ),
        (
            [
                *(
                    "sampling.node.instance_type=g2-standard-24",
                    "sampling.node.gpus=2",
                    "model_billions=14",
                    "training.max=2",
                ),
                *("runtime.samplers.gpus=2", "runtime.vllm.tensor_parallel_size=2", "runtime.trainers.workers=16"),
            ],
            "nq_mistral_7b: runtime.teachers.gpus: the teacher's weights take 28 GB of one GPU, but a GPU of sampling, "
            "g2-standard-24, has 24 GB; set method.teacher to topk or resident, or use machines with larger GPUs",
        ),
        (
            ["runtime.trainers.strategy=torch"],
            "nq_mistral_7b: runtime.trainers.strategy: with torch each worker has the whole model, and needs 122 GB of "
            "GPU memory and activations, but a GPU of a2-highgpu-8g has 40 GB; set zero3",
        ),
        (
            ["runtime.trainers.strategy=torch", "runtime.trainers.workers=1"],
            "but a GPU of a2-highgpu-8g has 40 GB; set zero3 and runtime.trainers.workers to 4 or more",
        ),
        (
            ["runtime.trainers.strategy=torch", "model.dtype=float32"],
            "but a GPU of a2-highgpu-8g has 40 GB; set zero3 and model.dtype to bfloat16",
        ),
        (
            ["sampling.node.instance_type=g2-standard-16", "runtime.vllm.gpu_memory_utilization=0.05"],
            "but vLLM has 0 GB of a GPU of sampling, g2-standard-16; raise runtime.vllm.gpu_memory_utilization",
        ),
    ],
)
def test_render_rejects_a_model_that_does_not_fit_with_one_line(words: list[str], message: str) -> None:
    of_recipe = [word for word in words if word.startswith(("model.", "runtime."))]
    spec = load_cluster("gke", [word for word in words if word not in of_recipe])
    with pytest.raises(UserError) as caught:
        render(spec, load_job("nq_mistral_7b", [DATA, EIGHT, *of_recipe]))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("billions", "words", "remedy"),
    [
        # 36 GB, and 32 without the copies.
        (2, NOT_RECOMPUTED, "set runtime.trainers.gradient_checkpointing to true"),
        # 4.8 bytes per parameter, and 2.8.
        (7.5, ["runtime.trainers.strategy=torch", *ADAPTERS], "set model.dtype to bfloat16"),
        # 6.9 bytes, 4.8 with recomputation, 2.9 in bfloat16, and 2.8 with both.
        (6, [*NOT_RECOMPUTED, *ADAPTERS], "set runtime.trainers.gradient_checkpointing to true"),
        (11, [*NOT_RECOMPUTED, *ADAPTERS], "set model.dtype to bfloat16"),
        (
            12,
            [*NOT_RECOMPUTED, *ADAPTERS],
            "set model.dtype to bfloat16 and runtime.trainers.gradient_checkpointing to true",
        ),
        # zero3 divides 2.9 bytes.
        (
            15,
            [*NOT_RECOMPUTED, *ADAPTERS],
            "set zero3 and model.dtype to bfloat16 and runtime.trainers.workers to 2 or more",
        ),
    ],
)
def test_render_names_the_smallest_change_with_which_a_worker_fits(
    billions: float, words: list[str], remedy: str
) -> None:
    spec = load_cluster("gke", [f"model_billions={billions}"])
    with pytest.raises(UserError, match=r"with torch each worker has the whole model") as caught:
        render(spec, load_job("nq_mistral_7b", [DATA, "runtime.trainers.workers=1", *words]))
    assert str(caught.value).endswith(f"has 40 GB; {remedy}")


def test_tight_memory_of_workers_that_have_the_whole_model() -> None:
    words = ["training.lora={rank: 16}", "runtime.trainers.strategy=torch", "runtime.trainers.micro_batch_tokens=65536"]
    (line,) = tight_memory(load_cluster("gke"), load_job("nq_mistral_7b", [DATA, EIGHT, *words]))
    assert "a GPU of a2-highgpu-8g has 40 GB; set runtime.trainers.strategy to zero3 with several workers, or" in line


def test_render_needs_no_memory_for_engines_that_the_command_does_not_start() -> None:
    small = ["sampling.node.instance_type=g2-standard-16"]
    words = [DATA, EIGHT, "runtime.vllm.gpu_memory_utilization=0.2"]
    assert render(load_cluster("gke", small), load_job("nq_mistral_7b", words, command="report"))


def test_memory_table_of_the_documentation_is_computed_as_in_the_code() -> None:
    """Columns: parameters, layers × width, divided memory, activations, per GPU of 4, of 8, of 16, fits."""
    recipe = load_recipe("nq_mistral_7b")
    tokens = recipe.runtime.trainers.micro_batch_tokens
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert f"activations of {tokens:,} tokens" in page
    rows = re.findall(
        r"^\| (\d+) B \| (\d+) × (\d+) \| (\d+) GB \| ([\d.]+) GB \| (\d+) GB \| (\d+) GB \| (\d+) GB \| (\d+) GB \|",
        page,
        re.MULTILINE,
    )
    assert len(rows) == 3
    for billions, layers, width, *stated in rows:
        parameters = int(billions) * 1e9
        sharded = zero3_bytes(recipe.study, parameters)
        activations = 2 * tokens * int(layers) * int(width)
        assert stated[0] == f"{sharded / 1e9:.0f}"
        assert stated[1] == f"{activations / 1e9:.1f}"
        for workers, text in zip((4, 8, 16), stated[2:5], strict=True):
            assert text == f"{(sharded / workers + activations + GPU_RESERVE) / 1e9:.0f}"
        assert stated[5] == f"{STATE_BYTES * parameters / 1e9:.0f}"


@pytest.mark.parametrize(
    ("words", "per_parameter"),
    [
        ([], 18 / 8),
        (["runtime.trainers.strategy=torch"], 16),
        (NOT_RECOMPUTED, 18),
        (["runtime.trainers.strategy=torch", "training.lora={rank: 16}"], 2 + 0.8),
        (["runtime.trainers.strategy=torch", "training.lora={rank: 16}", "model.dtype=float32"], 4 + 0.8),
        ([*NOT_RECOMPUTED, "training.lora={rank: 16}"], 2 + 0.8 + 0.1),
        ([*NOT_RECOMPUTED, "training.lora={rank: 16}", "model.dtype=float32"], 4 + 0.8 + 2.1),
        ([*NOT_RECOMPUTED, "method={name: seqkd, view: skip}"], 20),  # the view is a second pass
        ([*NOT_RECOMPUTED, "method={name: seqkd, view: pose}"], 18),
        ([*NOT_RECOMPUTED, "training.precision=float32"], 16),
    ],
)
def test_worker_bytes_of_each_strategy(words: list[str], per_parameter: float) -> None:
    recipe = load_recipe("nq_mistral_7b", [DATA, EIGHT, *words])
    assert worker_bytes(recipe.study, recipe.runtime.trainers, 1e9) == pytest.approx(per_parameter * 1e9)


@pytest.mark.parametrize(
    ("words", "per_parameter"),
    [
        ([], 18),
        (["method.teacher=resident"], 18 + 2),
        (["training.lora={rank: 16}"], 2 + 0.9),
        (["training.lora={rank: 16}", "method.teacher=resident"], 2 + 0.9),  # the student contains the base model
        # The second round begins with the merged model of the first.
        (["training.lora={rank: 16}", "method={name: r1-on-policy, teacher: resident}"], 2 + 0.9 + 2),
        (["training.lora={rank: 16}", "training.precision=float32"], 4 + 0.8),
    ],
)
def test_zero3_bytes_are_those_of_the_largest_round(words: list[str], per_parameter: float) -> None:
    study = load_recipe("nq_mistral_7b", [DATA, *words]).study
    assert zero3_bytes(study, 1e9) == pytest.approx(per_parameter * 1e9)


@pytest.mark.parametrize(
    "arguments", ["{quantization: fp8}", "{cpu_offload_gb: 8}", "{offload_group_size: 2, offload_num_in_group: 1}"]
)
def test_samplers_that_do_not_hold_all_weights_are_not_checked_against_the_memory(arguments: str) -> None:
    """vLLM quantizes the weights, or keeps some of them elsewhere, so that their size is not known."""
    small = ["sampling.node.instance_type=g2-standard-16"]
    words = [DATA, EIGHT, "runtime.vllm.gpu_memory_utilization=0.5", f"model.engine_args={arguments}"]
    with pytest.raises(UserError, match="the weights take"):
        render(load_cluster("gke", small), load_job("nq_mistral_7b", words[:-1]))
    assert render(load_cluster("gke", small), load_job("nq_mistral_7b", words))


@pytest.mark.parametrize("checkpointing", [True, False])
def test_torch_keeps_cast_weights_until_the_backward_pass_only_without_checkpointing(
    make_recipe: Callable[..., Recipe], make_source: Callable[[Study], Source], checkpointing: bool
) -> None:
    import torch

    from pos2distill.training.strategies.torch import TorchStrategy

    trainers = {"strategy": "torch", "gradient_checkpointing": checkpointing}
    recipe = make_recipe(method={"name": "seqkd"}, training={"precision": "bfloat16"}, runtime={"trainers": trainers})
    source = make_source(recipe.study)
    strategy = TorchStrategy(recipe.study, recipe.runtime.trainers, torch.device("cpu"), recipe.study.model)
    weights = {tuple(weight.shape) for name, weight in strategy.student.lm.named_parameters() if "proj" in name}
    kept = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        # A linear layer saves its weight transposed.
        if tensor.dtype == torch.bfloat16 and {tuple(tensor.shape), tuple(tensor.shape[::-1])} & weights:
            kept += tensor.numel()
        return tensor

    rows = [source.build.row(key) for key in source.row_keys()[:1]]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        strategy.forward(pack(rows, recipe.study, 0), None)
    linear = sum(weight.numel() for name, weight in strategy.student.lm.named_parameters() if "proj" in name)
    assert kept == (0 if checkpointing else linear)
    # The cache would hold a copy of every weight, which these hooks do not see.
    with strategy.autocast:
        assert not torch.is_autocast_cache_enabled()
