"""Secrets are named, never held: what looks like one in clear text is refused, and no message repeats it."""

import re

_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PWD|APIKEY|KEY|CREDENTIALS?|CONNECTION_STRING|DSN)(_|$)", re.IGNORECASE
)
_KEYS = (
    re.compile(r"hf_[A-Za-z0-9]{16,}"),  # Hugging Face
    re.compile(r"(AKIA|ASIA)[0-9A-Z]{16}"),  # AWS
    re.compile(r"AIza[0-9A-Za-z_-]{30,}"),  # Google
    re.compile(r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"),
    re.compile(r"\b(sk|rk|pk)-[A-Za-z0-9_-]{16,}"),
    re.compile(r"xox[abprs]-[A-Za-z0-9-]{10,}"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"),  # a JSON web token
    re.compile(r"://[^/\s:@]+:[^/\s@]+@"),  # a password in a URL
    re.compile(r"\b(sig|Signature|X-(Amz|Goog)-Signature|AccountKey|SharedAccessKey)=[^\s&;]{8,}", re.IGNORECASE),
    re.compile(r"\"(private_key|client_secret|refresh_token)\"\s*:\s*\"[^\"]"),  # files of Google's accounts
)
_HEX = re.compile(r"\b[0-9a-f]{32,}\b", re.IGNORECASE)  # Weights & Biases, and keys in hexadecimal
# Hexadecimal that is none: the digest of an image, a commit as a tag, as the revision of a model or in the hub's cache.
_COMMIT = re.compile(r"@sha256:[0-9a-f]{64}\b|(/[\w.-]+:|revision['\"]?\s*[=:]\s*['\"]?|/snapshots/)[0-9a-f]{40}\b")


def holds_secret(name: str, value: str) -> bool:
    """Whether a setting's name or its value is that of a secret. The path of a file is none."""
    named = bool(_NAME.search(name)) and bool(value) and not value.startswith("/")
    return named or looks_secret(value)


def looks_secret(text: str) -> bool:
    """Whether there is something in a text that has the form of a secret."""
    return holds_key(text) or bool(_HEX.search(_COMMIT.sub("", text)))


def holds_key(text: str) -> bool:
    """Whether there is a secret in a text that is sure to be one; digests and the like are not."""
    return any(form.search(text) for form in _KEYS)
