"""Stage `sample`: responses into the sample store, with what the teacher stores beside them.

missing samples -> prompts -> sampler pool -> teacher pool -> sample store (-> trainers)

The base model answers the advantageous prompts, and the teacher reads the same ones unless its slot is random. In an
on-policy method the student answers, at the slots that it is trained at; then the teacher gets the advantageous prompt
with the student's response.
"""

import functools
import shlex
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import pyarrow as pa

from pos2distill.config import ModelSection, PoolSection, Runtime, Study
from pos2distill.config.method import Alignment
from pos2distill.errors import MachineError, TransientError, UserError
from pos2distill.models.files import files_version
from pos2distill.records import sample_id_array
from pos2distill.sampling.blocks import sampling_blocks
from pos2distill.sampling.engines.protocol import SamplingParams
from pos2distill.sampling.failure_guard import FAILED, FailureGuard, describe_failures
from pos2distill.sampling.gpu_lock import gpu_start_lock
from pos2distill.sampling.operators import (
    ActorOperator,
    Operator,
    SampleCounter,
    TableFunction,
    TaskOperator,
    sample_operators,
    store_samples,
)
from pos2distill.sampling.prompting import replace_with_teacher_prompts
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.samples import SampleStore, Tally, UnreadablePartError
from pos2distill.store.selection import Selection

from ..artifact_names import SAMPLES
from ..executors.protocol import Coordinator, Stream
from ..run_coordinator import CoordinatorSpec, RunProgress
from .plan_context import PlanContext
from .predictions import PROMPT_FIELDS
from .prepare import TRAIN_FILE, training_examples_input, training_ids
from .resolve import resolve_auto_settings, with_distilled
from .stage import Digests, Input, RunContext, Stage, record_stopped

TEACHERS = "teachers"
"""The name of the pool of teachers."""

_FIELDS = (
    *PROMPT_FIELDS,
    "data.train_examples",
    "seed",
    "method.advantageous_slot",
    "method.teacher_slot",
    "sampling",
)


def plan(context: PlanContext, *, round_number: int = 1, previous: Stage | None = None) -> Stage:
    """The stage of a study.

    Args:
        round_number: 1 for the first round.
        previous: makes the model that answers, in the round before; default: the study's model.
    """
    study = context.study
    fields = [*_FIELDS]
    # Only where they are used; otherwise they would change fingerprints without changing a result.
    if study.method.spec.on_policy:
        fields += ["method.name", "method.k"]
        # With the default weight there are anchor rows, and their number does not depend on it.
        fields += ["method.anchor_weight"] if not study.method.anchor_weight else []
    inputs = {"examples": training_examples_input(context.prepare, context.digests), **context.training_inputs}
    if previous is not None:
        inputs["student"] = previous.output()
    # The stored values, not the setting: `resident` and `none` both store nothing and can use the same samples.
    derived = {"teacher": _stored_teacher(study)}
    name = "sample" if round_number == 1 else f"sample {round_number}"
    return context.declare(
        name=name,
        folder=SAMPLES,
        fields=fields,
        run=run,
        inputs=inputs,
        derived=derived,
    )


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
    spec = coordinator_spec(stage, context, "sample", counts="kept")
    if len(spec.selection.missing):
        with context.executor.coordinate(spec) as coordinator:
            stream = sample_stream(stage, context.runtime, coordinator, return_samples=False)
            samples = context.executor.map(stream.blocks(), stream.operators, label="sampling", coordinator=coordinator)
            try:
                for _ in samples:
                    pass  # the last operator has stored and counted the samples
            except (UserError, KeyboardInterrupt):
                record_stopped(stage, context, lambda: seconds(coordinator.read()))
                raise
            progress = coordinator.read()
    return publish(stage, context.runtime, progress)


def coordinator_spec(
    stage: Stage, context: RunContext, label: str, *, counts: Literal["kept", "trained"], epochs: int = 1
) -> CoordinatorSpec:
    """What the coordinator of a stage begins with: what is stored, and which samples are needed.

    Args:
        label, counts: see `CoordinatorSpec`.
        epochs: how often the samples are counted.
    """
    ids = sample_ids_of(stage)
    tally = SampleStore(stage.artifact).read_tally(ids)
    known = Selection(tally.sampled_N, tally.kept_N, stage.study.wanted_samples)
    # Samples that are published were accepted; those of corrupt parts may be made again.
    counted_by_guard = Counter[str]() if stage.artifact.is_finished else tally.outcomes
    guard = FailureGuard(
        context.runtime.max_failed_fraction,
        stored=counted_by_guard.total(),
        stored_failed=sum(counted_by_guard[outcome] for outcome in FAILED),
    )
    total = epochs * min(known.wanted, len(ids))
    stored = dict(tally.outcomes)
    return CoordinatorSpec(
        context.name, label, counts, total=total, stored=stored, guard=guard, ids=ids, selection=known
    )


def sample_stream(
    stage: Stage,
    runtime: Runtime,
    coordinator: Coordinator,
    *,
    return_samples: bool,
    preserve_order: bool = False,
    complete: bool = False,
) -> Stream:
    """The samples that the store lacks. Each block becomes one part of the store.

    Args:
        return_samples: return tables of `SAMPLE_SCHEMA`; else ids alone.
        complete: the store must lack none, and its blocks raise otherwise.
    """
    operators = sampling_operators(stage, runtime, coordinator, return_samples=return_samples)
    # Called whenever workers start, because less is missing after a restart.
    if complete:
        blocks = functools.partial(_require_none_missing, stage)
    else:
        blocks = functools.partial(missing_blocks, stage, runtime.samplers.batch_size)
    return Stream(blocks, operators, preserve_order)


def _require_none_missing(stage: Stage) -> list[pa.Table]:
    """No blocks.

    Raises:
        MachineError: if samples are missing, as those of a part that training has found to be corrupt.
    """
    missing = len(_selection(stage, SampleStore(stage.artifact)).missing)
    if missing:
        # Not a TransientError: waiting for the storage does not help, but another try of a cluster's job does.
        raise MachineError(
            f"{stage.artifact.url}: {missing} samples are corrupt or cannot be read from here; run the same command "
            f"again to make them again (runtime.mode=staged does not while it trains)"
        )
    return []


def sampling_operators(
    stage: Stage, runtime: Runtime, counter: SampleCounter, *, return_samples: bool
) -> list[Operator]:
    """The operators from blocks of missing samples to stored samples."""
    base = resolve_auto_settings(stage.study, stage.inputs)
    study = with_distilled(base, stage.inputs)
    teacher = stage.derived["teacher"]
    sampling = study.sampling
    params = SamplingParams(
        sampling.temperature,
        sampling.top_p,
        sampling.max_new_tokens,
        stop_ids=(),
        stored_top_k=teacher.get("k", 0),
    )
    examples = stage.inputs["examples"].artifact
    operators = sample_operators(
        study, runtime, examples, TRAIN_FILE, params, candidates=sampling.candidates, only_needed=True
    )
    if study.method.teacher_gets_another_prompt:
        replace_prompts = functools.partial(
            replace_with_teacher_prompts, study=study, model_version=files_version(study.model)
        )
        operators.append(TaskOperator("teacher prompts", replace_prompts, runtime.samplers.max))
    if teacher.get("teacher") == "cached":
        create = functools.partial(_create_teacher, base.model, teacher["alignment"], runtime.teachers)
        operators.append(ActorOperator(TEACHERS, create, runtime.teachers))
    store = functools.partial(store_samples, artifact=stage.artifact, counter=counter, return_samples=return_samples)
    operators.append(TaskOperator("store samples", store))
    return operators


def _create_teacher(base: ModelSection, alignment: Alignment, pool: PoolSection) -> TableFunction:
    # Imported in the actor: it loads torch and transformers.
    from pos2distill.sampling.teacher_encoder import TeacherEncoder

    with gpu_start_lock(pool.gpus):
        return TeacherEncoder(base, alignment=alignment, threads=pool.threads, device=pool.device)


def _selection(stage: Stage, store: SampleStore) -> Selection:
    """What the store knows of the samples, and so which are still to be made."""
    index, kept_N = store.read_index_and_kept(sample_ids_of(stage))
    return Selection(index.stored, kept_N, stage.study.wanted_samples)


def lacks_samples(stage: Stage) -> bool:
    """Whether the store lacks samples that are needed, also of a finished stage. Only reads."""
    if not stage.inputs["examples"].artifact.is_finished:
        return False  # which samples there are is known only then
    try:
        known = _selection(stage, SampleStore(stage.artifact, read_only=True))
    except UnreadablePartError:  # it is moved where its samples are made again
        return True
    return len(known.missing) > 0


def sample_ids_of(stage: Stage) -> pa.Array:
    """The ids of all samples that may be made, in the order of the training examples."""
    examples = training_ids(stage.inputs["examples"].artifact)
    return sample_id_array(examples, stage.study.method.responses_per_example)


def missing_blocks(stage: Stage, size: int) -> list[pa.Table]:
    """The samples that may still be needed in blocks, one for each part of the store."""
    return sampling_blocks(_selection(stage, SampleStore(stage.artifact)).missing, size)


def publish(stage: Stage, runtime: Runtime, progress: RunProgress | None) -> Manifest:
    """Count what the store holds, and publish it.

    Args:
        progress: figures of this run; None if it had nothing to sample.

    Counts: sampled = kept + surplus + wrong + empty + failed; kept are trained on, at most as many as wanted, and
    surplus is what was kept beyond; hit_max_tokens of all sampled were cut off at the length limit; thoughts and
    unfinished_thoughts, if there are some: see `count_thoughts`.

    Raises:
        UserError: if nothing was kept, or too many samples failed, also in earlier runs.
        TransientError: if other nodes wrote where this one cannot read.
    """
    artifact = stage.artifact
    tally = SampleStore(artifact).read_tally(sample_ids_of(stage))
    sampled = tally.outcomes.total()
    known = Selection(tally.sampled_N, tally.kept_N, stage.study.wanted_samples)
    absent = len(known.missing)
    if absent:
        raise TransientError(
            f"{artifact.url}: {sampled} of {sampled + absent} samples are visible from here; run the same command "
            f"again to make the others; if that does not help, runtime.storage must be a folder or URL that all nodes "
            f"share"
        )
    counts = _count_samples(tally, known)
    _require_usable(artifact, counts, runtime.max_failed_fraction)
    return artifact.publish(counts=counts, seconds=seconds(progress))


def _count_samples(tally: Tally, known: Selection) -> dict[str, int]:
    """The counts of `publish`."""
    counts = {
        "wanted": known.wanted,
        "sampled": tally.outcomes.total(),
        "kept": known.kept,
        "surplus": tally.outcomes["kept"] - known.kept,
    }
    for outcome in ("wrong", "empty", "failed"):
        counts[outcome] = tally.outcomes[outcome]
    counts["hit_max_tokens"] = tally.finish_reasons["length"]
    return counts | tally.thoughts


def _require_usable(artifact: Artifact, counts: Mapping[str, int], max_failed_fraction: float) -> None:
    """Reject samples of which none was kept, or too many failed."""
    sampled = counts["sampled"]
    if not counts["kept"]:
        most = max(("wrong", "empty", "failed"), key=lambda outcome: counts[outcome])
        raise UserError(
            f"{artifact.url}: none of {sampled} samples was kept ({counts['wrong']} wrong, {counts['empty']} empty, "
            f"{counts['failed']} failed); `inspect {shlex.quote(artifact.url)} --samples --outcome {most}` shows "
            f"them; try another method.advantageous_slot or model, or sampling.keep=all"
        )
    failed = sum(counts[outcome] for outcome in FAILED)
    if failed > max_failed_fraction * sampled:
        most = max(FAILED, key=lambda outcome: counts[outcome])
        raise UserError(
            f"{artifact.url}: {describe_failures(failed, sampled, max_failed_fraction)}; `inspect "
            f"{shlex.quote(artifact.url)} --samples --outcome {most}` shows them; with a larger limit they are left "
            f"out; to sample again, delete {artifact.url}"
        )


def seconds(progress: RunProgress | None) -> dict[str, float]:
    """What this run took to sample; zeros if an earlier run sampled everything."""
    progress = progress or RunProgress()
    return {"sample": progress.sampling_seconds, "teacher": progress.actor_seconds.get(TEACHERS, 0.0)}
