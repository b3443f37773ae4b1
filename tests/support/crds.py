"""A small stand-in for CRDs of KubeRay: the fields that rendered manifests have, with their types."""

from pathlib import Path
from typing import Any

import yaml

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
QUANTITY: Schema = {
    "anyOf": [INTEGER, TEXT],
    "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE])?$",
    "x-kubernetes-int-or-string": True,
}


def mapping_of(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}


def list_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def section(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    schema: Schema = {"type": "object", "properties": fields}
    if required:
        schema["required"] = list(required)
    return schema


def with_default(schema: Schema, default: int) -> Schema:
    return schema | {"default": default}


LABELS = mapping_of(TEXT)
RESOURCES = section(limits=mapping_of(QUANTITY), requests=mapping_of(QUANTITY))
SECRET_KEY = section(("key",), key=TEXT, name=TEXT, optional=BOOLEAN)
ENVIRONMENT = list_of(section(("name",), name=TEXT, value=TEXT, valueFrom=section(secretKeyRef=SECRET_KEY)))
MOUNTS = list_of(section(("name", "mountPath"), name=TEXT, mountPath=TEXT, subPath=TEXT, readOnly=BOOLEAN))
CONTAINER_SECURITY = section(
    allowPrivilegeEscalation=BOOLEAN,
    capabilities=section(add=list_of(TEXT), drop=list_of(TEXT)),
    privileged=BOOLEAN,
    readOnlyRootFilesystem=BOOLEAN,
)
CONTAINER = section(
    ("name",),
    name=TEXT,
    image=TEXT,
    command=list_of(TEXT),
    args=list_of(TEXT),
    workingDir=TEXT,
    env=ENVIRONMENT,
    ports=list_of(section(("containerPort",), containerPort=INTEGER, name=TEXT, protocol=TEXT)),
    resources=RESOURCES,
    securityContext=CONTAINER_SECURITY,
    volumeMounts=MOUNTS,
)
NODE_TERM = section(
    matchExpressions=list_of(section(("key", "operator"), key=TEXT, operator=TEXT, values=list_of(TEXT)))
)
NODE_AFFINITY = section(
    requiredDuringSchedulingIgnoredDuringExecution=section(
        ("nodeSelectorTerms",), nodeSelectorTerms=list_of(NODE_TERM)
    ),
    preferredDuringSchedulingIgnoredDuringExecution=list_of(
        section(("preference", "weight"), preference=NODE_TERM, weight=INTEGER)
    ),
)
POD_SECURITY = section(
    fsGroup=INTEGER,
    fsGroupChangePolicy=TEXT,
    runAsGroup=INTEGER,
    runAsNonRoot=BOOLEAN,
    runAsUser=INTEGER,
    seccompProfile=section(("type",), type=TEXT, localhostProfile=TEXT),
)
FILES = list_of(section(("key", "path"), key=TEXT, mode=INTEGER, path=TEXT))
VOLUME = section(
    ("name",),
    name=TEXT,
    configMap=section(defaultMode=INTEGER, items=FILES, name=TEXT, optional=BOOLEAN),
    emptyDir=section(medium=TEXT, sizeLimit=QUANTITY),
    persistentVolumeClaim=section(("claimName",), claimName=TEXT, readOnly=BOOLEAN),
    projected=section(
        sources=list_of(
            section(
                serviceAccountToken=section(("path",), path=TEXT, expirationSeconds=INTEGER),
                configMap=section(name=TEXT, items=FILES),
                downwardAPI=section(items=list_of(section(("path",), path=TEXT, fieldRef=section(fieldPath=TEXT)))),
            )
        )
    ),
    secret=section(defaultMode=INTEGER, items=FILES, optional=BOOLEAN, secretName=TEXT),
)
POD = section(
    ("containers",),
    affinity=section(nodeAffinity=NODE_AFFINITY),
    automountServiceAccountToken=BOOLEAN,
    containers=list_of(CONTAINER),
    hostNetwork=BOOLEAN,
    imagePullSecrets=list_of(section(name=TEXT)),
    initContainers=list_of(CONTAINER),
    nodeSelector=mapping_of(TEXT),
    priorityClassName=TEXT,
    restartPolicy=TEXT,
    runtimeClassName=TEXT,
    schedulerName=TEXT,
    securityContext=POD_SECURITY,
    serviceAccountName=TEXT,
    terminationGracePeriodSeconds=INTEGER,
    tolerations=list_of(section(effect=TEXT, key=TEXT, operator=TEXT, tolerationSeconds=INTEGER, value=TEXT)),
    volumes=list_of(VOLUME),
)
POD_TEMPLATE = section(metadata=section(annotations=LABELS, labels=LABELS, name=TEXT), spec=POD)
GROUP_FIELDS = {
    "labels": LABELS,
    "rayStartParams": mapping_of(TEXT),
    "resources": mapping_of(TEXT),
    "template": POD_TEMPLATE,
}
WORKER_GROUP = section(
    ("groupName", "maxReplicas", "minReplicas", "template"),
    groupName=TEXT,
    idleTimeoutSeconds=INTEGER,
    maxReplicas=with_default(INTEGER, 2**31 - 1),
    minReplicas=with_default(INTEGER, 0),
    numOfHosts=with_default(INTEGER, 1),
    priority=with_default(INTEGER, 0),
    replicas=with_default(INTEGER, 0),
    suspend=BOOLEAN,
    **GROUP_FIELDS,
)
CLUSTER = section(
    ("headGroupSpec",),
    authOptions=section(mode={"type": "string", "enum": ["disabled", "token"]}),
    autoscalerOptions=section(
        env=ENVIRONMENT,
        idleTimeoutSeconds=INTEGER,
        image=TEXT,
        resources=RESOURCES,
        securityContext=CONTAINER_SECURITY,
        version={"type": "string", "enum": ["v1", "v2"]},
        volumeMounts=MOUNTS,
    ),
    enableInTreeAutoscaling=BOOLEAN,
    historyServerOptions=section(collectorOptions=section(env=ENVIRONMENT, image=TEXT, resources=RESOURCES)),
    headGroupSpec=section(("template",), serviceType=TEXT, **GROUP_FIELDS),
    rayVersion=TEXT,
    workerGroupSpecs=list_of(WORKER_GROUP),
)
JOB = section(
    activeDeadlineSeconds=INTEGER,
    backoffLimit=with_default(INTEGER, 0),
    entrypoint=TEXT,
    preRunningDeadlineSeconds=INTEGER,
    rayClusterSpec=CLUSTER,
    shutdownAfterJobFinishes=BOOLEAN,
    submissionMode=TEXT,
    submitterConfig=section(backoffLimit=INTEGER),
    submitterPodTemplate=POD_TEMPLATE,
    suspend=BOOLEAN,
    ttlSecondsAfterFinished=INTEGER,
)


def write_crds(path: Path) -> Path:
    """Write the stand-ins for RayJob and RayCluster into one file, as `kubectl get crd -o yaml` prints them."""
    documents = []
    for kind, spec in (("RayJob", JOB), ("RayCluster", CLUSTER)):
        schema = section(apiVersion=TEXT, kind=TEXT, metadata={"type": "object"}, spec=spec)
        version = {"name": "v1", "schema": {"openAPIV3Schema": schema}}
        documents.append({"kind": "CustomResourceDefinition", "spec": {"names": {"kind": kind}, "versions": [version]}})
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return path
