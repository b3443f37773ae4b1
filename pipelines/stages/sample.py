"""Stage `sample`: advantaged responses into the sample store, with what the teacher stores beside them.

missing examples -> prompts -> sampler pool -> teacher pool -> sample store (-> trainers)
"""

import functools
import time

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pos2distill.config import Runtime, Study
from pos2distill.config.fields import restrict
from pos2distill.errors import CorruptPart, UserError
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
    sampling_blocks,
    store_samples,
)
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.samples import SampleStore, Tally
from pos2distill.tasks.permutations import Placement

from ..executors.protocol import Stream, Tracker
from ..progress import ProgressSpec
from .choose_slot import with_chosen_slot
from .evaluate import PROMPT_FIELDS
from .prepare import TRAIN, training_examples, training_ids
from .stage import Digests, Input, Run, Stage

_FIELDS = (*PROMPT_FIELDS, "method.advantageous_slot", "sampling")


def plan(study: Study, storage: str, digests: Digests, prepare: Stage, choose_slot: Stage | None) -> Stage:
    """The stage of a study. `choose_slot`: where the advantageous slot is `auto`."""
    settings = restrict(study, _FIELDS)
    inputs = {"examples": training_examples(prepare, digests)}
    if choose_slot is not None:
        inputs["slot"] = choose_slot.output()
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


def run(stage: Stage, run: Run) -> Manifest:
    """Sample what the store lacks, then publish it.

    Raises:
        UserError: if too many samples failed, and as `publish`.
    """
    start = time.monotonic()
    SampleStore(stage.artifact).open()
    missing = missing_indices(stage)
    if len(missing):
        spec = progress_spec(stage, run, "sample", total=len(training_ids(stage.inputs["examples"].artifact)))
        with run.executor.track(spec) as tracker:
            stream = sample_stream(stage, run.runtime, tracker, return_samples=False)
            samples = run.executor.map(stream.blocks(), stream.operators, label="sampling", tracker=tracker)
            for _ in samples:
                pass  # the last operator has stored and counted the samples
    return publish(stage, time.monotonic() - start)


def progress_spec(stage: Stage, run: Run, label: str, *, total: int) -> ProgressSpec:
    """What is tracked while samples are made.

    Args:
        label: `sample` or `distill`. total: examples to count to.
    """
    ids = training_ids(stage.inputs["examples"].artifact)
    stored = _tally(SampleStore(stage.artifact), ids).outcomes
    guard = FailureGuard(run.runtime.max_failed_fraction, len(ids) - stored.total())
    return ProgressSpec(run.name, label, total=total, stored=dict(stored), guard=guard)


def sample_stream(
    stage: Stage, runtime: Runtime, tracker: Tracker, *, return_samples: bool, preserve_order: bool = False
) -> Stream:
    """The samples that the store lacks. Each block of examples becomes one part of the store.

    Args:
        return_samples: return tables of `SAMPLE_SCHEMA`; else ids alone.
    """
    study = recipe.study
    size = recipe.runtime.samplers.batch_size
    missing = missing_indices(plan)
    if not len(missing):
        return ray.data.from_arrow(SAMPLE_SCHEMA.empty_table())
    blocks = [pa.table({"index": indices}) for indices in _blocks(missing, size)]
    examples = ray.data.from_arrow(blocks).map_batches(
        read_examples,
        fn_args=(plan.examples,),
        batch_format="pyarrow",
        compute=prompt_tasks(recipe.runtime.samplers),
        num_cpus=TASK_CPUS,
    )
    samples = generate(
        recipe,
        study.model,
        examples,
        [PromptSpec(study.data.documents, {hops: (Placement(study.advantageous(hops)),) for hops in study.data.hops})],
        temperature=study.sampling.temperature,
        top_p=study.sampling.top_p,
        max_new_tokens=study.sampling.max_new_tokens,
        for_training=True,
        tracker_actor=tracker_actor,
    )
    if study.method.teacher == "cached":
        teachers = pool_arguments(recipe.runtime.teachers)
        samples = samples.map_batches(EncodeTeacher, fn_constructor_args=(recipe, tracker_actor), **teachers)
    return samples.map_batches(
        write_samples, fn_args=(plan.samples, tracker_actor, hand_on), batch_format="pyarrow", num_cpus=TASK_CPUS
    )
    examples = stage.inputs["examples"].artifact
    operators = generation_operators(study, runtime, examples, TRAIN, specs, params, for_training=True)
    if teacher.get("teacher") == "cached":
        create = functools.partial(EncodeTeacher, study.model, teacher["alignment"], runtime.teachers)
        operators.append(ActorOperator("teachers", create, runtime.teachers))
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


def read_examples(batch: pa.Table, artifact: Artifact) -> pa.Table:
    """The training examples at the indices that a batch names, a table of `EXAMPLE_SCHEMA`."""
    file = _example_file(artifact.url)
    indices, size = batch["index"].to_numpy(), file.metadata.row_group(0).num_rows
    groups = np.unique(indices // size)
    row = np.searchsorted(groups, indices // size) * size + indices % size
    return file.read_row_groups(groups.tolist()).take(row)


def pool_needs(recipe: Recipe) -> tuple[float, float]:
    """CPUs and GPUs of the smallest pools of samplers and teachers, and of one task beside them."""
    pools = [recipe.runtime.samplers, *([recipe.runtime.teachers] if recipe.study.method.teacher == "cached" else [])]
    return sum(pool.min * pool.cpus for pool in pools) + TASK_CPUS, sum(pool.min * pool.gpus for pool in pools)


def publish_samples(plan: Plan, seconds: float) -> Manifest:
    """Count what the store holds, and publish it.

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
    return artifact.publish(counts=counts, seconds={"sample": seconds, "teacher": tally.teacher_seconds})


def _tally(store: SampleStore, ids: pa.Array) -> Tally:
    """Count the samples that are stored and readable."""
    while True:
        try:
            return store.tally(store.index(ids), ids)
        except CorruptPart:
            continue  # it has been quarantined and reported, and no longer counts
