"""A driver on pools: a dataset of sampler actors feeds training workers. Prints where everything ran, as JSON.

python -m tests.integration.drive STORAGE
"""

import json
import sys
import time

import numpy as np
import pyarrow as pa
import ray
import ray.train
from ray.data import DataContext
from ray.train import DataConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from pipelines.ray_session import pool_arguments, ray_session, trainer_arguments
from pos2distill.config import PoolSection, TrainersSection

SAMPLERS = PoolSection(min=1, max=2, batch_size=4, concurrent_batches=1, cpus=1, gpus=1)
TRAINERS = TrainersSection(workers=1, cpus=1)


def _node() -> str:
    return ray.get_runtime_context().get_node_labels().get("ray.io/node-group", "")


def _prompt(batch: pa.Table) -> pa.Table:
    return batch.append_column("prompted", pa.array([_node()] * len(batch)))


class _Sample:
    def __call__(self, batch: pa.Table) -> pa.Table:
        time.sleep(0.7)
        node = ray.get_runtime_context().get_node_id()
        columns = {"sampled": [_node()] * len(batch), "sampler": [node] * len(batch)}
        for name, values in columns.items():
            batch = batch.append_column(name, pa.array(values))
        return batch


def _train() -> dict[str, list[str]]:
    seen: dict[str, set[str]] = {"trained": {_node()}}
    for batch in ray.train.get_dataset_shard("train").iter_batches(batch_size=8):
        for name in ("prompted", "sampled", "sampler"):
            seen.setdefault(name, set()).update(np.unique(batch[name]))
    return {name: sorted(values) for name, values in seen.items()}


def main() -> None:
    """Run, and print."""
    with ray_session():
        dataset = (
            ray.data.range(240, override_num_blocks=60)
            .map_batches(_prompt, batch_format="pyarrow", num_cpus=0.5)
            .map_batches(_Sample, **pool_arguments(SAMPLERS))
        )
        options = DataContext.get_current().execution_options
        trainer = TorchTrainer(
            _train,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(**trainer_arguments(TRAINERS)),
            run_config=RunConfig(name="drive", storage_path=sys.argv[1]),
            datasets={"train": dataset},
            dataset_config=DataConfig(execution_options={"train": options}, enable_shard_locality=False),
        )
        print(json.dumps(trainer.fit().return_value))


if __name__ == "__main__":
    main()
