"""Paths and URLs that a user gave, opened through fsspec or refused in one line."""

import fsspec

from pos2distill.errors import UserError


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
