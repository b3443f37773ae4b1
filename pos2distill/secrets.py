"""Detection of secrets in clear text. Settings name a secret and never contain it, and no message repeats one.

Three things give a secret away: the format of a provider, which the rules of Kingfisher (MongoDB) know; credentials in
a URL; and the name that a value has. A random string without any of these, such as a hexadecimal key in a variable
called NOTE, is not recognized: a commit or a checksum looks the same.
"""

import functools
import gzip
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MASK = "***"
_CHUNK_BYTES = 64 * 2**20  # how much of a compressed file is searched at a time
_OVERLAP_BYTES = 2**16  # overlap of consecutive chunks, so that no secret is cut

# --- Formats

# Literal beginnings, since a search for them is many times as fast. Kingfisher 1.5 reports these formats together with
# other parts of a credential.
_FORMATS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    re.compile(r"A(?:KIA|SIA)[0-9A-Z]{16}(?![0-9A-Za-z])"),  # AWS access key
    re.compile(r"GOCSPX-[A-Za-z0-9_-]{20,}"),  # OAuth client of Google
    re.compile(r"uthorization['\"]?\s*[:=]\s*['\"]?(?:Basic|Bearer)\s+([A-Za-z0-9+/=._-]{16,})"),
    re.compile(r"\"auth\"\s*:\s*\"([A-Za-z0-9+/=]{16,})\""),  # registries in the configuration of Docker
)
# The rules are loaded only for a text that has a long word with a capital letter or a digit in it, as the formats of
# providers do.
_CANDIDATE = re.compile(r"(?=[a-z_+=-]{0,80}[A-Z0-9])[A-Za-z0-9_+=-]{20,}")

# --- URLs

_USER_INFO = re.compile(r"://([^/\s'\"<>]*)@")
_QUERY = re.compile(r"[?&;]([A-Za-z][A-Za-z0-9_-]{0,40})=([^&;\s'\"]+)")
_SIGNATURES = ("sig", "signature", "x-amz-signature", "x-goog-signature")  # query parameters of signed URLs

# --- Names

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORDS = (
    "password",
    "passwd",
    "passphrase",
    "secret",
    "token",
    "apikey",
    "credential",
    "credentials",
    "authorization",
)
_SHORT_WORDS = ("pwd", "pat", "pass", "dsn", "key")  # secrets at the end of a name only
_PLAIN_KEYS = ("public", "primary", "foreign", "partition", "sort", "cache")  # keys that are not secrets
# What follows the word in names of something else: TOKEN_FILE, SECRET_NAME, TOKEN_TIMEOUT.
_ABOUT_WORDS = (
    "file",
    "path",
    "dir",
    "name",
    "url",
    "uri",
    "endpoint",
    "timeout",
    "seconds",
    "type",
    "class",
    "id",
    "mode",
    "store",
    "size",
    "limit",
    "count",
    "length",
    "version",
)
_FLAGS = ("", "0", "1", "true", "false", "yes", "no", "on", "off", "none", "null", "auto")
# A path, a reference to a value that is filled in elsewhere, or a number.
_REFERENCE = re.compile(r"[/~.$<*{%].*|x{3,}|\d{1,5}|-?\d*\.\d+(e-?\d+)?|file:.*", re.IGNORECASE | re.DOTALL)
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
# A name and its value in a text: in YAML, JSON, TOML, an environment file or a connection string.
_ASSIGNMENT = re.compile(
    r"(?<![\w.-])([A-Za-z][A-Za-z0-9_.-]{1,60})([\"']?)[ \t]{0,4}[:=][ \t]{0,4}([\"']?)(?=([^\s\"',;&{}\[\]()]{6,}))"
)
_PASSWORD = re.compile("passw|passphrase")
_COMPOUND_PASS = re.compile("[_.]pass$|[a-z]Pass$|[A-Z_]PASS$")
_PASS = re.compile("pass$", re.IGNORECASE)
_PASSES = ("first", "second", "third", "one", "two", "three", "multi", "single", "forward", "backward", "last", "next")
# What follows a word of a sentence: another one, and not the next name of a mapping.
_MORE_WORDS = re.compile(r"[,;]?[ \t]+(?![\"']?[\w.-]+[\"']?[ \t]*:)[^\s#]")
_RANDOM_LENGTH = 12  # characters of a value that is random


def holds_secret(name: str, value: str) -> bool:
    """Whether a setting's name or value indicates a secret. A path or a flag is never one because of its name."""
    is_named = _names_secret(name) and not _is_reference(value)
    return is_named or looks_secret(value)


def looks_secret(text: str) -> bool:
    """Whether some part of a text is a secret."""
    return next(_secrets_in(text), None) is not None


def first_secret_line(text: str) -> int | None:
    """The number, from 1, of the first line that holds what looks like a secret; None if there is none."""
    for number, line in enumerate(text.splitlines(), 1):
        if looks_secret(line):
            return number
    return None


def mask_secrets(text: str) -> str:
    """The text with its secrets replaced, for messages that repeat what a user wrote."""
    # The longest first: one secret may be a part of another one.
    for secret in sorted(set(_secrets_in(text)), key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def file_holds_secret(path: Path) -> bool:
    """Whether a whole file contains a secret. Compressed files are read, of weights only the header is.

    In data, names say nothing: a question about passwords is not a password.
    """
    is_code, is_data = path.suffix == ".py", path.suffix in (".jsonl", ".gz")
    for data in _chunks(path):
        if any(finding.visible for finding in _scanner().scan(data)):
            return True
        text = data.decode(errors="replace")
        if next(_own_formats(text), None) is not None:
            return True
        if not is_data and next(_named_values(text, quoted=is_code), None) is not None:
            return True
    return False


def _chunks(path: Path) -> Iterator[bytes]:
    if path.suffix == ".safetensors":
        with open(path, "rb") as weights:
            # Its first 8 bytes are the length of the header: https://huggingface.co/docs/safetensors
            length = int.from_bytes(weights.read(8), "little")
            yield weights.read(min(length, _CHUNK_BYTES))
        return
    tail = b""
    with open(path, "rb") as raw:
        file: Any = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""):
            yield tail + chunk
            tail = chunk[-_OVERLAP_BYTES:]


def _secrets_in(text: str) -> Iterator[str]:
    yield from _own_formats(text)
    yield from _named_values(text, quoted=False)
    words = _CANDIDATE.findall(text)
    if not words:
        return
    # The words by themselves, too: some rules do not accept every character after a secret, such as a colon.
    for part in (text, "\n".join(words)):
        for finding in _scanner().scan(part):
            if finding.visible:
                yield finding.secret


def _own_formats(text: str) -> Iterator[str]:
    for pattern in _FORMATS:
        for match in pattern.finditer(text):
            yield match[match.lastindex or 0]
    for match in _USER_INFO.finditer(text):
        # A user's name alone is not a secret.
        _, separator, password = match[1].partition(":")
        if separator and password and not _is_reference(password):
            yield password
    for match in _QUERY.finditer(text):
        is_secret = match[1].lower() in _SIGNATURES or _names_secret(match[1])
        if is_secret and not _is_reference(match[2]):
            yield match[2]


def _named_values(text: str, *, quoted: bool) -> Iterator[str]:
    """Values with the names of secrets.

    Args:
        quoted: yield only values in quotes; in code, others are expressions, such as `token=config.token`.
    """
    for match in _ASSIGNMENT.finditer(text):
        name, value = match[1], match[4]
        if (quoted and not match[3]) or not _names_secret(name) or _is_reference(value):
            continue
        # The vocabulary of a tokenizer maps words such as `password` to numbers.
        is_password = _is_password(match, text) and not value.isdecimal()
        if is_password or _is_random(value):
            yield value


def _is_password(assignment: "re.Match[str]", text: str) -> bool:
    """Whether the name is a password's, and the text is no sentence about a path or a pass."""
    name, quote, opening_quote, value = assignment.groups()
    is_unquoted = not quote and not opening_quote and assignment[0].endswith(": ")
    is_sentence = is_unquoted and _MORE_WORDS.match(text, assignment.end() + len(value)) is not None
    if _PASSWORD.search(name.lower()):
        # `runs/my-password: expected a folder` is a message on a path.
        follows_path = text[: assignment.start()].endswith("/")
        return not (is_sentence and follows_path)
    if _COMPOUND_PASS.search(name):
        return True
    if _PASS.search(name) is None or name.lower().split("-")[0] in _PASSES:
        return False
    # By itself, or after a hyphen, a word of sentences too: `forward pass: bfloat16`.
    line_start = text.rfind("\n", 0, assignment.start()) + 1
    before = text[line_start : assignment.start()].rstrip(" \t-")
    begins_setting = not before or before[-1] in "{,"
    return not is_unquoted or (begins_setting and not is_sentence)


def _is_random(value: str) -> bool:
    """Whether a value is not a word, number or identifier: `token` and `key` are also names of harmless values."""
    letters = "".join(filter(str.isalpha, value))
    numbers = len(re.findall("[0-9]+", value))
    is_mixed = not letters.islower() and not letters.isupper()
    return len(value) >= _RANDOM_LENGTH and len(letters) > 2 and numbers >= (2 if is_mixed else 4)


def _names_secret(name: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words or words[-1] in _ABOUT_WORDS:
        return False
    last = words[-1]
    if last in _SHORT_WORDS:
        is_plain = last == "key" and (len(words) == 1 or words[-2] in _PLAIN_KEYS)
        return not is_plain
    # PGPASSWORD and HFTOKEN are one word.
    return any(word in _SECRET_WORDS for word in words) or last.endswith(("password", "passwd", "token", "secret"))


def _is_reference(value: str) -> bool:
    value = urllib.parse.unquote(value)
    is_flag = value.lower() in _FLAGS
    return is_flag or _REFERENCE.fullmatch(value) is not None or _UUID.fullmatch(value) is not None


@functools.cache
def _scanner() -> Any:
    """The rules of Kingfisher. Compiling them takes 4 s, once on a machine; afterwards they are read in 0.4 s."""
    from kingfisher_sdk import Scanner

    return Scanner()
