"""How work finds its nodes: the one place that names the labels and custom resources of the pools.

Sampling and training share a cluster and scale apart. Three facts about Ray 2.60 decide the names:

1. Ray Data's autoscaler asks for CPU, GPU and memory only, and the coordinator that shares a cluster between Data and
   Train tells nodes apart by one reserved label, `ray-subcluster`. With labels of any other key alone, Train reserved
   GPUs on the sampler node, and Data counted the trainer's as its own.
2. With `ray-subcluster` on both groups, what is reserved for Train is empty, and elastic training never starts.
3. With `ray-subcluster: sampling` on the sampling side only, and another key on the trainers, both are right.

So every node that works for Ray Data carries `ray-subcluster: sampling`, trainers carry `pool: trainer` and never
`ray-subcluster`. The custom resources keep out what has no label selector: bundles of a placement group of vLLM cannot
carry one, so an actor asks for some `sampler`, a training worker for one `trainer`.

The head carries neither: it has no CPUs for work. It carries a label of its own which says that there are pools, since
these may have no node yet. Where no node carries it (one machine, a cluster of another make), work goes anywhere.
"""

from dataclasses import dataclass

SUBCLUSTER_LABEL = "ray-subcluster"  # reserved by Ray; see above


@dataclass(frozen=True)
class Pool:
    """A kind of nodes: the Ray label that they carry and the custom resource that they offer."""

    label: str
    value: str
    resource: str

    @property
    def labels(self) -> dict[str, str]:
        """What a node of this pool carries, and what a selector asks for."""
        return {self.label: self.value}

    def units(self, gpus: int) -> int:
        """How much of the custom resource a node offers: one unit a GPU, and one on a node without."""
        return max(gpus, 1)


POOLS_LABEL = {"routing": "pools"}  # on the head
SAMPLER_SHARE = 0.001  # of the custom resource, for one actor; how many fit is decided by CPUs and GPUs

# Of Ray, for jobs whose nodes come and go.
RAY_VARIABLES = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1200",  # a GPU node takes minutes to come; Ray's default is 60 s
    # What a killed driver asked of the cluster is withheld so long from the one that goes on; Ray: 180 s.
    "RAY_DATA_AUTOSCALING_REQUEST_EXPIRE_TIME_S": "45",
}

SAMPLING = Pool(label=SUBCLUSTER_LABEL, value="sampling", resource="sampler")
TRAINING = Pool(label="pool", value="trainer", resource="trainer")
