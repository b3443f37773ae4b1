"""The types of fields, as JSON schemas: complete for the small kinds that are rendered, partial for KubeRay's.

The partial ones name the fields that the other rules read, allow all others, and so find no misspelled names. KubeRay's
own schemas (`--crds`) are checked in addition to them.
Source: the API reference of Kubernetes 1.34 and the CRDs of KubeRay 1.7.0.
"""

from typing import Any

from jsonschema import Draft202012Validator

from .fields import RAY_API

_Schema = dict[str, Any]
_TEXT: _Schema = {"type": "string"}
_INTEGER: _Schema = {"type": "integer"}
_BOOLEAN: _Schema = {"type": "boolean"}
_NUMBER_OR_NAME: _Schema = {"anyOf": [_INTEGER, _TEXT]}
_QUANTITY: _Schema = _NUMBER_OR_NAME
_ANY: _Schema = {}


def _closed(**fields: _Schema) -> _Schema:
    """A mapping with these fields and no others."""
    return {"type": "object", "properties": fields, "additionalProperties": False}


def _open(**fields: _Schema) -> _Schema:
    """A mapping with these fields, which may have others."""
    return {"type": "object", "properties": fields}


def _map_of(schema: _Schema) -> _Schema:
    return {"type": "object", "additionalProperties": schema}


def _list_of(schema: _Schema) -> _Schema:
    return {"type": "array", "items": schema}


_TEXTS = _map_of(_TEXT)
_METADATA = _closed(
    name=_TEXT,
    generateName=_TEXT,
    namespace=_TEXT,
    labels=_TEXTS,
    annotations=_TEXTS,
    finalizers=_list_of(_TEXT),
    ownerReferences=_list_of(_ANY),
    managedFields=_list_of(_ANY),
    creationTimestamp=_ANY,
    deletionTimestamp=_ANY,
    deletionGracePeriodSeconds=_INTEGER,
    generation=_INTEGER,
    resourceVersion=_TEXT,
    selfLink=_TEXT,
    uid=_TEXT,
)
_REQUIREMENT = _closed(key=_TEXT, operator=_TEXT, values=_list_of(_TEXT))
_SELECTOR = _closed(matchLabels=_TEXTS, matchExpressions=_list_of(_REQUIREMENT))
_PEERS = _list_of(
    _closed(
        podSelector=_SELECTOR,
        namespaceSelector=_SELECTOR,
        ipBlock=_closed(cidr=_TEXT, **{"except": _list_of(_TEXT)}),
    )
)
_PORTS = _list_of(_closed(protocol=_TEXT, port=_NUMBER_OR_NAME, endPort=_INTEGER))
_NETWORK_POLICY = _closed(
    podSelector=_SELECTOR,
    policyTypes=_list_of({"type": "string", "enum": ["Ingress", "Egress"]}),
    ingress=_list_of(_closed(**{"from": _PEERS, "ports": _PORTS})),
    egress=_list_of(_closed(to=_PEERS, ports=_PORTS)),
)
_DISRUPTION_BUDGET = _closed(
    minAvailable=_NUMBER_OR_NAME,
    maxUnavailable=_NUMBER_OR_NAME,
    selector=_SELECTOR,
    unhealthyPodEvictionPolicy={"type": "string", "enum": ["IfHealthyBudget", "AlwaysAllow"]},
)

_ENVIRONMENT = _list_of(_open(name=_TEXT, value=_TEXT, valueFrom=_open()))
_MOUNTS = _list_of(_open(name=_TEXT, mountPath=_TEXT))
_RESOURCES = _open(limits=_map_of(_QUANTITY), requests=_map_of(_QUANTITY))
_CONTAINER_SECURITY = _open(
    allowPrivilegeEscalation=_BOOLEAN,
    capabilities=_open(add=_list_of(_TEXT), drop=_list_of(_TEXT)),
    privileged=_BOOLEAN,
    readOnlyRootFilesystem=_BOOLEAN,
    runAsNonRoot=_BOOLEAN,
    runAsUser=_INTEGER,
    seccompProfile=_open(type=_TEXT),
)
_CONTAINERS = _list_of(
    _open(
        name=_TEXT,
        image=_TEXT,
        imagePullPolicy=_TEXT,
        command=_list_of(_TEXT),
        args=_list_of(_TEXT),
        workingDir=_TEXT,
        env=_ENVIRONMENT,
        ports=_list_of(_open(containerPort=_INTEGER)),
        resources=_RESOURCES,
        securityContext=_CONTAINER_SECURITY,
        volumeMounts=_MOUNTS,
    )
)
_POD = _open(
    affinity=_open(),
    automountServiceAccountToken=_BOOLEAN,
    containers=_CONTAINERS,
    initContainers=_CONTAINERS,
    hostIPC=_BOOLEAN,
    hostNetwork=_BOOLEAN,
    hostPID=_BOOLEAN,
    imagePullSecrets=_list_of(_open(name=_TEXT)),
    nodeSelector=_TEXTS,
    priorityClassName=_TEXT,
    restartPolicy=_TEXT,
    securityContext=_open(runAsNonRoot=_BOOLEAN, runAsUser=_INTEGER, seccompProfile=_open(type=_TEXT)),
    serviceAccountName=_TEXT,
    terminationGracePeriodSeconds=_INTEGER,
    tolerations=_list_of(_open(key=_TEXT, operator=_TEXT, value=_TEXT, effect=_TEXT)),
    volumes=_list_of(_open(name=_TEXT)),
)
_TEMPLATE = _open(metadata=_open(labels=_TEXTS, annotations=_TEXTS), spec=_POD)
_NODE_FIELDS = {"labels": _TEXTS, "resources": _TEXTS, "rayStartParams": _TEXTS, "template": _TEMPLATE}
_GROUP = _open(
    groupName=_TEXT,
    idleTimeoutSeconds=_INTEGER,
    maxReplicas=_INTEGER,
    minReplicas=_INTEGER,
    numOfHosts=_INTEGER,
    priority=_INTEGER,
    replicas=_INTEGER,
    **_NODE_FIELDS,
)
_CLUSTER = _open(
    authOptions=_open(mode={"type": "string", "enum": ["disabled", "token"]}),
    autoscalerOptions=_open(
        env=_ENVIRONMENT,
        resources=_RESOURCES,
        securityContext=_CONTAINER_SECURITY,
        version={"type": "string", "enum": ["v1", "v2"]},
        volumeMounts=_MOUNTS,
    ),
    enableInTreeAutoscaling=_BOOLEAN,
    headGroupSpec=_open(**_NODE_FIELDS),
    historyServerOptions=_open(collectorOptions=_open(env=_ENVIRONMENT, image=_TEXT, resources=_RESOURCES)),
    rayVersion=_TEXT,
    workerGroupSpecs=_list_of(_GROUP),
)
_JOB = _open(
    activeDeadlineSeconds=_INTEGER,
    backoffLimit=_INTEGER,
    entrypoint=_TEXT,
    preRunningDeadlineSeconds=_INTEGER,
    rayClusterSpec=_CLUSTER,
    shutdownAfterJobFinishes=_BOOLEAN,
    submissionMode={"type": "string", "enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    submitterConfig=_open(backoffLimit=_INTEGER),
    submitterPodTemplate=_TEMPLATE,
    suspend=_BOOLEAN,
    ttlSecondsAfterFinished=_INTEGER,
)
_IDENTITY = {"apiVersion": _TEXT, "kind": _TEXT, "metadata": _METADATA}
_SERVICE_ACCOUNT = _closed(
    **_IDENTITY,
    automountServiceAccountToken=_BOOLEAN,
    imagePullSecrets=_list_of(_closed(name=_TEXT)),
    secrets=_list_of(_ANY),
)
_CONFIG_MAP = _closed(**_IDENTITY, data=_TEXTS, binaryData=_TEXTS, immutable=_BOOLEAN)

# What every manifest has.
IDENTITY = Draft202012Validator({**_open(**_IDENTITY), "required": ["apiVersion", "kind", "metadata"]})
# By API version and kind. `status` is what `kubectl get` adds.
SHAPES = {
    ("v1", "ServiceAccount"): Draft202012Validator(_SERVICE_ACCOUNT),
    ("v1", "ConfigMap"): Draft202012Validator(_CONFIG_MAP),
    ("networking.k8s.io/v1", "NetworkPolicy"): Draft202012Validator(
        _closed(**_IDENTITY, spec=_NETWORK_POLICY, status=_ANY)
    ),
    ("policy/v1", "PodDisruptionBudget"): Draft202012Validator(
        _closed(**_IDENTITY, spec=_DISRUPTION_BUDGET, status=_ANY)
    ),
    (RAY_API, "RayJob"): Draft202012Validator(_open(**_IDENTITY, spec=_JOB)),
    (RAY_API, "RayCluster"): Draft202012Validator(_open(**_IDENTITY, spec=_CLUSTER)),
}
