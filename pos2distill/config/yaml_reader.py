"""Reading YAML that a user wrote: mappings with distinct string keys, of bounded size and depth.

Parsing alone accepts files that break the code after it: a key that appears twice (the last one wins), keys such as
`on` or `1`, which are not strings, and a few lines of nested aliases that stand for billions of values.
"""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from pos2distill.errors import UserError, collapse_whitespace

MAX_DEPTH = 100  # levels of nested lists and mappings; the schema of a RayJob has 32, a rendered manifest 14
MAX_VALUES = 1_000_000  # values in a document with aliases expanded; the CRDs of KubeRay 1.7 have about 100,000
MAX_SHOWN = 60  # characters of a key that a message shows
MAX_NUMBER = 1000  # characters of a number; Python prints no integer of more than 4300 digits

# libyaml is ten times as fast. PyYAML can be built without it.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# PyYAML 6.0 passes on what Python's own conversions raise, for example for `!!int x`, `!!bool x`, `!!timestamp x`.
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_CONVERSION_ERRORS = (ValueError, KeyError, IndexError, AttributeError, TypeError, OverflowError)


def read_documents(path: Path) -> list[Any]:
    """All documents in a file.

    Raises:
        UserError: naming the file, and where possible the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        raise UserError(f"{path}: not valid YAML: not UTF-8 text") from None
    try:
        return list(_documents(text))
    except _InvalidYaml as error:
        raise UserError(f"{path}: {error}") from None


def read_document(path: Path) -> Any:
    """The only document in a file; None if the file is empty.

    Raises:
        UserError: as in `read_documents`, or if there are several documents.
    """
    documents = read_documents(path)
    if len(documents) > 1:
        raise UserError(f"{path}: expected one document, got {len(documents)}; remove the lines with ---")
    return documents[0] if documents else None


def parse_value(text: str) -> Any:
    """One value, as an override has it; None for an empty text.

    Raises:
        ValueError: one line that says why the text is not a YAML value.
    """
    documents = list(_documents(text))
    if len(documents) > 1:
        raise ValueError("expected one value, got several documents")
    return documents[0] if documents else None


def last_comment(text: str, value: Any) -> str | None:
    """The comment at the end of a text whose value is this, or instead of a value; None if there is none."""
    for found in re.finditer(r"(?<!\S)#", text):
        # What is left out without a change of the value is a comment. Within quotes, the rest is another value or none.
        with contextlib.suppress(ValueError):
            if parse_value(text[: found.start()]) == value:
                return text[found.start() :]
    return None


class _InvalidYaml(ValueError):
    """The text is not valid YAML, or its keys or aliases are rejected. Its message is one line."""


def _documents(text: str) -> Iterator[Any]:
    try:
        _check_depth(text)
        loader = _Loader(text)
        try:
            while loader.check_node():
                node = loader.get_node()
                _measure(node, {})
                yield loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = error.problem or error.context
        if error.problem_mark and _is_indented_by_tab(text, error.problem_mark.line):
            problem = "indented with a tab; use spaces"
        raise _InvalidYaml(f"not valid YAML: {where}{problem}") from None
    except yaml.YAMLError as error:
        raise _InvalidYaml(f"not valid YAML: {collapse_whitespace(error)}") from None
    except _InvalidYaml:
        raise
    except _CONVERSION_ERRORS as error:
        raise _InvalidYaml(f"not valid YAML: a value cannot be converted ({type(error).__name__})") from None


def _is_indented_by_tab(text: str, line: int) -> bool:
    lines = text.splitlines()
    return line < len(lines) and lines[line].lstrip(" ").startswith("\t")


def _check_depth(text: str) -> None:
    """Reject deep nesting before nodes are made: libyaml makes them recursively and would overflow the stack."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise _InvalidYaml(f"line {_line(event)}: more than {MAX_DEPTH} nested levels")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _measure(node: yaml.Node, measured: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """The number of values in a node and its depth, with aliases as what they stand for.

    Args:
        measured: the results for other nodes by their id; None while a node is being measured.
    Raises:
        _InvalidYaml: if a limit is exceeded, or a key is not a string or appears twice.
    """
    line = _line(node)
    if isinstance(node, yaml.ScalarNode):
        if node.tag in _NUMBERS and len(node.value) > MAX_NUMBER:
            raise _InvalidYaml(f"line {line}: a number of more than {MAX_NUMBER} characters")
        return 1, 0
    if id(node) in measured:
        known = measured[id(node)]
        if known is None:
            raise _InvalidYaml(f"line {line}: an alias inside the value that it stands for")
        return known
    measured[id(node)] = None
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        children = [value for _, value in node.value]
    else:
        children = node.value
    values, depth = 1, 0
    for child in children:
        child_values, child_depth = _measure(child, measured)
        values += child_values
        depth = max(depth, child_depth)
    depth += 1
    if values > MAX_VALUES:
        raise _InvalidYaml(f"line {line}: aliases stand for more than {MAX_VALUES:,} values; write them out")
    if depth > MAX_DEPTH:
        raise _InvalidYaml(f"line {line}: more than {MAX_DEPTH} nested levels")
    measured[id(node)] = values, depth
    return values, depth


def _check_keys(node: yaml.MappingNode) -> None:
    names = set()
    for key, _ in node.value:
        line = _line(key)
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        if not isinstance(key, yaml.ScalarNode):
            raise _InvalidYaml(f"line {line}: a key must be a string, not a list or mapping")
        shown = key.value if len(key.value) <= MAX_SHOWN else f"{key.value[:MAX_SHOWN]}…"
        if key.tag != "tag:yaml.org,2002:str":
            raise _InvalidYaml(f"line {line}: the key '{shown}' is not a string; put it in quotes")
        if key.value in names:
            raise _InvalidYaml(f"line {line}: the key '{shown}' appears twice; remove one")
        names.add(key.value)


def _line(part: yaml.Node | yaml.Event) -> int:
    return int(part.start_mark.line) + 1 if part.start_mark else 0
