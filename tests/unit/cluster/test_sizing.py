import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.job_command import load_job
from cluster.known_models import KNOWN_MODELS
from cluster.nodes import NodeSection, quantity_bytes
from cluster.render import render
from cluster.sizing import (
    GPU_BYTES,
    GPU_RESERVE,
    hidden_state_bytes,
    node_disks,
    tight_memory,
    worker_bytes,
    zero3_bytes,
)
from cluster.spec import load_cluster
from cluster.spec_warnings import spec_warnings
from pos2distill.config import Recipe, Study
from pos2distill.config.load import load_recipe
from pos2distill.config.read import recipe_names
from pos2distill.config.training import STATE_BYTES
from pos2distill.errors import UserError
from pos2distill.training.micro_batches import pack
from tests.support.samples import Source

ROOT = Path(__file__).parents[3]
DATA = "data.path=gs://bucket/nq.jsonl.gz"
EIGHT = "runtime.trainers.workers=8"
P = KNOWN_MODELS["Mistral-7B-Instruct-v0.3"].parameters
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


@pytest.mark.parametrize("name", recipe_names())
def test_hidden_state_bytes_of_every_recipe_fit_the_default_scratch_twice(name: str) -> None:
    hidden = hidden_state_bytes(load_cluster("gke"), load_recipe(name).study)
    assert hidden <= 500 * 512 * 4096 * 2 == 2_097_152_000
    assert 2 * hidden < quantity_bytes(NodeSection(cpus=1, memory="16Gi").scratch)


def test_spec_warnings_name_a_scratch_that_the_hidden_states_may_fill() -> None:
    spec = load_cluster("gke")
    study = load_recipe("nq_mistral_7b", [DATA]).study
    assert hidden_state_bytes(spec, study) == 300 * 100 * 4096 * 2
    assert "scratch" not in "".join(spec_warnings(spec, load_job("nq_mistral_7b", [DATA, EIGHT])))
    many = [DATA, EIGHT, "data.train_examples=50000", "sampling.max_new_tokens=512"]
    lines = [line for line in spec_warnings(spec, load_job("nq_mistral_7b", many)) if ".node.scratch: " in line]
    assert [line.partition(".")[0] for line in lines] == ["sampling", "training", "data"]
    assert (
        "sampling.node.scratch: 50Gi may not hold what Ray spills if training falls behind: the teacher's hidden"
        in (lines[0])
    )
    assert "are 210 GB; raise it, or set method.teacher: resident" in lines[0]
    assert "scratch" not in "".join(spec_warnings(spec, load_job("nq_mistral_7b", [*many, "method.teacher=resident"])))


def test_node_disks_of_a_bucket_hold_models_and_one_checkpoint() -> None:
    disks = node_disks(load_cluster("gke"), load_job("nq_mistral_7b", [DATA]))
    assert disks["training"] == {"model": 2 * P, "trained model": 2 * P, "checkpoint": 12 * P}
    assert disks["sampling"] == {"model": 2 * P, "trained model": 2 * P}
    assert disks["data"] == {}


def test_node_disks_of_a_volume_hold_the_checkpoint_only() -> None:
    spec = load_cluster("onprem")
    job = load_job("nq_qwen1_5_7b", ["model.path=/mnt/storage/models/Qwen1.5-7B-Chat"])
    parameters = KNOWN_MODELS["Qwen1.5-7B-Chat"].parameters
    assert node_disks(spec, job) == {"sampling": {}, "training": {"checkpoint": 12 * parameters}}


def test_node_disks_reject_a_head_whose_scratch_is_larger_than_its_disk() -> None:
    with pytest.raises(UserError, match=r"^head\.disk: 97Gi, but a pod writes up to 500Gi \(scratch 500Gi\)"):
        node_disks(load_cluster("gke", ["head.scratch=500Gi", "head.disk=97Gi"]))


def test_node_disks_of_adapters_are_smaller() -> None:
    job = load_job("nq_mistral_7b", [DATA, "training.lora={rank: 16}"])
    assert node_disks(load_cluster("gke"), job)["training"]["checkpoint"] == pytest.approx(0.6 * P)


def test_node_disks_of_a_sweep_hold_the_model_of_every_study(tmp_path: Path) -> None:
    recipe = tmp_path / "sweep.yaml"
    text = (ROOT / "pipelines" / "recipes" / "nq_mistral_7b.yaml").read_text()
    recipe.write_text(f"{text}\nsweep: {{seed: [0, 1, 2]}}\n")
    disks = node_disks(load_cluster("gke"), load_job(str(recipe), [DATA]))
    assert disks["sampling"] == {"model": 2 * P, "trained model": 6 * P}
    assert disks["training"]["trained model"] == 2 * P


def test_node_disks_of_an_on_policy_method_hold_the_model_of_every_round() -> None:
    settings = [DATA, "method.name=r1-on-policy", "method.rounds=3"]
    disks = node_disks(load_cluster("gke"), load_job("nq_mistral_7b", settings))
    assert disks["sampling"] == {"model": 2 * P, "trained model": 6 * P}
    assert disks["training"]["trained model"] == 4 * P  # it begins with the one, and writes the other


def test_node_disks_of_many_rounds_are_compared() -> None:
    settings = [DATA, "method.name=r1-on-policy", "method.rounds=100"]
    with pytest.raises(UserError, match=r"sampling.node.disk: 150Gi, but a pod writes up to [0-9]{4}"):
        node_disks(load_cluster("gke"), load_job("nq_mistral_7b", settings))


def test_node_disks_of_a_cluster_without_a_job_follow_the_stated_size() -> None:
    assert node_disks(load_cluster("gke")) == {"sampling": {}, "training": {}, "data": {}}
    disks = node_disks(load_cluster("gke", ["model_billions=1"]))
    assert disks["training"] == {"model": 2e9, "trained model": 2e9, "checkpoint": 12e9}


def test_node_disks_read_the_size_of_a_local_model(tiny_model_path: str) -> None:
    from safetensors import safe_open

    with safe_open(f"{tiny_model_path}/model.safetensors", "pt") as file:
        parameters = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118
    job = load_job("quickstart", [f"model.path={tiny_model_path}", "model.dtype=float32"])
    assert node_disks(load_cluster("gke"), job)["training"] == {
        "trained model": 4 * parameters,
        "checkpoint": 12 * parameters,
    }


def test_render_requests_the_disk_of_models_and_checkpoints() -> None:
    cluster = render(load_cluster("gke"), load_job("nq_mistral_7b", [DATA, EIGHT]))[-1]["spec"]["rayClusterSpec"]
    _, training, _ = cluster["workerGroupSpecs"]
    pod = training["template"]["spec"]
    disk = pod["containers"][0]["resources"]["limits"]["ephemeral-storage"]
    # 50 GiB of scratch and 16 bytes per parameter.
    assert disk == f"{-int(-(50 * 2**30 + 16 * P) // 2**30)}Gi" == "159Gi"
    volumes = {volume["name"]: volume.get("emptyDir") for volume in pod["volumes"]}
    assert volumes["tmp"] == {"sizeLimit": disk}


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


def test_hidden_state_bytes_count_all_samples_of_an_on_policy_method() -> None:
    study = load_recipe("nq_mistral_7b", [DATA, "method.name=r1-on-policy"]).study
    samples = study.data.train_examples * (study.method.k + 1)
    assert hidden_state_bytes(load_cluster("gke"), study) == samples * 100 * 4096 * 2


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
