"""Records from any fsspec URL: JSON, plain or compressed (gzip, bzip2, xz, zip), and Parquet.

Messages name the file, and the record where one is at fault.

A JSON file is JSON Lines, or one JSON array (its first byte is `[`); a Parquet file begins with `PAR1`. All are
streamed: memory holds one record, or a batch of rows.
"""

from collections.abc import Iterator, Sequence
from typing import IO, Any

from fsspec.utils import infer_compression

from pos2distill.errors import UserError
from pos2distill.tasks.compressed import DECOMPRESSION_ERRORS, explain_error, open_decompressed
from pos2distill.tasks.data_files import data_files, one_line_errors
from pos2distill.tasks.json_records import BYTE_ORDER_MARK, array_records, line_records
from pos2distill.tasks.parquet_records import parquet_records

_BLANKS = BYTE_ORDER_MARK + b" \t\r\n"
_PARQUET_MAGIC = b"PAR1"
_JSON_STARTS = (b"{", b"[", b" ", b"\t", b"\r", b"\n")  # what a file of records can begin with

# What compressed files begin with, their kind, and the ending of their names.
_COMPRESSED = {b"\x1f\x8b": ("gzip", ".gz"), b"BZh": ("bzip2", ".bz2"), b"\xfd7zXZ\x00": ("xz", ".xz")}
# What files of other kinds begin with, and what to do about it.
_OTHER_KINDS = {
    b"\x28\xb5\x2f\xfd": "is Zstandard data; decompress it (`zstd -d`)",
    b"PK\x03\x04": "is a zip archive; extract the file with the records",
    b"ARROW1": "is an Arrow file; write its records as JSON Lines or Parquet",
    b"\xff\xfe\0\0": "is UTF-32; save it as UTF-8",
    b"\0\0\xfe\xff": "is UTF-32; save it as UTF-8",
    b"\xff\xfe": "is UTF-16; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
    b"version https://git-lfs": "is a git-lfs pointer, not the data; run `git lfs pull` in its folder",
    b"<!DOCTYPE": "is a web page; download the file itself",
    b"<!doctype": "is a web page; download the file itself",
    b"<html": "is a web page; download the file itself",
    b"%PDF": "is a PDF file; expected JSON Lines",
}


def read_records(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) for each record: `line 3` of JSON Lines, blank lines counted, `record 3` of an array,
    `row 3` of Parquet, where a null field counts as missing; for several files `a.parquet, row 3`, without the folders
    that they have in common.

    Args:
        url: URL of a file, or with `*` the pattern of several, which are read in the order of their names.
    Raises:
        UserError: a missing file, broken compression, bytes that are not UTF-8, a record that is not one JSON object.
    """
    files = data_files(url)
    common = _common_folders(files)
    for file in files:
        name = "" if file == url else f"{'/'.join(file.split('/')[common:])}, "
        for location, record in _file_records(file):
            yield f"{name}{location}", record


def _common_folders(files: Sequence[str]) -> int:
    """The number of leading folders that all paths have in common."""
    first, *others = [file.split("/")[:-1] for file in files]
    for index, folder in enumerate(first):
        for folders in others:
            if index == len(folders) or folders[index] != folder:
                return index
    return len(first)


def _file_records(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    location = ""
    with one_line_errors(url):
        try:
            with open_decompressed(url) as file:
                start = file.read(64)
                _check_kind(start, url)
                # Not by going back to the start, which streams over HTTP cannot.
                first = start.lstrip(_BLANKS)[:1] or _first_byte(file)
                is_array = first == b"["
            if start.startswith(_PARQUET_MAGIC):
                if infer_compression(url):
                    raise UserError(f"{url}: is a Parquet file in a compressed one; decompress it (data.path)")
                yield from parquet_records(url)
                return
            with open_decompressed(url) as file:
                records = array_records(file, url) if is_array else line_records(file, url)
                for location, record in records:
                    yield location, record
        except DECOMPRESSION_ERRORS as error:
            message = explain_error(error, url, location)
            if message is None:
                raise
            raise UserError(message) from None


def _check_kind(start: bytes, url: str) -> None:
    if url.lower().endswith((".xlsx", ".ods")):  # zip archives themselves
        raise UserError(f"{url}: is a spreadsheet; write its records as JSON Lines or Parquet (data.path)")
    for magic, (kind, ending) in _COMPRESSED.items():
        if start.startswith(magic):
            # `start` is decompressed where the name says that the file is compressed.
            if infer_compression(url):
                raise UserError(f"{url}: is compressed twice; decompress it once (data.path)")
            raise UserError(f"{url}: is {kind} data, but its name does not end in {ending}; rename it (data.path)")
    for magic, meaning in _OTHER_KINDS.items():
        if start.startswith(magic):
            raise UserError(f"{url}: {meaning} (data.path)")
    if url.lower().endswith(".parquet") and not start.startswith(_PARQUET_MAGIC):
        raise UserError(f"{url}: is not a Parquet file despite its name; copy it again, or rename it (data.path)")
    # Without a byte-order mark: JSON begins with a character of ASCII, and so does what follows it.
    encoding = {2: "UTF-16", 3: "UTF-32"}.get(start[:4].count(0))
    if encoding and start.lstrip(b"\0").startswith(_JSON_STARTS):
        raise UserError(f"{url}: is {encoding}; save it as UTF-8 (data.path)")


def _first_byte(file: IO[bytes]) -> bytes:
    """The first byte that is not blank, or nothing."""
    byte = file.read(1)
    while byte and byte in _BLANKS:
        byte = file.read(1)
    return byte
