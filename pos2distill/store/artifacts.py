"""Artifacts: the folder that a stage leaves behind, at any fsspec URL, visible whole or not at all.

An artifact is named after its stage and its fingerprint, `STORAGE/NAME-FINGERPRINT/`, and is there once its
`manifest.json` is: the manifest is written last, in one atomic step. Results of other settings stay beside it.
"""

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from pos2distill.errors import UserError
from pos2distill.records import SCHEMA_VERSION
from pos2distill.urls import open_url

RUN_FILE, DRIVER_FILE = "run.json", "driver.json"  # whose storage it is; who works in it (see `lease`)

_ROW_GROUP = 256  # rows that a reader of a few rows has to read


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an artifact says of itself. Counts add up: rows in = the other counts' sum, as each stage documents."""

    fingerprint: str
    counts: dict[str, int]
    seconds: dict[str, float]
    details: dict[str, Any]


class Artifact:
    """One stage's result under `storage`."""

    def __init__(self, storage: str, name: str, fingerprint: str) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.url = f"{storage.rstrip('/')}/{name}-{fingerprint}"
        self.fs, self.path = open_url(self.url, "runtime.storage")

    @property
    def is_local(self) -> bool:
        """Whether the artifact lies in a folder of this machine (or of a file system mounted on it)."""
        return isinstance(self.fs, LocalFileSystem)

    def manifest(self) -> Manifest | None:
        """The manifest, or None while the artifact is not finished.

        Raises:
            UserError: if the artifact was written by another version or is damaged.
        """
        path = f"{self.path}/manifest.json"
        if not self.fs.exists(path):
            return None
        try:
            raw = json.loads(self.fs.cat_file(path))
            if raw.pop("schema_version") != SCHEMA_VERSION:
                raise UserError(f"{self.url}: written by another version of this program; use another runtime.storage")
            return Manifest(**raw)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: damaged manifest ({error}); delete {self.url} and run again") from None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """An empty folder to write to; if the body fails, nothing half-written stays.

        What a killed run left in the folder goes first. A published artifact is never removed.
        """
        self._remove_unpublished()
        self.fs.makedirs(self.path, exist_ok=True)
        try:
            yield
        except BaseException:
            self._remove_unpublished()
            raise

    def _remove_unpublished(self) -> None:
        if self.fs.exists(self.path) and not self.fs.exists(f"{self.path}/manifest.json"):
            self.fs.rm(self.path, recursive=True)

    def publish(
        self, *, counts: Mapping[str, int], seconds: Mapping[str, float], details: Mapping[str, Any] | None = None
    ) -> Manifest:
        """Write the manifest: from now on the artifact is there."""
        manifest = Manifest(self.fingerprint, dict(counts), dict(seconds), dict(details or {}))
        fields = {name: getattr(manifest, name) for name in Manifest.__slots__}
        write_json(self.fs, f"{self.path}/manifest.json", {"schema_version": SCHEMA_VERSION, **fields})
        return manifest

    def write_table(self, name: str, table: pa.Table) -> None:
        """Write one Parquet file of the artifact."""
        write_table(self.fs, f"{self.path}/{name}", table)

    def read_table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Read one Parquet file of the artifact."""
        return pq.read_table(f"{self.path}/{name}", filesystem=self.fs, columns=columns)

    def remove(self, name: str) -> None:
        """Remove a folder of the artifact, if it is there."""
        if self.fs.exists(f"{self.path}/{name}"):
            self.fs.rm(f"{self.path}/{name}", recursive=True)

    def upload(self, folder: Path, name: str) -> None:
        """Put a local folder into the artifact."""
        self.fs.put(f"{folder}/", f"{self.path}/{name}/", recursive=True)


def check_storage(storage: str, name: str) -> bool:
    """Whether a folder is taken for the run of this recipe; if not, it is free. Nothing is written.

    Raises:
        UserError: if the folder holds another recipe's run, or files that are no run's.
    """
    fs, path = open_url(storage, "runtime.storage")
    marker = f"{path}/{RUN_FILE}"
    if fs.exists(marker):
        try:
            owner = json.loads(fs.cat_file(marker))["name"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{storage}: damaged {RUN_FILE} ({error}); choose another runtime.storage") from None
        if owner != name:
            raise UserError(
                f"{storage}: holds the run of recipe '{owner}', not '{name}'; choose another runtime.storage"
            )
        return True
    if fs.exists(path) and (not fs.isdir(path) or _content(fs, path)):
        raise UserError(f"{storage}: is not empty and holds no run (no {RUN_FILE}); choose another runtime.storage")
    return False


def claim_storage(storage: str, name: str) -> None:
    """Take a folder for the run of one recipe.

    Raises:
        UserError: as `check_storage`, or if the folder cannot be made.
    """
    if check_storage(storage, name):
        return
    fs, path = open_url(storage, "runtime.storage")
    try:
        fs.makedirs(path, exist_ok=True)
        write_json(fs, f"{path}/{RUN_FILE}", {"name": name})
    except OSError as error:
        raise UserError(
            f"{storage}: cannot be made ({error.strerror or error}); choose another runtime.storage"
        ) from None


def release_storage(storage: str) -> None:
    """Give back a folder in which nothing was made. Who calls this holds its lease."""
    fs, path = open_url(storage, "runtime.storage")
    if not _content(fs, path):
        fs.rm_file(f"{path}/{RUN_FILE}")


def _content(fs: fsspec.AbstractFileSystem, path: str) -> set[str]:
    """What a folder holds besides the files that say whose it is."""
    return {str(entry).rsplit("/", 1)[-1] for entry in fs.ls(path, detail=False)} - {RUN_FILE, DRIVER_FILE}


def other_fingerprints(storage: str, name: str, fingerprint: str) -> list[str]:
    """Fingerprints of the finished artifacts of this stage that other settings left in the same storage."""
    fs, path = open_url(storage, "runtime.storage")
    found = fs.glob(f"{path}/{name}-*/manifest.json")
    stamps = [str(entry).rsplit("/", 2)[-2].removeprefix(f"{name}-") for entry in found]
    return sorted(stamp for stamp in stamps if stamp != fingerprint)


def write_table(fs: fsspec.AbstractFileSystem, path: str, table: pa.Table) -> None:
    """Write a Parquet file atomically, with checksums."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True, row_group_size=_ROW_GROUP)
    write_bytes(fs, path, sink.getvalue().to_pybytes())


def write_json(fs: fsspec.AbstractFileSystem, path: str, value: Any) -> None:
    """Write JSON, indented for people, atomically."""
    write_bytes(fs, path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def write_bytes(fs: fsspec.AbstractFileSystem, path: str, data: bytes) -> None:
    """Write a file so that readers see all of it or none: a rename on disk, one PUT on an object store."""
    if not isinstance(fs, LocalFileSystem):
        fs.pipe_file(path, data)
        return
    partial = f"{path}.{uuid.uuid4().hex}.partial"
    try:
        with open(partial, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
