"""The two executors give the same results: one study under both, byte for byte."""

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import ray

from pipelines.executors.ray.data import build_dataset
from pipelines.executors.ray.messages import DriverMailbox
from pos2distill.config import PoolSection, Recipe
from pos2distill.sampling.operators import ActorOperator
from tests.support.commands import run_distill, run_study
from tests.support.results import counts_of, read_steps
from tests.support.tiny import write_examples


def results(storage: Path) -> dict[str, bytes]:
    """Every file but manifests, which hold times, the report, which shows them, and what names the checkpoint by the id
    that each training draws."""
    files = {}
    for path in sorted(storage.rglob("*")):
        name = str(path.relative_to(storage))
        if (
            path.is_file()
            and path.name not in ("manifest.json", "run.json", "provenance.json", "made_from.json")
            and not name.startswith("report/")
        ):
            files[name] = path.read_bytes()
    return files


@pytest.mark.xdist_group("compute")
def test_executors_give_equal_bytes(finished: Recipe, small_toy: Callable[..., Recipe], tmp_path: Path) -> None:
    run_study(small_toy(tmp_path, "runtime.executor=local"))
    expected = results(Path(finished.storage))
    kinds = {name.partition("/")[0].rpartition("-")[0] for name in expected}
    assert {"examples", "base-scores", "samples", "checkpoint", "distilled-scores"} <= kinds
    assert results(tmp_path) == expected


@pytest.mark.xdist_group("compute")
@pytest.mark.parametrize("order", ["arrival", pytest.param("fixed", marks=pytest.mark.slow)])
def test_executors_train_on_the_same_kept_examples(
    local_ray: None, make_recipe: Callable[..., Recipe], tmp_path: Path, order: str
) -> None:
    """12 are wanted of 60, and half of the answers fail, so that about 24 are needed.

    How many more are sampled on Ray depends on the order in which answers are stored: with the first failures alone, a
    batch begins that turns out not to be needed.
    """
    write_examples(tmp_path / "data.jsonl", 150, 6)
    trained = {}
    for executor in ("local", "ray"):
        recipe = make_recipe(
            model={"engine": "fake"},
            data={"train_examples": 12, "train_candidates": 60, "eval_examples": 2},
            method={"k": 1},
            training={"global_batch_rows": 8, "epochs": 2, "order": order},
            runtime={
                "executor": executor,
                "storage": str(tmp_path / executor),
                "fake": {"fail_every": 2},
                "max_failed_fraction": 1.0,
                "samplers": {"batch_size": 4, "concurrent_batches": 1},
                "teachers": {"batch_size": 4, "concurrent_batches": 1},
            },
        )
        run_distill(recipe)
        counts = counts_of(recipe, "sample")
        assert (counts["wanted"], counts["kept"]) == (12, 12)
        assert counts["sampled"] == 12 + counts["surplus"] + counts["failed"]
        assert counts["sampled"] == 24 if executor == "local" else 24 <= counts["sampled"] < 60
        steps = read_steps(recipe)
        trained[executor] = [
            {example for step in steps if step["epoch"] == epoch for example in step["examples"]} for epoch in (0, 1)
        ]
        assert [len(examples) for examples in trained[executor]] == [12, 12]
        assert steps[-1]["fraction"] == 1.0
    assert trained["local"] == trained["ray"]
    assert trained["ray"][0] == trained["ray"][1]


@pytest.mark.xdist_group("compute")
@pytest.mark.parametrize(("is_async", "only_needed"), [(False, False), (True, False), (True, True)])
def test_actors_on_gpus_take_whole_blocks(
    local_ray: None, capsys: pytest.CaptureFixture[str], *, is_async: bool, only_needed: bool
) -> None:
    """Ray Data checks a pipeline's arguments while it is built, which needs no GPU."""
    operator = ActorOperator("gpu samplers", lambda: lambda table: table, PoolSection(gpus=1), is_async, only_needed)
    build_dataset([pa.table({"example_id": ["a", "b"]})], [operator], DriverMailbox.start()).explain()
    assert "MapBatches(gpu samplers)" in capsys.readouterr().out


@pytest.mark.xdist_group("compute")
def test_warnings_of_actors_are_printed(local_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    def work(mailbox: DriverMailbox) -> None:
        mailbox.warn("the hub does not answer")

    mailbox = DriverMailbox.start()
    with mailbox.shown():
        ray.get(ray.remote(num_cpus=0)(work).remote(mailbox))
    assert capsys.readouterr().err == "warning: the hub does not answer\n"
