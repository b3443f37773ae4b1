"""Stage `sample`: advantaged responses into the sample store, with the teacher's hidden states.

examples without a sample ─ permute, prompt ─ sampler pool, judge ─ teacher pool ─ store
"""

import time
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from pipelines.generate import Asked, generate
from pipelines.plan import Plan
from pipelines.ray_session import device_of, pool_arguments, ray_session, require_resources
from pipelines.tee import write_samples
from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.models.responses import hidden_to_bytes
from pos2distill.records import SAMPLE_SCHEMA
from pos2distill.sampling.guard import FailureGuard
from pos2distill.sampling.teacher import Teacher
from pos2distill.store.artifacts import Manifest
from pos2distill.store.samples import SampleStore
from pos2distill.tasks.permutations import Placement

_PART_ROWS = 64


class AddTeacherStates:
    """The cached teacher: hidden states of the kept answers of a batch, once an example."""

    def __init__(self, recipe: Recipe) -> None:
        pool = recipe.runtime.teachers
        self.dtype = recipe.study.model.dtype
        self.teacher = Teacher(
            recipe.study.model,
            alignment=recipe.study.method.alignment,
            threads=pool.threads,
            device=device_of(pool.gpus),
        )

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Add the columns `hidden`, `hidden_dtype` and `teacher_seconds` (each row's share of the batch's time)."""
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

    Counts: sampled = kept + wrong + empty + failed.
    Raises:
        UserError: if too many failed, nothing was kept, or other nodes wrote where this one cannot read.
    """
    start = time.monotonic()
    store = SampleStore(plan.samples)
    store.open()
    examples = plan.examples.read_table("train.parquet")
    done = store.example_ids()
    missing = examples.filter(pc.invert(pc.is_in(examples["example_id"], pa.array(sorted(done), pa.string()))))
    if len(missing):
        with ray_session(), tqdm(desc="sample", total=len(examples), initial=len(done), unit="example") as bar:
            _run(recipe, plan, missing, bar)
    return _publish(plan, store, set(examples["example_id"].to_pylist()), time.monotonic() - start)


def _run(recipe: Recipe, plan: Plan, missing: pa.Table, bar: tqdm) -> None:
    study = recipe.study
    pools = [recipe.runtime.samplers]
    if cached := study.method.needs_teacher and study.method.teacher == "cached":
        pools.append(recipe.runtime.teachers)
    require_resources(
        "sampling", cpus=sum(pool.min * pool.cpus for pool in pools), gpus=sum(pool.min * pool.gpus for pool in pools)
    )
    samples = generate(
        recipe,
        study.model,
        missing,
        [Asked(study.data.documents, {hops: (Placement(study.advantageous(hops)),) for hops in study.data.hops})],
        temperature=study.sampling.temperature,
        top_p=study.sampling.top_p,
        max_new_tokens=study.sampling.max_new_tokens,
        for_training=True,
    )
    if cached:
        teachers = pool_arguments(recipe.runtime.teachers)
        samples = samples.map_batches(AddTeacherStates, fn_constructor_args=(recipe,), **teachers)
    receipts = samples.map_batches(
        write_samples, fn_args=(plan.samples,), batch_size=_PART_ROWS, batch_format="pyarrow", num_cpus=0.5
    )
    guard = FailureGuard(recipe.runtime.max_failed_share, len(missing))
    for receipt in receipts.iter_rows():
        bar.update(len(receipt["outcomes"]))
        guard.add(receipt["outcomes"], receipt["errors"], receipt["example_ids"])


def _publish(plan: Plan, store: SampleStore, wanted: set[str], seconds: float) -> Manifest:
    table = store.read(["example_id", "outcome", "finish_reason", "teacher_seconds"])
    if set(table["example_id"].to_pylist()) != wanted:
        raise UserError(
            f"{plan.samples.url}: {len(table)} of {len(wanted)} samples can be seen from here; "
            f"runtime.storage must be a folder or URL that all nodes share"
        )
    outcomes = Counter(table["outcome"].to_pylist())
    counts = {"sampled": len(table), **{name: outcomes[name] for name in ("kept", "wrong", "empty", "failed")}}
    counts["cut_at_length"] = Counter(table["finish_reason"].to_pylist())["length"]
    if not counts["kept"]:
        raise UserError(
            f"{plan.samples.url}: none of {len(table)} samples was kept ({outcomes['wrong']} wrong, "
            f"{outcomes['empty']} empty, {outcomes['failed']} failed); try another method.advantageous_slot or model, "
            f"or sampling.keep=all"
        )
    teacher_seconds = pc.sum(table["teacher_seconds"]).as_py() or 0.0
    return plan.samples.publish(counts=counts, seconds={"sample": seconds, "teacher": teacher_seconds})
