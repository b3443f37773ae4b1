"""Secrets are named, never held: what looks like one in clear text is refused, and no message repeats it."""

import re

_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PWD|APIKEY|KEY|CREDENTIALS?|CONNECTION_STRING|DSN)(_|$)", re.IGNORECASE
)
_VALUES = (
    re.compile(r"hf_[A-Za-z0-9]{16,}"),  # Hugging Face
    re.compile(r"(AKIA|ASIA)[0-9A-Z]{16}"),  # AWS
    re.compile(r"AIza[0-9A-Za-z_-]{30,}"),  # Google
    re.compile(r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"),
    re.compile(r"\b(sk|rk|pk)-[A-Za-z0-9_-]{16,}"),
    re.compile(r"xox[abprs]-[A-Za-z0-9-]{10,}"),
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"),  # a JSON web token
    re.compile(r"\b[0-9a-f]{32,}\b", re.IGNORECASE),  # Weights & Biases, and keys in hexadecimal
    re.compile(r"://[^/\s:@]+:[^/\s@]+@"),  # a password in a URL
)
_IMAGE_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


def holds_secret(name: str, value: str) -> bool:
    """Whether a setting's name or its value is that of a secret. The path of a file is none."""
    named = bool(_NAME.search(name)) and bool(value) and not value.startswith("/")
    return named or looks_secret(value)


def looks_secret(text: str) -> bool:
    """Whether there is something in a text that has the form of a secret."""
    return any(form.search(_IMAGE_DIGEST.sub("", text)) for form in _VALUES)
