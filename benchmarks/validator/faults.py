"""Faulty manifests and specs by kind, one fault each.

`MANIFESTS` change the job that the preset `eks` is rendered to, `OBJECTS` one of the objects beside it, `SPECS` the
preset `gke`. In a path, ~ is a dot inside a name, and `...` as a value removes the field. None of the lists was written
from the validator's rules. The faults are of three kinds: KubeRay's own checks refuse them (`validation.go` and the CEL
rules of its CRDs, version 1.7); Kubernetes accepts them and a run then suffers from them; or they open a cluster.
"""

from typing import Any

CLUSTER = "spec.rayClusterSpec"
AUTOSCALER = f"{CLUSTER}.autoscalerOptions"
HEAD = f"{CLUSTER}.headGroupSpec"
SAMPLING, TRAINING = (f"{CLUSTER}.workerGroupSpecs[{index}]" for index in (0, 1))
POD = "template.spec"
RAY = f"{POD}.containers[0]"
SUBMITTER = "spec.submitterPodTemplate.spec"

Fault = tuple[str, str, Any]  # name, path, value


def _rule(policy: str, **condition: Any) -> dict[str, Any]:
    return {"policy": policy, "condition": {"ttlSeconds": 30, **condition}}


def _variable(name: str, value: str) -> dict[str, str]:
    return {"name": name, "value": value}


_SPOT = {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot"]}
_SPOT_TERMS = {"nodeSelectorTerms": [{"matchExpressions": [_SPOT]}]}
_ON_SPOT = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": _SPOT_TERMS}}

OPERATOR: list[Fault] = [
    ("name of 48 characters", "metadata.name", "a" * 48),
    ("name that begins with a digit", "metadata.name", "9lives"),
    ("negative backoffLimit", "spec.backoffLimit", -1),
    ("activeDeadlineSeconds 0", "spec.activeDeadlineSeconds", 0),
    ("ttl without shutdown", "spec.shutdownAfterJobFinishes", False),
    ("unknown submissionMode", "spec.submissionMode", "K8JobMode"),
    ("no cluster", "spec.rayClusterSpec", ...),
    ("token with an old Ray", f"{CLUSTER}.rayVersion", "2.51.0"),
    ("token without a version", f"{CLUSTER}.rayVersion", ...),
    ("unknown mode of authentication", f"{CLUSTER}.authOptions.mode", "tokn"),
    ("Kubernetes' tokens on a RayJob", f"{CLUSTER}.authOptions.enableK8sTokenAuth", True),
    ("minReplicas above maxReplicas", f"{SAMPLING}.minReplicas", 99),
    ("negative minReplicas", f"{SAMPLING}.minReplicas", -1),
    ("negative maxReplicas", f"{SAMPLING}.maxReplicas", -1),
    ("negative idle timeout of a group", f"{SAMPLING}.idleTimeoutSeconds", -5),
    ("negative idle timeout of the autoscaler", f"{AUTOSCALER}.idleTimeoutSeconds", -1),
    ("restartPolicy Always with autoscaler v2", f"{HEAD}.{POD}.restartPolicy", "Always"),
    ("autoscaler v2 twice", f"{HEAD}.{RAY}.env[0]", _variable("RAY_enable_autoscaler_v2", "1")),
    ("resources and rayStartParams", f"{SAMPLING}.rayStartParams.num-gpus", "1"),
    ("rayStartParams.labels", f"{SAMPLING}.rayStartParams.labels", "a=b"),
    ("label with a prefix a..b", f"{SAMPLING}.labels.a~~b/x", "y"),
    ("label with a prefix of 254 characters", f"{SAMPLING}.labels.{'p' * 254}/x", "y"),
    ("no container", f"{SAMPLING}.{POD}.containers", []),
    ("two groups of one name", f"{TRAINING}.groupName", "sampling"),
    ("external redis without options", f"{HEAD}.{RAY}.env[0]", _variable("RAY_REDIS_ADDRESS", "redis:6379")),
    ("user of redis", f"{HEAD}.{RAY}.env[0]", _variable("REDIS_USERNAME", "me")),
    ("own command of the autoscaler", f"{HEAD}.{RAY}.env[0]", _variable("KUBERAY_GEN_AUTOSCALER_START_CMD", "x")),
    ("empty deletionStrategy", "spec.deletionStrategy", {}),
    ("deletionStrategy with one end", "spec.deletionStrategy", {"onSuccess": {"policy": "DeleteCluster"}}),
    ("deletion rule without a status", "spec.deletionStrategy", {"deletionRules": [_rule("DeleteCluster")]}),
    (
        "deletion rule with both statuses",
        "spec.deletionStrategy",
        {"deletionRules": [_rule("DeleteCluster", jobStatus="FAILED", jobDeploymentStatus="Failed")]},
    ),
    (
        "deletion rules with shutdownAfterJobFinishes",
        "spec.deletionStrategy",
        {"deletionRules": [_rule("DeleteCluster", jobStatus="FAILED")]},
    ),
    ("clusterSelector beside a cluster", "spec.clusterSelector", {"ray.io/cluster": "mine"}),
    ("runtimeEnvYAML that is a list", "spec.runtimeEnvYAML", "- a"),
    ("upgradeStrategy on a RayJob", f"{CLUSTER}.upgradeStrategy", {"type": "Recreate"}),
    ("managedBy of somebody", f"{CLUSTER}.managedBy", "me"),
    ("fault tolerance on a RayJob", f"{CLUSTER}.gcsFaultToleranceOptions", {"redisAddress": "redis:6379"}),
]
SCHEMA: list[Fault] = [
    ("misspelled field of metadata", "metadata.anotations", {}),
    ("misspelled field of the job", "spec.backofLimit", 2),
    ("misspelled field of a group", f"{SAMPLING}.maxReplica", 2),
    ("misspelled field of a container", f"{SAMPLING}.{RAY}.imagePulPolicy", "Always"),
    ("number as text", f"{SAMPLING}.maxReplicas", "8"),
    ("text as number", "spec.entrypoint", 5),
    ("list as text", f"{CLUSTER}.workerGroupSpecs", "x"),
    ("mapping as list", f"{SAMPLING}.rayStartParams", []),
    ("true as number", "spec.backoffLimit", True),
    ("no kind", "kind", ...),
    ("wrong kind", "kind", "RayJbo"),
    ("no apiVersion", "apiVersion", ...),
    ("spec without a value", "spec", None),
    ("resource of a number", f"{SAMPLING}.resources.sampler", 1),
]
BREAKS_A_RUN: list[Fault] = [
    ("no sampling group", f"{CLUSTER}.workerGroupSpecs[0]", ...),
    ("no training group", f"{CLUSTER}.workerGroupSpecs[1]", ...),
    ("no groups", f"{CLUSTER}.workerGroupSpecs", []),
    ("one trainer unit on 8 GPUs", f"{TRAINING}.resources.trainer", "1"),
    ("sampler unit 0", f"{SAMPLING}.resources.sampler", "0"),
    ("trainer unit that is a word", f"{TRAINING}.resources.trainer", "eight"),
    ("no Ray label of samplers", f"{SAMPLING}.labels", {}),
    ("samplers' label on trainers", f"{TRAINING}.labels.ray-subcluster", "sampling"),
    ("training without nodes", f"{TRAINING}.maxReplicas", 0),
    ("dashboard on loopback", f"{HEAD}.rayStartParams.dashboard-host", "127.0.0.1"),
    ("work on the head", f"{HEAD}.rayStartParams.num-cpus", "4"),
    ("read-only root without HOME", f"{SAMPLING}.{RAY}.env[0]", ...),
    ("GPUs without a toleration", f"{SAMPLING}.{POD}.tolerations", []),
    ("CPUs of the entrypoint on a head of 0", "spec.entrypointNumCpus", 2),
    ("GPUs of the entrypoint on a head without", "spec.entrypointNumGpus", 1),
    ("image of another Ray version", f"{HEAD}.{RAY}.image", "rayproject/ray:2.40.0"),
    ("another image on workers", f"{SAMPLING}.{RAY}.image", "pos2distill:0.0.9"),
    ("image that may change", f"{SAMPLING}.{RAY}.image", "pos2distill:latest"),
    ("more GPUs than the machine has", f"{SAMPLING}.{RAY}.resources.limits.nvidia~com/gpu", "4"),
    ("more CPUs than the machine has", f"{SAMPLING}.{RAY}.resources.limits.cpu", "64"),
    ("more memory than the machine has", f"{SAMPLING}.{RAY}.resources.limits.memory", "900Gi"),
    ("request below the limit", f"{SAMPLING}.{RAY}.resources.requests.memory", "1Gi"),
    ("no limits", f"{SAMPLING}.{RAY}.resources.limits", ...),
    ("shared memory larger than memory", f"{SAMPLING}.{POD}.volumes[2].emptyDir.sizeLimit", "100Gi"),
    ("shared memory on disk", f"{SAMPLING}.{POD}.volumes[2].emptyDir.medium", ""),
    ("shared memory of 64Mi", f"{SAMPLING}.{POD}.volumes[2].emptyDir.sizeLimit", "64Mi"),
    ("object store of 10 PB", f"{SAMPLING}.rayStartParams.object-store-memory", "10000000000000000"),
    ("object store with a unit", f"{SAMPLING}.rayStartParams.object-store-memory", "12Gi"),
    ("reference to a Secret without a name", f"{HEAD}.{RAY}.env[7].valueFrom.secretKeyRef.name", ""),
    ("a variable twice", f"{SAMPLING}.{RAY}.env[8]", _variable("HOME", "/x")),
    ("no authentication on a worker", f"{SAMPLING}.{RAY}.env[8]", _variable("RAY_AUTH_MODE", "disabled")),
    ("RAY_ADDRESS on the head", f"{HEAD}.{RAY}.env[8]", _variable("RAY_ADDRESS", "auto")),
    ("two mounts at one path", f"{SAMPLING}.{RAY}.volumeMounts[1].mountPath", "/tmp"),
    ("mount of no volume", f"{SAMPLING}.{RAY}.volumeMounts[1].name", "nowhere"),
    ("job that stays suspended", "spec.suspend", True),
    ("start deadline after the deadline", "spec.preRunningDeadlineSeconds", 999_999_999),
    ("trainers on spot machines", f"{TRAINING}.{POD}.nodeSelector.karpenter~sh/capacity-type", "spot"),
    ("trainers on spot machines by affinity", f"{TRAINING}.{POD}.affinity", _ON_SPOT),
    ("head on spot machines", f"{HEAD}.{POD}.nodeSelector.karpenter~sh/capacity-type", "spot"),
    ("unknown imagePullPolicy", f"{SAMPLING}.{RAY}.imagePullPolicy", "Sometimes"),
    ("submitter of another image", f"{SUBMITTER}.containers[0].image", "busybox:1.37"),
    ("submitter that may end before the job", f"{SUBMITTER}.containers[0].command", ["ray", "job", "submit"]),
    ("no submitter", "spec.submissionMode", "HTTPMode"),
    ("group without the label of the policies", f"{SAMPLING}.template.metadata.labels", {}),
    ("account that nobody makes", f"{HEAD}.{POD}.serviceAccountName", "other"),
    ("group name with capital letters", f"{SAMPLING}.groupName", "Sampling_A"),
    ("idle timeout 0", f"{SAMPLING}.idleTimeoutSeconds", 0),
    ("grace period of 1 s for training", f"{TRAINING}.{POD}.terminationGracePeriodSeconds", 1),
    ("lost head stays for 300 s", f"{HEAD}.{POD}.tolerations", []),
    ("no autoscaling", f"{CLUSTER}.enableInTreeAutoscaling", False),
    ("no disk requested", f"{TRAINING}.{RAY}.resources.limits.ephemeral-storage", ...),
]
SECURITY: list[Fault] = [
    ("files of the machine", f"{SAMPLING}.{POD}.volumes[0]", {"name": "tmp", "hostPath": {"path": "/"}}),
    ("capability SYS_ADMIN", f"{SAMPLING}.{RAY}.securityContext.capabilities.add", ["SYS_ADMIN"]),
    ("capabilities not dropped", f"{SAMPLING}.{RAY}.securityContext.capabilities", ...),
    ("seccomp of a container", f"{SAMPLING}.{RAY}.securityContext.seccompProfile", {"type": "Unconfined"}),
    ("seccomp of a pod", f"{SAMPLING}.{POD}.securityContext.seccompProfile", {"type": "Unconfined"}),
    ("root in a container", f"{SAMPLING}.{RAY}.securityContext.runAsNonRoot", False),
    ("root in a pod", f"{SAMPLING}.{POD}.securityContext.runAsUser", 0),
    ("privileged", f"{SAMPLING}.{RAY}.securityContext.privileged", True),
    ("escalation", f"{SAMPLING}.{RAY}.securityContext.allowPrivilegeEscalation", True),
    ("writable root", f"{SAMPLING}.{RAY}.securityContext.readOnlyRootFilesystem", False),
    ("root init container", f"{SAMPLING}.{POD}.initContainers", [{"name": "a", "image": "b:1"}]),
    ("second container", f"{SAMPLING}.{POD}.containers[1]", {"name": "a", "image": "b:1"}),
    ("token of the API on workers", f"{SAMPLING}.{POD}.automountServiceAccountToken", True),
    ("token of the API on the head", f"{HEAD}.{POD}.automountServiceAccountToken", True),
    ("dashboard for everybody", f"{HEAD}.serviceType", "LoadBalancer"),
    ("network of the machine", f"{SAMPLING}.{POD}.hostNetwork", True),
    ("processes of the machine", f"{SAMPLING}.{POD}.hostPID", True),
    ("port of the machine", f"{SAMPLING}.{RAY}.ports", [{"containerPort": 1, "hostPort": 80}]),
    ("settings of the kernel", f"{SAMPLING}.{POD}.securityContext.sysctls", [{"name": "a.b", "value": "1"}]),
    ("no authentication", f"{CLUSTER}.authOptions", ...),
    ("password in a variable", f"{SAMPLING}.{RAY}.env[8]", _variable("DB_PASS", "hunter2")),
    ("password in runtimeEnvYAML", "spec.runtimeEnvYAML", "env_vars: {DB_PASSWORD: hunter2}"),
    ("password of the autoscaler", f"{AUTOSCALER}.env[1]", _variable("PGPASSWORD", "hunter2")),
    ("password in the command", "spec.entrypoint", "python run.py study x data.path=s3://me:hunter2pw@bucket"),
    ("autoscaler as root", f"{AUTOSCALER}.securityContext", {"runAsUser": 0}),
]
# The objects by index: ServiceAccount, policies of all pods and of the head, budgets of the head and of training.
OBJECTS: list[tuple[str, int, str, Any]] = [
    ("token of the API for all pods", 0, "automountServiceAccountToken", True),
    ("misspelled field of a policy", 1, "spec.podselector", {}),
    ("policy that selects nothing", 1, "spec.podSelector.matchLabels.app", "x"),
    ("policy of another cluster's pods", 1, "spec.podSelector.matchLabels.app~kubernetes~io/instance", "other"),
    ("policy without DNS", 1, "spec.egress[1]", ...),
    ("policy without the cluster's pods", 1, "spec.egress[0]", ...),
    ("policy that lets nobody in", 1, "spec.ingress", []),
    ("policy that lets everybody in", 1, "spec.ingress", [{}]),
    ("policy that lets pods connect anywhere", 1, "spec.egress", [{}]),
    ("policy of another namespace", 1, "metadata.namespace", "default"),
    ("policy for egress only", 1, "spec.policyTypes", ["Egress"]),
    ("no block of addresses", 1, "spec.egress[2].to[0].ipBlock.cidr", "everywhere"),
    ("port 0", 1, "spec.egress[2].ports[0].port", 0),
    ("misspelled field of a budget", 3, "spec.minAvailble", 1),
    ("budget with both numbers", 3, "spec.maxUnavailable", 1),
    ("budget that selects nothing", 3, "spec.selector.matchLabels.app", "x"),
    ("budget on samplers", 4, "spec.selector.matchLabels.ray~io/group", "sampling"),
]
SPECS: list[tuple[str, str]] = [
    ("misspelled section", "smapling.max=2"),
    ("misspelled field", "sampling.node.gpu=1"),
    ("more CPUs than the machine has", "sampling.node.cpus=40"),
    ("more memory than the machine has", "sampling.node.memory=500Gi"),
    ("half of a machine's GPUs", "training.node.gpus=4"),
    ("machine of another cloud", "training.node.instance_type=p4d.24xlarge"),
    ("misspelled machine", "training.node.instance_type=a2-highgpu-9g"),
    ("image with capital letters", "image=Reg/Proj:1"),
    ("image without a version", "image=pos2distill"),
    ("another cloud's bucket", "storage.url=s3://my-bucket/runs"),
    ("no way to the bucket", "network.egress=[]"),
    ("DNS by name", "network.dns=[kube-dns]"),
    ("version of Ray that the image lacks", "ray_version=2.61.0"),
    ("PATH", "pods.env={PATH: /bin}"),
    ("GPUs hidden", "pods.env={NVIDIA_VISIBLE_DEVICES: none}"),
    ("cache on a read-only disk", "pods.env={HF_HOME: /opt/hf}"),
    ("variable that KubeRay refuses", "pods.env={RAY_REDIS_ADDRESS: 'redis:6379'}"),
    ("key of a Secret with a slash", "pods.secrets=[{env: A, secret: a, key: a/b}]"),
    ("name of a Secret with capital letters", "pods.pull_secrets=[Reg_1]"),
    ("priority class with capital letters", "pods.priority_class=High"),
    ("selector with a space", "head.node_selector={a b: c}"),
    ("toleration with a space", "head.tolerations=[{key: a b}]"),
    ("annotation with a space", "pods.annotations={a b: c}"),
    ("no room for the model", "training.node.scratch=1Gi training.node.disk=20Gi"),
    ("shared memory is nearly all memory", "sampling.node.shm=78Gi"),
    ("long grace on spot", "sampling.grace_s=3600"),
    ("command in a path", "pods.project=/opt/$(id)"),
    ("path that leaves its folder", "storage.url=gs://bucket/../x"),
    ("mount over the system", "storage={url: /etc/x, claim: c, mount: /etc}"),
    ("namespace of the system", "namespace=kube-system"),
    ("trainers without GPUs", "training.node.gpus=0"),
    ("samplers without GPUs", "sampling.node.gpus=0"),
    ("spot training", "training.spot=true"),
    ("root", "pods.user=0"),
    ("password in a variable", "pods.env={HF_TOKEN: hunter2}"),
    ("misspelled identity annotation", "pods.service_account_annotations={iam.gke.io/gcp-service-acount: x@y.z}"),
    ("no identity at all", "pods.service_account_annotations={}"),
    ("metadata server closed", "network.egress=[{cidr: 0.0.0.0/0}]"),
    ("API server closed", "network.api_server={cidr: 10.0.0.1/32, ports: [80]}"),
    ("GPUs too small for the model", "training.node.instance_type=g2-standard-96"),
]

MANIFESTS: dict[str, list[Fault]] = {
    "KubeRay's operator refuses it": OPERATOR,
    "the schema refuses it": SCHEMA,
    "a run breaks": BREAKS_A_RUN,
    "it opens the cluster": SECURITY,
}
