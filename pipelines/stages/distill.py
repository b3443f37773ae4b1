"""Stage `distill`: Ray Train workers train the student on samples, from the store or straight from the samplers."""

import functools
import json
import time
from typing import Any

import pyarrow.fs
import ray
import ray.train
from ray.actor import ActorHandle
from ray.train import CheckpointConfig, DataConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from pipelines.executors.ray.preemption import PreemptionNotice
from pipelines.executors.ray.progress import RunProgress
from pipelines.executors.ray.session import (
    ray_session,
    require_resources,
    stream_options,
    trainer_arguments,
)
from pipelines.interrupt import interruptible
from pipelines.plan import STATE_FOLDER, STEPS_FOLDER, Plan
from pipelines.stages.sample import STREAM, missing_indices, open_stream, pool_needs, publish_samples, track_sampling
from pos2distill.config import Recipe
from pos2distill.errors import Stopped, UserError, find_user_error
from pos2distill.store.artifacts import Artifact, Manifest


def make_checkpoint(recipe: Recipe, plan: Plan) -> Manifest:
    """Train, and write `model/` (Hugging Face format) and `steps/` (one line a step).

    What the sample store lacks is sampled meanwhile and trained on as it comes; the samples are then published here.
    An interrupted run goes on from its last checkpoint.

    Counts: rows = examples * (K + 1), or K without an anchor; every row once an epoch.
    Raises:
        Stopped: if a signal prompt_specs for it; a checkpoint has been written.
        UserError: if training cannot go on; nothing of what is stored is lost.
    """
    start = time.monotonic()
    streams = plan.samples.manifest() is None
    with ray_session(), track_sampling(recipe, plan, "distill", epochs=recipe.study.training.epochs) as tracker_actor:
        _require_room(recipe, streams=streams)
        trainer = _make_trainer(recipe, plan, tracker_actor)
        outcome, signal = interruptible(trainer.fit, lambda: ray.get(tracker_actor.ask_to_stop.remote()))
        run_progress: RunProgress = ray.get(tracker_actor.read.remote())
    result: dict[str, Any] = outcome.return_value
    if "fatal_error" in result:
        if streams and not len(missing_indices(plan)):
            publish_samples(plan, run_progress.sampling_seconds)  # if nothing was kept, this says what became of all
        raise UserError(result["fatal_error"])
    if not result["finished"]:
        raise Stopped(f"stopped after step {result['steps']}; its checkpoint is kept", 128 + signal)
    if streams:
        publish_samples(plan, run_progress.sampling_seconds)
    manifest = plan.checkpoint.publish(counts=count_rows(plan), seconds={"distill": time.monotonic() - start})
    plan.checkpoint.remove(STATE_FOLDER)
    if signal:
        raise Stopped("stopped after training", 128 + signal)
    return manifest


def _require_room(recipe: Recipe, *, streams: bool) -> None:
    trainers = recipe.runtime.trainers
    cpus, gpus = trainers.workers * trainers.cpus, trainers.workers * trainers.gpus
    if not streams:
        require_resources("training", cpus=cpus, gpus=gpus)
        return
    pool_cpus, pool_gpus = pool_needs(recipe)
    what = "training while sampling (runtime.mode=streamed; staged does one after the other)"
    require_resources(what, cpus=cpus + pool_cpus, gpus=gpus + pool_gpus)


def read_steps(plan: Plan) -> list[dict[str, Any]]:
    """The step records of a checkpoint, in order."""
    fs, folder = plan.checkpoint.fs, f"{plan.checkpoint.path}/{STEPS_FOLDER}"
    return [
        json.loads(line) for path in sorted(fs.glob(f"{folder}/*.jsonl")) for line in fs.cat_file(path).splitlines()
    ]


def _make_trainer(recipe: Recipe, plan: Plan, tracker_actor: ActorHandle) -> TorchTrainer:
    trainers, checkpoints = recipe.runtime.trainers, recipe.runtime.checkpoints
    plan.checkpoint.fs.makedirs(plan.checkpoint.path, exist_ok=True)
    return TorchTrainer(
        _train_worker,
        train_loop_config={"recipe": recipe, "plan": plan, "tracker_actor": tracker_actor},
        torch_config=TorchConfig(backend="nccl" if trainers.gpus else "gloo"),
        scaling_config=ScalingConfig(**trainer_arguments(trainers)),
        run_config=RunConfig(
            name=STATE_FOLDER,
            storage_path=plan.checkpoint.path,
            storage_filesystem=_arrow_filesystem(plan.checkpoint),
            checkpoint_config=CheckpointConfig(num_to_keep=checkpoints.keep),
            failure_config=FailureConfig(max_failures=trainers.max_restarts),
            callbacks=[PreemptionNotice()],
        ),
        # Called whenever workers start, so that workers that start again get what is missing by then.
        datasets={STREAM: functools.partial(open_stream, recipe, plan, tracker_actor)},
        dataset_config=DataConfig(
            enable_shard_locality=False,  # samplers and trainers share no node
            execution_options=stream_options(preserve_order=recipe.study.training.order == "fixed"),
        ),
    )


def _train_worker(config: dict[str, Any]) -> dict[str, Any]:
    """What runs on each worker; an error that starting again would not mend comes back as `fatal_error`, its line.

    It may be one worker's alone, while the others wait for it. So it is told to the tracker_actor and raised: Ray Train ends
    all workers and starts them again, and then all of them refuse.
    """
    from pipelines.executors.ray.train_worker import (
        train_worker,
    )  # here, since Train's controller loads this module too

    tracker_actor = config["tracker_actor"]
    if fatal_error := ray.get(tracker_actor.fatal_error.remote()):
        return {"fatal_error": fatal_error}
    try:
        return train_worker(**config)
    except Exception as error:
        if cause := find_user_error(error):
            if ray.train.get_context().get_world_size() == 1:
                return {"fatal_error": str(cause)}
            ray.get(tracker_actor.refuse.remote(str(cause)))
        raise


def count_rows(plan: Plan) -> dict[str, int]:
    """What was trained on, by the steps: examples and rows of the first epoch, epochs, steps."""
    steps = read_steps(plan)
    first = [step for step in steps if step["epoch"] == 0]
    return {
        "examples": sum(len(step["examples"]) for step in first),
        "rows": sum(step["rows"] for step in first),
        "epochs": steps[-1]["epoch"] + 1,
        "steps": len(steps),
    }


def _arrow_filesystem(artifact: Artifact) -> pyarrow.fs.FileSystem | None:
    """The artifact's file system as Ray Train takes one, so that both reach the storage in the same way."""
    if artifact.is_local:
        return None
    return pyarrow.fs.PyFileSystem(pyarrow.fs.FSSpecHandler(artifact.fs))
