"""`import pos2distill` in scripts and notebooks."""

import asyncio
import functools
import inspect
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pos2distill
from pipelines import stage_runner
from pipelines.api_input import Questions, questions_file, to_overrides, to_plain_value, to_recipe
from pipelines.run_coordinator import RunCoordinator
from pos2distill.config import Recipe
from pos2distill.config.yaml_reader import parse_value
from pos2distill.errors import TransientError, UserError
from pos2distill.evaluation.result import Evaluation
from pos2distill.store.lease import hold_lease
from pos2distill.training.step_log import StepLog
from tests.support.paths import PROJECT
from tests.support.results import flip_bit
from tests.support.tiny import write_examples

LOCAL = {"runtime.executor": "local", "runtime.mode": "staged"}


@pytest.fixture
def recipe_file(make_recipe: Callable[..., Recipe], tmp_path: Path) -> str:
    make_recipe()
    return str(tmp_path / "recipe.yaml")


def test_study_returns_both_evaluations_and_the_checkpoint(recipe_file: str) -> None:
    result = pos2distill.study(recipe_file, LOCAL)
    assert result.curve == result.after.curve
    assert result.before.curve.examples == 4
    assert result.plot().png.startswith(b"\x89PNG")
    assert result.checkpoint.plot().png.startswith(b"\x89PNG")
    answers = result.to_pandas()
    assert answers["model"].value_counts().to_dict() == {"before": 16, "after": 16}
    accuracy = answers[answers["model"] == "after"].groupby("placement")["correct"].mean()
    assert tuple(accuracy) == result.after.curve.accuracy_by_slot
    assert (Path(result.checkpoint.path) / "config.json").exists()
    assert Path(result.report).exists()
    # The other functions find what the study has made.
    samples = pos2distill.sample(recipe_file, LOCAL)
    assert samples.counts["sampled"] == len(samples.to_pandas()) == 8
    assert set(samples.to_pandas()["outcome"]) <= {"kept", "empty"}
    checkpoint = pos2distill.distill(recipe_file, LOCAL)
    assert checkpoint.path == result.checkpoint.path
    assert list(checkpoint.to_pandas()["step"]) == list(range(len(checkpoint.steps)))
    assert pos2distill.evaluate(recipe_file, settings=LOCAL).summary() == result.after.summary()


def test_sample_makes_corrupt_samples_again(recipe_file: str) -> None:
    """A part that the index finds corrupt, and one of which only a reader of all columns does."""
    first = pos2distill.sample(recipe_file, LOCAL)
    for column in ("sample_id", "text"):
        part = sorted((Path(first.url) / "parts").iterdir())[0]
        flip_bit(part, column)
        again = pos2distill.sample(recipe_file, LOCAL)
        assert again.to_pandas().sort_values("sample_id").equals(first.to_pandas().sort_values("sample_id"))
        assert again.counts == first.counts
        (Path(first.url) / "quarantine" / part.name).unlink()


def test_distill_runs_in_a_thread(recipe_file: str) -> None:
    """As in a service. Handlers of signals belong to the main thread."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(pos2distill.sample, recipe_file, LOCAL).result()
        checkpoint = pool.submit(pos2distill.distill, recipe_file, LOCAL).result()
    assert checkpoint.steps
    assert not [each.name for each in threading.enumerate() if each.name in ("stop", "work")]


def test_distill_ends_with_an_error_if_the_lease_is_lost(
    recipe_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a storage does not answer. The process, here that of the tests, continues."""
    pos2distill.sample(recipe_file, LOCAL)
    mark = tmp_path / "storage" / "driver.json"
    report_fatal = RunCoordinator.report_fatal
    reported = threading.Event()
    closed: list[StepLog] = []

    def lose_lease(*_: object) -> None:
        # The mark of another driver. Again and again, since a renewal may overwrite one that it has just not seen.
        for _attempt in range(240):
            mark.write_text("{}")
            if reported.wait(0.5):
                return
        raise AssertionError("the loss of the lease is not reported")

    def report(coordinator: RunCoordinator, error: TransientError) -> None:
        report_fatal(coordinator, error)
        reported.set()

    def close(log: StepLog) -> None:
        closed.append(log)

    with monkeypatch.context() as patch:
        patch.setattr(stage_runner, "hold_lease", functools.partial(hold_lease, period=0.2))
        patch.setattr(RunCoordinator, "report_step", lose_lease)
        patch.setattr(RunCoordinator, "report_fatal", report)
        patch.setattr(StepLog, "close", close)
        with pytest.raises(TransientError, match=r"storage: another run took over .+; run the same command again to"):
            pos2distill.distill(recipe_file, LOCAL)
    assert mark.read_text() == "{}"
    assert len(closed) == 1, "runs in trackers are closed, since the process opens them again"
    (checkpoint,) = (tmp_path / "storage").glob("checkpoint-*")
    assert not (checkpoint / "training").exists(), "no state is saved that another driver may read"
    assert not list((checkpoint / "steps").iterdir())
    assert [path.name for path in checkpoint.iterdir() if path.is_file()] == []
    mark.unlink()
    assert pos2distill.distill(recipe_file, LOCAL).steps


def test_evaluate_takes_a_model_and_data_inside_a_running_loop(tiny_model_path: str, tmp_path: Path) -> None:
    """As in a notebook, whose thread runs an event loop."""
    questions = write_examples(tmp_path / "questions.jsonl", 20, 6)
    settings = {
        "data.prompt": "plain",
        "evaluation.max_new_tokens": 4,
        "runtime.storage": str(tmp_path / "runs"),
    }

    async def cell() -> Evaluation:
        made: Evaluation = pos2distill.evaluate(
            model=tiny_model_path, data=str(questions), documents=4, slots=[0, 3], examples=5, settings=settings
        )
        return made

    evaluation = asyncio.run(cell())
    assert evaluation.curve.slots == (0, 3)
    assert len(evaluation.to_pandas()) == 10
    assert evaluation.verdict
    picture = evaluation.plot()
    picture.save(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes() == picture._repr_png_()


def test_evaluate_takes_records(tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    questions = write_examples(tmp_path / "questions.jsonl", 20, 6)
    records = [json.loads(line) for line in questions.read_text().splitlines()]

    def evaluate(data: Questions) -> Evaluation:
        settings = {
            "data.prompt": "plain",
            "evaluation.max_new_tokens": 4,
            "runtime.storage": str(tmp_path / type(data).__name__),
        }
        made: Evaluation = pos2distill.evaluate(
            model=tiny_model_path, data=data, documents=4, slots=2, examples=5, settings=settings
        )
        return made

    expected = evaluate(questions)
    assert evaluate(iter(records)).summary()["curves"] == expected.summary()["curves"]
    with pytest.raises(UserError, match=r"^data: record 2: cannot be written as JSON \("):
        evaluate([records[0], {"question": {1, 2}}])
    with pytest.raises(UserError, match=r"^data: record 1: expected a mapping, got str$"):
        evaluate(["a question"])  # type: ignore[list-item]
    with pytest.raises(UserError, match=r"^data: expected a file or records, got one mapping; of columns, make"):
        evaluate({"question": ["a", "b"]})  # type: ignore[dict-item]
    with pytest.raises(UserError, match=r"^data: expected a file or records, got int$"):
        evaluate(5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^data: record 1: contains an unpaired surrogate, which is not a character$"):
        evaluate([{"question": "\ud83d"}])


def test_evaluate_takes_records_with_null_fields_as_parquet_does(tiny_model_path: str, tmp_path: Path) -> None:
    """A `datasets.Dataset` has every field in every row."""
    questions = write_examples(tmp_path / "questions.jsonl", 20, 6)
    records = [json.loads(line) for line in questions.read_text().splitlines()]
    records[0]["id"] = None
    for record in records[::2]:
        for document in record["documents"]:
            document["title"] = None
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "questions.parquet")

    def evaluate(data: Questions, storage: str) -> Evaluation:
        settings = {"data.prompt": "plain", "evaluation.max_new_tokens": 4, "runtime.storage": tmp_path / storage}
        made: Evaluation = pos2distill.evaluate(
            model=Path(tiny_model_path), data=data, documents=np.int64(4), slots=np.array([0, 3]), settings=settings
        )
        return made

    of_parquet = (
        evaluate(tmp_path / "questions.parquet", "parquet").to_pandas().drop(columns="seconds", errors="ignore")
    )
    of_records = evaluate(records, "records").to_pandas().drop(columns="seconds", errors="ignore")
    assert of_records.equals(of_parquet)
    assert len(of_records) == 40


def test_questions_file_is_temporary_and_named_after_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later call with the same records resumes: its file has another folder, but the same name and bytes."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    records: list[dict[str, Any]] = [
        {"question": "who", "answers": ("a", None)},
        {"question": "wo \u00fc", "score": np.float32(0.5)},
    ]
    with questions_file(records) as one, questions_file(iter(records)) as other:
        assert one != other
        assert Path(one).name == Path(other).name
        assert Path(one).read_bytes() == Path(other).read_bytes()
        second = json.loads(Path(one).read_text().splitlines()[1])
        assert second == {"question": "wo \u00fc", "score": 0.5}
    assert list(tmp_path.iterdir()) == []
    with questions_file(tmp_path / "given.jsonl") as given:
        assert given == str(tmp_path / "given.jsonl")


def test_errors_about_records_name_the_record_and_no_file(
    recipe_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    long = [{**record, "question": f"{'long ' * 200}{record['question']}"} for record in records]
    with pytest.raises(UserError, match=r"^example fox-\d+ \(data: record \d+\): prompt of "):
        pos2distill.evaluate(recipe_file, data=long, settings=LOCAL)
    del records[2]["question"]
    with pytest.raises(UserError, match=r"^data: record 3: field 'question' is missing; found fields: "):
        pos2distill.sample(recipe_file, LOCAL, data=records)
    with pytest.raises(UserError, match=r"^data: record 1, question: empty$"):
        pos2distill.evaluate(recipe_file, data=[{**records[0], "question": ""}], settings=LOCAL)
    with pytest.raises(UserError, match=r"^data: holds no examples; expected a record for each question"):
        pos2distill.evaluate(recipe_file, data=[], settings=LOCAL)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(TransientError, match=r"^data: record 2: a; data: record 31$"), questions_file(records) as file:
        raise TransientError(f"{file}, line 2: a; {file}, line 31")
    with pytest.raises(ValueError, match=r"^/.*, line 2$"), questions_file(records) as file:
        raise ValueError(f"{file}, line 2")


def test_study_takes_records_and_leaves_no_file(
    recipe_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    records = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    first = pos2distill.sample(recipe_file, LOCAL, data=records)
    assert pos2distill.sample(recipe_file, LOCAL, data=iter(records)).url == first.url
    checkpoint = pos2distill.distill(recipe_file, LOCAL, data=records)
    result = pos2distill.study(recipe_file, LOCAL, data=records)
    assert result.checkpoint.path == checkpoint.path
    assert pos2distill.evaluate(recipe_file, data=records, settings=LOCAL).summary() == result.after.summary()
    assert not list(temporary.rglob("questions*"))


def test_settings_are_named_as_a_scripts(recipe_file: str) -> None:
    """Loading calls them those of the command line, which a script does not have."""
    for recipe in (recipe_file, "quickstart"):
        with pytest.raises(UserError, match=r"^settings: training.epoch: unknown field; did you mean 'epochs'\?$"):
            to_recipe(recipe, {"training.epoch": 1})


def test_to_overrides_takes_paths_and_numpy() -> None:
    settings = {
        "training.learning_rate": np.float64(0.5),
        "seed": np.int64(3),
        "model.path": Path("models/mine"),
        "evaluation.slots": np.array([0, 2]),
        "method.advantageous_slot": (np.int32(1),),
        "training.lora": {"targets": range(2), "path": Path("a")},
        "description": "\U0001f600",
    }
    values = dict(override.split("=", 1) for override in to_overrides(settings))
    assert {name: parse_value(value) for name, value in values.items()} == {
        "training.learning_rate": 0.5,
        "seed": 3,
        "model.path": "models/mine",
        "evaluation.slots": [0, 2],
        "method.advantageous_slot": [1],
        "training.lora": {"targets": [0, 1], "path": "a"},
        "description": "\U0001f600",
    }


@pytest.mark.parametrize(
    "text",
    [
        *(f"a{character}b" for character in "\x00\x07\x1f\x7f\x80\x85\x9f\xa0\u2028\u2029\ufeff\ufffd\ufffe\uffff"),
        "\n\t\\u0085 \"'",
        "\u00fc \U0001f600 \U0010ffff",
    ],
)
def test_to_overrides_keeps_every_character(text: str) -> None:
    (override,) = to_overrides({"description": {text: [text]}})
    assert parse_value(override.partition("=")[2]) == {text: [text]}
    assert to_plain_value(text, "recipe") == text


def test_to_recipe_keeps_every_character_of_the_data_path(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    make_recipe()
    path = f"{tmp_path}/questions \U0001f600\x85.jsonl"
    assert to_recipe(tmp_path / "recipe.yaml", None, path).study.data.path == path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"seed": {1, 2}},
            r"^settings: seed: cannot be written as JSON \(expected numbers, text, lists and mappings, got",
        ),
        ({"seed": b"1"}, r"^settings: seed: cannot be written as JSON \(.* got bytes\)$"),
        (
            {"evaluation.slots": np.array(["2026-01-01"], "datetime64[D]")},
            r"^settings: evaluation\.slots: .* got date\)$",
        ),
        (5, r"^settings: expected a mapping of dotted names to values, got int$"),
    ],
)
def test_to_overrides_names_the_setting(settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        to_overrides(settings)


def test_to_recipe_names_the_section_that_cannot_be_written(make_recipe: Callable[..., Recipe]) -> None:
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(UserError, match=r"^recipe: data: cannot be written as JSON \(Circular reference"):
        to_recipe({"name": "mine", "data": {"path": nested}}, None)
    with pytest.raises(UserError, match=r"^recipe: expected a path or name, got int$"):
        to_recipe(5, None)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"^data: a Recipe has its data already; give its name, file or mapping instead$"
    ):
        to_recipe(make_recipe(), {"seed": 1}, "data.jsonl")
    assert to_plain_value({"path": Path("a"), "count": np.uint8(3)}, "recipe") == {"path": "a", "count": 3}


def test_evaluate_takes_a_mapping_and_changes_nothing_in_it(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe(runtime={"executor": "local"})
    raw = {"name": "tiny", "description": "", **recipe.study.model_dump(mode="json")}
    raw["runtime"] = recipe.runtime.model_dump(mode="json")
    before = repr(raw)
    assert pos2distill.evaluate(raw, settings={"evaluation.slots": 2}).curve.slots == (0, 3)
    assert pos2distill.evaluate(raw, {"evaluation.slots": 2}).curve.slots == (0, 3)
    assert repr(raw) == before


def test_functions_reject_what_does_not_fit(make_recipe: Callable[..., Recipe], recipe_file: str) -> None:
    with pytest.raises(UserError, match=r"^evaluate: expected either a recipe, or model and data$"):
        pos2distill.evaluate(recipe_file, model="m", data="d")
    with pytest.raises(UserError, match=r"^evaluate: expected either a recipe, or model and data$"):
        pos2distill.evaluate(model="m")
    with pytest.raises(UserError, match=r"^model: expected a path or name, got int$"):
        pos2distill.evaluate(model=5, data="d")
    with pytest.raises(UserError, match=r"^examples: cannot be written as JSON \("):
        pos2distill.evaluate(model="m", data="d", examples={3})
    with pytest.raises(UserError, match=r"^evaluate: base_url, documents, slots and examples belong to model and data"):
        pos2distill.evaluate(recipe_file, slots=3)
    with pytest.raises(UserError, match=r"^settings: a Recipe has its settings already"):
        pos2distill.sample(make_recipe(), {"seed": 1})
    with pytest.raises(UserError, match=r"^tiny: is a sweep of several studies; call study for each"):
        pos2distill.study(recipe_file, {"sweep.seed": [0, 1]})
    with pytest.raises(AttributeError, match="has no attribute 'destill'"):
        _ = pos2distill.destill


@pytest.mark.parametrize(
    ("argument", "settings", "message"),
    [
        ({}, {"model.path": "b"}, "model: model.path is set too; give one of them"),
        (
            {},
            {"model": {"engine": "hf"}},
            "model: model.path would be replaced with its whole section model; set fields of the section instead, as "
            "model.FIELD",
        ),
        ({}, {"data.path": "b"}, "data: data.path is set too; give one of them"),
        ({"documents": 4}, {"data.documents": 3}, "documents: data.documents is set too; give one of them"),
        ({"examples": 5}, {"data.eval_examples": 3}, "examples: data.eval_examples is set too; give one of them"),
        ({"slots": [0, 3]}, {"evaluation.slots": 2}, "slots: evaluation.slots is set too; give one of them"),
        (
            {"base_url": "http://x/v1"},
            {"runtime.endpoint.base_url": "http://y/v1"},
            "base_url: runtime.endpoint.base_url is set too; give one of them",
        ),
    ],
)
def test_evaluate_rejects_an_argument_whose_setting_is_given_too(
    argument: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    """One of them would be without effect."""
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        pos2distill.evaluate(model="a", data="questions.jsonl", settings=settings, **argument)


@pytest.mark.parametrize("settings", [{"data.path": "b.jsonl"}, {"data": {"format": "jsonl", "path": "b.jsonl"}}])
def test_to_recipe_rejects_data_beside_its_setting(recipe_file: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"^data: data\.path is set too; give one of them$"):
        to_recipe(recipe_file, settings, "a.jsonl")


def test_to_recipe_takes_data_beside_other_settings_of_its_section(recipe_file: str) -> None:
    loaded = to_recipe(recipe_file, {"data": {"format": "jsonl", "documents": 5}}, "/a.jsonl")
    assert (loaded.study.data.path, loaded.study.data.documents) == ("/a.jsonl", 5)


@pytest.mark.parametrize("name", ["evaluate", "sample", "distill", "study"])
def test_functions_begin_with_the_same_arguments(name: str) -> None:
    parameters = list(inspect.signature(getattr(pos2distill, name)).parameters.values())
    assert [(each.name, each.kind.name) for each in parameters[:3]] == [
        ("recipe", "POSITIONAL_OR_KEYWORD"),
        ("settings", "POSITIONAL_OR_KEYWORD"),
        ("data", "KEYWORD_ONLY"),
    ]


def test_import_is_light(tmp_path: Path) -> None:
    """In a script outside the checkout."""
    script = (
        "import sys, pos2distill; heavy = {'torch', 'ray', 'transformers', 'pandas', 'pydantic', 'pipelines'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert {'evaluate', 'sample', 'distill', 'study'} <= set(dir(pos2distill))\n"
        "print(pos2distill.evaluate.__name__)"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "evaluate\n"), done.stderr
