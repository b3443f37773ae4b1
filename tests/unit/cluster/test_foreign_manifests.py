"""Manifests of other projects, which KubeRay accepts: stand-ins for the kinds of files that its users have."""

from pathlib import Path

import pytest

from cluster.types import Level
from cluster.validate import check, load_manifests
from pipelines.cli import command_line
from tests.support.crds import write_crds
from tests.support.manifests import changed
from tests.support.paths import PUBLISHED_CRDS

PLAIN_POD = """
        spec:
          containers:
          - {name: ray, image: "rayproject/ray:2.60.0"}
"""
GENERATED_NAME = f"""
apiVersion: ray.io/v1
kind: RayJob
metadata:
  generateName: batch-
  labels: {{kueue.x-k8s.io/queue-name: research}}
spec:
  entrypoint: python -c 'print(1)'
  shutdownAfterJobFinishes: true
  suspend: true
  rayClusterSpec:
    rayVersion: "2.60.0"
    headGroupSpec:
      rayStartParams: {{}}
      template: {PLAIN_POD}
"""
WITH_CODE_IN_A_CONFIG_MAP = f"""
apiVersion: v1
kind: ConfigMap
metadata: {{name: code}}
data:
  main.py: |
    import ray
    ray.init()
---
apiVersion: ray.io/v1
kind: RayJob
metadata: {{name: runs-code}}
spec:
  entrypoint: python /code/main.py
  runtimeEnvYAML: |
    pip: [requests==2.32.0]
    env_vars: {{COUNT: "1"}}
  deletionStrategy:
    deletionRules:
    - policy: DeleteCluster
      condition: {{jobStatus: SUCCEEDED, ttlSeconds: 30}}
  rayClusterSpec:
    headGroupSpec:
      template: {PLAIN_POD}
          - {{name: log-shipper, image: "fluent/fluent-bit:3"}}
          volumes:
          - {{name: code, configMap: {{name: code}}}}
"""
FAULT_TOLERANT = """
apiVersion: v1
kind: Secret
metadata: {name: redis}
stringData: {password: made-up-password-1}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: redis}
spec: {replicas: 1, selector: {matchLabels: {app: redis}}, template: {metadata: {labels: {app: redis}}}}
---
apiVersion: ray.io/v1
kind: RayCluster
metadata: {name: keeps-its-state}
spec:
  rayVersion: "2.60.0"
  gcsFaultToleranceOptions:
    redisAddress: redis:6379
    redisPassword: {valueFrom: {secretKeyRef: {name: redis, key: password}}}
  headGroupSpec:
    rayStartParams: {num-cpus: "0"}
    template:
      spec:
        containers:
        - name: ray-head
          image: rayproject/ray:2.60.0
          resources: {limits: {cpu: 11, memory: 75Gi}, requests: {cpu: 11000m, memory: 76800Mi}}
          volumeMounts:
          - {name: ray-token, mountPath: /var/run/token}
          lifecycle: {preStop: {exec: {command: ["/bin/sh", "-c", "ray stop"]}}}
"""
MANY_GROUPS = """
apiVersion: ray.io/v1
kind: RayCluster
metadata: {name: all-shapes, annotations: {team: research}}
spec:
  enableInTreeAutoscaling: true
  autoscalerOptions: {upscalingMode: Default, idleTimeoutSeconds: 60, resources: {limits: {cpu: 500m, memory: 512Mi}}}
  headGroupSpec:
    serviceType: LoadBalancer
    template:
      metadata: {labels: {app: ray}}
      spec:
        restartPolicy: Always
        hostNetwork: true
        containers:
        - name: head
          image: rayproject/ray:latest
          command: ["/bin/bash", "-c", "--"]
          args: ["ulimit -n 65536; $KUBERAY_GEN_RAY_START_CMD"]
          env: [{name: RAY_ENABLE_K8S_TOKEN_AUTH, value: "true"}, {name: RAY_LOG_TO_STDERR, value: "1"}]
          securityContext: {privileged: true}
  workerGroupSpecs:
  - groupName: tpu_workers
    replicas: 1
    minReplicas: 0
    maxReplicas: 4
    numOfHosts: 4
    rayStartParams: {resources: '"{\\"TPU\\": 4}"'}
    template:
      spec:
        initContainers:
        - {name: prepare, image: "busybox:1.37", command: [sh, -c, "sleep 1"]}
        containers:
        - {name: worker, image: "rayproject/ray:2.60.0-tpu", resources: {limits: {google.com/tpu: "4"}}}
        nodeSelector: {cloud.google.com/gke-tpu-topology: 2x2x4}
  - groupName: scaled-by-hand
    suspend: false
    minReplicas: 1
    maxReplicas: 1
    template: {spec: {containers: [{name: worker, image: "rayproject/ray:2.60.0", env: , ports: null}]}}
"""
SERVICE_WITH_RIGHTS = """
apiVersion: v1
kind: List
items:
- {apiVersion: v1, kind: ServiceAccount, metadata: {name: ray, namespace: one}}
- {apiVersion: v1, kind: ServiceAccount, metadata: {name: ray, namespace: two}}
- apiVersion: rbac.authorization.k8s.io/v1
  kind: Role
  metadata: {name: "team:reader"}
  rules: [{apiGroups: [""], resources: [pods], verbs: [get]}]
- {apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: disk}, spec: {accessModes: [ReadWriteOnce]}}
- {apiVersion: v1, kind: Service, metadata: {name: web}, spec: {ports: [{port: 80}]}}
- {apiVersion: ray.io/v1, kind: RayService, metadata: {name: serves}, spec: {serveConfigV2: "applications: []"}}
- apiVersion: networking.k8s.io/v1
  kind: NetworkPolicy
  metadata: {name: open}
  spec: {podSelector: {}, ingress: [{}], egress: [{to: [{ipBlock: {cidr: 10.0.0.0/8, except: [10.1.0.0/16]}}]}]}
"""
SELECTS_A_CLUSTER = """
apiVersion: ray.io/v1
kind: RayJob
metadata: {name: on-existing}
spec:
  entrypoint: python main.py
  submissionMode: HTTPMode
  clusterSelector: {ray.io/cluster: all-shapes}
"""
FILES = {
    "generated name": GENERATED_NAME,
    "config map": WITH_CODE_IN_A_CONFIG_MAP,
    "fault tolerance": FAULT_TOLERANT,
    "many groups": MANY_GROUPS,
    "service and rights": SERVICE_WITH_RIGHTS,
    "selects a cluster": SELECTS_A_CLUSTER,
}


@pytest.mark.parametrize("name", FILES)
def test_check_reports_no_error_in_what_kuberay_accepts(name: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(FILES[name])
    manifests = load_manifests(path)
    assert manifests
    crds = [None, str(PUBLISHED_CRDS)] if PUBLISHED_CRDS.is_dir() else [None]
    for source in crds:
        refused = [finding.line(name) for finding in check(manifests, source) if finding.is_refused]
        assert refused == []


def test_check_warns_of_what_is_risky_in_it(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(MANY_GROUPS)
    findings = check(load_manifests(path) or [])
    assert {finding.level for finding in findings} == {Level.WARNING}
    head = "spec.headGroupSpec.template.spec"
    assert [finding.path for finding in findings] == [
        f"{head}.hostNetwork",
        f"{head}.containers[0].securityContext.privileged",
        f"{head}.containers[0].image",
        "spec.authOptions.mode",
    ]


def test_check_accepts_authentication_that_a_variable_turns_on(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(GENERATED_NAME)
    manifest = (load_manifests(path) or [])[0]
    assert [finding.path for finding in check([manifest])] == ["spec.rayClusterSpec.authOptions.mode"]
    container = "spec.rayClusterSpec.headGroupSpec.template.spec.containers[0]"
    assert check([changed(manifest, f"{container}.env", [{"name": "RAY_AUTH_MODE", "value": "token"}])]) == []


def test_run_cluster_validate_exits_with_0_for_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(f"{MANY_GROUPS}---{SERVICE_WITH_RIGHTS}")
    assert command_line.main(["cluster", "validate", str(path)]) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert len(lines) == 4
    assert all(line.startswith(f"warning: {path}: document 1, RayCluster/all-shapes: spec.") for line in lines)
    assert printed.out == (
        "8 manifests are valid (rules only; to check the schema too, set --crds; of PersistentVolumeClaim (v1), "
        "RayService (ray.io/v1), Role (rbac.authorization.k8s.io/v1), Service (v1), the metadata only)\n"
    )


def test_run_cluster_validate_says_that_an_older_version_was_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(GENERATED_NAME.replace("ray.io/v1", "ray.io/v1alpha1"))
    assert command_line.main(["cluster", "validate", str(path)]) == 0
    printed = capsys.readouterr()
    assert "apiVersion: is 'ray.io/v1alpha1', but RayJob is served as ray.io/v1; set that" in printed.err
    assert "of RayJob (ray.io/v1alpha1), the metadata only" in printed.out


def test_run_cluster_validate_rejects_an_unknown_mode_with_and_without_crds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """KubeRay's CRD has no list of the modes; the operator refuses an unknown one."""
    path = tmp_path / "theirs.yaml"
    path.write_text(SELECTS_A_CLUSTER.replace("HTTPMode", "K8JobMode"))
    crds = write_crds(tmp_path / "crds.yaml")
    for words in ([], ["--crds", str(crds)]):
        assert command_line.main(["cluster", "validate", str(path), *words]) == 2
        line = f"error: {path}: document 1, RayJob/on-existing: spec.submissionMode: expected one of: K8sJobMode, "
        assert capsys.readouterr().err.count(line) == 1
