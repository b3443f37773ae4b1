"""Stage `sample`: advantaged responses into the sample store, with what the teacher stores beside them.

missing examples -> prompts -> sampler pool -> teacher pool -> sample store (-> trainers)
"""

import contextlib
import functools
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pos2distill.config import Runtime, Study
from pos2distill.config.fields import restrict
from pos2distill.errors import CorruptPart, UserError
from pos2distill.sampling.blocks import sampling_blocks
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.failure_guard import FailureGuard
from pos2distill.sampling.operators import (
    ActorOperator,
    EncodeTeacher,
    Operator,
    PromptSpec,
    SampleCounter,
    TaskOperator,
    generation_operators,
    store_samples,
)
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.samples import SampleStore, Tally

from ..executors.protocol import Stream, Tracker
from ..progress import ProgressSpec, RunProgress
from .evaluate import PROMPT_FIELDS
from .measured import with_measured
from .prepare import TRAIN, training_examples, training_ids
from .stage import Digests, Input, RunContext, Stage

TEACHERS = "teachers"
"""The name of the pool of teachers."""

_FIELDS = (*PROMPT_FIELDS, "seed", "method.advantageous_slot", "sampling")


def plan(study: Study, storage: str, digests: Digests, prepare: Stage, measured: Mapping[str, Input]) -> Stage:
    """The stage of a study. `measured`: what was measured of the model before."""
    settings = restrict(study, _FIELDS)
    inputs = {"examples": training_examples(prepare, digests), **measured}
    # The stored values, not the setting: `resident` and `none` both store nothing and can use the same samples.
    derived = {"teacher": _stored_teacher(study)}
    artifact = Artifact(storage, "samples", digests.fingerprint(settings, inputs, derived))
    return Stage("sample", artifact, settings, run, inputs, derived)


def stores_teacher(stage: Stage) -> bool:
    """Whether the samples hold what a teacher knows."""
    return bool(stage.derived["teacher"])


def responses(stage: Stage, digests: Digests) -> Input:
    """The responses alone, which do not depend on what a teacher stores with them."""
    return Input(stage.artifact, digests.fingerprint(stage.study, stage.inputs))


def _stored_teacher(study: Study) -> dict[str, object]:
    """What the teacher stores with the samples; empty if nothing."""
    method = study.method
    if method.teacher == "cached":
        return {"teacher": "cached", "alignment": method.alignment}
    if method.teacher == "topk":
        return {"teacher": "topk", "k": method.teacher_topk}
    return {}


def run(stage: Stage, context: RunContext) -> Manifest:
    """Sample what the store lacks, then publish it.

    Raises:
        UserError: if too many samples failed, and as `publish`.
    """
    progress = None
    SampleStore(stage.artifact).open()
    if len(missing_indices(stage)):
        spec = progress_spec(stage, context, "sample")
        with context.executor.track(spec) as tracker:
            stream = sample_stream(stage, context.runtime, tracker, return_samples=False)
            samples = context.executor.map(stream.blocks(), stream.operators, label="sampling", tracker=tracker)
            try:
                for _ in samples:
                    pass  # the last operator has stored and counted the samples
            except (UserError, KeyboardInterrupt):
                # What ended the run is what the user must see, whatever happens to this record of its time.
                with contextlib.suppress(Exception):
                    stage.artifact.add_seconds(seconds(tracker.read()))
                raise
            progress = tracker.read()
    return publish(stage, progress)


def progress_spec(stage: Stage, context: RunContext, label: str, *, epochs: int = 1) -> ProgressSpec:
    """What is tracked while samples are made.

    Args:
        label: `sample` or `distill`. epochs: how often the examples are counted.
    """
    ids = training_ids(stage.inputs["examples"].artifact)
    stored = _tally(SampleStore(stage.artifact), ids).outcomes
    # Only the samples to come: a retry is not stopped by failures that an earlier run recorded.
    guard = FailureGuard(context.runtime.max_failed_fraction, len(ids) - stored.total())
    return ProgressSpec(context.name, label, total=epochs * len(ids), stored=dict(stored), guard=guard)


def sample_stream(
    stage: Stage, runtime: Runtime, tracker: Tracker, *, return_samples: bool, preserve_order: bool = False
) -> Stream:
    """The samples that the store lacks. Each block of examples becomes one part of the store.

    Args:
        return_samples: return tables of `SAMPLE_SCHEMA`; else ids alone.
    """
    operators = sampling_operators(stage, runtime, tracker, return_samples=return_samples)
    # Called whenever workers start, because less is missing after a restart.
    blocks = functools.partial(missing_blocks, stage, runtime.samplers.batch_size)
    return Stream(blocks, operators, preserve_order)


def sampling_operators(
    stage: Stage, runtime: Runtime, counter: SampleCounter, *, return_samples: bool
) -> list[Operator]:
    """The operators from blocks of missing examples to stored samples."""
    study = with_measured(stage.study, stage.inputs)
    teacher = stage.derived["teacher"]
    specs = [PromptSpec(study.data.documents, placements=None)]
    sampling = study.sampling
    params = SamplingParams(
        sampling.temperature,
        sampling.top_p,
        sampling.max_new_tokens,
        stop_ids=(),
        stored_top_k=teacher.get("k", 0),
    )
    examples = stage.inputs["examples"].artifact
    operators = generation_operators(study, runtime, examples, TRAIN, specs, params, for_training=True)
    if teacher.get("teacher") == "cached":
        create = functools.partial(EncodeTeacher, study.model, teacher["alignment"], runtime.teachers)
        operators.append(ActorOperator(TEACHERS, create, runtime.teachers))
    store = functools.partial(store_samples, artifact=stage.artifact, counter=counter, return_samples=return_samples)
    operators.append(TaskOperator("store samples", store))
    return operators


def missing_indices(stage: Stage) -> npt.NDArray[np.int64]:
    """Indices of the training examples that the store lacks."""
    ids = training_ids(stage.inputs["examples"].artifact)
    return SampleStore(stage.artifact).index(ids).missing


def missing_blocks(stage: Stage, size: int) -> list[pa.Table]:
    """The missing examples in blocks, one for each part of the store."""
    return sampling_blocks(missing_indices(stage), size)


def publish(stage: Stage, progress: RunProgress | None) -> Manifest:
    """Count what the store holds, and publish it.

    Args:
        progress: of this run; None if it had nothing to sample.

    Counts: sampled = kept + wrong + empty + failed; hit_max_tokens of them were cut off at the length limit.

    Raises:
        UserError: if nothing was kept, or other nodes wrote where this one cannot read.
    """
    artifact = stage.artifact
    ids = training_ids(stage.inputs["examples"].artifact)
    tally = _tally(SampleStore(artifact), ids)
    absent = len(ids) - tally.outcomes.total()
    if absent:
        raise UserError(
            f"{artifact.url}: {len(ids) - absent} of {len(ids)} samples are visible from here; run again if parts were "
            f"quarantined; else runtime.storage must be a folder or URL that all nodes share"
        )
    counts = {"sampled": len(ids)}
    for outcome in ("kept", "wrong", "empty", "failed"):
        counts[outcome] = tally.outcomes[outcome]
    counts["hit_max_tokens"] = tally.finish_reasons["length"]
    if not counts["kept"]:
        raise UserError(
            f"{artifact.url}: none of {len(ids)} samples was kept ({counts['wrong']} wrong, {counts['empty']} empty, "
            f"{counts['failed']} failed); try another method.advantageous_slot or model, or sampling.keep=all"
        )
    return artifact.publish(counts=counts, seconds=seconds(progress))


def seconds(progress: RunProgress | None) -> dict[str, float]:
    """What this run took to sample; zeros if an earlier run sampled everything."""
    progress = progress or RunProgress()
    return {"sample": progress.sampling_seconds, "teacher": progress.actor_seconds.get(TEACHERS, 0.0)}


def _tally(store: SampleStore, ids: pa.Array) -> Tally:
    """Count the samples that are stored and readable."""
    while True:
        try:
            return store.tally(store.index(ids), ids)
        except CorruptPart:
            continue  # it has been quarantined and reported, and no longer counts
