import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipelines.cli import command_line
from pipelines.plan import make_plan
from pipelines.progress_bar import StageProgress, show_stage
from pipelines.stages import analyze, parts_loop
from pos2distill.config.load import load_recipe
from pos2distill.errors import ExitCode
from pos2distill.store.artifacts import Artifact
from pos2distill.store.parts import TableParts
from tests.support.toy import LOCAL

TOY = (
    LOCAL,
    "data.documents=8",
    "data.train_examples=6",
    "data.eval_examples=4",
    "evaluation.slots=2",
    "evaluation.other_documents=[]",
    "evaluation.bootstrap_samples=100",
    "method.k=1",
    "training.epochs=1",
)


def run(capsys: pytest.CaptureFixture[str], command: str, recipe: str, storage: Path, *overrides: str) -> str:
    assert command_line.main([command, recipe, *TOY, f"runtime.storage={storage}", *overrides]) == 0
    return capsys.readouterr().out


def analyses_in(storage: Path) -> dict[str, Any]:
    return json.loads((storage / "analysis" / "analysis.json").read_text())


def test_analyze_base_then_study_then_analyze_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = tmp_path / "run"
    said = run(capsys, "analyze", "quickstart", storage)
    assert re.search(
        r"^analyze base .* examples 4, correct 4, wrong 0, empty 0, failed 0, passes 8$", said, re.MULTILINE
    )
    assert "base: at positions other than the advantageous one" in said
    base = analyses_in(storage)["base"]
    assert (base["documents"], base["slots"], base["token_shift"]["examples"]) == (8, [[0], [7]], 4)
    # The last slot is the advantageous one.
    assert base["token_shift"]["nats_by_slot"][1]["value"] == pytest.approx(0, abs=1e-6)
    assert base["token_shift"]["recovery_by_slot"][1]["value"] == 1
    attention = base["attention"]["answer"]
    total = sum(attention["by_document"][0]) + sum(attention[part][0] for part in ("before", "after", "response"))
    assert total == pytest.approx(1, abs=1e-4)
    assert base["thought_shift"] == {"skipped": "questions of one hop are answered without a chain (data.hops)"}
    pictures = {path.name for path in (storage / "analysis").glob("*.png")}
    assert pictures == {"token-shift.png", "attention.png", "wrong-answers.png"}

    # A study with the same section shows it in the report, and another without it computes nothing again.
    said = run(capsys, "study", "quickstart", storage, "analysis={}")
    assert re.search(r"^analyze base  +cached", said, re.MULTILINE)
    assert re.search(r"^analyze distilled  +\d", said, re.MULTILINE)
    assert analyses_in(storage).keys() == {"base", "distilled"}
    page = (storage / "report" / "index.html").read_text()
    assert "<h2>Why answers differ by position</h2>" in page
    assert '<div id="token-shift" class="chart">' in page
    assert "token-shift.png" not in page  # its data is in the page
    said = run(capsys, "study", "quickstart", storage)
    assert "analyze base" not in said
    assert "Why answers differ" not in (storage / "report" / "index.html").read_text()
    said = run(capsys, "analyze", "quickstart", storage)
    assert said.count("cached") == 5
    assert "distilled: at positions other than the advantageous one" in said


def test_analyze_chains_of_two_hops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage = tmp_path / "run"
    settings = ["evaluation.slots=pairs", "analysis.attention=false", "data.documents=10", "data.eval_examples=2"]
    said = run(capsys, "analyze", "quickstart_r2", storage, *settings)
    assert "attention            not available: analysis.attention is false" in said
    base = analyses_in(storage)["base"]
    shift = base["thought_shift"]
    assert shift["documents_named_by"] == "title"
    assert shift["chains"] == 2 * len(base["slots"])
    assert list(shift["by_group"]) == ["connected", "disconnected", "reversed"]
    ratios = [shift["overall"][step]["value"] for step in ("retrieval", "reasoning", "answer", "none")]
    assert sum(ratios) == pytest.approx(1)
    right = [row["correct"] for row in evaluation_of(storage).read_table("predictions.parquet").to_pylist()]
    anyway = shift["overall"]["correct_in_spite_of_a_failed_step"]
    assert ratios[3] + anyway == pytest.approx(sum(right) / len(right))
    assert "thought-shift.png" in {path.name for path in (storage / "analysis").iterdir()}


def test_analyze_generates_only_answers_that_the_evaluation_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same answers, whether the advantageous slot was evaluated or not."""
    append = TableParts.append
    written: set[str] = set()

    def recording(parts: TableParts, table: pa.Table) -> None:
        written.add(parts.url.rpartition("/")[2])
        append(parts, table)

    monkeypatch.setattr(TableParts, "append", recording)
    settings = ("evaluation.slots=[0]", "analysis.attention=false")
    run(capsys, "analyze", "quickstart", tmp_path / "generated", *settings)
    assert written == {"parts", "answer-parts", "pass-parts"}
    written.clear()
    settings = ("evaluation.slots=[0, 7]", "analysis.attention=false")
    run(capsys, "analyze", "quickstart", tmp_path / "evaluated", *settings)
    assert written == {"parts", "pass-parts"}
    first, second = (analyses_in(tmp_path / name)["base"]["token_shift"] for name in ("generated", "evaluated"))
    assert first["response_tokens"] == second["response_tokens"]
    assert first["nats_by_token"][0] == pytest.approx(second["nats_by_token"][0], abs=1e-6)


def test_analyze_resumes_after_every_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four questions whose answers are generated in one part, and passed over in a part each."""
    settings = ("evaluation.slots=[0]", "analysis.attention=false")
    monkeypatch.setattr(analyze, "_RESPONSES_PER_BLOCK", 1)
    run(capsys, "evaluate", "quickstart", tmp_path, *settings)
    append = TableParts.append
    written: list[str] = []

    def append_one(parts: TableParts, table: pa.Table) -> None:
        if len(written) == 1:
            raise KeyboardInterrupt
        append(parts, table)
        written.append(Path(parts.folder).name)

    monkeypatch.setattr(TableParts, "append", append_one)
    for folder in ("answer-parts", "pass-parts", "pass-parts", "pass-parts"):
        exit_code = command_line.main(["analyze", "quickstart", *TOY, f"runtime.storage={tmp_path}", *settings])
        assert exit_code == ExitCode.INTERRUPTED
        assert written == [folder]
        written.clear()
    capsys.readouterr()
    said = run(capsys, "analyze", "quickstart", tmp_path, *settings)
    assert written == ["pass-parts"]
    monkeypatch.setattr(TableParts, "append", append)
    assert "examples 4, correct 4, wrong 0, empty 0, failed 0, passes 4" in said
    run(capsys, "analyze", "quickstart", tmp_path / "undisturbed", *settings)
    shift, undisturbed = (analyses_in(folder)["base"]["token_shift"] for folder in (tmp_path, tmp_path / "undisturbed"))
    assert shift == undisturbed
    assert not list(tmp_path.glob("base-analysis-*/*-parts"))


def test_analyze_shows_progress_while_it_generates_and_while_it_passes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, str, int]] = []

    @contextmanager
    def recording(label: str, total: int, *, unit: str, **settings: Any) -> Iterator[StageProgress]:
        with show_stage(label, total, unit=unit, **settings) as progress:
            yield progress
        shown.append((label, f"{progress.count} of {total} {unit}s", progress.done))

    monkeypatch.setattr(parts_loop, "show_stage", recording)
    run(capsys, "analyze", "quickstart", tmp_path, "evaluation.slots=[0]", "analysis.attention=false")
    assert shown == [
        ("evaluate base", "4 of 4 prompts", 0),
        ("analyze base", "4 of 4 prompts", 0),
        ("analyze base", "4 of 4 responses", 0),
    ]


def evaluation_of(storage: Path) -> Artifact:
    (folder,) = storage.glob("base-scores-*")
    return Artifact(str(storage), "base-scores", folder.name.removeprefix("base-scores-"))


def test_analyze_without_correct_answers_says_why(make_recipe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(data={"eval_examples": 2}, runtime={"executor": "local"})
    path = Path(recipe.storage).parent / "recipe.yaml"
    assert command_line.main(["analyze", str(path)]) == 0
    said = capsys.readouterr().out
    assert "token shift          not available: no answer at the advantageous slot was correct" in said
    analysis = analyses_in(Path(recipe.storage))["base"]
    assert analysis["attention"] == {"skipped": "no answer at the advantageous slot was correct"}
    assert analysis["wrong_answers"]["wrong"] == analysis["wrong_answers"]["answers"] == 8


def test_make_plan_with_an_analysis_keeps_all_other_fingerprints(make_recipe: Any) -> None:
    without, with_it = make_plan(make_recipe()), make_plan(make_recipe(analysis={"examples": 3}))
    plain = {stage.name: stage.fingerprint for stage in without.stages}
    analyzed = {stage.name: stage.fingerprint for stage in with_it.stages}
    assert list(analyzed) == [*plain, "analyze base", "analyze distilled"]
    assert plain.items() <= analyzed.items()
    assert without.fingerprint != with_it.fingerprint
    assert without.stages_for_analyze() == []
    assert "analysis" not in without.study.model_dump(mode="json")


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ({"analysis": {"examples": 4}}, {"analyze base", "analyze distilled"}),
        ({"training": {"epochs": 2}}, {"distill", "evaluate distilled", "analyze distilled"}),
        ({"evaluation": {"bootstrap_samples": 300}}, set()),
    ],
)
def test_make_plan_setting_changes_its_analyses(make_recipe: Any, override: Any, changed: set[str]) -> None:
    before = {stage.name: stage.fingerprint for stage in make_plan(make_recipe(analysis={"examples": 3})).stages}
    override = {"analysis": {"examples": 3}, **override}
    after = {stage.name: stage.fingerprint for stage in make_plan(make_recipe(**override)).stages}
    assert {name for name in before if before[name] != after[name]} == changed


@pytest.mark.parametrize("method", ["reorder", "ms_poe", "attention_buckets"])
def test_analyze_rejects_methods_that_change_how_the_model_answers(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*TOY, f"runtime.storage={tmp_path}", f"inference.method={method}"]
    assert command_line.main(["analyze", "quickstart", *overrides]) == 2
    message = f"analysis: it runs the model as it is, without inference.method '{method}'; leave one of them out\n"
    assert capsys.readouterr().err == f"error: quickstart: {message}"
    assert command_line.main(["study", "quickstart", *overrides, "analysis={}"]) == 2
    assert capsys.readouterr().err.endswith(message)


def test_analyze_dry_run_names_its_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["analyze", "quickstart", *TOY, f"runtime.storage={tmp_path}", "--dry-run"]) == 0
    stages = re.findall(r"^#   to run    (\w+(?: \w+)*)  ", capsys.readouterr().out, re.MULTILINE)
    assert stages == ["prepare", "evaluate base", "analyze base"]


def test_analysis_settings_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["analyze", "quickstart", "analysis.exampels=3"]) == 2
    assert "analysis.exampels: unknown field; did you mean 'examples'?" in capsys.readouterr().err
    assert load_recipe("quickstart", ["analysis={}"]).study.analysis is not None
