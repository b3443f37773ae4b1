"""Random damage to recipes, data files, model folders and stores: never a traceback, never long.

hypothesis draws the same cases in every run (profile `steady`). POS2DISTILL_FUZZ=5000 draws other ones, as many
for each kind of input.
"""

import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipelines.cli import command_line
from pos2distill.config import Recipe, Study
from pos2distill.config.validation import dotted_names
from tests.support.commands import run_evaluate, run_study
from tests.support.stores import interrupt_evaluation

_SECONDS = 20.0
_MORE = int(os.environ.get("POS2DISTILL_FUZZ", "0"))

fuzz = settings(
    max_examples=_MORE or 25,
    derandomize=not _MORE,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


# Of tests whose every example runs commands on a whole storage.
fuzz_storages = settings(fuzz, max_examples=_MORE or 10)


@pytest.fixture
def dry_run(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., int]:
    """`dry_run(*settings)`: a dry run of the recipe, which must accept it, or reject it with one line, soon."""
    make_recipe()
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    # Names of hosts are random too; none of them should be asked.
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")

    def run(*words: str, path: Path = tmp_path / "recipe.yaml") -> int:
        start = time.monotonic()
        code = command_line.main(["study", str(path), *words, "--dry-run"])
        assert time.monotonic() - start < _SECONDS
        printed = capsys.readouterr()
        errors = [line for line in printed.err.splitlines() if not line.startswith("warning: ")]
        assert (code, len(errors)) in [(0, 0), (2, 1)], printed
        assert all(line.startswith("error: ") and len(line) < 2000 for line in errors)
        assert list(temporary.iterdir()) == []
        return code

    return run


def _paths(raw: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The keys that lead to each value of nested mappings and lists."""
    paths = [path] if path else []
    items = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for key, value in items:
        paths += _paths(value, (*path, key))
    return paths


def _change(raw: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a path, or without it (`_ABSENT`)."""
    raw = json.loads(json.dumps(raw))
    inner = raw
    for key in path[:-1]:
        inner = inner[key]
    if value is _ABSENT:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return raw


_ABSENT = object()
# Text without surrogates, which no file in UTF-8 can hold.
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_VALUES = st.one_of(
    st.just(_ABSENT),
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([0, -1, 1, 2, 10**9, 10**18, 2**63, 10**30]),
    st.floats(allow_nan=False),
    _TEXT,
    st.sampled_from(
        ["", " ", "auto", "all", "first", "~", "/", ".", "..", "a\0b", "s3://", "://", "memory://", "é" * 300]
    ),
    st.lists(st.integers(-2, 9), max_size=4),
    st.lists(_TEXT, max_size=2),
    st.dictionaries(_TEXT, st.integers(), max_size=2),
)


@fuzz
@given(data=st.data())
def test_settings(dry_run: Callable[..., int], data: st.DataObject) -> None:
    """Values of all kinds for settings of the study and of the runtime."""
    words = []
    for name in data.draw(st.lists(st.sampled_from(dotted_names(Recipe)), min_size=1, max_size=2)):
        value = data.draw(_VALUES.filter(lambda value: value is not _ABSENT))
        words.append(f"{name}={json.dumps(value)}")
    dry_run(*(word for word in words if "\0" not in word))


@fuzz
@given(
    name=st.sampled_from(dotted_names(Study)), values=st.lists(_VALUES.filter(lambda v: v is not _ABSENT), max_size=3)
)
def test_sweeps(dry_run: Callable[..., int], tmp_path: Path, name: str, values: list[Any]) -> None:
    raw = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump({**raw, "sweep": {name: values}}))
    dry_run(path=path)


@fuzz
@given(data=st.data())
def test_recipes(dry_run: Callable[..., int], tmp_path: Path, data: st.DataObject) -> None:
    """A recipe with one value changed, or its text cut, or with other bytes in it."""
    text = (tmp_path / "recipe.yaml").read_bytes()
    path = tmp_path / "fuzzed.yaml"
    if data.draw(st.booleans()):
        raw = yaml.safe_load(text)
        changed = _change(raw, data.draw(st.sampled_from(_paths(raw))), data.draw(_VALUES))
        path.write_text(yaml.safe_dump(changed))
    else:
        path.write_bytes(_mutate(text, data))
    dry_run(path=path)


@fuzz
@given(data=st.data())
def test_data_files(dry_run: Callable[..., int], tmp_path: Path, data: st.DataObject) -> None:
    """A data file with one value of a record changed, or its bytes; as lines or as an array."""
    lines = (tmp_path / "data.jsonl").read_text().splitlines()
    if data.draw(st.booleans()):
        number = data.draw(st.integers(0, len(lines) - 1))
        record = json.loads(lines[number])
        changed = _change(record, data.draw(st.sampled_from(_paths(record))), data.draw(_VALUES))
        lines[number] = json.dumps(changed)
    is_array = data.draw(st.booleans())
    content = f"[{','.join(lines)}]" if is_array else "\n".join(lines)
    path = tmp_path / data.draw(st.sampled_from(["x.jsonl", "x.json", "x.jsonl.gz"]))
    path.write_bytes(_mutate(content.encode(), data) if data.draw(st.booleans()) else content.encode())
    dry_run(f"data.path={path}")


@fuzz
@given(data=st.data())
def test_model_folders(dry_run: Callable[..., int], tmp_path: Path, tiny_model_path: str, data: st.DataObject) -> None:
    """A model with one file changed: a value of its JSON, or its bytes; or without the file."""
    # Another folder each time: a model that was checked once is not checked again by the same process.
    folder = tmp_path / f"model-{uuid.uuid4().hex}"
    shutil.copytree(tiny_model_path, folder)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    if path.suffix == ".json" and data.draw(st.booleans()):
        raw = json.loads(path.read_text())
        raw.pop("added_tokens", None)  # hundreds of values of one kind
        changed = _change(raw, data.draw(st.sampled_from(_paths(raw))), data.draw(_VALUES))
        path.write_text(json.dumps(changed))
    elif data.draw(st.integers(0, 9)) == 0:
        path.unlink()
    else:
        path.write_bytes(_mutate(path.read_bytes(), data))
    dry_run(f"model.path={folder}")
    shutil.rmtree(folder)


@fuzz
@given(data=st.data())
def test_stores(dry_run: Callable[..., int], tmp_path: Path, data: st.DataObject) -> None:
    """A storage with random bytes in the files that a dry run reads."""
    storage = tmp_path / "store"
    shutil.rmtree(storage, ignore_errors=True)
    (storage / "report").mkdir(parents=True)
    (storage / "run.json").write_text('{"name": "tiny"}')
    (storage / "report" / "summary.json").write_text('{"fingerprint": "x"}')
    path = storage / data.draw(st.sampled_from(["run.json", "report/summary.json"]))
    value = data.draw(_VALUES.filter(lambda value: value is not _ABSENT))
    path.write_bytes(data.draw(st.one_of(st.binary(max_size=40), st.just(json.dumps(value).encode()))))
    dry_run(f"runtime.storage={storage}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, make_shared_recipe: Callable[..., Recipe]) -> Recipe:
    """The recipe of a small study that is finished."""
    recipe = make_shared_recipe(
        tmp_path_factory.mktemp("finished"),
        runtime={"executor": "local"},
        evaluation={"slots": "all", "other_documents": []},
    )
    run_study(recipe)
    run_evaluate(recipe)
    return recipe


# Of the storage STORE of RECIPE. The first ones change nothing in it.
_READING = ["runs STORE", "compare STORE", "inspect STORE", "inspect STORE --samples", "inspect STORE --prompts"]
_WRITING = ["export STORE TASKS", "report RECIPE", "evaluate RECIPE"]


def _damage(content: bytes, data: st.DataObject) -> bytes | None:
    """The content cut, replaced, or None: without the file."""
    kind = data.draw(st.sampled_from(["cut", "list", "object", "random", "delete"]))
    if kind == "cut":
        return content[: data.draw(st.integers(0, len(content)))]
    if kind == "random":
        return data.draw(st.binary(max_size=40))
    return {"list": b"[]", "object": b"{}"}.get(kind)


@fuzz_storages
@given(data=st.data())
def test_finished_stores(
    finished: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    """The storage of a finished study with one or two files damaged: each command works, or names what is damaged."""
    storage, tasks = tmp_path / "damaged", tmp_path / "tasks"
    for folder in (storage, tasks):
        shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(finished.storage, storage)
    names = sorted(str(path.relative_to(storage)) for path in storage.rglob("*") if path.is_file())
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True)):
        content = _damage((storage / name).read_bytes(), data)
        if content is None:
            (storage / name).unlink()
        else:
            (storage / name).write_bytes(content)
    recipe = str(Path(finished.study.data.path).parent / "recipe.yaml")
    for command in (*_READING, data.draw(st.sampled_from(_WRITING))):
        words = command.replace("STORE", str(storage)).replace("TASKS", str(tasks)).replace("RECIPE", recipe).split()
        if recipe in words:
            words.append(f"runtime.storage={storage}")
        start = time.monotonic()
        code = command_line.main(words)
        assert time.monotonic() - start < _SECONDS
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert (code, len(errors)) in [(0, 0), (2, 1)], command
        assert all(len(line) < 2000 for line in errors)


@fuzz_storages
@given(data=st.data())
def test_interrupted_evaluations(
    finished: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], data: st.DataObject
) -> None:
    """The storage of an evaluation that was interrupted, with its parts damaged: it continues, with the same result."""
    storage = tmp_path / "interrupted"
    shutil.rmtree(storage, ignore_errors=True)
    shutil.copytree(finished.storage, storage)
    (folder,) = storage.glob("base-scores-*")
    expected = (folder / "predictions.parquet").read_bytes()
    for part in interrupt_evaluation(folder):
        content = _damage(part.read_bytes(), data)
        part.unlink()
        if content is not None:
            part.with_name(data.draw(st.sampled_from([part.name, "part-x.parquet"]))).write_bytes(content)
    recipe = str(Path(finished.study.data.path).parent / "recipe.yaml")
    code = command_line.main(["evaluate", recipe, f"runtime.storage={storage}"])
    assert code == 0, capsys.readouterr().err
    assert (folder / "predictions.parquet").read_bytes() == expected


def _mutate(content: bytes, data: st.DataObject) -> bytes:
    """The content cut, with a part of it twice, without a part, or with other bytes in it."""
    start = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(start, min(len(content), start + 200)))
    inserted = data.draw(
        st.sampled_from([b"", b"\0", b"\xff", b"\n", b'"', b"{", b"[" * 50, b"]", b":", b"- ", b"&a *a", b"9" * 30])
    )
    kind = data.draw(st.sampled_from(["cut", "repeat", "replace"]))
    if kind == "cut":
        return content[:start] + inserted
    if kind == "repeat":
        return content[:end] + inserted + content[start:]
    return content[:start] + inserted + content[end:]
