from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.job_command import load_job
from cluster.recipe_checks import check_recipe
from cluster.render import render
from cluster.spec import ClusterSpec, load_cluster
from pos2distill.errors import UserError
from tests.support.paths import PROJECT

WORD = "hunter2"  # in the position of a password
SERVER = ["model.engine=openai", "model.path=gpt-x", "runtime.endpoint.base_url=http://10.0.20.15:8000/v1"]


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("quickstrat", [], "quickstrat: no such recipe; did you mean 'quickstart'?"),
        ("quickstart", ["training.epoch=1"], "training.epoch: unknown field; did you mean 'epochs'?"),
        ("nq_mistral_7b", [], "nq-open-20_total_documents_gold_at_0.jsonl.gz does not exist in the pods; set a URL"),
        ("quickstart", ["model.path=/models/x"], "model.path: /models/x does not exist in the pods; set a URL"),
        ("quickstart", ["model.path=./mymodel"], "model.path: ./mymodel does not exist in the pods; set a URL"),
        ("quickstart", ["model.path=../x"], "model.path: ../x does not exist in the pods; set a URL"),
        ("quickstart", ["runtime.storage=s3://b/../x"], "runtime.storage: s3://b/../x: expected a path without '..'"),
        ("quickstart", ["model.path=~/m"], f"model.path: {Path.home()}/m does not exist in the pods; set a URL"),
        ("quickstart", ["model.path=gcs://b/m"], "model.path: the image cannot open gcs://; did you mean 'gs'?"),
        ("quickstart", ["data.path=htps://h/x"], "data.path: the image cannot open htps://; did you mean 'https'?"),
        (
            "quickstart",
            ["runtime.storage=https://h/x"],
            "runtime.storage: the image cannot open https://; expected one of: gs, s3",
        ),
        ("quickstart", ["runtime.storage=/tmp/x"], "runtime.storage: /tmp/x does not exist in the pods; set a URL"),
        (
            "quickstart",
            ["model.engine=vllm", "runtime.samplers.gpus=2", "runtime.vllm.tensor_parallel_size=2"],
            "runtime.samplers.gpus: 2, but a node of sampling has 1; lower it",
        ),
        (
            "quickstart",
            ["runtime.trainers={workers: 8, gpus: 1}"],
            "runtime.trainers.workers: 8, but only 4 fit on the nodes of training; raise spec.training.max",
        ),
        (
            # Two nodes of 8 CPUs have 16, but only one worker with 5 fits on each.
            "quickstart",
            ["runtime.trainers={workers: 3, gpus: 1, cpus: 5}", "spec.training.max=2"],
            "runtime.trainers.workers: 3, but only 2 fit on the nodes of training; raise spec.training.max or lower",
        ),
        (
            "quickstart",
            ["runtime.samplers={max: 3, cpus: 5}"],
            "runtime.samplers.max: 3, but only 2 fit on the nodes of sampling; raise spec.sampling.max or lower",
        ),
        ("quickstart", ["runtime.teachers.cpus=9"], "runtime.teachers.cpus: 9, but a node of sampling has 8; lower it"),
        (
            "quickstart",
            ["runtime.samplers={max: 2, gpus: 1}", "runtime.teachers={max: 1, gpus: 1}"],
            "runtime.samplers.max: samplers and teachers need 3 GPUs, but sampling has at most 2; raise spec.sampling",
        ),
        (
            "quickstart",
            ["runtime.samplers={max: 1, gpus: 1}", "runtime.teachers={max: 1, gpus: 1}"],
            "quickstart: runtime.trainers.gpus: 0, but the nodes have GPUs, which samplers and teachers use; set 1",
        ),
        (
            "quickstart",
            ["runtime.trainers.gpus=1", "runtime.teachers={max: 1, gpus: 1}"],
            "quickstart: runtime.samplers.gpus: 0, but the nodes have GPUs, which teachers and trainers use; set 1",
        ),
        (
            "quickstart",
            ["runtime.trainers.gpus=1", "runtime.samplers.gpus=1", "method.teacher=cached"],
            "quickstart: runtime.teachers.gpus: 0, but the nodes have GPUs, which samplers and trainers use; set 1",
        ),
        (
            "quickstart",
            ["model.engine=vllm"],
            "quickstart: runtime.samplers.gpus: 0, but vLLM of the image for GPUs needs one; set 1",
        ),
        (
            "nq_mistral_7b",
            ["spec.storage={url: /mnt/storage/runs, claim: c}", "spec.network.egress=[]", "data.path=/mnt/storage/x"],
            "nq_mistral_7b: model.path: mistralai/Mistral-7B-Instruct-v0.3 would be downloaded from the hub: network",
        ),
        (
            "quickstart",
            ["spec.storage={url: /mnt/storage/runs, claim: c}", "spec.network.egress=[]", "data.path=https://host/x"],
            "quickstart: data.path: https://host/x: network.egress: no rule lets the pods connect to port 443 of host",
        ),
        (
            "quickstart",
            [f"data.path={PROJECT}/examples/toy/data.jsonl.gz"],
            "does not exist in the pods; set a URL, or the path relative to the project, examples/toy/data.jsonl.gz",
        ),
        (
            "quickstart",
            ["evaluation.also_evaluate=[TRANSFER]"],
            "mine.yaml: not in the image; copy it to pipelines/recipes/ and rebuild the image",
        ),
        (
            "nq_mistral_7b",
            ["data.path=s3://b/x", "evaluation.also_evaluate=[webq_mistral_7b]"],
            "nq_mistral_7b: evaluation.also_evaluate: webq_mistral_7b: data.path: ",
        ),
        (
            "quickstart",
            ["runtime={executor: local, trainers: {strategy: torch}}"],
            "quickstart: runtime.executor: local would run everything in the head's pod, which has no GPU, and nothing",
        ),
        (
            "quickstart",
            ["sweep={data.path: [s3://b/x, /home/me/y.jsonl]}"],
            "quickstart: data.path: /home/me/y.jsonl does not exist in the pods; set a URL",
        ),
        (
            "quickstart",
            ["sweep={model: [{path: examples/toy/model}, {path: /home/me/model}]}"],
            "quickstart: model.path: /home/me/model does not exist in the pods; set a URL",
        ),
        (
            "quickstart",
            [
                *("spec.storage={url: /mnt/storage/runs, claim: c}", "spec.network.egress=[]"),
                "sweep={model.path: [examples/toy/model, org/other]}",
            ],
            "quickstart: model.path: org/other would be downloaded from the hub: network.egress: no rule",
        ),
        (
            "quickstart",
            ["runtime.trainers.gpus=1", "runtime.samplers.gpus=1", "sweep={method.teacher: [resident, cached]}"],
            "quickstart: runtime.teachers.gpus: 0, but the nodes have GPUs, which samplers and trainers use; set 1",
        ),
        (
            "quickstart",
            [f"data.path=s3://k:{WORD}@b/x"],
            "an override contains what looks like a secret; use pods.secrets",
        ),
    ],
)
def test_check_recipe_rejects_a_recipe_that_cannot_run(
    load: Callable[..., ClusterSpec], tmp_path: Path, recipe: str, overrides: list[str], message: str
) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text((PROJECT / "pipelines" / "recipes" / "quickstart.yaml").read_text())
    of_spec = [override.removeprefix("spec.") for override in overrides if override.startswith("spec.")]
    overrides = [each.replace("TRANSFER", str(mine)) for each in overrides if not each.startswith("spec.")]
    with pytest.raises(UserError) as caught:
        check_recipe(load(*of_spec), load_job(recipe, overrides))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert WORD not in str(caught.value)


@pytest.mark.parametrize("command", ["study", "sample", "distill", "analyze"])
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (SERVER, "quickstart: model.engine: 'openai' is for the command evaluate only, got {}; set model.engine to"),
        (
            [*SERVER[2:], "sweep={model: [{engine: hf}, {engine: openai, path: gpt-x}]}"],
            "quickstart: model.engine: 'openai' is for the command evaluate only, got {}",
        ),
        (["data.train_examples=0"], "quickstart: data.train_examples: 0 is for the command evaluate only, got {}"),
    ],
    ids=["server", "sweep", "examples"],
)
def test_check_recipe_rejects_training_of_what_can_only_be_evaluated(
    load: Callable[..., ClusterSpec], command: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_recipe(load(), load_job("quickstart", overrides, command=command))
    assert str(caught.value).startswith(message.format(command))


@pytest.mark.parametrize(
    "network",
    [
        "network.egress=[{cidr: 0.0.0.0/0}, {cidr: 10.0.20.0/24, ports: [8000]}]",
        "pods.env={HTTP_PROXY: 'http://proxy.example.org:443'}",
    ],
)
def test_check_recipe_accepts_an_evaluation_of_a_server(load: Callable[..., ClusterSpec], network: str) -> None:
    """Its model is a name on the server: no path, nothing of the hub, and no disk for it."""
    spec = load(network, "model_billions=null")
    check_recipe(spec, load_job("quickstart", SERVER, command="evaluate"))
    assert render(spec, load_job("quickstart", SERVER, command="evaluate"))
    owned = [word.replace("gpt-x", "owner/gpt-x") for word in SERVER]
    assert render(spec, load_job("quickstart", owned, command="evaluate"))


def test_check_recipe_rejects_a_server_that_no_rule_allows(load: Callable[..., ClusterSpec]) -> None:
    with pytest.raises(UserError) as caught:
        check_recipe(load(), load_job("quickstart", SERVER, command="evaluate"))
    assert str(caught.value).startswith(
        "quickstart: runtime.endpoint.base_url: http://10.0.20.15:8000/v1: network.egress: no rule lets the pods "
        "connect to port 8000 of 10.0.20.15; add for example"
    )


def test_check_recipe_accepts_a_sweep_of_what_the_pods_can_open(load: Callable[..., ClusterSpec]) -> None:
    """A path of the project, as the sweep writes it, is one of the image too."""
    job = load_job("quickstart", ["sweep={data.path: [examples/toy/data.jsonl.gz, s3://b/x]}"])
    check_recipe(load(), job)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"runtime.samplers.max={'9' * 400}"], "only 2 fit on the nodes of sampling"),
        ([f"runtime.samplers={{max: {'9' * 400}, cpus: 1.0e-300}}"], "runtime.samplers.max: 999"),
        (["runtime.samplers.cpus=5.0e-324"], None),
        ([f"runtime.samplers={{max: {'9' * 400}, cpus: 0}}"], None),
    ],
    ids=range(4),
)
def test_check_recipe_compares_pools_of_any_size(
    load: Callable[..., ClusterSpec], overrides: list[str], message: str | None
) -> None:
    spec = load("sampling.node.cpus=1")
    if message is None:
        check_recipe(spec, load_job("quickstart", overrides))
    else:
        with pytest.raises(UserError, match=message):
            check_recipe(spec, load_job("quickstart", overrides))


@pytest.mark.parametrize(
    ("command", "overrides"),
    [
        ("evaluate", []),
        ("report", ["runtime.samplers.max=9"]),
        ("study", ["method.teacher=resident", "runtime.trainers={workers: 1, gpus: 1}"]),
    ],
)
def test_check_recipe_checks_the_pools_that_the_command_starts(
    load: Callable[..., ClusterSpec], command: str, overrides: list[str]
) -> None:
    """Two GPUs are enough for the samplers, without teachers."""
    pools = ["runtime.samplers={max: 2, gpus: 1}", "runtime.teachers={max: 1, gpus: 1}"]
    check_recipe(load(), load_job("quickstart", [*pools, *overrides], command=command))


def test_check_recipe_checks_the_teachers_of_an_analysis(load: Callable[..., ClusterSpec]) -> None:
    """The command adds the section `analysis` where the recipe has none."""
    job = load_job("quickstart", ["runtime.samplers.gpus=1", "runtime.teachers={max: 3, gpus: 1}"], command="analyze")
    with pytest.raises(UserError, match=r"runtime.teachers.max: 3, but only 2 fit on the nodes of sampling"):
        check_recipe(load(), job)


def test_check_recipe_leaves_room_for_data_tasks() -> None:
    """Samplers and teachers that fill all nodes would wait for tasks that find no room."""
    job = load_job("quickstart", ["runtime.samplers={max: 1, cpus: 1}", "runtime.teachers={max: 1, cpus: 1}"])
    message = r"samplers, teachers and a task that reads and stores data need 2.5 CPUs, but sampling has at most 2; "
    with pytest.raises(UserError, match=message):
        check_recipe(load_cluster("kind", ["sampling.node.cpus=2", "sampling.max=1"]), job)
    check_recipe(load_cluster("kind", ["sampling.node.cpus=2.5", "sampling.max=1"]), job)


def test_check_recipe_divides_as_decimals() -> None:
    """In floating point, 0.3 / 0.1 is less than 3, and 10 * 0.1 in fractions is more than 1."""
    for cpus, samplers in ((0.3, 3), (1, 10)):
        # Data tasks, which need room too, have nodes of their own.
        data = "data={max: 1, spot: false, node: {cpus: 1, memory: 2Gi, shm: 1Gi, scratch: 1Gi}}"
        spec = load_cluster("kind", [f"sampling.node.cpus={cpus}", "training.node.cpus=2", data])
        pools = [f"runtime.samplers={{max: {samplers}, cpus: 0.1, threads: 1}}", "runtime.teachers.cpus=0"]
        check_recipe(spec, load_job("quickstart", pools))
        pools[0] = f"runtime.samplers={{max: {samplers + 1}, cpus: 0.1, threads: 1}}"
        with pytest.raises(UserError, match=f"{samplers + 1}, but only {samplers} fit"):
            check_recipe(spec, load_job("quickstart", pools))


def test_check_recipe_offers_no_folder_of_the_project_as_storage(load: Callable[..., ClusterSpec]) -> None:
    message = r"runtime\.storage: .+/runs/x does not exist in the pods; set a URL, or remove it, for a folder of spec\."
    with pytest.raises(UserError, match=message):
        check_recipe(load(), load_job("quickstart", ["runtime.storage=runs/x"]))


def test_check_recipe_accepts_a_model_that_a_cache_may_hold(load: Callable[..., ClusterSpec]) -> None:
    volume = "pods={volumes: [{claim: m, mount: /models}], model_cache: /models/hub}"
    spec = load("storage={url: /mnt/storage/runs, claim: c}", "network.egress=[]", volume, "sampling.max=6")
    check_recipe(spec, load_job("nq_mistral_7b", ["data.path=/mnt/storage/x"]))
