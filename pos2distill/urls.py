"""Paths and URLs that a user gave, opened through fsspec or refused in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import fsspec

from pos2distill.errors import UserError

# Packages whose exceptions say that a remote storage refused or could not be reached. Most of them are no OSError:
# s3fs 2026.9 passes on botocore's, gcsfs 2026.10 google.auth's, and both aiohttp's.
_STORAGE_PACKAGES = ("botocore", "aiobotocore", "gcsfs", "google", "aiohttp")


def open_url(url: str, setting: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The file system and the path in it.

    Args:
        setting: the setting that holds the URL, for the message.
    Raises:
        UserError: for an unknown protocol, or one whose package is not installed.
    """
    try:
        # No cached listings: other processes write to the same folders.
        fs, path = fsspec.url_to_fs(url, use_listings_cache=False)
    except (ValueError, ImportError) as error:
        raise UserError(f"{url}: cannot be opened ({error}) ({setting})") from None
    return fs, path


@contextmanager
def storage_errors(url: str, setting: str) -> Iterator[None]:
    """Turns what a storage raises into one line with the likely remedy. Other exceptions pass.

    Args:
        setting: as of `open_url`.
    Raises:
        UserError: instead of the storage's own exception.
    """
    try:
        yield
    except Exception as error:
        package = type(error).__module__.partition(".")[0]
        if package not in _STORAGE_PACKAGES and not isinstance(error, OSError):
            raise
        raise UserError(f"{url}: cannot be used ({_reason(error)}) ({setting}){_remedy(error)}") from None


def _reason(error: Exception) -> str:
    """The first line of the error's own text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _remedy(error: Exception) -> str:
    name = type(error).__name__
    if isinstance(error, PermissionError) or "Credential" in name or "Token" in name:
        return "; check the credentials of the storage and their rights"
    if "Connect" in name or "Endpoint" in name or "Timeout" in name:
        return "; check the network and AWS_ENDPOINT_URL or the storage's other address settings"
    return ""
