"""Ray Train's notice of nodes that are about to be preempted, watched from the controller's node."""

import ray
from ray.train.v2._internal.callbacks.preemption_callback import PreemptionCallback
from ray.train.v2._internal.execution.preemption import PreemptionWatcher
from ray.train.v2._internal.execution.worker_group import WorkerGroup

from pos2distill.environment import disable_preemption_watcher

from .connection import driver_node


class PreemptionNotice(PreemptionCallback):
    """Ray Train's own callback, with another node for its watcher.

    Ray 2.60 starts the watcher on any node. On a sampler's node it would keep that node from ever being idle, and so
    from being released while training continues (ray#64703 reports the same of another of Train's actors). Create it
    on the driver: Ray Train then does not add its own.
    """

    def __init__(self) -> None:
        super().__init__()
        disable_preemption_watcher()

    def after_worker_group_start(self, worker_group: WorkerGroup) -> None:
        """Watch the nodes of this group's workers, and notify all workers."""
        # The old watcher knows the nodes and workers of the group before a restart.
        self._stop_watcher()
        workers = {worker.distributed_context.world_rank: worker for worker in worker_group.get_workers()}
        node_to_ranks: dict[str, list[int]] = {}
        for rank, worker in workers.items():
            node_to_ranks.setdefault(worker.metadata.node_id, []).append(rank)
        # Without CPUs, like Ray Train's own, so that it fits on a head node that offers none.
        watcher = ray.remote(num_cpus=0, max_restarts=-1)(PreemptionWatcher)
        self._watcher = watcher.options(scheduling_strategy=driver_node()).remote(
            node_to_ranks=node_to_ranks,
            poll_interval_s=self._poll_interval_s,
            worker_actors_by_rank={rank: worker.actor for rank, worker in workers.items()},
        )
