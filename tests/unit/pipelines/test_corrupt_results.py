"""Stored results that someone damaged: named with how to make them again, or made again."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError, ProfileNotFound

from pipelines.cli import command_line
from pipelines.executors.local import LOCAL_STATES
from pipelines.stages.search_scales import best_so_far, read_generations
from pos2distill.config import ModelSection, Recipe
from pos2distill.config.load import load_recipe
from pos2distill.errors import UserError
from pos2distill.models.files import files_version
from pos2distill.models.rope.search import Candidate
from pos2distill.store.artifacts import Artifact
from pos2distill.urls import storage_errors
from tests.support.privileges import respecting_modes
from tests.support.stores import interrupt_evaluation

LOCAL = {"executor": "local", "trainers": {"strategy": "torch", "gradient_checkpointing": False}}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the storage of a finished study; filled by the first test that needs it."""
    return tmp_path_factory.mktemp("finished") / "storage"


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe], finished: Path, tmp_path: Path) -> str:
    """The recipe of a finished study, in a copy of its storage."""
    made = make_recipe(runtime=LOCAL)
    path = str(tmp_path / "recipe.yaml")
    if not finished.exists():
        assert command_line.main(["study", path]) == 0
        shutil.copytree(made.storage, finished)
    else:
        shutil.copytree(finished, made.storage)
    return path


def _path(recipe: str, pattern: str) -> Path:
    """The one path that matches in the storage."""
    (path,) = Path(load_recipe(recipe).storage).glob(pattern)
    return path


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _garble(path: Path) -> None:
    path.write_bytes(b"garbage")


def _halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _to_list(path: Path) -> None:
    path.write_text("[]")


def _to_object(path: Path) -> None:
    path.write_text("{}")


def _without_details(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"details": {}}))


def _with_lists(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": [], "details": []}))


def _to_folder(path: Path) -> None:
    _remove(path)
    path.mkdir()


def _to_file(path: Path) -> None:
    _remove(path)
    path.write_text("")


def _to_other_columns(path: Path) -> None:
    pq.write_table(pa.table({"other": [1]}), path)


def _cut_rows(path: Path) -> None:
    pq.write_table(pq.read_table(path).slice(0, 3), path)


def _nest(path: Path) -> None:
    path.write_text("[" * 100_000)


Damage = Callable[[Path], None]
AGAIN = "and run again to make it again"
UNUSABLE = "corrupt, or of another version; expected how the artifact was made"
EARLIER = "corrupt, or of an earlier version; expected"
SUMMARY = "corrupt; expected what `report` writes; run `report` for this run to make it again"
# It asks both models, and is rejected before it asks the first one.
RESUMED = ["study", "evaluation.max_new_tokens=9"]
# The damaged path, the damage, the command, words of the line.
CASES: list[tuple[str, Damage, list[str], str]] = [
    ("base-scores-*/predictions.parquet", _remove, ["report"], f"predictions.parquet: missing; delete DIR {AGAIN}"),
    ("base-scores-*/predictions.parquet", _remove, ["study"], f"predictions.parquet: missing; delete DIR {AGAIN}"),
    ("base-scores-*/predictions.parquet", _remove, ["evaluate"], f"predictions.parquet: missing; delete DIR {AGAIN}"),
    ("base-scores-*/predictions.parquet", _halve, ["report"], f"predictions.parquet: corrupt; delete DIR {AGAIN}"),
    ("base-scores-*/predictions.parquet", _empty, ["study"], f"predictions.parquet: corrupt; delete DIR {AGAIN}"),
    ("base-scores-*/predictions.parquet", _to_other_columns, ["report"], f"parquet: corrupt; delete DIR {AGAIN}"),
    ("base-scores-*/predictions.parquet", _cut_rows, ["report"], f"predictions.parquet: corrupt; delete DIR {AGAIN}"),
    ("distilled-scores-*/predictions.parquet", _cut_rows, ["evaluate"], f"parquet: corrupt; delete DIR {AGAIN}"),
    ("distilled-scores-*/predictions.parquet", _garble, ["report"], f"parquet: corrupt; delete DIR {AGAIN}"),
    ("distilled-scores-*/predictions.parquet", _to_folder, ["report"], "predictions.parquet"),
    ("base-scores-*/manifest.json", _garble, ["report"], "corrupt manifest"),
    ("base-scores-*/manifest.json", _to_list, ["study"], "corrupt manifest"),
    ("base-scores-*/manifest.json", _nest, ["report"], "corrupt manifest"),
    ("checkpoint-*/manifest.json", _empty, ["study"], "corrupt manifest"),
    (
        "base-scores-*/manifest.json",
        _without_details,
        ["report"],
        f"manifest.json: {EARLIER} 'prompt_tokens' in details; delete DIR {AGAIN}",
    ),
    (
        "base-scores-*/manifest.json",
        _without_details,
        ["evaluate"],
        f"manifest.json: {EARLIER} 'prompt_tokens' in details; delete DIR {AGAIN}",
    ),
    ("base-scores-*/manifest.json", _with_lists, ["report"], "corrupt manifest (expected objects as counts, seconds"),
    ("checkpoint-*/manifest.json", _to_folder, ["study"], "manifest.json"),
    ("checkpoint-*/model", _remove, ["study"], f"model: missing; delete DIR {AGAIN}"),
    ("checkpoint-*/model", _remove, RESUMED, f"model: missing; delete DIR {AGAIN}"),
    (
        "checkpoint-*/model/model.safetensors",
        _halve,
        RESUMED,
        "model: corrupt (DIR/model/model.safetensors: its header",
    ),
    ("checkpoint-*/model/model.safetensors", _halve, RESUMED, f"; delete DIR {AGAIN}"),
    ("checkpoint-*/model/model.safetensors", _garble, RESUMED, "model: corrupt (DIR/model/model.safetensors: is not a"),
    ("checkpoint-*/model/model.safetensors", _remove, RESUMED, "model: corrupt (DIR/model: holds no weights"),
    ("checkpoint-*/model/config.json", _garble, RESUMED, "model: corrupt (DIR/model"),
    ("checkpoint-*/model/config.json", _remove, RESUMED, "model: corrupt (DIR/model"),
    ("checkpoint-*/model/tokenizer.json", _garble, RESUMED, "model: corrupt (DIR/model"),
    ("checkpoint-*/model/tokenizer.json", _remove, RESUMED, "model: corrupt (DIR/model"),
    ("checkpoint-*/steps", _remove, ["study"], f"steps: missing; delete DIR {AGAIN}"),
    ("checkpoint-*/steps", _remove, ["report"], f"steps: missing; delete DIR {AGAIN}"),
    ("checkpoint-*/steps/*.jsonl", _garble, ["report"], f"steps: corrupt; delete DIR {AGAIN}"),
    ("checkpoint-*/steps/*.jsonl", _to_object, ["report"], f"steps: corrupt; delete DIR {AGAIN}"),
    (
        "examples-*/train.parquet",
        _remove,
        ["study", "training.epochs=2"],
        f"train.parquet: missing; delete DIR {AGAIN}",
    ),
    ("examples-*/train.parquet", _cut_rows, ["distill", "training.epochs=2"], f"parquet: corrupt; delete DIR {AGAIN}"),
    ("examples-*/train.parquet", _to_other_columns, ["distill", "training.epochs=2"], "train.parquet: corrupt"),
    ("examples-*/evaluation.parquet", _cut_rows, ["report"], f"evaluation.parquet: corrupt; delete DIR {AGAIN}"),
    ("examples-*/train.parquet", _halve, ["distill", "training.epochs=2"], "train.parquet: corrupt; delete DIR"),
    (
        "examples-*/evaluation.parquet",
        _garble,
        ["evaluate", "evaluation.max_new_tokens=9"],
        "evaluation.parquet: corrupt",
    ),
    ("checkpoint-*/provenance.json", _garble, ["report"], f"provenance.json: {UNUSABLE}; delete DIR {AGAIN}"),
    ("checkpoint-*/provenance.json", _to_object, ["report"], f"provenance.json: {UNUSABLE}; delete DIR {AGAIN}"),
    ("checkpoint-*/model/config.json", _to_list, ["report"], f"config.json: corrupt; delete DIR {AGAIN}"),
    ("checkpoint-*/model/config.json", _remove, ["report"], f"config.json: missing; delete DIR {AGAIN}"),
    ("examples-*/locations.json", _nest, ["report"], f"locations.json: corrupt; delete DIR {AGAIN}"),
    ("examples-*/locations.json", _to_list, ["report"], f"locations.json: corrupt; delete DIR {AGAIN}"),
    ("run.json", _garble, ["study"], "corrupt run.json"),
    ("run.json", _nest, ["report"], "corrupt run.json"),
    ("run.json", _to_list, ["report"], "corrupt run.json"),
    ("run.json", _to_folder, ["report"], "run.json"),
    ("run.json", _remove, ["study"], "is not empty and holds no run (no run.json)"),
    ("report", _to_file, ["report"], "report"),
    ("report/index.html", _to_folder, ["report"], "index.html"),
]


@pytest.mark.parametrize(("pattern", "damage", "command", "words"), CASES)
def test_damaged_results_are_named(
    recipe: str, pattern: str, damage: Damage, command: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _path(recipe, pattern)
    damage(path)
    capsys.readouterr()
    assert command_line.main([command[0], recipe, *command[1:]]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(errors) == 1, errors
    assert errors[0].startswith("error: ")
    folder = path if "-" in path.name else path.parent
    while "-" not in folder.name and folder.name != "storage":
        folder = folder.parent
    assert words.replace("DIR", str(folder)) in errors[0]


@pytest.mark.parametrize(
    "refusal",
    [
        PermissionError(13, "Permission denied"),
        ClientError({"Error": {"Code": "ExpiredToken"}, "ResponseMetadata": {"HTTPStatusCode": 400}}, "ListObjectsV2"),
        ClientError({"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}, "GetObject"),
        ProfileNotFound(profile="mine"),
    ],
)
def test_a_checkpoint_that_may_not_be_read_is_not_called_corrupt(
    recipe: str, refusal: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever deleted it would lose the training."""

    def refuse(model: ModelSection) -> str:
        with storage_errors(model.path, "model.path"):
            if "/checkpoint-" in model.path:
                raise refusal
        return files_version(model)

    monkeypatch.setattr("pipelines.checks.preflight.files_version", refuse)
    _remove(_path(recipe, "distilled-scores-*"))
    assert command_line.main(["study", recipe]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "/model: cannot be used (" in error
    assert "corrupt" not in error


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_file_of_a_checkpoint_that_may_not_be_read_is_not_called_corrupt(
    recipe: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _path(recipe, f"checkpoint-*/model/{name}").chmod(0)
    _remove(_path(recipe, "distilled-scores-*"))
    with respecting_modes():
        assert command_line.main(["study", recipe]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "Permission denied" in error
    assert f"/model/{name}" in error
    assert "; check the permissions of the file and of its folder" in error
    assert "corrupt" not in error


def test_dry_run_of_report_leaves_out_samples_that_are_gone(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Reports do without them, and `report` samples nothing."""
    _remove(_path(recipe, "samples-*"))
    capsys.readouterr()
    assert command_line.main(["report", recipe, "--dry-run"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#   ")]
    states = {line[14:32].rstrip(): line[4:12].rstrip() for line in lines}
    assert states.pop("report") == "to write"
    assert "sample" not in states
    assert set(states.values()) == {"cached"}


def _without_settings(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {"settings": {}}))


def _with_text_as_mean(path: Path) -> None:
    summary = json.loads(path.read_text())
    summary["base"]["mean"] = "high"
    path.write_text(json.dumps(summary))


@pytest.mark.parametrize("damage", [_garble, _empty, _to_list, _to_object, _nest, _with_text_as_mean])
@pytest.mark.parametrize("command", ["runs", "compare"])
def test_runs_and_compare_name_a_damaged_summary(
    recipe: str, command: str, damage: Damage, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _path(recipe, "report/summary.json")
    damage(path)
    capsys.readouterr()
    assert command_line.main([command, load_recipe(recipe).storage]) == 2
    assert capsys.readouterr().err == f"error: {path}: {SUMMARY}, or delete {path.parent}\n"


@pytest.mark.parametrize("damage", [_garble, _to_list, _to_object, _without_settings])
@pytest.mark.parametrize("command", ["inspect", "export"])
def test_inspect_and_export_name_a_damaged_provenance(
    recipe: str, command: str, damage: Damage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _path(recipe, "distilled-scores-*/provenance.json")
    damage(path)
    words = [str(tmp_path / "tasks")] if command == "export" else []
    capsys.readouterr()
    assert command_line.main([command, load_recipe(recipe).storage, *words]) == 2
    assert capsys.readouterr().err == (f"error: {path}: {UNUSABLE}; delete {path.parent} {AGAIN}\n")


@pytest.mark.parametrize(
    ("pattern", "damage"),
    [("report/summary.json", _garble), ("report/summary.json", _to_list), ("report", _remove)],
)
def test_a_damaged_report_is_written_again(recipe: str, pattern: str, damage: Damage) -> None:
    path = _path(recipe, pattern)
    before = json.loads(_path(recipe, "report/summary.json").read_text())
    damage(path)
    assert command_line.main(["study", recipe]) == 0
    after = json.loads(_path(recipe, "report/summary.json").read_text())
    assert after["fingerprint"] == before["fingerprint"]
    assert _path(recipe, "report/index.html").stat().st_size > 10_000


def _rename_to_no_number(path: Path) -> None:
    path.rename(path.with_name("part-abc.parquet"))


@pytest.mark.parametrize("damage", [_garble, _halve, _empty, _remove, _to_other_columns, _rename_to_no_number])
def test_an_interrupted_evaluation_continues_with_a_damaged_part(recipe: str, damage: Damage) -> None:
    folder = _path(recipe, "base-scores-*")
    expected = (folder / "predictions.parquet").read_bytes()
    (part, _) = interrupt_evaluation(folder)
    damage(part)
    assert command_line.main(["evaluate", recipe]) == 0
    assert (folder / "predictions.parquet").read_bytes() == expected


@pytest.mark.parametrize("content", ["garbage", "{}", '[{"genome": [1.0]}]'])
def test_read_generations_rejects_a_damaged_one(tmp_path: Path, content: str) -> None:
    artifact = Artifact(str(tmp_path), "rope-scales", "abcd")
    folder = Path(artifact.path) / "generations"
    folder.mkdir(parents=True)
    (folder / "0000.json").write_text('[{"genome": [1, 2], "accuracy": [0.5, 0.25], "fitness": 0.125}]')
    ((candidate,),) = read_generations(artifact)
    assert candidate == Candidate((1.0, 2.0), (0.5, 0.25), 0.125)
    (folder / "0001.json").write_text(content)
    with pytest.raises(UserError, match=rf"generations/0001\.json: corrupt; delete {artifact.path} {AGAIN}"):
        read_generations(artifact)


def test_read_generations_accepts_an_empty_one_but_not_as_the_first(tmp_path: Path) -> None:
    artifact = Artifact(str(tmp_path), "rope-scales", "abcd")
    folder = Path(artifact.path) / "generations"
    folder.mkdir(parents=True)
    (folder / "0000.json").write_text('[{"genome": [1, 2], "accuracy": [0.5, 0.25], "fitness": 0.125}]')
    (folder / "0001.json").write_text("[]")
    first, second = read_generations(artifact)
    assert (len(first), second) == (1, [])
    assert best_so_far([first, second]) == [0.125, 0.125]
    (folder / "0000.json").write_text("[]")
    with pytest.raises(UserError, match=rf"generations/0000\.json: corrupt; delete {artifact.path} {AGAIN}"):
        read_generations(artifact)


@pytest.mark.parametrize("content", ["garbage", "{}", "[1]", '["a"]'])
def test_a_corrupt_list_of_local_states_is_named(tmp_path: Path, content: str) -> None:
    artifact = Artifact(str(tmp_path), "checkpoint", "abcd")
    assert LOCAL_STATES.read(artifact) == {}
    folder = Path(artifact.path) / "training" / "local"
    folder.mkdir(parents=True)
    (folder / "latest.json").write_text('["00000003-a", "00000012-b"]')
    assert LOCAL_STATES.read(artifact) == {"00000003-a": 3, "00000012-b": 12}
    (folder / "latest.json").write_text(content)
    with pytest.raises(UserError, match=rf"latest\.json: corrupt; remove {folder} to train again from the samples$"):
        LOCAL_STATES.read(artifact)


def test_a_deleted_artifact_is_made_again(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As the lines about damaged files say."""
    path = _path(recipe, "base-scores-*")
    before = (path / "predictions.parquet").read_bytes()
    _remove(path)
    assert command_line.main(["study", recipe]) == 0
    assert (path / "predictions.parquet").read_bytes() == before
