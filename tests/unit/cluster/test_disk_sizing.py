from pathlib import Path

import pytest

from cluster.disk_sizing import hidden_state_bytes, node_disks
from cluster.job_command import load_job
from cluster.known_models import KNOWN_MODELS
from cluster.nodes import NodeSection, quantity_bytes
from cluster.render import render
from cluster.spec import load_cluster
from cluster.spec_warnings import spec_warnings
from pos2distill.config.load import load_recipe
from pos2distill.config.read import recipe_names
from pos2distill.errors import UserError

ROOT = Path(__file__).parents[3]
DATA = "data.path=gs://bucket/nq.jsonl.gz"
EIGHT = "runtime.trainers.workers=8"
P = KNOWN_MODELS["Mistral-7B-Instruct-v0.3"].parameters


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


def test_hidden_state_bytes_count_all_samples_of_an_on_policy_method() -> None:
    study = load_recipe("nq_mistral_7b", [DATA, "method.name=r1-on-policy"]).study
    samples = study.data.train_examples * (study.method.k + 1)
    assert hidden_state_bytes(load_cluster("gke"), study) == samples * 100 * 4096 * 2
