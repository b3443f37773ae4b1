"""Detection of secrets in clear text. Settings name a secret and never contain it, and no message repeats one."""

import re

_NAME = re.compile(
    r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|PWD|APIKEY|KEY|CREDENTIALS?|CONNECTION_STRING|DSN)(_|$)", re.IGNORECASE
)
_KEYS = (
    re.compile(r"hf_[A-Za-z0-9]{16,}"),  # Hugging Face
    re.compile(r"(AKIA|ASIA)[0-9A-Z]{16}"),  # AWS
    re.compile(r"AIza[0-9A-Za-z_-]{30,}"),  # Google
    re.compile(r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"),
    re.compile(r"\b(sk|rk|pk)-[A-Za-z0-9_-]{16,}"),  # OpenAI, Stripe and others
    re.compile(r"xox[abprs]-[A-Za-z0-9-]{10,}"),  # Slack
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----"),
    re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"),  # a JSON web token
    re.compile(r"://[^/\s:@]+:[^/\s@]+@"),  # a password in a URL
    re.compile(r"\b(sig|Signature|X-(Amz|Goog)-Signature|AccountKey|SharedAccessKey)=[^\s&;]{8,}", re.IGNORECASE),
    re.compile(r"\"(private_key|client_secret|refresh_token)\"\s*:\s*\"[^\"]"),  # key files of Google accounts
)
_HEX = re.compile(r"\b[0-9a-f]{32,}\b", re.IGNORECASE)  # keys in hexadecimal, such as those of Weights & Biases
# Hexadecimal strings that are not secrets: an image digest, and a commit as an image tag, as a model's revision or in
# the path of a Hugging Face cache.
_COMMIT = re.compile(r"@sha256:[0-9a-f]{64}\b|(/[\w.-]+:|revision['\"]?\s*[=:]\s*['\"]?|/snapshots/)[0-9a-f]{40}\b")


def holds_secret(name: str, value: str) -> bool:
    """Whether a setting's name or value indicates a secret. An absolute path is never a secret because of its name."""
    is_path = value.startswith("/")
    named_as_secret = _NAME.search(name) is not None and value != "" and not is_path
    return named_as_secret or looks_secret(value)


def looks_secret(text: str) -> bool:
    """Whether some part of a text has the form of a secret. A hexadecimal string may be a false positive."""
    return holds_key(text) or _HEX.search(_COMMIT.sub("", text)) is not None


def holds_key(text: str) -> bool:
    """Whether a text contains a string that is certainly a secret. Hexadecimal strings do not count."""
    return any(pattern.search(text) for pattern in _KEYS)
