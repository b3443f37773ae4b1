"""Stage `distill`: train the student on samples, from the store or while they are sampled."""

import json
import sys
import time
import uuid
from dataclasses import dataclass, replace
from typing import Any

from pos2distill.config import Runtime
from pos2distill.errors import Stopped, UserError, warn
from pos2distill.literal_paths import list_matching
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.checkpoint_layout import ADAPTER_FOLDER, STATE_FOLDER, STEPS_FOLDER
from pos2distill.training.job import TrainingJob, TrainingOutcome
from pos2distill.training.step_record import STEP_FIELDS
from pos2distill.urls import storage_errors

from ..artifact_names import CHECKPOINT
from ..executors import saved_steps
from ..executors.protocol import Coordinator
from ..interrupt import interruptible
from ..progress_bar import is_quiet
from ..run_coordinator import CoordinatorSpec, RunProgress
from . import sample
from .plan_context import PlanContext
from .predictions import PROMPT_FIELDS
from .prepare import TRAIN_FILE, training_examples_input
from .resolve import resolve_auto_settings, with_distilled
from .stage import RunContext, Stage, record_stopped

PEAK_MEMORY = "peak_memory_gib"
"""Name of the detail in the manifest, see `TrainingOutcome.peak_memory_gib`."""

# Every setting of the method except those of `auto`, which have an influence only through the chosen slot.
_METHOD = (
    "method.name",
    "method.advantageous_slot",
    "method.k",
    "method.distractor_order",
    "method.weights",
    "method.anchor_weight",
    "method.view",
    "method.alignment",
    "method.divergence",
    "method.teacher",
    "method.teacher_slot",
    "method.teacher_topk",
)
_FIELDS = (*PROMPT_FIELDS, "data.train_examples", "seed", *_METHOD, "training")


def plan(context: PlanContext, sample_stage: Stage, *, round_number: int = 1, previous: Stage | None = None) -> Stage:
    """The stage of a study.

    Args:
        sample_stage: makes the samples that are trained on.
        round_number: 1 for the first round.
        previous: makes the model that is trained further, in the round before; default: the study's model.
    """
    fields = [*_FIELDS]
    # Only where it is used; otherwise it would change fingerprints without changing a result.
    if context.study.method.view in ("skip", "cyclic"):
        fields.append("method.view_weight")
    # Only the responses of the samples: how training uses a teacher is in this stage's own settings.
    responses = sample.responses(sample_stage, context.digests)
    examples = training_examples_input(context.prepare, context.digests)
    inputs = {"examples": examples, "samples": responses, **context.training_inputs}
    if previous is not None:
        inputs["student"] = previous.output()
    name = "distill" if round_number == 1 else f"distill {round_number}"
    return context.declare(
        name=name,
        folder=CHECKPOINT,
        fields=fields,
        run=run,
        inputs=inputs,
        streams={"samples": sample_stage},
    )


def run(stage: Stage, context: RunContext) -> Manifest:
    """Train, and write `model/` (Hugging Face format), `adapter/` (of LoRA) and `steps/` (one line for each step).

    Samples that the store lacks are made at the same time and trained on as they arrive; then they are published here.
    An interrupted run continues from its last training state.

    Counts: see `count_trained`.

    Raises:
        Stopped: if a signal asked for it; a checkpoint has been written.
        UserError: if training cannot continue; everything that is stored stays.
    """
    start = time.monotonic()
    sample_stage = stage.streams["samples"]
    _publish_complete_samples(sample_stage, context.runtime)
    streamed = not sample_stage.artifact.is_finished
    trained = _train(stage, context, sample_stage, start, streamed=streamed)
    # Here, since what workers print is not shown.
    for warning in trained.outcome.warnings:
        warn(warning)
    if not trained.outcome.finished:
        stage.artifact.add_seconds(_seconds(start))
        if streamed:
            sample_stage.artifact.add_seconds(sample.seconds(trained.progress))
        # Training stops early only on request, so there was a signal.
        raise Stopped(f"stopped after step {trained.outcome.steps}; its checkpoint is kept", 128 + trained.signal)
    if streamed:
        sample.publish(sample_stage, context.runtime, trained.progress)
    manifest = _publish(stage.artifact, _seconds(start), trained.outcome.peak_memory_gib)
    # The signal came too late to stop training. This stage is finished, but the next ones must not start.
    if trained.signal:
        raise Stopped("stopped after training", 128 + trained.signal)
    return manifest


@dataclass(frozen=True, slots=True)
class _Trained:
    """What training has come to. signal: the number of the one that asked it to stop; 0 if none did."""

    outcome: TrainingOutcome
    signal: int
    progress: RunProgress


def _publish_complete_samples(sample_stage: Stage, runtime: Runtime) -> None:
    """Publish samples that an earlier run has all made and not published.

    Raises:
        UserError: as `sample.publish`: what is wrong with them must not be found after training.
    """
    if not sample_stage.artifact.is_finished and not sample.lacks_samples(sample_stage):
        sample.publish(sample_stage, runtime, None)


def _train(stage: Stage, context: RunContext, sample_stage: Stage, start: float, *, streamed: bool) -> _Trained:
    """Train until the end, or until a signal asks to stop.

    Args:
        start: when the stage began, by the monotonic clock.
        streamed: whether samples are made while training runs.
    Raises:
        UserError: if training cannot continue; the seconds and, if all are there, the samples are recorded.
    """
    job = _job(stage, context, sample_stage)
    spec = resumed_spec(
        sample.coordinator_spec(sample_stage, context, "distill", counts="trained", epochs=job.study.training.epochs),
        stage.artifact,
    )
    with context.executor.coordinate(spec) as coordinator:
        stream = sample.sample_stream(
            sample_stage,
            context.runtime,
            coordinator,
            return_samples=True,
            preserve_order=job.study.training.order == "fixed",
            complete=context.runtime.mode == "staged" and not streamed,
        )
        try:
            outcome, signal = interruptible(
                lambda: context.executor.train(job, stream, coordinator), coordinator.request_stop
            )
        except UserError:
            # Where another driver has taken the run over, that is what the user must know.
            context.lease.check()
            record_stopped(stage, context, lambda: _seconds(start))
            if streamed:
                _keep_samples(sample_stage, context.runtime, _read(coordinator))
            raise
        return _Trained(outcome, signal, coordinator.read())


def _publish(checkpoint: Artifact, seconds: dict[str, float], peak_memory_gib: float) -> Manifest:
    """Publish a checkpoint whose training has ended, and remove its training state."""
    # Training it again gives other weights, which results of the first ones must not be taken for (`made_from`).
    details = {"id": uuid.uuid4().hex, PEAK_MEMORY: peak_memory_gib}
    manifest = checkpoint.publish(counts=count_trained(checkpoint), seconds=seconds, details=details)
    # After the manifest: until then a killed run resumes from this state.
    checkpoint.remove(STATE_FOLDER)
    return manifest


def check_executor(stage: Stage, executor: str) -> None:
    """Raise if training that was stopped was begun by another executor, under which it continues.

    Raises:
        UserError: if the other one has saved training states, with what to do.
    """
    artifact = stage.artifact
    with storage_errors(artifact.url, "runtime.storage"):
        saved = saved_steps(artifact)
    for other in saved:
        if other == executor:
            continue
        continue_it = "" if executor in saved else f"set runtime.executor={other} to continue it, or "
        raise UserError(
            f"runtime.executor: {executor}, but executor {other} has begun the training in {artifact.url}; "
            f"{continue_it}delete that folder to train again from the samples"
        )


def resumed_spec(spec: CoordinatorSpec, checkpoint: Artifact) -> CoordinatorSpec:
    """The progress of a run that continues from its newest training state, if there is one."""
    steps = read_logged_steps(checkpoint)
    if not steps:
        return spec
    last = steps[-1]
    if not is_quiet():
        steps_done = last["step"] + 1
        # In streamed mode the number of steps is known only when the stream has ended.
        total = round(steps_done / last["fraction"])
        print(f"distill: resuming at step {steps_done} of about {total}", file=sys.stderr)
    return replace(spec, trained=round(last["fraction"] * spec.total))


def _read(coordinator: Coordinator) -> RunProgress:
    """The latest figures; zeros if the coordinator is gone with its cluster."""
    try:
        return coordinator.read()
    except Exception:  # from Ray or its transport; the error that ended the run is shown
        return RunProgress()


def _seconds(start: float) -> dict[str, float]:
    return {"distill": time.monotonic() - start}


def _keep_samples(sample_stage: Stage, runtime: Runtime, progress: RunProgress) -> None:
    """After training has failed, publish the samples if all are there.

    Raises:
        UserError: as `sample.publish`; its message counts all samples.
    """
    if sample.lacks_samples(sample_stage):
        sample_stage.artifact.add_seconds(sample.seconds(progress))
    else:
        sample.publish(sample_stage, runtime, progress)


def _job(stage: Stage, context: RunContext, sample_stage: Stage) -> TrainingJob:
    study = resolve_auto_settings(stage.study, stage.inputs)
    return TrainingJob(
        name=context.name,
        logged_settings=context.logged_settings,
        study=study,
        runtime=context.runtime,
        student_start=with_distilled(study, stage.inputs).model,
        examples=stage.inputs["examples"].artifact,
        examples_file=TRAIN_FILE,
        samples=sample_stage.artifact,
        checkpoint=stage.artifact,
    )


def has_adapter(checkpoint: Artifact) -> bool:
    """Whether a checkpoint has adapters (`training.lora`), which are stored by themselves too."""
    return bool(checkpoint.fs.exists(f"{checkpoint.path}/{ADAPTER_FOLDER}/adapter_config.json"))


def read_logged_steps(checkpoint: Artifact) -> list[dict[str, Any]]:
    """The step records of training up to its newest saved state, from which it continues, in order.

    Empty without a state. Later records, written before a state whose upload was cut off, are of steps that will be
    made again.
    """
    step = max(saved_steps(checkpoint).values(), default=0)
    return read_steps(checkpoint)[:step] if step else []


def read_steps(checkpoint: Artifact) -> list[dict[str, Any]]:
    """The step records of a checkpoint, in order.

    Raises:
        UserError: if they are missing or corrupt.
    """
    records = []
    with checkpoint.reading(STEPS_FOLDER):
        # File names are zero-padded step numbers, so their order is that of the steps.
        for path in list_matching(checkpoint.fs, f"{checkpoint.path}/{STEPS_FOLDER}", "*.jsonl"):
            for line in checkpoint.fs.cat_file(path).splitlines():
                record = json.loads(line)
                if not isinstance(record, dict) or not record.keys() >= set(STEP_FIELDS):
                    raise ValueError(f"expected an object with the fields {STEP_FIELDS}")
                records.append(record)
    checkpoint.require(STEPS_FOLDER)
    return records


def count_trained(checkpoint: Artifact) -> dict[str, int]:
    """What was trained on, by the step records: examples and rows of the first epoch, epochs, steps.

    Raises:
        UserError: if a step has no record, or more than one: the counts would be wrong.
    """
    steps = read_steps(checkpoint)
    for expected, step in enumerate(steps):
        if step["step"] != expected:
            raise UserError(
                f"{checkpoint.url}/{STEPS_FOLDER}: expected the record of step {expected}, found that of step "
                f"{step['step']}; delete {checkpoint.url} to train again from the samples"
            )
    first_epoch = [step for step in steps if step["epoch"] == 0]
    return {
        # Each once, although on-policy methods have several samples of an example.
        "examples": len({example for step in first_epoch for example in step["examples"]}),
        "rows": sum(step["rows"] for step in first_epoch),
        "epochs": steps[-1]["epoch"] + 1,
        "steps": len(steps),
    }
