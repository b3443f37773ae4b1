"""Stage `distill`: Ray Train workers read the sample store and train the student."""

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import ray.train
import torch
from pyarrow.fs import FSSpecHandler, PyFileSystem
from ray.actor import ActorHandle
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from pipelines.examples import read_training_examples
from pipelines.plan import Plan
from pipelines.progress import training_progress
from pipelines.ray_session import ray_session, require_resources
from pos2distill.config import Recipe, Study
from pos2distill.models.load import context_length, keep_generation_config, load_tokenizer
from pos2distill.store.artifacts import Manifest, write_bytes
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.training.rows import RowSource
from pos2distill.training.stepper import Stepper, build_stepper, has_resident_teacher
from pos2distill.training.teachers import ResidentStates, TeacherStates, cached_states
from pos2distill.training.trackers import open_trackers
from pos2distill.training.trainer import Ranks, StepRecord, train
from pos2distill.urls import open_url

MODEL_FOLDER = "model"
STEPS_FILE = "steps.jsonl"


def make_checkpoint(recipe: Recipe, plan: Plan) -> Manifest:
    """Train, and write `model/` (Hugging Face format) and `steps.jsonl` (one line a step).

    Counts: rows = examples * (K + 1), or K without an anchor; every row once an epoch.
    """
    start = time.monotonic()
    trainers = recipe.runtime.trainers
    with plan.checkpoint.writing(), ray_session(), training_progress() as board:
        workers = trainers.workers
        require_resources("training", cpus=workers * trainers.cpus, gpus=workers * trainers.gpus)
        trainer = TorchTrainer(
            _train_worker,
            train_loop_config={"recipe": recipe, "plan": plan, "board": board},
            torch_config=TorchConfig(backend="nccl" if trainers.gpus else "gloo"),
            scaling_config=ScalingConfig(
                num_workers=trainers.workers,
                use_gpu=trainers.gpus > 0,
                resources_per_worker=_resources(trainers.cpus, trainers.gpus),
            ),
            run_config=RunConfig(name=f"train-{plan.checkpoint.fingerprint}", **_ray_storage(recipe)),
        )
        counts: dict[str, int] = trainer.fit().return_value
        return plan.checkpoint.publish(counts=counts, seconds={"distill": time.monotonic() - start})


def make_source(study: Study, plan: Plan) -> RowSource:
    """The training rows of a study, from its examples and its sample store."""
    build_prompt = PromptBuilder(
        load_tokenizer(study.model),
        study.data.prompt,
        max_length=context_length(study.model),
        reserve=study.sampling.max_new_tokens,
    )
    return RowSource(read_training_examples(plan), SampleStore(plan.samples).read(), build_prompt, study)


def read_steps(plan: Plan) -> list[dict[str, Any]]:
    """The step records of a finished checkpoint."""
    text = plan.checkpoint.fs.cat_file(f"{plan.checkpoint.path}/{STEPS_FILE}").decode()
    return [json.loads(line) for line in text.splitlines()]


def _train_worker(config: dict[str, Any]) -> dict[str, int]:
    """What runs on each training worker."""
    recipe: Recipe = config["recipe"]
    plan: Plan = config["plan"]
    context = ray.train.get_context()
    # Asked of the settings first: Ray shows a worker without GPUs those of its machine.
    device = ray.train.torch.get_device() if recipe.runtime.trainers.gpus else torch.device("cpu")
    ranks = Ranks(context.get_world_rank(), context.get_world_size(), str(device))
    study = recipe.study
    source = make_source(study, plan)
    stepper = build_stepper(study, recipe.runtime.trainers, device)
    teacher: TeacherStates | None = None
    if has_resident_teacher(study):
        teacher = ResidentStates(stepper.frozen_states, alignment=study.method.alignment)
    elif study.method.needs_teacher:
        teacher = cached_states
    log = _StepLog(recipe, plan, source.total_steps, config["board"]) if ranks.rank == 0 else None
    train(study, recipe.runtime.trainers, source, stepper, teacher, ranks, [log] if log else [])
    _save(stepper, study, plan, write=ranks.rank == 0)
    if log:
        log.close()
    return {
        "examples": len(source.example_ids),
        "rows": source.rows_per_epoch,
        "epochs": study.training.epochs,
        "steps": source.total_steps,
    }


class _StepLog:
    """Step records to the progress board, the trackers and, at the end, the artifact."""

    def __init__(self, recipe: Recipe, plan: Plan, total_steps: int, board: ActorHandle) -> None:
        self.plan = plan
        self.lines: list[str] = []
        self.total_steps = total_steps
        self.board = board
        self.trackers = open_trackers(
            recipe.runtime.trackers,
            run=f"{recipe.name}-{plan.checkpoint.fingerprint}",
            folder=f"{recipe.storage}/tensorboard/{plan.checkpoint.fingerprint}",
            settings=recipe.study.model_dump(mode="json"),
        )

    def __call__(self, record: StepRecord) -> None:
        self.lines.append(json.dumps(record.as_dict()))
        self.board.post.remote(len(self.lines), self.total_steps, record.loss)
        for tracker in self.trackers:
            tracker.log(record)

    def close(self) -> None:
        """Write the log and end the trackers."""
        text = "\n".join(self.lines) + "\n"
        write_bytes(self.plan.checkpoint.fs, f"{self.plan.checkpoint.path}/{STEPS_FILE}", text.encode())
        for tracker in self.trackers:
            tracker.close()


def _save(stepper: Stepper, study: Study, plan: Plan, *, write: bool) -> None:
    """Save weights and tokenizer; every rank takes part, one writes."""
    with tempfile.TemporaryDirectory() as scratch:
        local = Path(plan.checkpoint.path if plan.checkpoint.is_local else scratch) / MODEL_FOLDER
        stepper.save(local)
        if write:
            load_tokenizer(study.model).save_pretrained(local)
            keep_generation_config(study.model, local)
            if not plan.checkpoint.is_local:
                plan.checkpoint.upload(local, MODEL_FOLDER)


def _resources(cpus: float, gpus: float) -> dict[str, float]:
    return {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}


def _ray_storage(recipe: Recipe) -> dict[str, Any]:
    """Where Ray Train keeps its own notes of the run: reached as all else is, by the same endpoint and credentials."""
    fs, path = open_url(f"{recipe.storage}/ray", "runtime.storage")
    return {"storage_path": path, "storage_filesystem": PyFileSystem(FSSpecHandler(fs))}
