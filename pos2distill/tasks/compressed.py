"""Data files, decompressed as the endings of their names say, and what is wrong with broken ones."""

import gzip
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import fsspec
from fsspec.utils import infer_compression

from pos2distill.errors import UserError

DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)
"""What reading a broken compressed file raises, and (OSError) other faults; see `explain_error`."""

_ENCRYPTED = 1  # the bit of a member's flags


@contextmanager
def open_decompressed(url: str) -> Iterator[IO[bytes]]:
    """The file for reading; of a zip archive, the one file in it.

    Raises:
        UserError: if an archive holds no file, or several, or an encrypted one.
    """
    if infer_compression(url) != "zip":
        with fsspec.open(url, "rb", compression="infer") as file:
            yield file
        return
    with fsspec.open(url, "rb") as file, zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if not member.is_dir() and not _is_macos_metadata(member)]
        if len(members) != 1:
            names = ": " + ", ".join(member.filename for member in members[:3]) if members else ""
            raise UserError(
                f"{url}: expected a zip archive of one file, found {len(members) or 'none'}{names}; extract the files, "
                f"and give the one with the records (several: a pattern with *) (data.path)"
            )
        if members[0].flag_bits & _ENCRYPTED:
            raise UserError(f"{url}: {members[0].filename} in it is encrypted; extract it (data.path)")
        try:
            opened = archive.open(members[0])
        except NotImplementedError as error:  # a method of compression that Python does not have
            raise UserError(f"{url}: cannot be opened ({error}); extract the file in it (data.path)") from None
        with opened:
            yield opened


def _is_macos_metadata(member: zipfile.ZipInfo) -> bool:
    """Whether it is one of the files that macOS adds to archives, which hold attributes of the others."""
    name = member.filename.rsplit("/", 1)[-1]
    return member.filename.startswith("__MACOSX/") or name.startswith("._") or name == ".DS_Store"


def explain_error(error: Exception, url: str, location: str) -> str | None:
    """The message for one of `DECOMPRESSION_ERRORS`; None if it is not about compression.

    Args:
        location: where the last record that was read is, or empty.
    """
    kind = infer_compression(url)
    if isinstance(error, gzip.BadGzipFile | zipfile.BadZipFile):
        with fsspec.open(url, "rb") as file:
            start = file.read(2)
        if start != (b"\x1f\x8b" if kind == "gzip" else b"PK"):
            return f"{url}: is not a {kind} file despite its name ({error}); rename or fetch it again"
        reason = "other bytes follow its end" if "Not a gzipped file" in str(error) else error
        return f"{url}: broken {kind} ({reason}); fetch the file again"
    if isinstance(error, lzma.LZMAError):
        return f"{url}: is not a complete xz file ({error}); rename or fetch it again"
    if isinstance(error, EOFError | zlib.error):
        where = f"after {location}" if location else "before its first record"
        return f"{url}: broken {kind} {where} ({error}); fetch the file again"
    if "Invalid data stream" in str(error):  # bz2 has no exception of its own
        return f"{url}: is not a complete bz2 file ({error}); rename or fetch it again"
    return None
