"""Names that Kubernetes, KubeRay, Kueue and the clouds define. Rendering and checking use the same ones."""

GPU = "nvidia.com/gpu"  # resource of NVIDIA's device plugin
GPU_COUNT_LABEL = "nvidia.com/gpu.count"  # node label of NVIDIA's feature discovery
INSTANCE_TYPE_LABEL = "node.kubernetes.io/instance-type"

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ELASTIC_ANNOTATION = "kueue.x-k8s.io/elastic-job"  # behind a feature gate of Kueue that is off by default

GROUP_LABEL = "ray.io/group"  # KubeRay sets it on the pods of a worker group to the group's name
MADE_BY_KUBERAY_LABEL = "ray.io/originated-from-crd"  # KubeRay sets it on the cluster and the submitter of a RayJob
SET_ON_PODS = ("app.kubernetes.io/name", "app.kubernetes.io/created-by")  # KubeRay sets them, besides its own labels
NODE_TYPE_LABEL = "ray.io/node-type"  # KubeRay sets it on every pod of a cluster: head or worker
MARKET_LABEL = "ray.io/market-type"  # Ray node label: spot or on-demand

# KubeRay before 1.4 chose the autoscaler's version by this variable; `autoscalerOptions.version` replaces it.
AUTOSCALER_V2_VARIABLE = "RAY_enable_autoscaler_v2"

# Environment variables that KubeRay sets itself. It rejects a cluster that sets the last three by hand.
SET_BY_KUBERAY = (
    AUTOSCALER_V2_VARIABLE,
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_ADDRESS",
    "RAY_PORT",
    "RAY_IP",
    "FQ_RAY_IP",
    "RAY_CLUSTER_NAME",
    "RAY_CLOUD_INSTANCE_ID",
    "RAY_NODE_TYPE_NAME",
    "RAY_REDIS_ADDRESS",
    "REDIS_USERNAME",
    "KUBERAY_GEN_AUTOSCALER_START_CMD",
)

# Variables that KubeRay sets itself in the container that it adds for its History Server.
COLLECTOR_VARIABLES = (
    "POD_IP",
    "FQ_RAY_IP",
    "RAY_CLUSTER_NAME",
    "RAY_CLUSTER_NAMESPACE",
    "RAY_ROLE",
    "OWNER_KIND",
    "OWNER_NAME",
    "EVENTS_PORT",
)

RAY_JOB_NAME_LENGTH = 47  # KubeRay 1.7.0: it appends suffixes to the name of a RayJob
RAY_CLUSTER_NAME_LENGTH = 53

# Node labels of spot machines, which the cloud may reclaim at any time, by the spec's `platform`.
GKE_SPOT_LABEL = "cloud.google.com/gke-spot"
GKE_PREEMPTIBLE_LABEL = "cloud.google.com/gke-preemptible"
SPOT_SELECTORS: dict[str, dict[str, str]] = {
    "gke": {GKE_SPOT_LABEL: "true"},
    "eks": {"eks.amazonaws.com/capacityType": "SPOT"},
    "karpenter": {"karpenter.sh/capacity-type": "spot"},
    "other": {},
}
# Older and other labels of such machines, which are never rendered.
OTHER_SPOT_SELECTORS: tuple[dict[str, str], ...] = (
    {GKE_PREEMPTIBLE_LABEL: "true"},
    {"kubernetes.azure.com/scalesetpriority": "spot"},
)
ON_DEMAND_SELECTORS: dict[str, dict[str, str]] = {
    "gke": {},  # GKE has no label for on-demand machines; pods.py excludes spot machines by node affinity instead
    "eks": {"eks.amazonaws.com/capacityType": "ON_DEMAND"},
    "karpenter": {"karpenter.sh/capacity-type": "on-demand"},
    "other": {},
}

# Taints of a node that does not answer. Kubernetes keeps pods on it for 300 s unless they tolerate them for less.
LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
LOST_NODE_DEFAULT_SECONDS = 300

TOKEN_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"  # clients look here for a token of the API
SUBMITTER_MODULE = "pipelines.jobs.rayjob_submitter"

# Every rendered object carries this label. Rules of this project apply only to manifests with it.
PART_OF_LABEL = "app.kubernetes.io/part-of"
INSTANCE_LABEL = "app.kubernetes.io/instance"
PROJECT = "pos2distill"
STORAGE_ANNOTATION = f"{PROJECT}/storage"  # annotation of a RayJob: where the results of its study are

# The variables with the address of a store or hub that is not the usual one, by the scheme of its URLs.
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("STORAGE_EMULATOR_HOST",),
    "hf": ("HF_ENDPOINT",),
}
# The variables with the address of a proxy.
PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
