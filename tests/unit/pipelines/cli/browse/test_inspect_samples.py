import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipelines.cli import command_line
from pipelines.plan import make_plan, make_plans
from pipelines.provenance import Provenance, read_provenance, record_provenance
from pipelines.stage_runner import driver_lease, run_stages
from pipelines.stages.sample import sample_ids_of
from pos2distill.config import Recipe
from pos2distill.store.artifacts import Artifact
from pos2distill.store.samples import SampleStore
from tests.support.commands import Command, run_sample
from tests.support.paths import ODD_NAME


def test_inspect_samples_shows_what_was_kept(recipe: Recipe, command: Command) -> None:
    rows = [json.loads(line) for line in command("inspect", recipe.storage, "--samples", "--json", "--limit", "0")]
    assert len(rows) == 8
    assert all(row["outcomes"][0] == "kept" for row in rows)  # sampling.keep=all
    (line,) = command("inspect", recipe.storage, "--samples", "--json", "--prompts", "--limit", "1")
    first = json.loads(line)
    assert first["prompt"].startswith("<s><|user|>Title: ")
    assert first["position"] == "1"
    # The folder of the samples says what it is.
    folder = make_plan(recipe).first_sample.artifact.path
    assert len(command("inspect", folder, "--json", "--limit", "0")) == 8


def test_inspect_samples_leaves_a_corrupt_part(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """A command that reads does not change the run."""
    storage = shutil.copytree(recipe.storage, tmp_path / ODD_NAME)
    (part,) = storage.glob("samples-*/parts/*.parquet")
    part.write_bytes(b"garbage")
    (line,) = command("inspect", str(storage), "--samples", code=2)
    assert line.startswith(f"error: {part}: corrupt (")
    assert part.read_bytes() == b"garbage"
    assert not list(storage.glob("samples-*/quarantine"))


def test_inspect_samples_of_an_evaluation_rejects(recipe: Recipe, command: Command, tmp_path: Path) -> None:
    """Answers of an evaluation are no samples."""
    storage = tmp_path / "evaluated"
    shutil.copytree(recipe.storage, storage, ignore=shutil.ignore_patterns("samples-*"))
    assert command("inspect", str(storage), "--samples", code=2) == [f"error: {storage}: holds no finished samples"]


def test_inspect_samples_of_a_sweep_knows_that_a_later_study_stores_its_teacher(
    make_recipe: Callable[..., Recipe], command: Command
) -> None:
    """SeqKD, which has no teacher, comes first and samples for both."""
    local = {"executor": "local"}
    recipes = [make_recipe(runtime=local, method={"name": "seqkd"}), make_recipe(runtime=local, method={"name": "r1"})]
    plan = make_plans(recipes)[0]
    with driver_lease(recipes[0]) as lease:
        run_stages(recipes[0], plan, plan.stages_for_sample(), lease)
    provenance = read_provenance(plan.first_sample.artifact)
    assert provenance is not None
    assert provenance.settings["method"]["name"] == "r1"
    *_, line = command("inspect", recipes[0].storage, "--samples", "--entropy", "--json", "--limit", "1")
    assert json.loads(line)["entropy"]["mean"] > 0


def test_inspect_samples_shows_the_teachers_entropy(recipe: Recipe, command: Command) -> None:
    """Against transformers' own forward pass over prompt and response."""
    lines = command("inspect", recipe.storage, "--samples", "--entropy", "--json", "--limit", "2")
    shown = [json.loads(line)["entropy"] for line in lines]
    model = AutoModelForCausalLM.from_pretrained(recipe.study.model.path, dtype=torch.float32)
    store = SampleStore(make_plan(recipe).first_sample.artifact)
    ids = sample_ids_of(make_plan(recipe).first_sample)
    samples = store.load(store.index(ids), np.arange(2), ["prompt_ids", "response_ids"]).to_pylist()
    for sample, entropy in zip(samples, shown, strict=True):
        response = sample["response_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([[*sample["prompt_ids"], *response]])).logits[0, -len(response) - 1 : -1]
        logs = logits.log_softmax(-1)
        expected = -(logs.exp() * logs).sum(-1)
        assert [nats for _, nats in entropy["tokens"]] == pytest.approx(expected.tolist(), rel=1e-4)
        assert entropy["mean"] == pytest.approx(expected.mean().item(), rel=1e-4)
    text = command("inspect", recipe.storage, "--samples", "--entropy", "--limit", "1")
    (line,) = (line for line in text if line.startswith("entropy   mean "))
    assert line.count(".") == len(shown[0]["tokens"]) + 1


def test_inspect_rejects_the_entropy_of_answers(recipe: Recipe, command: Command) -> None:
    assert command("inspect", recipe.storage, "--entropy", code=2) == [
        "error: --entropy: is of samples; give --samples too"
    ]


def test_inspect_rejects_the_entropy_of_a_teacher_that_was_not_stored(
    make_shared_recipe: Callable[..., Recipe], command: Command, tmp_path: Path
) -> None:
    recipe = make_shared_recipe(tmp_path, method={"teacher": "resident"}, runtime={"executor": "local"})
    run_sample(recipe)
    command("runs", recipe.storage)  # reads what the command has printed
    (line,) = command("inspect", recipe.storage, "--samples", "--entropy", code=2)
    assert line.endswith("holds no teacher states, which method.teacher=cached stores (here resident)")


@pytest.mark.parametrize(
    ("method", "responses"),
    [
        ({"name": "r1-on-policy", "rounds": 1, "k": 1}, 2),
        ({"name": "r1", "teacher_slot": "random", "advantageous_slot": 1}, 1),
    ],
)
def test_inspect_samples_shows_the_answered_prompts_not_the_teachers(
    make_shared_recipe: Callable[..., Recipe],
    command: Command,
    tmp_path: Path,
    method: dict[str, Any],
    responses: int,
) -> None:
    recipe = make_shared_recipe(tmp_path, method=method, runtime={"executor": "local"})
    run_sample(recipe)
    lines = command("inspect", recipe.storage, "--samples", "--json", "--limit", "0", "--prompts")
    rows = [json.loads(line) for line in lines if line.startswith("{")]  # the run's own lines come before
    assert len(rows) == 8 * responses
    assert all(row["question"] and row["location"] for row in rows)
    assert len({row["sample_id"] for row in rows}) == len(rows)
    assert len({row["example_id"] for row in rows}) == 8
    last = command("inspect", recipe.storage, "--samples", "--json", "--example", rows[-1]["sample_id"])
    assert [json.loads(line)["sample_id"] for line in last] == [rows[-1]["sample_id"]]
    # The gold document is at the position of each.
    for row in rows:
        answer, position = row["answers"][0], int(row["position"])
        documents = row["prompt"].split("Title: ")[1:]
        assert len(documents) == row["documents"] == 4
        assert [answer in text.partition("Question: ")[0] for text in documents].index(True) + 1 == position
    assert (len({row["position"] for row in rows}) > 1) == (responses > 1)


def test_inspect_samples_of_a_policy_shows_those_that_failed(
    make_shared_recipe: Callable[..., Recipe], command: Command, tmp_path: Path
) -> None:
    """Their prompts are too long to be built, so there are none to show."""
    recipe = make_shared_recipe(
        tmp_path,
        method={"name": "r1-on-policy", "rounds": 1, "k": 1},
        runtime={"executor": "local", "max_failed_fraction": 1},
    )
    data = tmp_path / "data.jsonl"
    records = [json.loads(line) for line in data.read_text().splitlines()]
    for record in records[::3]:
        record["question"] += " please" * 80
    data.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    run_sample(recipe)
    lines = command("inspect", recipe.storage, "--samples", "--json", "--limit", "0", "--prompts")
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    assert len(rows) == 8 * 2
    failed = [row for row in rows if row["outcomes"] == ["failed"]]
    assert 0 < len(failed) < len(rows)
    assert all(row["prompt"] == "" and row["error"] for row in failed)


def test_inspect_samples_shows_those_of_which_none_was_kept(
    make_recipe: Callable[..., Recipe], tmp_path: Path, command: Command
) -> None:
    """The error names the command that shows them; once some are kept, the samples are as any others."""
    make_recipe(runtime={"executor": "local", "mode": "staged"}, sampling={"max_new_tokens": 4, "keep": "correct"})
    recipe = str(tmp_path / "recipe.yaml")
    (*_, line) = command("sample", recipe, code=2)
    found = re.search(r"none of 8 samples was kept \((\d) wrong, (\d) empty, 0 failed\); `inspect (.*)` shows", line)
    assert found
    shown = command("inspect", *found[3].split(), "--json", "--limit", "0")
    rows = [json.loads(row) for row in shown]
    assert len(rows) == max(int(found[1]), int(found[2]))
    assert {row["outcomes"][0] for row in rows} <= {"wrong", "empty"}
    (folder,) = (tmp_path / "storage").glob("samples-*")
    assert command_line.main(["inspect", str(folder), "--limit", "1"]) == 0
    # Nothing that needs finished samples takes them for such.
    (said, more, line) = command("push", str(tmp_path / "storage"), "me/mine", code=2)
    assert said == f"{folder}: not finished; what is stored so far is shown"
    assert more == "the first 1; --limit 0 shows all"
    assert "holds no finished checkpoint" in line


def test_record_provenance_of_samples_that_are_finished_later(tmp_path: Path, recipe: Recipe) -> None:
    samples, scores = (Artifact(str(tmp_path), name, "0123") for name in ("samples", "base-scores"))
    first, second = Provenance.now(recipe), replace(Provenance.now(recipe), date="later")
    record_provenance(samples, first, "sample", {})
    assert read_provenance(samples) is None  # nothing was stored
    for artifact in (samples, scores):
        Path(artifact.path).mkdir()
        record_provenance(artifact, first, "stage", {})
    assert read_provenance(scores) is None
    assert read_provenance(samples) == replace(first, stage="stage")
    samples.publish(counts={}, seconds={})
    record_provenance(samples, second, "stage", {})
    assert read_provenance(samples) == replace(second, stage="stage")
    assert sorted(path.name for path in Path(samples.path).iterdir()) == ["manifest.json", "provenance.json"]
