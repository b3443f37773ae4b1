import time
from pathlib import Path
from typing import Any

import pytest

from pos2distill.config.overrides import apply_override
from pos2distill.config.yaml_reader import MAX_DEPTH, MAX_SHOWN, parse_value, read_document, read_documents
from pos2distill.errors import UserError

LONG = "k" * 100_000
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"b{index}: &b{index} [{', '.join([f'*b{index - 1}' if index else '*a'] * 10)}]\n" for index in range(9)
)
CHAIN = "b0: &b0 {x: 1}\n" + "".join(f"b{index}: &b{index} {{x: *b{index - 1}}}\n" for index in range(1, 5000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("on: 1", "line 1: the key 'on' is not a string; put it in quotes"),
        ("a: {1: b}", "line 1: the key '1' is not a string; put it in quotes"),
        ("a:\n  ? [b]\n  : c", "line 2: a key must be a string, not a list or mapping"),
        ("a: 1\nb: 2\na: 3", "line 3: the key 'a' appears twice; remove one"),
        (f"? {LONG}\n: 1\n? {LONG}\n: 2", f"line 3: the key '{LONG[:MAX_SHOWN]}…' appears twice"),
        ("[" * 50_000, f"line 1: more than {MAX_DEPTH} nested levels"),
        (CHAIN, f"more than {MAX_DEPTH} nested levels"),
        (BOMB, "aliases stand for more than 1,000,000 values; write them out"),
        ("a: &a [*a]", "line 1: an alias inside the value that it stands for"),
        ("a: *b", "not valid YAML: line 1: found undefined alias"),
        ("a: [1", "not valid YAML: line 2: did not find expected"),
        ("a: !!python/object:os.system x", "not valid YAML: line 1: could not determine a constructor"),
        ("a: \0", "not valid YAML: unacceptable character"),
        ("a:\n\tb: 1", "not valid YAML: line 2: indented with a tab; use spaces"),
        ("a:\n  b: 1\n \tc: 1", "not valid YAML: line 3: indented with a tab; use spaces"),
        ("a: 2024-13-45", "not valid YAML: a value cannot be converted"),
        *((f"a:\n- {value}", "line 2: a number of more than 1000 char") for value in ("9" * 5000, f"0x{'f' * 5000}")),
        *((f"a: !!{tag} x", "not valid YAML: a value cannot be") for tag in ("int", "float", "bool", "timestamp")),
        ("a: !!int ''", "not valid YAML: a value cannot be converted (IndexError)"),
    ],
    ids=lambda text: text[:30],
)
def test_read_documents_rejects_with_one_line_at_once(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        read_documents(path)
    assert time.monotonic() - start < 5
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_read_documents_rejects_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(UserError, match=r"a.yaml: not valid YAML: not UTF-8 text"):
        read_documents(tmp_path / "a.yaml")
    with pytest.raises(UserError, match=r"cannot be read \(Is a directory\)"):
        read_documents(tmp_path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: &x {b: 1}\nc: {<<: *x, b: 2}", {"a": {"b": 1}, "c": {"b": 2}}),
        ("a: &x [1]\nb: *x", {"a": [1], "b": [1]}),
        ("'on': yes\n'1': ~", {"on": True, "1": None}),
    ],
)
def test_read_document_accepts_aliases_merges_and_quoted_keys(tmp_path: Path, text: str, value: Any) -> None:
    (tmp_path / "a.yaml").write_text(text)
    assert read_document(tmp_path / "a.yaml") == value


def test_read_document_rejects_several(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: 1\n---\nb: 2\n")
    with pytest.raises(UserError, match="expected one document, got 2; remove the lines with ---"):
        read_document(tmp_path / "a.yaml")


def test_parse_value_rejects_several_documents() -> None:
    with pytest.raises(ValueError, match="expected one value, got several documents"):
        parse_value("1\n---\n2")


@pytest.mark.parametrize(
    ("raw", "override", "message"),
    [
        ({}, "pods.env={1: b}", "pods.env: cannot read the value: line 1: the key '1' is not a string"),
        ({"sweep": None}, "sweep.data.seed=[1]", "sweep.data.seed: 'sweep' is null and has no fields"),
    ],
)
def test_apply_override_rejects_odd_keys_and_sections(raw: dict[str, Any], override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        apply_override(raw, override)
    assert message in str(caught.value)
