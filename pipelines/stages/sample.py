"""Stage `sample`: advantaged responses into the sample store, with the teacher's hidden states.

examples without a sample ─ permute, prompt ─ sampler pool, judge ─ teacher pool ─ store ─ (trainers)
"""

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import ray.data
from ray.actor import ActorHandle
from ray.data import Dataset

from pipelines.executors.ray.progress import track_progress
from pipelines.executors.ray.session import device_of, pool_arguments, ray_session, require_resources, set_data_context
from pipelines.generate import TASK_CPUS, PromptSpec, generate, prompt_tasks
from pipelines.plan import Plan
from pipelines.stages.prepare import TRAIN, training_ids
from pipelines.tee import write_samples
from pos2distill.config import Recipe
from pos2distill.errors import CorruptPart, UserError
from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.sampling.failure_guard import FailureGuard
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.samples import SampleStore, Tally
from pos2distill.tasks.permutations import Placement
from pos2distill.urls import open_url

STREAM = "samples"
"""The stream's name among the data sets of Ray Train."""


class EncodeTeacher:
    """The cached teacher: hidden states of the kept answers of a batch, once an example."""

    def __init__(self, recipe: Recipe, tracker_actor: ActorHandle | None = None) -> None:
        from pos2distill.sampling.teacher_encoder import (
            TeacherEncoder,
        )  # here, since Ray's coordinators load this module too

        pool = recipe.runtime.teachers
        self.tracker_actor = tracker_actor
        self.dtype = recipe.study.model.dtype
        self.teacher = TeacherEncoder(
            recipe.study.model,
            alignment=recipe.study.method.alignment,
            threads=pool.threads,
            device=device_of(pool.gpus),
        )

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Add the columns `hidden`, `hidden_dtype` and `teacher_seconds` (each row's share of the batch's time)."""
        from pos2distill.models.hidden_states import hidden_to_bytes

        if self.tracker_actor:
            self.tracker_actor.heartbeat.remote("teachers", ray.get_runtime_context().get_actor_id())
        start = time.monotonic()
        kept = np.flatnonzero(np.asarray(batch["outcome"]) == "kept")
        hidden: list[bytes | None] = [None] * len(batch)
        if len(kept):
            prompts, responses = (
                [batch[name][int(row)].values.to_numpy() for row in kept] for name in ("prompt_ids", "response_ids")
            )
            for row, hidden_TH in zip(kept, self.teacher(prompts, responses), strict=True):
                hidden[row] = hidden_to_bytes(hidden_TH)
        each = (time.monotonic() - start) / len(batch)
        columns = {
            "hidden": hidden,
            "hidden_dtype": [self.dtype] * len(batch),
            "teacher_seconds": [each] * len(batch),
        }
        for name, values in columns.items():
            field = SAMPLE_SCHEMA.field(name)
            batch = batch.append_column(field, pa.array(values, field.type))
        return batch


def make_samples(recipe: Recipe, plan: Plan) -> Manifest:
    """Sample what the store lacks, then publish it.

    Raises:
        UserError: if too many failed, and as `publish_samples`.
    """
    start = time.monotonic()
    with ray_session(), track_sampling(recipe, plan, "sample") as tracker_actor:
        cpus, gpus = pool_needs(recipe)
        require_resources("sampling", cpus=cpus, gpus=gpus)
        for _ in missing_samples(recipe, plan, tracker_actor, hand_on=False).iter_batches(batch_size=None):
            pass  # the tee has stored and counted it
    return publish_samples(plan, time.monotonic() - start)


@contextmanager
def track_sampling(recipe: Recipe, plan: Plan, stage: str, *, epochs: int = 1) -> Iterator[ActorHandle]:
    """The live tracker_actor of a stage that samples, with what an earlier run stored.

    Args:
        epochs: how often the stage goes over the examples.
    """
    store = SampleStore(plan.samples)
    store.open()
    ids = training_ids(plan)
    stored = _tally(store, ids).outcomes
    done = stored.total() if stage == "sample" else 0
    guard = FailureGuard(recipe.runtime.max_failed_fraction, len(ids) - stored.total())
    with track_progress(recipe.name, stage, guard, total=epochs * len(ids), done=done, stored=stored) as tracker_actor:
        yield tracker_actor


def missing_samples(recipe: Recipe, plan: Plan, tracker_actor: ActorHandle, *, hand_on: bool) -> Dataset:
    """Samples of the examples that the store lacks, lazily; each block of examples is one part of the store.

    Args:
        hand_on: the samples come out, of `SAMPLE_SCHEMA`; else their ids alone.
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


def open_stream(recipe: Recipe, plan: Plan, tracker_actor: ActorHandle) -> Dataset:
    """What the trainers read. Called in an actor of Ray Train's; here, where its loading needs no torch."""
    set_data_context()
    return missing_samples(recipe, plan, tracker_actor, hand_on=True)


def missing_indices(plan: Plan) -> npt.NDArray[np.int64]:
    """The training examples that the store lacks, by their indices."""
    return SampleStore(plan.samples).index(training_ids(plan)).missing


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

    Counts: sampled = kept + wrong + empty + failed; hit_max_tokens of them had no room to end.
    Raises:
        UserError: if nothing was kept, or other nodes wrote where this one cannot read.
    """
    store, ids = SampleStore(plan.samples), training_ids(plan)
    tally = _tally(store, ids)
    if absent := len(ids) - tally.outcomes.total():
        raise UserError(
            f"{plan.samples.url}: {len(ids) - absent} of {len(ids)} samples can be seen from here; "
            f"run again if parts were quarantined; else runtime.storage must be a folder or URL that all "
            f"nodes share"
        )
    counts = {"sampled": len(ids), **{name: tally.outcomes[name] for name in ("kept", "wrong", "empty", "failed")}}
    counts["hit_max_tokens"] = tally.finish_reasons["length"]
    if not counts["kept"]:
        raise UserError(
            f"{plan.samples.url}: none of {len(ids)} samples was kept ({counts['wrong']} wrong, "
            f"{counts['empty']} empty, {counts['failed']} failed); try another method.advantageous_slot or model, "
            f"or sampling.keep=all"
        )
    return plan.samples.publish(counts=counts, seconds={"sample": seconds, "teacher": tally.teacher_seconds})


def _tally(store: SampleStore, ids: pa.Array) -> Tally:
    """What became of the samples that are there and whole."""
    while True:
        try:
            return store.tally(store.index(ids), ids)
        except CorruptPart:
            continue  # it is quarantined and logged, and no longer counts


def _blocks(missing: npt.NDArray[np.int64], size: int) -> list[npt.NDArray[np.int64]]:
    """The indices to sample, cut at multiples of `size`, so that a part sampled again is the very same batch.

    A short rest joins the block before it: Ray would wait to fill it up with whatever block comes last.
    """
    blocks = np.split(missing, np.flatnonzero(np.diff(missing // size)) + 1)
    if len(blocks) > 1 and len(blocks[-1]) < size:
        blocks[-2:] = [np.concatenate(blocks[-2:])]
    return blocks


@functools.lru_cache(maxsize=1)
def _example_file(artifact_url: str) -> pq.ParquetFile:
    """Opened once in a process: Ray runs many tasks in one."""
    fs, path = open_url(f"{artifact_url}/{TRAIN}", "runtime.storage")
    return pq.ParquetFile(fs.open(path))
