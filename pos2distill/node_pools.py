"""Node pools: the Ray labels, custom resources and environment variables that decide on which node work runs.

Sampling and training share a cluster and scale independently. Three facts about Ray 2.60 determine the names:

1. The autoscaler of Ray Data requests CPU, GPU and memory only. The coordinator that divides a cluster between Ray Data
   and Ray Train recognizes one reserved node label, `ray-subcluster`. If nodes carried labels with other keys only,
   Train would reserve GPUs on the sampling nodes and Data would count the GPUs of the training nodes as its own.
2. If both groups carry `ray-subcluster`, the resources reserved for Train are empty and elastic training never starts.
3. If only the sampling nodes carry `ray-subcluster: sampling`, and training nodes a label with another key, both work.

Therefore every node that works for Ray Data carries `ray-subcluster: sampling`, and every training node carries
`pool: trainer` and never `ray-subcluster`. The custom resources exclude work that has no label selector: the placement
group bundles of vLLM cannot have one, so a sampling actor requests a fraction of `sampler` and a training worker
requests one `trainer`.

The head carries neither label, because it runs no work. It carries the label `routing: pools`, which says that the
cluster has pools even while they have no nodes. On a cluster without that label, such as a single machine, work runs
on any node.
"""

from dataclasses import dataclass

SUBCLUSTER_LABEL = "ray-subcluster"  # reserved by Ray; see above


@dataclass(frozen=True)
class Pool:
    """A kind of nodes: the Ray label that they carry and the custom resource that they provide."""

    label: str
    value: str
    resource: str

    @property
    def labels(self) -> dict[str, str]:
        """The label of a node of this pool, which is also the label selector for it."""
        return {self.label: self.value}

    def units(self, gpus: int) -> int:
        """Amount of the custom resource on a node: one per GPU, or one on a node without GPUs."""
        return max(gpus, 1)


POOLS_LABEL = {"routing": "pools"}  # on the head
# Amount of `sampler` that one actor requests. It is small because CPUs and GPUs decide how many actors fit on a node.
SAMPLER_UNITS_PER_ACTOR = 0.001

# Environment variables of Ray for clusters whose nodes are added and removed while a job runs. Read in Ray 2.60.
RAY_VARIABLES = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1200",  # Ray's default is 60 s; a new GPU node takes minutes to start
    # The resource requests of a killed driver stay valid for this time (Ray's default is 180 s). Until then the driver
    # that resumes the run cannot use those resources.
    "RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S": "45",
    # A job that is stopped (`ray job stop`, its deadline) saves a checkpoint, which may take minutes. Ray kills it
    # after this time, 3 s by default.
    "RAY_JOB_STOP_WAIT_TIME_S": "900",
}
TASK_CPUS = 0.5  # CPUs of one task of a stateless operator of Ray Data

# Seconds that running work may continue after a node's termination notice. Ray's default is 30 s. Its value depends on
# the node's grace period, so `cluster/` sets it for each group.
DRAIN_VARIABLE = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"

# Set on a head whose jobs are retried by others, to the address of its dashboard: a job that fails with a user error,
# or by its gate, is then stopped instead, so that it is not tried again. And the time (seconds since 1970) at which a
# job is stopped.
JOB_DASHBOARD_VARIABLE = "POS2DISTILL_JOB_DASHBOARD"
JOB_DEADLINE_VARIABLE = "POS2DISTILL_JOB_DEADLINE"
# In the last lines of the log of such a job.
NOT_RETRIED = "stopped, since another attempt would fail with the same error"
GATE_FAILED = "stopped, since the gate would fail in another attempt too"
DEADLINE_PASSED = "its deadline has passed"

SAMPLING = Pool(label=SUBCLUSTER_LABEL, value="sampling", resource="sampler")
TRAINING = Pool(label="pool", value="trainer", resource="trainer")
