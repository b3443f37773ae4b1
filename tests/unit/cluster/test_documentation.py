"""The pages about clusters: shell blocks are correct shell, say whether they have been run, and name what renders."""

import re
import shlex
import subprocess
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from cluster.render import render
from cluster.spec import load_cluster
from cluster.validate import check
from pipelines.cli import command_line
from tests.support.paths import CLUSTER_PAGES

PAGE = "".join(page.read_text() for page in CLUSTER_PAGES)
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def mapping(*required: str, **fields: Any) -> dict[str, Any]:
    """The schema of a mapping with these fields and no others."""
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT, "minItems": 1}


def list_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


# The fields that the page uses of a PersistentVolumeClaim and a Pod (Kubernetes 1.34), and of eksctl's ClusterConfig
# (https://eksctl.io/usage/schema).
CLAIM = mapping(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "v1"},
    kind={"const": "PersistentVolumeClaim"},
    metadata=mapping("name", name=TEXT),
    spec=mapping(
        *("accessModes", "resources"),
        storageClassName=TEXT,
        accessModes=list_of({"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]}),
        resources=mapping("requests", requests=mapping("storage", storage={"pattern": "^[1-9][0-9]*[MGT]i$"})),
    ),
)
CONTAINER = mapping(
    *("name", "image", "command", "securityContext"),
    name=TEXT,
    image=TEXT,
    command=TEXTS,
    securityContext=mapping(
        *("allowPrivilegeEscalation", "capabilities"),
        allowPrivilegeEscalation={"const": False},
        capabilities=mapping("drop", drop={"const": ["ALL"]}),
    ),
    volumeMounts=list_of(mapping("name", "mountPath", name=TEXT, mountPath=TEXT)),
)
CLAIM_VOLUME = mapping(
    *("name", "persistentVolumeClaim"),
    name=TEXT,
    persistentVolumeClaim=mapping("claimName", claimName=TEXT),
)
POD = mapping(
    *("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "v1"},
    kind={"const": "Pod"},
    metadata=mapping("name", name=TEXT),
    spec=mapping(
        *("containers", "securityContext"),  # the level `restricted` of Pod Security
        imagePullSecrets=list_of(mapping("name", name=TEXT)),
        securityContext=mapping(
            *("runAsNonRoot", "seccompProfile"),
            runAsNonRoot={"const": True},
            runAsUser=NUMBER,
            fsGroup=NUMBER,
            seccompProfile=mapping("type", type={"const": "RuntimeDefault"}),
        ),
        containers=list_of(CONTAINER),
        volumes=list_of(CLAIM_VOLUME),
    ),
)
STATEMENT = mapping(*("Effect", "Action", "Resource"), Effect={"enum": ["Allow", "Deny"]}, Action=TEXTS, Resource=TEXT)
ACCOUNT = mapping(
    "metadata",
    metadata=mapping("name", "namespace", name=TEXT, namespace=TEXT),
    wellKnownPolicies=mapping(autoScaler=FLAG),
    roleName=TEXT,
    roleOnly=FLAG,
    attachPolicy=mapping("Version", "Statement", Version={"const": "2012-10-17"}, Statement=list_of(STATEMENT)),
)
NODE_GROUP = mapping(
    *("name", "instanceType", "desiredCapacity", "volumeSize"),
    **dict.fromkeys(("name", "instanceType"), TEXT),
    **dict.fromkeys(("minSize", "desiredCapacity", "maxSize", "volumeSize"), NUMBER),
    **dict.fromkeys(("spot", "propagateASGTags"), FLAG),
    taints=list_of(
        mapping(
            *("key", "effect"),
            key=TEXT,
            value=TEXT,
            effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
        )
    ),
    tags={"type": "object", "additionalProperties": TEXT},
)
CLUSTER_CONFIG = mapping(
    *("apiVersion", "kind", "metadata", "managedNodeGroups"),
    apiVersion={"const": "eksctl.io/v1alpha5"},
    kind={"const": "ClusterConfig"},
    metadata=mapping("name", "region", name=TEXT, region=TEXT),
    addons=list_of(mapping("name", name=TEXT, configurationValues=TEXT)),
    iam=mapping(withOIDC=FLAG, serviceAccounts=list_of(ACCOUNT)),
    managedNodeGroups=list_of(NODE_GROUP),
)


def commands() -> list[tuple[str, list[str]]]:
    """The words of every `run.py cluster` command that renders, after the preset that was last copied."""
    found = []
    for block in BLOCKS:
        preset = "gke"
        for line in block.splitlines():
            copied = re.match(r"cp cluster/presets/(\w+)\.yaml my_cluster.yaml", line)
            if copied:
                preset = copied[1]
            if re.match(r"python run.py cluster (render|validate|submit) (?!manifests)", line):
                found.append((preset, shlex.split(line, comments=True)[4:]))
    return found


def test_page_has_the_blocks_that_are_checked() -> None:
    assert len(BLOCKS) >= 7
    assert len(commands()) >= 7


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_is_correct_shell_and_says_whether_it_has_been_run(block: str) -> None:
    done = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.match(r"# (not run|run)\b", block)


@pytest.mark.parametrize(("preset", "words"), commands(), ids=lambda value: str(value)[:60])
def test_command_renders_valid_manifests(preset: str, words: list[str]) -> None:
    spec, *rest = words
    rest = rest[: rest.index("--out")] if "--out" in rest else rest
    name = preset if spec == "my_cluster.yaml" else spec
    assert command_line.main(["cluster", "render", name, *rest]) == 0


def test_eks_cluster_gives_the_autoscaler_the_disks_that_the_preset_needs() -> None:
    """A group without nodes has only what its tags say."""
    text = re.search(r"cat > eks_cluster.yaml <<'END'\n(.*?)^END$", PAGE, re.MULTILINE | re.DOTALL)
    assert text
    groups = {group["name"]: group for group in yaml.safe_load(text[1])["managedNodeGroups"]}
    spec = load_cluster("eks", ["platform=eks"])
    for name in ("sampling", "training"):
        node = spec.groups[name].node
        assert groups[name]["instanceType"] == node.instance_type
        assert groups[name]["maxSize"] == spec.groups[name].max
        assert groups[name]["tags"]["k8s.io/cluster-autoscaler/node-template/resources/ephemeral-storage"] == node.disk
        assert groups[name]["propagateASGTags"]
        assert groups[name]["taints"][0]["key"] == "nvidia.com/gpu"


def test_objects_of_the_page_fit_their_schemas() -> None:
    schemas = {"PersistentVolumeClaim": CLAIM, "Pod": POD, "ClusterConfig": CLUSTER_CONFIG}
    texts = re.findall(r"<<'END'\n(.*?)^END$", PAGE, re.MULTILINE | re.DOTALL)
    objects = [yaml.safe_load(text) for text in texts]
    assert {each["kind"] for each in objects} == set(schemas)
    for each in objects:
        errors = [error.message for error in Draft202012Validator(schemas[each["kind"]]).iter_errors(each)]
        assert errors == []


def test_yaml_blocks_are_parts_of_a_spec() -> None:
    blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        overrides = [
            f"{name}={yaml.safe_dump(value, default_flow_style=True).strip()}"
            for name, value in yaml.safe_load(block).items()
        ]
        assert check(render(load_cluster("gke", overrides))) == []
