"""cluster/egress.py: which connections the rendered network policy may allow, and which it cannot."""

import pytest

from cluster.entrypoint import make_entrypoint
from cluster.job_command import load_job
from cluster.names import PROXIES
from cluster.spec import load_cluster
from pos2distill.errors import UserError

BUCKET = ("storage.url=s3://p2d/runs", "storage.claim=null")
DATA = "data.path=/mnt/storage/nq.jsonl"
MODEL = "model.path=/mnt/storage/model"
NO_EGRESS = "network.egress=[]"


def endpoint(address: str, variable: str = "AWS_ENDPOINT_URL") -> str:
    return f"pods.env={{{variable}: '{address}'}}"


def rule(text: str) -> str:
    return f"network.egress=[{{{text}}}]"


@pytest.mark.parametrize(
    "overrides",
    [
        [endpoint("http://minio.storage:9000"), rule("namespace: storage, ports: [9000]")],
        # A Service of port 443 with pods that listen at 9000.
        [endpoint("https://minio.storage.svc"), rule("namespace: storage, ports: [9000]")],
        [endpoint("http://10.0.20.15:9000"), rule("cidr: 10.0.0.0/8, ports: [9000]")],
        [endpoint("http://store.example.org:9000"), rule("cidr: 10.0.20.15/32, ports: [9000]")],
        [endpoint("http://10.0.20.15:9000"), rule("namespace: storage, ports: [9000]")],  # the address of a Service
        [endpoint(""), rule("cidr: 0.0.0.0/0")],
        [endpoint("https://store.example.org", "AWS_ENDPOINT_URL_S3"), rule("cidr: 0.0.0.0/0")],
        # The value in a Secret is not known.
        ["pods.secrets=[{env: AWS_ENDPOINT_URL, secret: minio, key: url}]", NO_EGRESS],
        # Through a proxy in the cluster.
        ["pods.env={HTTPS_PROXY: 'http://proxy.proxies:3128'}", rule("namespace: proxies, ports: [3128]")],
        ["pods.env={ALL_PROXY: 'socks5://proxy.proxies'}", rule("namespace: proxies, ports: [1080]")],
        ["pods.secrets=[{env: HTTPS_PROXY, secret: proxy, key: url}]", NO_EGRESS],
    ],
)
def test_load_cluster_accepts_what_a_rule_may_allow(overrides: list[str]) -> None:
    assert load_cluster("onprem", [*BUCKET, *overrides]).storage.url == "s3://p2d/runs"


OPEN_9000 = "connect to port 9000 of AWS_ENDPOINT_URL; add for example {cidr: 10.0.20.15/32, ports: [9000]} with its"
NO_SERVER = "expected the URL of a server, for example http"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([NO_EGRESS], "network.egress: s3://p2d/runs: no rule lets the pods connect to it; add for example {cidr: 0.0"),
        ([rule("namespace: storage")], "network.egress: s3://p2d/runs: no rule lets the pods connect to it; add for"),
        ([endpoint("http://minio.storage:9000"), NO_EGRESS], OPEN_9000),
        ([endpoint("http://minio.storage:9000"), rule("cidr: 0.0.0.0/0")], OPEN_9000),
        ([endpoint("http://10.0.20.15:9000"), rule("cidr: 192.168.0.0/24, ports: [9000]")], OPEN_9000),
        ([endpoint("http://[fd00::1]:9000"), rule("cidr: 10.0.0.0/8, ports: [9000]")], OPEN_9000),
        # Only 443 is open, or only another port inside.
        ([endpoint("http://8.8.4.4:9000"), "network.egress=[{cidr: 0.0.0.0/0}, {namespace: a}]"], OPEN_9000),
        (
            [rule("cidr: 10.0.0.0/8, ports: [9000]")],
            "network.egress: s3://p2d/runs: no rule lets the pods connect to it;",
        ),
        # gcsfs uses no proxy.
        (
            ["storage.url=gs://p2d/runs", endpoint("http://proxy:3128", "HTTPS_PROXY"), rule("namespace: proxies")],
            "network.egress: gs://p2d/runs: no rule lets the pods connect to it; add for example {cidr: 0.0.0.0/0}",
        ),
        ([endpoint("store.example.org:9000")], f"pods.env: AWS_ENDPOINT_URL: {NO_SERVER}://minio.storage:9000"),
        ([endpoint("http://:443")], f"pods.env: AWS_ENDPOINT_URL: {NO_SERVER}://minio.storage:9000"),
        ([endpoint("ftp://store")], f"pods.env: AWS_ENDPOINT_URL: {NO_SERVER}://minio.storage:9000"),
        ([endpoint("htp://minio.storage:9000")], f"pods.env: AWS_ENDPOINT_URL: {NO_SERVER}://minio.storage:9000"),
        ([endpoint("socks5://store:9000")], f"pods.env: AWS_ENDPOINT_URL: {NO_SERVER}://minio.storage:9000"),
        ([endpoint("http://minio:0")], f"pods.env: AWS_ENDPOINT_URL: {NO_SERVER}://minio.storage:9000"),
        ([endpoint("htp://proxy:3128", "https_proxy")], f"pods.env: https_proxy: {NO_SERVER}://proxy.example.org:3128"),
        ([endpoint("http://store:70000")], f"pods.env: AWS_ENDPOINT_URL: {NO_SERVER}://minio.storage:9000"),
        ([endpoint("http://:3128", "https_proxy")], f"pods.env: https_proxy: {NO_SERVER}://proxy.example.org:3128"),
    ],
)
def test_load_cluster_rejects_what_no_rule_can_allow(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_cluster("onprem", [*BUCKET, *overrides])
    assert message in str(error.value)


@pytest.mark.parametrize("variable", PROXIES)
def test_load_cluster_rejects_a_closed_proxy_whatever_the_storage(variable: str) -> None:
    with pytest.raises(UserError, match=f"no rule lets the pods connect to port 3128 of {variable}; add for example"):
        load_cluster("onprem", [endpoint("http://proxy.example.org:3128", variable)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([MODEL, "data.path=hf://datasets/a/b.jsonl"], "data.path: hf://datasets/a/b.jsonl: network.egress: no rule"),
        (
            [MODEL, DATA, "runtime.storage=s3://b/runs"],
            "runtime.storage: s3://b/runs: network.egress: no rule lets the",
        ),
        (
            [MODEL, "data.path=http://8.8.4.4:8080/x"],
            "data.path: http://8.8.4.4:8080/x: network.egress: no rule lets the pods connect to port 8080 of 8.8.4.",
        ),
        # The rule that the hub itself needs is there, but it opens 443 alone.
        (
            [MODEL, "data.path=http://huggingface.co/x"],
            "data.path: http://huggingface.co/x: network.egress: no rule lets the pods connect to port 80 of hugg",
        ),
        (
            [DATA],
            "model.path: mistralai/Mistral-7B-Instruct-v0.3 would be downloaded from the hub: network.egress: no r",
        ),
    ],
)
def test_make_entrypoint_rejects_what_no_rule_can_allow(words: list[str], message: str) -> None:
    spec = load_cluster("onprem", [rule("namespace: storage, ports: [9000]")])
    with pytest.raises(UserError) as error:
        make_entrypoint(spec, load_job("nq_mistral_7b", words))
    assert f"nq_mistral_7b: {message}" in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["network.egress=[{namespace: storage, ports: [80]}]"],
            [MODEL, "data.path=http://files.storage.svc/nq.jsonl"],
        ),
        (
            ["network.egress=[{namespace: mirror, ports: [8080]}]", endpoint("http://hf.mirror:8080", "HF_ENDPOINT")],
            [DATA],
        ),
        (["network.egress=[{cidr: 8.8.4.0/24, ports: [8080]}]"], [MODEL, "data.path=http://8.8.4.4:8080/x"]),
    ],
)
def test_make_entrypoint_accepts_what_a_rule_may_allow(overrides: list[str], words: list[str]) -> None:
    assert make_entrypoint(load_cluster("onprem", overrides), load_job("nq_mistral_7b", words))


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "HF_ENDPOINT"])
def test_load_cluster_rejects_an_endpoint_that_is_none_whatever_the_storage(variable: str) -> None:
    with pytest.raises(
        UserError, match=f"pods.env: {variable}: expected the URL of a server, for example http://minio"
    ):
        load_cluster("onprem", [endpoint("ftp://store", variable)])


def test_make_entrypoint_finds_the_endpoint_of_each_store() -> None:
    """The spec's own storage is on a volume, so that its endpoint matters for other URLs only."""
    spec = load_cluster("onprem", [endpoint("http://store.example.org:9000"), rule("cidr: 0.0.0.0/0")])
    assert make_entrypoint(spec, load_job("nq_mistral_7b", [MODEL, DATA]))
    with pytest.raises(UserError, match=r"data.path: s3://b/nq.jsonl: network.egress: no rule .* port 9000 of AWS_END"):
        make_entrypoint(spec, load_job("nq_mistral_7b", [MODEL, "data.path=s3://b/nq.jsonl"]))
    assert make_entrypoint(spec, load_job("nq_mistral_7b", [MODEL, "data.path=gs://b/nq.jsonl"]))


def test_make_entrypoint_writes_no_results_to_files_of_a_secret() -> None:
    spec = load_cluster("gke", ["pods.volumes=[{secret: key, mount: /key}, {claim: data, mount: /data}]"])
    with pytest.raises(
        UserError,
        match=r"runtime.storage: /key/runs does not exist in the pods; set a URL, or a folder "
        r"below /data, or remove it, for a folder of spec.storage.url$",
    ):
        make_entrypoint(spec, load_job("quickstart", ["runtime.storage=/key/runs"]))
