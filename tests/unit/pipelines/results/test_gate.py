"""The gate of `evaluate`, on predictions made by hand: accuracies 1, 0.85 and 0.8 at three slots."""

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.cli import command_line, model_options
from pipelines.cli.gate_options import add_gate, read_gate
from pipelines.commands import plan_command, run_evaluate
from pipelines.plan import make_plan
from pipelines.provenance import Provenance
from pipelines.stages.predictions import Predictions, count_predictions
from pos2distill.config import Recipe
from pos2distill.config.gate import Gate
from pos2distill.errors import UserError
from pos2distill.records import PREDICTION_SCHEMA, QUESTIONS, REFUSAL_SCHEMA
from pos2distill.store.artifacts import Artifact
from pos2distill.store.files import write_bytes
from pos2distill.store.storage import claim_storage
from tests.support.predictions import make_examples, predictions
from tests.support.tables import examples_to_table


def publish(artifact: Artifact, right: tuple[int, ...], cut: int = 0) -> None:
    """Of 200 examples at each slot, the first so many are right; the first answers at the first slot are cut."""
    rows = [
        {
            "example_id": f"e{example}",
            "documents": 4,
            "placement": slot,
            "order": 0,
            "group": "",
            "slots": [slot],
            "sampled_ids": [],
            "text": "",
            "correct": example < count,
            "f1": 0.0,
            "finish_reason": "length" if slot == 0 and example < cut else "stop",
            "prompt_tokens": 100,
            "answer_tokens": 4,
        }
        for slot, count in enumerate(right)
        for example in range(200)
    ]
    table = pa.Table.from_pylist(rows, schema=PREDICTION_SCHEMA)
    counts = count_predictions(200, Predictions(table, REFUSAL_SCHEMA.empty_table()))
    with artifact.writing():
        artifact.write_table("predictions.parquet", table)
        details = {"prompt_tokens": {"4": {"mean": 100.0, "max": 100}}, "context_tokens": 512}
        artifact.publish(counts=counts, seconds={}, details=details)


def publish_examples(artifact: Artifact) -> None:
    """The examples that the predictions are of."""
    with artifact.writing():
        artifact.write_table("evaluation.parquet", examples_to_table(make_examples(200, 4)))
        artifact.write_json("locations.json", {})
        artifact.publish(counts={"eval": 200}, seconds={})


def publish_checkpoint(artifact: Artifact) -> None:
    """Those parts of a checkpoint that the page of an evaluation shows: one step, and the model's config."""
    step = {"step": 0, "epoch": 0, "examples": ["e0"], "fraction": 1.0, "rows": 4, "weight_by_slot": {"1": 1.0}}
    step |= {"loss": 0.5, "loss_trivial": 0.5, "loss_anchor": None, "grad_norm": 1.0, "learning_rate": 1e-3}
    files = {"steps/00000.jsonl": json.dumps(step) + "\n", "model/config.json": "{}"}
    with artifact.writing():
        for name, text in files.items():
            artifact.fs.makedirs(f"{artifact.path}/{Path(name).parent}", exist_ok=True)
            write_bytes(artifact.fs, f"{artifact.path}/{name}", text.encode())
        artifact.publish(counts={}, seconds={})


@pytest.fixture
def evaluate(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., int]:
    recipe = make_recipe()
    plan = make_plan(recipe)
    claim_storage(recipe.storage, recipe.name)
    publish_examples(plan.prepare.artifact)
    publish(plan.evaluate_base.artifact, (200, 170, 160))

    def evaluate(*options: str) -> int:
        return command_line.main(["evaluate", str(tmp_path / "recipe.yaml"), *options])

    return evaluate


def test_gate_fails_on_a_larger_gap(evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--fail-if-gap-above", "5") == 1
    err = capsys.readouterr().err
    assert err.startswith("gate failed: GAP 20.0, at least 1")
    assert err.endswith("with 95 % confidence, is above 5\n")


def test_gate_passes_at_the_limit(evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--fail-if-gap-above", "20", "--fail-if-mean-below", "70") == 0
    assert capsys.readouterr().out.endswith(
        "gate passed: GAP 20.0 is not above 20\ngate passed: mean 88.3 is not below 70\n"
    )


def test_gate_is_part_of_the_json(evaluate: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--json") == 0
    assert "gate" not in json.loads(capsys.readouterr().out)
    assert evaluate("--json", "--fail-if-gap-above", "20") == 0
    assert json.loads(capsys.readouterr().out)["gate"] == {"passed": True, "reason": None}
    assert evaluate("--json", "--fail-if-gap-above", "5") == 1
    printed = capsys.readouterr()
    gate = json.loads(printed.out)["gate"]
    assert gate["passed"] is False
    assert printed.err.splitlines()[-1] == f"gate failed: {gate['reason']}"


def test_gate_fails_without_correct_answers(
    evaluate: Callable[..., int], make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(make_recipe())
    publish_checkpoint(plan.distill.artifact)
    publish(plan.evaluate_distilled.artifact, (0, 0, 0))
    assert evaluate("--fail-if-gap-above", "100") == 1
    assert capsys.readouterr().err == "gate failed: no answer is correct (mean 0.0), so the GAP means nothing\n"


def test_evaluate_warns_of_truncated_answers(
    evaluate: Callable[..., int], make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(make_recipe())
    publish_checkpoint(plan.distill.artifact)
    publish(plan.evaluate_distilled.artifact, (200, 200, 200), cut=70)
    assert evaluate("--fail-if-gap-above", "5") == 0
    assert capsys.readouterr().err == (
        "warning: evaluate distilled: 70 of 600 answers were cut at evaluation.max_new_tokens; "
        "raise it if they are incomplete\n"
    )


def test_gate_judges_the_checkpoint_if_there_is_one(
    evaluate: Callable[..., int], make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(make_recipe())
    publish_checkpoint(plan.distill.artifact)
    publish(plan.evaluate_distilled.artifact, (200, 180, 200))
    assert evaluate("--fail-if-gap-above", "10") == 0
    assert evaluate("--fail-if-gap-above", "4") == 1
    assert "gate failed: GAP 10.0, at least" in capsys.readouterr().err


# --- against a baseline


@pytest.fixture
def baseline(make_recipe: Callable[..., Recipe]) -> Artifact:
    """A checkpoint 10 points below the base model, which is the baseline."""
    plan = make_plan(make_recipe())
    publish_checkpoint(plan.distill.artifact)
    publish(plan.evaluate_distilled.artifact, (170, 140, 150))
    return plan.evaluate_base.artifact


def test_drop_against_a_baseline(
    evaluate: Callable[..., int], baseline: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate("--fail-if-drop-above", "2", "--baseline", baseline.url) == 1
    assert capsys.readouterr().err.startswith("gate failed: drop of the mean 11.7, at least ")
    file = f"{baseline.url}/predictions.parquet"
    assert evaluate("--fail-if-drop-above", "15", "--baseline", file) == 0
    assert capsys.readouterr().out.endswith("gate passed: drop of the mean 11.7 is not above 15\n")


def test_baseline_may_be_a_run(
    evaluate: Callable[..., int], baseline: Artifact, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run, and of the folder that `evaluate` prints, it is the last model's: here this checkpoint itself."""
    evaluate()
    for run in (baseline.storage, f"{baseline.storage}/evaluation"):
        assert evaluate("--fail-if-drop-above", "2", "--baseline", run) == 0
        assert capsys.readouterr().out.endswith("gate passed: drop of the mean 0.0 is not above 2\n")


@pytest.mark.parametrize(("name", "value"), [("format", "nq"), ("distractors", "random"), ("metric", "em")])
def test_baseline_of_other_documents_or_another_metric_is_rejected(
    evaluate: Callable[..., int],
    baseline: Artifact,
    make_recipe: Callable[..., Recipe],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: str,
) -> None:
    """The same questions in the same slots are easier among random documents."""
    provenance = Provenance.now(make_recipe())
    own = provenance.settings["data"][name]
    provenance.settings["data"][name] = value
    baseline.write_json("provenance.json", asdict(provenance))
    assert evaluate("--fail-if-drop-above", "15", "--baseline", baseline.url) == 2
    assert capsys.readouterr().err == (
        f"error: --baseline: {baseline.url}/predictions.parquet: was made with data.{name}={value}, and this "
        f"evaluation has {own}\n"
    )
    # Also of a copy by another name, as a check of every change keeps one.
    copy = shutil.copytree(baseline.path, tmp_path / "kept")
    assert evaluate("--fail-if-drop-above", "15", "--baseline", str(copy)) == 2
    assert f"{copy}/predictions.parquet: was made with data.{name}={value}" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert evaluate("--fail-if-drop-above", "15", "--baseline", "kept") == 2
    (copy / "provenance.json").write_text("{")
    assert evaluate("--fail-if-drop-above", "15", "--baseline", str(copy)) == 2
    assert capsys.readouterr().err.endswith(
        f"error: --baseline: {copy}/predictions.parquet: the provenance.json beside it is corrupt, or not of this "
        f"program; evaluate that model again, or move the baseline to a folder of its own\n"
    )
    provenance.settings["data"][name] = own
    baseline.write_json("provenance.json", asdict(provenance))
    assert evaluate("--fail-if-drop-above", "15", "--baseline", baseline.url) == 0


def test_a_corrupt_baseline_is_named(
    evaluate: Callable[..., int], baseline: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(Path(baseline.path, "predictions.parquet").read_bytes())
    content[20] ^= 1
    (tmp_path / "damaged.parquet").write_bytes(content)
    assert evaluate("--fail-if-drop-above", "15", "--baseline", f"{tmp_path}/damaged.parquet") == 2
    assert capsys.readouterr().err == (
        f"error: --baseline: {tmp_path}/damaged.parquet: corrupt; evaluate that model again, or name another baseline\n"
    )


def test_baseline_that_cannot_be_compared(
    evaluate: Callable[..., int], baseline: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Artifact(str(tmp_path / "other"), "base-scores", "0" * 16)
    publish(other, (200, 170))
    (tmp_path / "text.parquet").write_text("no table")
    pq.write_table(pa.table({"example_id": ["a"]}), tmp_path / "table.parquet")
    missing = tmp_path / "missing"
    longer = tmp_path / "longer"
    longer.mkdir()
    pq.write_table(predictions(9, [[1, 0]]), longer / "predictions.parquet")
    for url, message in [
        (missing, f"{missing}: no such folder"),
        (
            f"{missing}.parquet",
            f"{missing}.parquet: no such file; expected a run, or the folder of its answers",
        ),
        (tmp_path / "text.parquet", f"{tmp_path}/text.parquet: no table of predictions of this version"),
        (tmp_path / "table.parquet", f"{tmp_path}/table.parquet: no table of predictions of this version"),
        (
            longer,
            f"{longer}/predictions.parquet: holds no answers to prompts of 4 documents; expected another "
            f"evaluation of the same questions",
        ),
        (
            other.url,
            "other questions, slots or prompt lengths than this evaluation; both need the same data, "
            "data.eval_examples, evaluation.slots and evaluation.seed",
        ),
    ]:
        assert evaluate("--fail-if-drop-above", "2", "--baseline", str(url)) == 2
        assert capsys.readouterr().err == f"error: --baseline: {message}\n"


def test_baseline_of_other_questions_with_the_same_ids_is_rejected(
    evaluate: Callable[..., int],
    make_recipe: Callable[..., Recipe],
    baseline: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def with_digest(artifact: Artifact, digest: str) -> pa.Table:
        return artifact.read_table("predictions.parquet").replace_schema_metadata({QUESTIONS: digest})

    pq.write_table(with_digest(baseline, "other"), tmp_path / "other.parquet")
    for artifact in (baseline, make_plan(make_recipe()).evaluate_distilled.artifact):
        artifact.write_table("predictions.parquet", with_digest(artifact, "one"))
    assert evaluate("--fail-if-drop-above", "15", "--baseline", baseline.url) == 0
    capsys.readouterr()
    assert evaluate("--fail-if-drop-above", "15", "--baseline", f"{tmp_path}/other.parquet") == 2
    assert capsys.readouterr().err.startswith("error: --baseline: other questions, slots or prompt lengths than this")


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "quickstart"],
        ["evaluate", "--model", "m", "--data", "d"],
        ["submit", "evaluate", "quickstart", "--address", "http://127.0.0.1:1"],
        ["cluster", "render", "gke", "evaluate", "quickstart"],
    ],
)
@pytest.mark.parametrize("baseline", ["", " "])
def test_empty_baseline_is_rejected_before_anything_runs(
    words: list[str], baseline: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of a variable of the shell that is not set."""
    monkeypatch.setattr(model_options, "recipe_of_questions", lambda *_, **__: None)
    assert command_line.main([*words, "--fail-if-drop-above", "2", "--baseline", baseline]) == 2
    assert capsys.readouterr().err == "error: --baseline: is empty; expected a run, or the folder of its answers\n"


def test_run_evaluate_reads_every_baseline_that_is_given(
    evaluate: Callable[..., int], make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also an empty one, of a gate that was made in Python."""
    recipe = make_recipe()
    gate = Gate(drop_above=2.0, baseline="")
    with pytest.raises(UserError, match=r"^--baseline: RUN: is empty; expected a folder$"):
        run_evaluate(recipe, plan_command(recipe, "evaluate"), gate=gate)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("options", [("--fail-if-drop-above", "2"), ("--baseline", "runs/x")])
def test_drop_and_baseline_belong_together(
    evaluate: Callable[..., int], options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(*options) == 2
    assert capsys.readouterr().err == "error: --fail-if-drop-above and --baseline: expected both or none\n"


def test_read_gate_warns_of_a_limit_that_may_be_a_fraction(capsys: pytest.CaptureFixture[str]) -> None:
    for points in ("5", "0", "1"):
        read_gate(gate_options(f"--fail-if-gap-above={points}"))
    assert capsys.readouterr().err == ""
    assert read_gate(gate_options("--fail-if-gap-above=0.05")).gap_above == 0.05
    assert capsys.readouterr().err == (
        "warning: --fail-if-gap-above: 0.05 is less than one percentage point; 0.05 as a fraction is 5\n"
    )


def gate_options(*words: str) -> argparse.Namespace:
    """The options of the gate, of these words."""
    parser = argparse.ArgumentParser()
    add_gate(parser)
    return parser.parse_args(words)
