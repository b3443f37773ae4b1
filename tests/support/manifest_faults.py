"""Faults of manifests, one each, by the level of what is reported: the path, the value, and a part of the line.

The base is a rendered job (`tests/unit/cluster/test_rules.py`). In a path, ~ is a dot inside a name. As a value, ...
removes the field.
"""

from typing import Any

from cluster.types import Level

CLUSTER = "spec.rayClusterSpec"
HEAD = f"{CLUSTER}.headGroupSpec"
SAMPLING, TRAINING = (f"{CLUSTER}.workerGroupSpecs[{index}]" for index in (0, 1))
POD = "template.spec"
RAY = f"{POD}.containers[0]"
COLLECTOR = f"{CLUSTER}.historyServerOptions.collectorOptions"
SUBMITTER = "spec.submitterPodTemplate"
WORKERS = "runtime.trainers.workers=8"
WORD = "hunter2"  # in the position of a password
VARIABLE = {"name": "A", "value": "b"}


def environment(**variables: str) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def node_affinity(key: str, operator: str, *values: str) -> dict[str, Any]:
    expression = {"key": key, "operator": operator, **({"values": list(values)} if values else {})}
    terms = [{"matchExpressions": [expression]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


LOST_NODE: list[dict[str, Any]] = [
    {"key": f"node.kubernetes.io/{name}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    for name in ("not-ready", "unreachable")
]
TOKEN_VOLUME = {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}

ERRORS: list[tuple[str, Any, str]] = [
    ("kind", "RayJbo", "kind: 'RayJbo' is not a KubeRay kind; set one of RayJob, RayCluster"),
    ("apiVersion", "ray.io/v2", "apiVersion: 'ray.io/v2' is not a KubeRay version; set ray.io/v1"),
    (f"{HEAD}.{RAY}.image", ..., "image: missing; KubeRay sets none, and Kubernetes rejects the pod"),
    (f"{SAMPLING}.{RAY}.image", "", "image: missing; KubeRay sets none, and Kubernetes rejects the pod"),
    ("kind", ["RayJob"], "kind: expected a string (in quotes), got a list"),
    ("kind", ..., "kind: missing; add it"),
    ("apiVersion", ..., "apiVersion: missing; add it"),
    ("metadata", None, "metadata: expected a mapping, got nothing"),
    ("metadata", [], "metadata: expected a mapping, got a list"),
    ("metadata.name", ..., "metadata.name: missing; set it"),
    ("metadata.name", "a" * 48, "metadata.name: has 48 characters; shorten it to 47"),
    ("metadata.name", "a" * 100_000, "metadata.name: has 100000 characters; shorten it to 47"),
    ("metadata.name", "9lives", "metadata.name: '9lives' is not a valid DNS label; use a to z"),
    ("metadata.name", 5, "metadata.name: expected a string (in quotes), got a number"),
    ("metadata.anotations", {}, "metadata.anotations: unknown field; did you mean 'annotations'?"),
    ("metadata.labels.team", "a b", "metadata.labels.team: 'a b' is not a valid label; use at most"),
    ("metadata.labels.a b", "x", "metadata.labels.a b: is not a valid key; use at most"),
    ("metadata.labels.team", True, "metadata.labels.team: expected a string (in quotes), got true or false"),
    ("spec", None, "spec: expected a mapping, got nothing"),
    ("spec", "x", "spec: expected a mapping, got a string"),
    ("spec.entrypoint", 5, "spec.entrypoint: expected a string (in quotes), got a number"),
    ("spec.backoffLimit", True, "spec.backoffLimit: expected an integer, got true or false"),
    ("spec.backoffLimit", -1, "spec.backoffLimit: is -1; set it to 0 or more"),
    ("spec.ttlSecondsAfterFinished", -1, "spec.ttlSecondsAfterFinished: is -1; set it to 0 or more"),
    ("spec.activeDeadlineSeconds", 0, "spec.activeDeadlineSeconds: is 0; set it to 1 or more"),
    ("spec.preRunningDeadlineSeconds", 0, "spec.preRunningDeadlineSeconds: is 0; set it to 1 or more"),
    ("spec.shutdownAfterJobFinishes", False, "spec.ttlSecondsAfterFinished: requires shutdownAfterJobFinishes: true"),
    ("spec.submissionMode", "K8JobMode", "spec.submissionMode: expected one of: K8sJobMode, HTTPMode"),
    ("spec.rayClusterSpec", ..., "spec.rayClusterSpec: missing; describe the job's cluster"),
    (f"{CLUSTER}.workerGroupSpecs", "x", "workerGroupSpecs: expected a list, got a string"),
    (f"{CLUSTER}.workerGroupSpecs[0]", None, "workerGroupSpecs[0]: expected a mapping, got nothing"),
    (f"{CLUSTER}.rayVersion", ..., "rayVersion: missing: authOptions requires it; set the version in the image"),
    (f"{CLUSTER}.rayVersion", "2.51.0", "rayVersion: authOptions requires Ray 2.52 or newer, got 2.51.0; use a newer"),
    (f"{CLUSTER}.rayVersion", "new", "rayVersion: 'new' is not a valid version; expected for example 2.60.0"),
    (f"{CLUSTER}.authOptions.mode", "tokn", "authOptions.mode: expected one of: disabled, token"),
    (f"{CLUSTER}.autoscalerOptions.version", "v1", "idleTimeoutSeconds: requires autoscaler v2; set"),
    (f"{HEAD}.{POD}.restartPolicy", "Always", "restartPolicy: is Always, but autoscaler v2 replaces pods itself; set"),
    (f"{HEAD}.template", {}, "headGroupSpec.template.spec.containers: missing; a pod requires the Ray container"),
    (f"{SAMPLING}.{POD}.containers", [], "containers: missing; a pod requires the Ray container"),
    (f"{SAMPLING}.minReplicas", 99, "minReplicas: 99 is more than maxReplicas, 16; lower it"),
    (f"{SAMPLING}.minReplicas", -1, "minReplicas: is -1; set 0 or more"),
    (f"{SAMPLING}.maxReplicas", -1, "maxReplicas: is -1; set 0 or more"),
    (f"{SAMPLING}.maxReplicas", "8", "maxReplicas: expected an integer, got a string"),
    (f"{SAMPLING}.idleTimeoutSeconds", -5, "idleTimeoutSeconds: is negative; set 0 or more"),
    (f"{SAMPLING}.rayStartParams", [], "rayStartParams: expected a mapping, got a list"),
    (f"{SAMPLING}.rayStartParams.num-gpus", "1", "rayStartParams.num-gpus: is not supported together with"),
    (f"{SAMPLING}.rayStartParams.labels", "a=b", "rayStartParams.labels: is not supported; set"),
    (f"{SAMPLING}.resources.sampler", 1, "resources.sampler: expected a string (in quotes), got a number"),
    (f"{SAMPLING}.labels.a~~b/x", "y", "labels.a..b/x: is not a valid key; use at most 63"),
    (f"{SAMPLING}.labels.{'p' * 254}/x", "y", "is not a valid key; use at most 63"),
    (f"{SAMPLING}.{POD}.tolerations", {}, "tolerations: expected a list, got a mapping"),
    (f"{SAMPLING}.{POD}.nodeSelector.pool", "a b", "nodeSelector.pool: 'a b' is not a valid label"),
    (f"{SAMPLING}.{POD}.hostNetwork", "yes", "hostNetwork: expected true or false, got a string"),
    (f"{SAMPLING}.{RAY}.resources.limits.cpu", "many", "limits.cpu: is not a valid quantity; expected for example 4"),
    (f"{SAMPLING}.{RAY}.resources.limits.cpu", -1, "limits.cpu: is not a valid quantity; expected for example 4"),
    (f"{SAMPLING}.{RAY}.resources.requests.cpu", "14001m", "requests.cpu: 14001m is more than the limit, 14; lower it"),
    (f"{SAMPLING}.{RAY}.imagePullPolicy", "Sometimes", "imagePullPolicy: expected one of: Always, IfNotPresent, Never"),
    (f"{SAMPLING}.{POD}.volumes[0].name", "scratch", "volumes[1].name: there are two volumes 'scratch'; remove one"),
    (f"{SAMPLING}.{POD}.volumes[0].secret", {}, "volumes[0].secret: is a second source, beside emptyDir; remove one"),
    (f"{SAMPLING}.{RAY}.volumeMounts[1].mountPath", "/tmp", "volumeMounts[1].mountPath: is used twice in this"),
    (f"{SAMPLING}.{RAY}.env[0].name", "A B", "env[0].name: is not a valid name of an environment variable; set one"),
    (f"{SAMPLING}.{RAY}.env[0].value", 1, "env[0].value: expected a string (in quotes), got a number"),
    (
        f"{SAMPLING}.{RAY}.env[0]",
        {**VARIABLE, "valueFrom": {"fieldRef": {"fieldPath": "x"}}},
        "env[0].valueFrom: is not supported together with value; remove one of them",
    ),
    (f"{SAMPLING}.{POD}.containers[1]", {"name": "ray-worker"}, "containers[1].name: 'ray-worker' is used twice in"),
    ("metadata.annotations.a b", "x", "metadata.annotations.a b: is not a valid key; use at most 63 letters"),
    (f"{HEAD}.template.metadata.annotations.{'a' * 64}", "x", "is not a valid key; use at most 63 letters"),
    ("metadata.annotations", {"a": "x" * 300_000}, "metadata.annotations: have 300001 bytes; shorten them to 262144"),
    *(
        (f"{SAMPLING}.{POD}.tolerations[0]", toleration, f"tolerations[0].{message}")
        for toleration, message in (
            ({"key": "a b", "operator": "Exists"}, "key: is not a valid key; use at most 63"),
            ({"key": "a", "operator": "Exist"}, "operator: 'Exist' is unknown; did you mean 'Exists'?"),
            ({"operator": "Equal"}, "operator: a toleration of all taints requires Exists; set it, or a key"),
            ({"key": "a", "operator": "Exists", "value": "b"}, "value: is not supported with the operator Exists"),
            ({"key": "a", "value": "b c"}, "value: 'b c' is not a valid value; use at most 63 letters and digits"),
            ({"key": "a", "effect": "NoScheduled"}, "effect: 'NoScheduled' is unknown; did you mean 'NoSchedule'?"),
            (
                {"key": "a", "effect": "NoSchedule", "tolerationSeconds": 60},
                "tolerationSeconds: requires the effect NoExecute; set that, or remove it",
            ),
        )
    ),
    (f"{HEAD}.{POD}.priorityClassName", "High", "priorityClassName: 'High' is not a valid name; use a to z"),
    (f"{HEAD}.{POD}.serviceAccountName", "a_b", "serviceAccountName: 'a_b' is not a valid name; use a to z"),
    (
        f"{SAMPLING}.{RAY}.env[1]",
        {"name": "T", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b/c"}}},
        "secretKeyRef.key: is not a valid key of a Secret; use letters, digits",
    ),
    (f"{HEAD}.{RAY}.ports[0].containerPort", 70000, "ports[0].containerPort: is 70000; set a number from 1 to 65535"),
    (f"{HEAD}.{RAY}.ports[0].protocol", "tcp", "ports[0].protocol: 'tcp' is not a protocol; did you mean 'TCP'?"),
    (
        f"{SAMPLING}.{RAY}.resources.limits.gpu",
        "1",
        "limits.gpu: is not a resource; set one of cpu, memory, ephemeral-storage, or of",
    ),
    (
        f"{SAMPLING}.{RAY}.resources.limits.ephemeral_storage",
        "1Gi",
        "limits.ephemeral_storage: is not a resource; set one of cpu, memory, ephemeral-storage, or of a device, such",
    ),
    (f"{SAMPLING}.{RAY}.resources.limits.rdma/h c", "1", "limits.rdma/h c: is not a resource; set one of"),
    (f"{SAMPLING}.{RAY}.resources.limits.nvidia~com/gpu", "0.5", "limits.nvidia.com/gpu: 0.5 is not a whole number"),
    (f"{SUBMITTER}.spec", [], "submitterPodTemplate.spec: expected a mapping, got a list"),
    (f"{CLUSTER}.historyServerOptions", {"a": 1}, "historyServerOptions.collectorOptions: missing; set the image and"),
    (COLLECTOR, {"image": "a/b:1"}, "collectorOptions.env: STORAGE_BACKEND is missing; set for example gcs, and GCS_"),
    (COLLECTOR, {"env": environment(STORAGE_BACKEND="gcs", GCS_BUCKET="b")}, "collectorOptions.image: missing; set it"),
    (COLLECTOR, {"image": "", "env": environment(STORAGE_BACKEND="gcs", GCS_BUCKET="b")}, "image: missing; set it"),
    (
        COLLECTOR,
        {"image": "a/b:1", "env": environment(STORAGE_BACKEND="s3", S3_REGION="")},
        "collectorOptions.env: S3_REGION is missing, which s3 requires; set it",
    ),
    (
        COLLECTOR,
        {"image": "a/b:1", "env": [*environment(STORAGE_BACKEND="gcs"), {"name": "GCS_BUCKET"}]},
        "collectorOptions.env: GCS_BUCKET is missing, which gcs requires; set it",
    ),
    (COLLECTOR, {"env": environment(STORAGE_BACKEND="S3")}, "env: S3_REGION is missing, which S3 requires; set it"),
    (
        COLLECTOR,
        {"env": environment(STORAGE_BACKEND="gcs", GCS_BUCKET="b", POD_IP="1")},
        "collectorOptions.env[2].name: POD_IP is set by KubeRay itself; remove it",
    ),
]
POLICIES: list[tuple[str, Any, str]] = [
    (COLLECTOR, {"image": "kuberay/collector:nightly"}, "'kuberay/collector:nightly' may change between pods; name a"),
    ("apiVersion", "ray.io/v1alpha1", "apiVersion: is 'ray.io/v1alpha1', but RayJob is served as ray.io/v1; set that"),
    ("kind", "RayCronJob", "kind: 'RayCronJob' is not rendered here; did you mean 'RayJob'?"),
    ("spec.entrypoint", ..., "spec.entrypoint: missing; set the command"),
    ("spec.activeDeadlineSeconds", ..., "spec.activeDeadlineSeconds: missing: a job that hangs would keep its GPUs"),
    ("spec.preRunningDeadlineSeconds", 604800, "604800 is not before activeDeadlineSeconds, 172800; lower it"),
    ("spec.suspend", True, "spec.suspend: without a queue, the job would never start; remove it"),
    ("spec.entrypointNumCpus", 2, "spec.entrypointNumCpus: the driver runs on the head, which offers no resources"),
    ("spec.entrypointNumGpus", 1, "spec.entrypointNumGpus: the driver runs on the head, which offers no resources"),
    ("spec.shutdownAfterJobFinishes", ..., "spec.shutdownAfterJobFinishes: missing: the cluster would stay after"),
    (
        "metadata.labels.kueue~x-k8s~io/queue-name",
        "research",
        "queue-name: Kueue rejects clusters that autoscale; remove",
    ),
    ("metadata.labels.app~kubernetes~io/instance", "x", "instance: is not that of the object; set x"),
    ("metadata.labels.app~kubernetes~io/instance", ..., "instance: missing; set the name of the cluster"),
    (f"{CLUSTER}.authOptions", ..., "authOptions.mode: anyone who can reach the head may run code on it; set token"),
    (f"{CLUSTER}.enableInTreeAutoscaling", False, "enableInTreeAutoscaling: is off, so that 'sampling' never grows"),
    (SAMPLING, ..., "workerGroupSpecs: no group for sampling; add one with the resource sampler"),
    (TRAINING, ..., "workerGroupSpecs: no group for training; add one with the resource trainer"),
    (f"{CLUSTER}.workerGroupSpecs", [], "workerGroupSpecs: no group for sampling; add one with the resource sampler"),
    (f"{HEAD}.rayStartParams.num-cpus", "4", 'rayStartParams.num-cpus: the head must not run work; set "0"'),
    (f"{HEAD}.rayStartParams.num-cpus", ..., 'rayStartParams.num-cpus: the head must not run work; set "0"'),
    (f"{HEAD}.rayStartParams.dashboard-host", "127.0.0.1", "dashboard-host: other pods cannot reach the dashboard"),
    (f"{HEAD}.serviceType", "LoadBalancer", "serviceType: opens the dashboard to other networks; remove it"),
    (f"{HEAD}.{RAY}.resources.limits.nvidia~com/gpu", "1", "the head runs no work and needs no GPU; remove it"),
    (f"{HEAD}.labels", {"pool": "trainer", "routing": "pools"}, "headGroupSpec.labels: the head must not be in a pool"),
    (f"{HEAD}.labels", ..., "headGroupSpec.labels.routing: missing: work would be placed on nodes of any pool; set"),
    (f"{SAMPLING}.replicas", 99, "replicas: 99 is not between minReplicas and maxReplicas; set 0"),
    (f"{SAMPLING}.maxReplicas", 0, "maxReplicas: is 0, so that work for this group waits forever; set 1 or more"),
    (f"{SAMPLING}.numOfHosts", 2, "numOfHosts: is 2, but a replica must be one node; set 1"),
    (f"{SAMPLING}.suspend", True, "suspend: the group would have no nodes; remove it"),
    (f"{SAMPLING}.groupName", "training", "groupName: 'training' is used twice; rename one"),
    (f"{SAMPLING}.groupName", "Sampling_A", "groupName: is not a valid part of a pod's name; use a to z"),
    (f"{SAMPLING}.labels.ray-subcluster", ..., "labels: no work is placed on this group; set ray-subcluster: sampling"),
    (f"{SAMPLING}.labels.ray-subcluster", "smapling", "ray-subcluster: 'smapling' is not a pool; set sampling"),
    (f"{SAMPLING}.resources", ..., "resources.sampler: missing on nodes for sampling; set one for each GPU"),
    (f"{SAMPLING}.resources.sampler", "0", 'resources.sampler: expected one for each GPU; set "1"'),
    (f"{SAMPLING}.resources.trainer", "1", "provides both sampling and training; make two groups of it"),
    (f"{TRAINING}.resources.trainer", "1", 'resources.trainer: expected one for each GPU; set "8"'),
    (f"{TRAINING}.resources.trainer", "eight", 'resources.trainer: expected one for each GPU; set "8"'),
    (f"{TRAINING}.labels.ray-subcluster", "sampling", "ray-subcluster: with this label, training never gets its nodes"),
    (f"{TRAINING}.labels.pool", ..., "labels.pool: missing on nodes for training; set trainer"),
    (f"{TRAINING}.resources", ..., "resources.trainer: missing on nodes for training; set one for each"),
    (f"{TRAINING}.labels.ray~io/market-type", "spot", "training must not use spot machines, since the loss of one"),
    (
        f"{TRAINING}.{POD}.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
        [{"matchExpressions": [{"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot"]}]}],
        "training must not use spot machines, since the loss of one",
    ),
    (f"{TRAINING}.{RAY}.resources.limits.nvidia~com/gpu", ..., "missing: training needs GPUs; set the number of a pod"),
    (f"{TRAINING}.{POD}.tolerations", [], "tolerations: missing for nvidia.com/gpu: machines with GPUs are tainted"),
    (
        f"{SAMPLING}.{POD}.nodeSelector",
        {"nvidia.com/gpu.count": "0"},
        "1 GPUs, but the selected machines have 0, so that the pod would wait forever; lower it",
    ),
    (
        f"{TRAINING}.{POD}.nodeSelector.node~kubernetes~io/instance-type",
        "g6.12xlarge",
        "8 GPUs, but g6.12xlarge has 4, so that the pod would wait forever",
    ),
    (f"{TRAINING}.{POD}.terminationGracePeriodSeconds", 500, "must be a number below terminationGracePeriodSeconds, 5"),
    (f"{TRAINING}.{RAY}.env", [], "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S is missing: work stops after 30 s; set"),
    (f"{SAMPLING}.{RAY}.resources.requests.cpu", "1", "requests.cpu: 1 is not the limit, 14, which the machine may"),
    (
        f"{TRAINING}.{RAY}.resources.limits.ephemeral-storage",
        ...,
        "limits.ephemeral-storage: missing, although it is requested; set it to the request",
    ),
    (f"{SAMPLING}.{RAY}.resources.limits.memory", ..., "limits.memory: missing: Ray takes the size of its node from"),
    (f"{SAMPLING}.{RAY}.resources.limits.memory", "2Gi", "limits.memory: must be more than the volume at /dev/shm"),
    (f"{SAMPLING}.rayStartParams.object-store-memory", "9" * 16, "object-store-memory: is more than the volume at"),
    (f"{SAMPLING}.rayStartParams.object-store-memory", "12Gi", "object-store-memory: expected a number of bytes"),
    (f"{SAMPLING}.{POD}.volumes[2].emptyDir", {}, "volumeMounts: no volume in memory at /dev/shm; mount an emptyDir"),
    (f"{SAMPLING}.{RAY}.volumeMounts[2]", ..., "volumeMounts: no volume in memory at /dev/shm; mount an emptyDir"),
    (f"{SAMPLING}.{RAY}.image", "repo/p:latest", "image: 'repo/p:latest' may change between pods; name a version"),
    (f"{SAMPLING}.{RAY}.image", "repo/other:1", "containers[0].image: is not that of the head; set"),
    (f"{SUBMITTER}.spec.containers[0].image", "busybox:1.37", "submitterPodTemplate.spec.containers[0].image: is not"),
    (f"{SAMPLING}.{POD}.volumes[0].name", "temp", "volumeMounts[0].name: there is no volume 'tmp'; add it"),
    (f"{SAMPLING}.{RAY}.volumeMounts", [], "volumeMounts: Ray writes to /tmp, which is read-only; mount an emptyDir"),
    (f"{SAMPLING}.{RAY}.env[0].value", "/home/ray", "env: HOME is not on a mounted volume, so caches cannot be"),
    (f"{SAMPLING}.{RAY}.env[0]", ..., "env: HOME is not on a mounted volume, so caches cannot be written"),
    (f"{SAMPLING}.{RAY}.env[1].name", "HOME", "env[1].name: 'HOME' is set twice; remove one"),
    (f"{SAMPLING}.{RAY}.env[1].name", "RAY_AUTH_MODE", "env[1].name: 'RAY_AUTH_MODE' is set by KubeRay; remove it"),
    *(
        (f"{HEAD}.{RAY}.env[1].name", name, f"env[1].name: '{name}' is set by KubeRay; remove it")
        for name in ("RAY_enable_autoscaler_v2", "RAY_REDIS_ADDRESS", "REDIS_USERNAME")
    ),
    (
        f"{CLUSTER}.autoscalerOptions.env[1]",
        {"name": "KUBERAY_GEN_AUTOSCALER_START_CMD", "value": "x"},
        "autoscalerOptions.env[1].name: 'KUBERAY_GEN_AUTOSCALER_START_CMD' is set by KubeRay; remove it",
    ),
    *(
        (
            "spec.submissionMode",
            mode,
            "submissionMode: has no submitter of its own that waits for the job; set K8sJobMode",
        )
        for mode in ("InteractiveMode", "SidecarMode")
    ),
    (f"{HEAD}.{RAY}.env[1].name", "RAY_ADDRESS", "env[1].name: 'RAY_ADDRESS' is set by KubeRay; remove it"),
    (
        f"{SAMPLING}.{RAY}.env[1]",
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "", "key": "token"}}},
        "secretKeyRef.name: name and key of the Secret are required; set both",
    ),
    (f"{SAMPLING}.{RAY}.env[0]", {"name": "DB_PASS", "value": WORD}, "'DB_PASS' looks like a secret in clear"),
    (
        f"{CLUSTER}.autoscalerOptions.env[1]",
        {"name": "API_TOKEN", "value": WORD},
        "autoscalerOptions.env[1].value: 'API_TOKEN' looks like a secret in clear text; use valueFrom.secretKeyRef",
    ),
    (f"{SAMPLING}.{RAY}.args", [f"--url=https://me:{WORD}@host/x"], "args[0]: contains what looks like a secret; use"),
    (
        "spec.runtimeEnvYAML",
        f"env_vars:\n  PGPASSWORD: {WORD}\n",
        "spec.runtimeEnvYAML: contains what looks like a secret; use a Kubernetes Secret",
    ),
    (f"{SAMPLING}.{RAY}.securityContext.readOnlyRootFilesystem", ..., "readOnlyRootFilesystem: writable by default"),
    (f"{SAMPLING}.{RAY}.securityContext.allowPrivilegeEscalation", ..., "allowPrivilegeEscalation: allowed by default"),
    (f"{SAMPLING}.{RAY}.securityContext.capabilities", ..., "capabilities.drop: capabilities are kept by default; set"),
    (f"{SAMPLING}.{RAY}.securityContext.capabilities.add", ["SYS_ADMIN"], "capabilities.add: adds a capability again"),
    (f"{SAMPLING}.{RAY}.securityContext.privileged", True, "privileged: gives the container all rights on the host"),
    (f"{SAMPLING}.{RAY}.securityContext.runAsNonRoot", False, "runAsNonRoot: the container may run as root; remove it"),
    (f"{SAMPLING}.{RAY}.securityContext.seccompProfile", {"type": "Unconfined"}, "seccompProfile.type: every system"),
    (f"{SAMPLING}.{POD}.securityContext.runAsNonRoot", ..., "runAsNonRoot: missing: the pod may run as root; set true"),
    (f"{SAMPLING}.{POD}.securityContext.runAsUser", 0, "securityContext.runAsUser: 0 is root; set for example 1000"),
    (f"{SAMPLING}.{POD}.securityContext.seccompProfile", ..., "seccompProfile: missing: every system call is allowed"),
    (f"{SAMPLING}.{POD}.initContainers", [{"name": "a", "image": "b"}], "initContainers[0].image: 'b' may change"),
    (
        f"{SAMPLING}.{POD}.initContainers",
        [{"name": "a", "image": "b:1", "securityContext": {"runAsUser": 0}}],
        "initContainers[0].securityContext.runAsUser: 0 is root; set for example 1000",
    ),
    (f"{SAMPLING}.{POD}.automountServiceAccountToken", True, "automountServiceAccountToken: gives all containers of"),
    (f"{SAMPLING}.{POD}.hostNetwork", True, "hostNetwork: gives the pod access to the host; remove it"),
    (f"{SAMPLING}.{POD}.volumes[0]", {"name": "tmp", "hostPath": {"path": "/"}}, "hostPath: gives the pod files of"),
    (f"{SAMPLING}.{POD}.volumes[0]", {"name": "tmp", "nfs": {"path": "/"}}, "volumes[0].nfs: is not permitted by Pod"),
    (f"{SAMPLING}.{POD}.securityContext.appArmorProfile", {"type": "Unconfined"}, "type: takes the machine's AppArmor"),
    (f"{SAMPLING}.{RAY}.securityContext.appArmorProfile", {"type": "Unconfined"}, "type: takes the machine's AppArmor"),
    (f"{SAMPLING}.{RAY}.securityContext.seLinuxOptions", {"type": "spc_t"}, "seLinuxOptions: takes the pod out of"),
    (f"{SAMPLING}.{POD}.securityContext.seLinuxOptions", {"user": "root"}, "seLinuxOptions: takes the pod out of"),
    (f"{HEAD}.headService", {"spec": {"type": "LoadBalancer"}}, "headService.spec.type: opens the dashboard to other"),
    (f"{HEAD}.enableIngress", True, "headGroupSpec.enableIngress: opens the dashboard to other networks; remove it"),
    # The head stays where it is as long as it can, and is replaced where it cannot.
    *(
        (
            f"{HEAD}.{POD}.nodeSelector",
            {key: value},
            "nodeSelector: the head must not be on machines that the cloud may",
        )
        for key, value in (
            ("karpenter.sh/capacity-type", "spot"),
            ("eks.amazonaws.com/capacityType", "SPOT"),
            ("cloud.google.com/gke-spot", "true"),
            ("cloud.google.com/gke-preemptible", "true"),
            ("kubernetes.azure.com/scalesetpriority", "spot"),
        )
    ),
    (f"{HEAD}.labels.ray~io/market-type", "spot", "nodeSelector: the head must not be on machines that the cloud may"),
    (
        f"{HEAD}.{POD}",
        {"affinity": node_affinity("cloud.google.com/gke-spot", "Exists")},
        "headGroupSpec.template.spec.nodeSelector: the head must not be on machines that the cloud may reclaim; use",
    ),
    (
        f"{HEAD}.{POD}",
        {"affinity": node_affinity("karpenter.sh/capacity-type", "In", "on-demand", "spot")},
        "headGroupSpec.template.spec.nodeSelector: the head must not be on machines that the cloud may reclaim; use",
    ),
    (
        f"{SUBMITTER}.spec.nodeSelector",
        {"karpenter.sh/capacity-type": "spot"},
        "nodeSelector: the submitter must not be on machines that the cloud may reclaim; use on-demand machines",
    ),
    *(
        (
            f"{HEAD}.{POD}.tolerations",
            tolerations,
            "tolerations: the head stays on a lost node too long; tolerate node.kubernetes.io/",
        )
        for tolerations in (
            [],
            LOST_NODE[:1],
            LOST_NODE[1:],
            [{"operator": "Exists"}, *LOST_NODE],
            [{**LOST_NODE[0], "tolerationSeconds": 300}, LOST_NODE[1]],
            [{key: value for key, value in LOST_NODE[0].items() if key != "tolerationSeconds"}, LOST_NODE[1]],
        )
    ),
    # The submitter waits for the end of the job.
    (
        f"{SUBMITTER}",
        ...,
        "submitterPodTemplate.spec.containers[0].command: KubeRay's own submitter may end before the job; set",
    ),
    (
        f"{SUBMITTER}.spec.containers[0].command",
        ...,
        "containers[0].command: KubeRay's own submitter may end before the job; set",
    ),
    (
        f"{SUBMITTER}.spec.containers[0].command[2]",
        "ray",
        "containers[0].command: KubeRay's own submitter may end before the job",
    ),
    (
        f"{SUBMITTER}.spec.containers[0].command[3]",
        "ls",
        "containers[0].command: does not submit spec.entrypoint; make",
    ),
    (
        f"{SUBMITTER}.spec.restartPolicy",
        "Always",
        "restartPolicy: the pod of a Job must end; set Never, and retries in",
    ),
    (f"{SUBMITTER}.spec.restartPolicy", ..., "restartPolicy: the pod of a Job must end; set Never, and retries in"),
    ("spec.submissionMode", "HTTPMode", "submissionMode: has no submitter of its own that waits for the job; set K8s"),
    # The token of the Kubernetes API.
    *(
        (f"{pod}.automountServiceAccountToken", value, "spec.automountServiceAccountToken: gives all containers of the")
        for pod in (f"{HEAD}.{POD}", f"{SUBMITTER}.spec", f"{TRAINING}.{POD}")
        for value in (True, ...)
    ),
    (
        f"{HEAD}.{RAY}.volumeMounts[3]",
        {"name": "api-access", "mountPath": "/var/run/secrets/kubernetes.io/serviceaccount"},
        "containers[0].volumeMounts[3].name: gives the container a token of the API; remove this mount",
    ),
    (
        f"{HEAD}.{POD}.initContainers",
        [{"name": "a", "image": "b:1", "volumeMounts": [{"name": "api-access", "mountPath": "/x"}]}],
        "initContainers[0].volumeMounts[0].name: gives the container a token of the API; remove this mount",
    ),
    *(
        (f"{pod}.volumes[2]", TOKEN_VOLUME, "volumes[2].projected: only the autoscaler on the head may have a token")
        for pod in (f"{SAMPLING}.{POD}", f"{TRAINING}.{POD}", f"{SUBMITTER}.spec")
    ),
    (f"{HEAD}.{POD}.volumes[3]", ..., "autoscalerOptions.volumeMounts: no token of the API, so that no node is ever"),
    (f"{CLUSTER}.autoscalerOptions.volumeMounts[2]", ..., "volumeMounts: no token of the API, so that no node is ever"),
    (f"{HEAD}.{POD}.shareProcessNamespace", True, "shareProcessNamespace: shows a container's files to the others; re"),
    # The machine.
    *(
        (f"{pod}.{field}", value, message)
        for pod in (f"{HEAD}.{POD}", f"{TRAINING}.{POD}", f"{SUBMITTER}.spec")
        for field, value, message in (
            (
                "containers[0].ports",
                [{"containerPort": 1, "hostPort": 80}],
                "ports[0].hostPort: opens a port of the mac",
            ),
            ("containers[0].securityContext.procMount", "Unmasked", "procMount: shows more of /proc; remove it"),
            (
                "securityContext.sysctls",
                [{"name": "kernel.msgmax", "value": "1"}],
                "securityContext.sysctls: changes settings of the kernel; remove it",
            ),
        )
    ),
    (f"{CLUSTER}.autoscalerOptions.securityContext", ..., "autoscalerOptions.securityContext.readOnlyRootFilesystem"),
    (f"{SAMPLING}.template.metadata.labels", {}, "labels.app.kubernetes.io/part-of: is not that of the object; set"),
]
WARNINGS: list[tuple[str, Any, str]] = [
    (f"{SAMPLING}.idleTimeoutSeconds", 0, "idleTimeoutSeconds: is 0: nodes are removed between two tasks; set for"),
]
# Of the objects beside the job, by position: ServiceAccount, two policies, the budgets of head and training.
OBJECTS: list[tuple[Level, int, str, Any, str]] = [
    (Level.ERROR, 0, "metadata.name", "Upper", "metadata.name: 'Upper' is not a valid name; use a to z"),
    (Level.POLICY, 0, "automountServiceAccountToken", True, "automountServiceAccountToken: gives all pods a token of"),
    (Level.POLICY, 0, "automountServiceAccountToken", ..., "automountServiceAccountToken: gives all pods a token of"),
    (
        Level.ERROR,
        0,
        "automountServiceAccountTokn",
        False,
        "unknown field; did you mean 'automountServiceAccountToken'",
    ),
    (Level.ERROR, 1, "spec.podselector", {}, "spec.podselector: unknown field; did you mean 'podSelector'?"),
    (Level.ERROR, 1, "spec.policyTypes", ["Egres"], "spec.policyTypes[0]: expected one of: Ingress, Egress"),
    (Level.ERROR, 3, "spec.minAvailble", 1, "spec.minAvailble: unknown field; did you mean 'minAvailable'?"),
    (Level.ERROR, 3, "spec.maxUnavailable", 1, "spec.maxUnavailable: is not supported together with minAvailable"),
    (Level.ERROR, 3, "spec.minAvailable", [], "spec.minAvailable: expected an integer or a string; set one of them"),
    *(
        (Level.ERROR, 1, f"spec.egress[2].to[0].ipBlock.{field}", value, f"ipBlock.{message}")
        for field, value, message in (
            ("cidr", "everywhere", "cidr: 'everywhere' is not a valid CIDR block; set for example 10.0.0.0/16"),
            ("cidr", "10.0.0.1", "cidr: '10.0.0.1' is not a valid CIDR block; set for example 10.0.0.0/16"),
            ("cidr", "10.0.0.0/33", "cidr: '10.0.0.0/33' is not a valid CIDR block"),
            ("cidr", "10.0.0.0/255.0.0.0", "cidr: '10.0.0.0/255.0.0.0' is not a valid CIDR block"),
            ("cidr", "", "cidr: '' is not a valid CIDR block"),
            ("cidr", ..., "cidr: '' is not a valid CIDR block"),
            ("except", ["10.0.0.0"], "except[0]: is not a valid CIDR block; set for example 10.1.0.0/16"),
            ("except", ["0.0.0.0/0"], "except[0]: must be a smaller part of 0.0.0.0/0; remove it"),
            ("except", ["fd00::/8"], "except[0]: must be a smaller part of 0.0.0.0/0; remove it"),
        )
    ),
    *(
        (Level.ERROR, 1, f"spec.egress[2].ports[0].{field}", value, f"ports[0].{message}")
        for field, value, message in (
            ("port", 0, "port: is 0; set a number from 1 to 65535"),
            ("port", 65536, "port: is 65536; set a number from 1 to 65535"),
            ("port", "HTTPS", "port: 'HTTPS' is not a valid port name; set a number from 1 to 65535"),
            ("protocol", "TPC", "protocol: 'TPC' is not a protocol; did you mean 'TCP'?"),
            ("protocol", "tcp", "protocol: 'tcp' is not a protocol; did you mean 'TCP'?"),
            ("endPort", 80, "endPort: is 80; set a number from 443 to 65535"),
        )
    ),
    (
        Level.ERROR,
        1,
        "spec.egress[2].ports[0]",
        {"port": "https", "endPort": 500},
        "endPort: requires a number as port; set it, or remove endPort",
    ),
    (Level.ERROR, 1, "spec.egress[2].to[0]", {}, "spec.egress[2].to[0]: names nobody; set podSelector, namespace"),
    (
        Level.ERROR,
        1,
        "spec.egress[2].to[0].podSelector",
        {},
        "to[0].podSelector: is not supported together with ipBlock; use two peers",
    ),
    (Level.POLICY, 1, "apiVersion", "extensions/v1beta1", "apiVersion: is 'extensions/v1beta1', but NetworkPolicy is"),
    (Level.POLICY, 1, "spec.podSelector.matchLabels", {}, "part-of: is not that of the object; set pos2distill"),
    (Level.POLICY, 1, "spec.podSelector.matchLabels.app", "x", "matchLabels.app: no pod carries this label; remove it"),
    (Level.POLICY, 1, "spec.egress", [{}], "spec.egress[0]: allows every address; set to"),
    (Level.POLICY, 1, "spec.ingress", [{}], "spec.ingress[0]: allows every address; set from"),
    (
        Level.POLICY,
        1,
        "spec.ingress[0].from[0]",
        {"ipBlock": {"cidr": "0.0.0.0/0"}},
        "from[0].ipBlock.cidr: allows every address; name those that need access",
    ),
    (
        Level.POLICY,
        1,
        "spec.ingress[0].from[0]",
        {"namespaceSelector": {}},
        "from[0].namespaceSelector: allows every pod of the cluster; name a namespace",
    ),
    (Level.POLICY, 1, "spec.egress[2].ports", ..., "spec.egress[2].ports: missing: allows every port of every address"),
    (Level.POLICY, 1, "spec.ingress", [], "spec.ingress: the cluster's pods cannot reach each other; add their labels"),
    (Level.POLICY, 1, "spec.egress[0]", ..., "spec.egress: the cluster's pods cannot reach each other; add their"),
    (Level.POLICY, 1, "spec.egress[1]", ..., "spec.egress: names cannot be looked up; allow port 53"),
    (Level.POLICY, 1, "spec.policyTypes", ["Egress"], "spec.policyTypes: ingress is not restricted; add Ingress"),
    (Level.POLICY, 3, "spec.selector.matchLabels.ray~io/node-type", "worker", "only the head and training are"),
    (Level.POLICY, 4, "spec.selector.matchLabels.ray~io/group", "sampling", "only the head and training are"),
    (
        Level.POLICY,
        4,
        "spec.minAvailable",
        ...,
        "spec.minAvailable: missing: all pods may be drained; set",
    ),
]
# Of manifests of other projects, in which policies are not checked.
RISKS: list[tuple[str, Any, str]] = [
    (f"{SAMPLING}.{POD}.hostPID", True, "hostPID: gives the pod access to the host"),
    (f"{SAMPLING}.{RAY}.image", "rayproject/ray", "'rayproject/ray' may change between pods"),
    (f"{SAMPLING}.{RAY}.env[0]", {"name": "DB_PASS", "value": WORD}, "'DB_PASS' looks like a secret"),
    (f"{CLUSTER}.authOptions", ..., "authOptions.mode: anyone who can reach the head may run code on it"),
    (f"{SAMPLING}.{POD}.volumes[0]", {"name": "tmp", "hostPath": {"path": "/"}}, "hostPath: gives the pod files of"),
    (f"{SAMPLING}.{RAY}.securityContext.privileged", True, "privileged: gives the container all rights on the host"),
]
