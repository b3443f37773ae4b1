"""What runs on each training worker: the loader, the strategy, checkpoints by step, the log."""

import json
import os
import queue
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray.train
import torch
from ray.actor import ActorHandle
from ray.data import DataIterator
from ray.train import Checkpoint
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2.api.report_config import CheckpointUploadMode

from pipelines.plan import MODEL_FOLDER, STATE_FOLDER, STEPS_FOLDER, Plan
from pipelines.stages.prepare import training_ids
from pipelines.stages.sample import STREAM
from pos2distill.config import Recipe, Study, fingerprint
from pos2distill.errors import UserError
from pos2distill.models.files import copy_generation_config
from pos2distill.models.load import context_length, load_tokenizer
from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.store.artifacts import write_bytes
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.training.distributed import DistContext, control_group
from pos2distill.training.loader import Action, BatchLoader, TrainingProgress
from pos2distill.training.loop import StepRecord, Trainer
from pos2distill.training.rows import RowBuilder, examples_per_batch
from pos2distill.training.strategies import build_strategy
from pos2distill.training.strategies.protocol import Strategy
from pos2distill.training.teachers import build_teacher
from pos2distill.training.trackers import open_trackers

_POLL_SECONDS = 0.5


def train_worker(recipe: Recipe, plan: Plan, tracker_actor: ActorHandle) -> dict[str, Any]:
    """Train on this worker, from the last checkpoint if there is one.

    Returns: `finished`, and at which of the `steps`.
    """
    study, trainers = recipe.study, recipe.runtime.trainers
    context = ray.train.get_context()
    # Asked of the settings first: Ray shows a worker without GPUs those of its machine.
    device = ray.train.torch.get_device() if trainers.gpus else torch.device("cpu")
    world = context.get_world_size()
    dist = DistContext(context.get_world_rank(), world, str(device), control_group(world))
    strategy = build_strategy(study, trainers, device)
    teacher = build_teacher(study, strategy.frozen_states, device)
    ids = training_ids(plan)
    progress = _resume(strategy, plan, len(ids))
    log = StepLog(recipe, plan, tracker_actor, progress, len(ids)) if dist.rank == 0 else None
    checkpointer = Checkpointer(recipe, plan, tracker_actor, strategy, dist, log, progress.step)
    pull = -(-examples_per_batch(study) // world)
    loader = BatchLoader(
        study,
        ids,
        SampleStore(plan.samples),
        lambda: Shard(ray.train.get_dataset_shard(STREAM), pull),
        dist,
        checkpointer.action,
    )
    build = RowBuilder(make_prompt_builder(study), study)
    trainer = Trainer(study, trainers, build, strategy, teacher, dist)
    finished = trainer.train(loader, progress, [log] if log else [], checkpointer.save)
    if finished:
        _save_model(strategy, study, plan, write=dist.rank == 0)
    if log:
        log.close()
    return {"finished": finished, "steps": progress.step}


def make_prompt_builder(study: Study) -> PromptBuilder:
    """The prompts of a study, as in sampling."""
    return PromptBuilder(
        load_tokenizer(study.model),
        study.data.prompt,
        max_length=context_length(study.model),
        reserve=0,  # the response is there, and fitted behind the advantageous prompt
    )


class Shard:
    """This worker's part of the stream, pulled by a thread, so that a look at it never waits long.

    Args:
        shard: of the stream. rows: pulled at a time.
    """

    def __init__(self, shard: DataIterator, rows: int) -> None:
        self.coming: queue.Queue[pa.Table | BaseException | None] = queue.Queue(maxsize=2)
        self.ended = False
        threading.Thread(target=self._pull, args=(shard, rows), name="shard", daemon=True).start()

    def poll(self) -> pa.Table | None:
        """Samples that have come, after a moment's wait perhaps none; None once the stream has ended."""
        if self.ended:
            return None
        try:
            part = self.coming.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return SAMPLE_SCHEMA.empty_table()
        if isinstance(part, BaseException):
            raise part
        self.ended = part is None
        return part

    def _pull(self, shard: DataIterator, rows: int) -> None:
        try:
            for batch in shard.iter_batches(batch_size=rows, batch_format="pyarrow"):
                self.coming.put(batch.cast(SAMPLE_SCHEMA))
            self.coming.put(None)
        except BaseException as error:  # handed to whoever polls
            self.coming.put(error)


class Checkpointer:
    """Decides when a checkpoint is due, and writes it; Ray Train uploads it while training goes on."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        tracker_actor: ActorHandle,
        strategy: Strategy,
        dist: DistContext,
        log: "StepLog | None",
        step: int,
    ) -> None:
        self.settings = recipe.runtime.checkpoints
        self.tracker_actor = tracker_actor
        self.strategy = strategy
        self.dist = dist
        self.log = log
        # Of this storage's run, user and rank alone. What a worker that died here could not upload goes first.
        run = fingerprint(plan.checkpoint.url)
        self.scratch = Path(tempfile.gettempdir()) / f"pos2distill-{run}-{os.getuid()}-{dist.rank}"
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self.last_step, self.last_time = step, time.monotonic()
        self.asked = self.tracker_actor.stop_asked.remote() if dist.rank == 0 else None
        self.preempted = False

    def action(self, step: int) -> Action:
        """What is to happen after this step: every rank looks at its node, rank 0 at the clock and the tracker_actor too."""
        notice = _is_preempted() and not self.preempted
        self.preempted |= notice
        if self.dist.rank:
            return Action.CHECKPOINT if notice else Action.CONTINUE
        action = max(self._asked(), Action.CHECKPOINT if notice else Action.CONTINUE)
        steps, minutes = step - self.last_step, (time.monotonic() - self.last_time) / 60
        if steps and (minutes >= self.settings.minutes or steps >= (self.settings.steps or steps + 1)):
            action = max(action, Action.CHECKPOINT)
        if action:
            self.last_step, self.last_time = step, time.monotonic()
        return action

    def save(self, progress: TrainingProgress) -> None:
        """Write a checkpoint; every rank its own part. To stop, training waits until it is uploaded."""
        # A folder of its own: one of the same step may be on its way, if nothing has come to train on since.
        folder = Path(tempfile.mkdtemp(prefix=f"{progress.step}-", dir=self.scratch))
        self.strategy.save_state(folder)
        if self.log:
            progress.save(folder)
            self.log.flush()
        ray.train.report(
            {"step": progress.step},
            checkpoint=Checkpoint.from_directory(folder),
            checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        )

    def _asked(self) -> Action:
        """What the tracker_actor was asked for; the question is on its way all the time, so that nobody waits for it."""
        ready, _ = ray.wait([self.asked], timeout=0)
        if not ready:
            return Action.CONTINUE
        action = Action.STOP if ray.get(self.asked) else Action.CONTINUE
        self.asked = self.tracker_actor.stop_asked.remote()
        return action


class StepLog:
    """Step records to the progress tracker_actor, the trackers and the artifact, there a file from checkpoint to checkpoint."""

    def __init__(
        self, recipe: Recipe, plan: Plan, tracker_actor: ActorHandle, progress: TrainingProgress, examples: int
    ) -> None:
        self.plan = plan
        self.tracker_actor = tracker_actor
        self.examples = examples * recipe.study.training.epochs
        self.lines: list[str] = []
        self.start = progress.step
        fs, folder = self.plan.checkpoint.fs, f"{self.plan.checkpoint.path}/{STEPS_FOLDER}"
        fs.makedirs(folder, exist_ok=True)
        # What came after the checkpoint is done again.
        fs.invalidate_cache(folder)
        for path in fs.glob(f"{folder}/*.jsonl"):
            if int(Path(path).stem) >= self.start:
                fs.rm(path)
        self.trackers = open_trackers(
            recipe.runtime.trackers,
            run=f"{recipe.name}-{self.plan.checkpoint.fingerprint}",
            folder=f"{recipe.storage}/tensorboard/{self.plan.checkpoint.fingerprint}",
            settings=recipe.study.model_dump(mode="json"),
        )

    def __call__(self, record: StepRecord) -> None:
        """Log one step."""
        self.lines.append(json.dumps(record.as_dict()))
        self.tracker_actor.count_step.remote(round(record.fraction * self.examples), record.step + 1, record.loss)
        for tracker in self.trackers:
            tracker.log(record)

    def flush(self) -> None:
        """Write the steps since the last time, under the number of the first."""
        if self.lines:
            path = f"{self.plan.checkpoint.path}/{STEPS_FOLDER}/{self.start:08d}.jsonl"
            write_bytes(self.plan.checkpoint.fs, path, ("\n".join(self.lines) + "\n").encode())
            self.start, self.lines = self.start + len(self.lines), []

    def close(self) -> None:
        """Write the rest and end the trackers."""
        self.flush()
        for tracker in self.trackers:
            tracker.close()


def _is_preempted() -> bool:
    """Whether this worker's node is about to be taken away.

    Ray's public `get_preemption_info` says the same but waits for all ranks; the loader exchanges their wishes anyway.
    """
    return get_train_context().preemption_context.preemption_info is not None


def _resume(strategy: Strategy, plan: Plan, examples: int) -> TrainingProgress:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return TrainingProgress.at_start(examples)
    with checkpoint.as_directory() as folder:
        try:
            strategy.load_state(Path(folder))
            return TrainingProgress.load(Path(folder))
        except UserError as error:
            again = f"remove {plan.checkpoint.url}/{STATE_FOLDER} to train anew from the samples"
            raise UserError(f"{error}; {again}") from None


def _save_model(strategy: Strategy, study: Study, plan: Plan, *, write: bool) -> None:
    """Save weights and tokenizer; every rank takes part, one writes."""
    with tempfile.TemporaryDirectory() as scratch:
        local = Path(plan.checkpoint.path if plan.checkpoint.is_local else scratch) / MODEL_FOLDER
        if write:
            shutil.rmtree(local, ignore_errors=True)  # of a run that was killed while it saved
        strategy.save(local)
        if write:
            load_tokenizer(study.model).save_pretrained(local)
            copy_generation_config(study.model, local)
            if not plan.checkpoint.is_local:
                plan.checkpoint.upload(local, MODEL_FOLDER)
