"""A study in one process on a GPU: the same answers as on a CPU, and training that improves them."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from pipelines.plan import make_plan
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from tests.support.commands import run_evaluate, run_study

GPUS = 1


def toy(storage: Path, gpus: int) -> Recipe:
    """The built-in toy with few questions, at its worst and its best position, in float32."""
    settings = (
        f"runtime.storage={storage}",
        *("runtime.executor=local", "runtime.mode=staged", "runtime.trainers.strategy=torch"),
        *(f"runtime.{pool}.gpus={gpus}" for pool in ("samplers", "teachers", "trainers")),
        *("data.train_examples=90", "data.eval_examples=20", "evaluation.slots=[0, 29]"),
        *("evaluation.other_documents=[]", "model.dtype=float32", "training.precision=float32"),
    )
    return load_recipe("quickstart", settings)


def predictions(recipe: Recipe, command: Callable[[Recipe], object], *, distilled: bool) -> pa.Table:
    """What the base or the distilled model answered."""
    command(recipe)
    plan = make_plan(recipe)
    stage = plan.evaluate_distilled if distilled else plan.evaluate_base
    return stage.artifact.read_table("predictions.parquet").sort_by(
        [("example_id", "ascending"), ("placement", "ascending")]
    )


def test_study_on_a_gpu_answers_as_on_a_cpu_and_learns(tmp_path: Path) -> None:
    on_gpu = toy(tmp_path / "gpu", GPUS)
    after = predictions(on_gpu, run_study, distilled=True)
    before = predictions(on_gpu, run_study, distilled=False)
    on_cpu = predictions(toy(tmp_path / "cpu", 0), run_evaluate, distilled=False)
    same = [one == other for one, other in zip(before["text"].to_pylist(), on_cpu["text"].to_pylist(), strict=True)]
    assert len(same) == 40
    # Sums in another order may turn a token between two that are equally likely.
    assert sum(same) >= 38
    right = [sum(table["correct"].to_pylist()) for table in (before, after)]
    assert right[0] < right[1]
