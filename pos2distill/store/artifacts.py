"""Artifacts: the folder that a stage writes, at any fsspec URL, visible whole or not at all.

An artifact is named after its stage and its fingerprint, `STORAGE/NAME-FINGERPRINT/`. It is finished once its
`manifest.json` exists: the manifest is written last, in one atomic step. Settings that change the fingerprint get a
folder of their own, so results of other settings are kept.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
from fsspec.implementations.local import LocalFileSystem

from pos2distill.errors import UserError
from pos2distill.literal_paths import last_part, list_matching, make_folder, remove, upload
from pos2distill.records import SCHEMA_VERSION
from pos2distill.store.files import ROW_GROUP_SIZE, is_corrupt, read_if_any, read_table, sync, write_json, write_table
from pos2distill.urls import open_url, storage_errors

MANIFEST = "manifest.json"
_SECONDS_FILE = "seconds.json"  # the seconds of runs that were stopped before they finished the artifact
_SECONDS = pydantic.TypeAdapter(dict[str, float])


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of `manifest.json`.

    Attributes:
        counts: rows in, and what became of them; they add up, as each stage documents.
        seconds: wall-clock time by stage; of sampling and training over all runs that were not killed.
        details: further values of the stage.
    """

    fingerprint: str
    counts: dict[str, int]
    seconds: dict[str, float]
    details: dict[str, Any]


class Artifact:
    """The result of one stage in `storage`."""

    def __init__(self, storage: str, name: str, fingerprint: str) -> None:
        self.name = name
        self.fingerprint = fingerprint
        self.url = f"{storage.rstrip('/')}/{name}-{fingerprint}"
        self.fs, self.path = open_url(self.url, "runtime.storage")

    @property
    def is_local(self) -> bool:
        """Whether the artifact is in a folder of this machine, or of a file system mounted on it."""
        return isinstance(self.fs, LocalFileSystem)

    @classmethod
    def in_folder(cls, storage: str, folder: str) -> "Artifact":
        """The artifact in the folder `NAME-FINGERPRINT` of a storage."""
        name, _, fingerprint = folder.rpartition("-")
        return cls(storage, name, fingerprint)

    @property
    def folder(self) -> str:
        """The folder in the storage, `NAME-FINGERPRINT`."""
        return f"{self.name}-{self.fingerprint}"

    @property
    def storage(self) -> str:
        """The URL of the storage."""
        return self.url.rpartition("/")[0]

    @property
    def is_finished(self) -> bool:
        """Whether it has a manifest.

        Raises:
            UserError: see `manifest`.
        """
        return self.manifest() is not None

    def manifest(self) -> Manifest | None:
        """The manifest, or None while the artifact is not finished.

        Raises:
            UserError: if another version wrote the artifact, or the manifest is corrupt.
        """
        content = self._manifest_bytes()
        if content is None:
            return None
        path = f"{self.path}/{MANIFEST}"
        try:
            raw = json.loads(content)
            if raw.pop("schema_version") != SCHEMA_VERSION:
                raise UserError(
                    f"{self.url}: written by another version of pos2distill; run its command again, which makes it anew"
                )
            manifest = Manifest(**raw)
            if not all(isinstance(each, dict) for each in (manifest.counts, manifest.seconds, manifest.details)):
                raise TypeError("expected objects as counts, seconds and details")
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: corrupt manifest ({error}); delete {self.url} and run again") from None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Provide an empty folder to write to, and remove it if the body fails before `publish`.

        Files of a killed run are removed first. A published artifact is never removed.
        """
        self._remove_unpublished()
        make_folder(self.fs, self.path)
        try:
            yield
        except BaseException:
            self._remove_unpublished()
            raise

    def _manifest_bytes(self) -> bytes | None:
        """The content of the manifest; None if there is none."""
        return read_if_any(self.fs, f"{self.path}/{MANIFEST}")

    def _remove_unpublished(self) -> None:
        if self._manifest_bytes() is None and self.fs.exists(self.path):
            remove(self.fs, self.path)

    def discard(self, *, last: str) -> None:
        """Remove the artifact, finished or not. Its manifest first: what is left of a killed removal is unfinished.

        Args:
            last: the file that says what else is in the folder.
        """
        self.remove(MANIFEST)
        for path in self.fs.ls(self.path, detail=False) if self.fs.exists(self.path) else ():
            name = last_part(path)
            if name != last:
                self.remove(name)
        if self.fs.exists(self.path):
            remove(self.fs, self.path)

    def publish(
        self, *, counts: Mapping[str, int], seconds: Mapping[str, float], details: Mapping[str, Any] | None = None
    ) -> Manifest:
        """Write the manifest, which makes the artifact visible.

        Args:
            seconds: the seconds that this run took; those of earlier runs (`add_seconds`, and of a manifest that is
                replaced) are added.
        """
        total = self._with_earlier(seconds)
        replaced = self.manifest()
        if replaced is not None:
            total = _added(total, replaced.seconds)
        manifest = Manifest(self.fingerprint, dict(counts), total, dict(details or {}))
        self.write_json(MANIFEST, {"schema_version": SCHEMA_VERSION, **asdict(manifest)})
        self.remove(_SECONDS_FILE)
        return manifest

    def add_seconds(self, seconds: Mapping[str, float]) -> None:
        """Record the seconds of a run that was stopped, so that the manifest of a later one counts them too.

        Nothing is recorded of a run that has written nothing.
        """
        if self.fs.exists(self.path):
            self.write_json(_SECONDS_FILE, self._with_earlier(seconds))

    def _with_earlier(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """The seconds of this run and of all earlier ones, added up by name."""
        path = f"{self.path}/{_SECONDS_FILE}"
        with storage_errors(path, "runtime.storage"):
            content = read_if_any(self.fs, path)
        if content is None:
            return dict(seconds)
        try:
            before = _SECONDS.validate_json(content)
        except ValueError:
            raise UserError(
                f"{path}: corrupt; expected the seconds of earlier runs by stage; delete this file and run again: all "
                f"else is kept"
            ) from None
        return _added(seconds, before)

    def write_table(self, name: str, table: pa.Table) -> None:
        """Write one Parquet file of the artifact."""
        write_table(self.fs, f"{self.path}/{name}", table)

    def write_tables(self, name: str, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
        """Write one Parquet file piece by piece, for what does not fit in memory.

        Not atomic, which it need not be: inside `writing`, nothing is read before the artifact is published.
        """
        with (
            self.fs.open(f"{self.path}/{name}", "wb") as file,
            pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer,
        ):
            for table in tables:
                writer.write_table(table, row_group_size=ROW_GROUP_SIZE)
        if self.is_local:
            sync([Path(self.path) / name])

    def read_table(
        self, name: str, columns: list[str] | None = None, *, schema: pa.Schema | None = None, count: str = ""
    ) -> pa.Table:
        """Read one Parquet file of the artifact.

        Args:
            schema: that of the whole file, if it is checked.
            count: the name of its number of rows in the manifest's counts, if that is checked.
        Raises:
            UserError: see `reading`; the file is also corrupt if it has other columns or another number of rows.
        """
        with self.reading(name):
            table = read_table(self.fs, f"{self.path}/{name}", columns)
            if schema is not None and table.schema != pa.schema(
                [schema.field(each) for each in columns or schema.names]
            ):
                raise ValueError("its columns are not those of the table")
        manifest = self.manifest() if count else None
        if manifest is not None and manifest.counts.get(count) != len(table):
            raise UserError(f"{self.url}/{name}: {_rerun_message('corrupt', self.url)}")
        return table

    def write_json(self, name: str, value: Any) -> None:
        """Write one JSON file of the artifact, atomically."""
        write_json(self.fs, f"{self.path}/{name}", value)

    def read_json(self, name: str, *keys: str) -> dict[str, Any]:
        """Read one JSON file of the artifact: an object with at least these keys.

        Raises:
            UserError: see `reading`.
        """
        with self.reading(name):
            content = json.loads(self.fs.cat_file(f"{self.path}/{name}"))
            if not isinstance(content, dict) or not content.keys() >= set(keys):
                raise ValueError(f"expected an object with the fields {keys}")
        return content

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """While the body reads a file of a finished artifact, turns what it raises into one line.

        Raises:
            UserError: if the file is missing or corrupt, with how to make it again.
        """
        with storage_errors(self.url, "runtime.storage"):
            try:
                yield
            except (FileNotFoundError, pa.ArrowException, ValueError, KeyError, RecursionError) as error:
                what = "missing" if isinstance(error, FileNotFoundError) else "corrupt"
                raise UserError(f"{self.url}/{name}: {_rerun_message(what, self.url)}") from None
            except OSError as error:
                if not is_corrupt(error):
                    raise
                raise UserError(f"{self.url}/{name}: {_rerun_message('corrupt', self.url)}") from None

    def require(self, *names: str) -> None:
        """Reject a finished artifact that lacks one of its files or folders.

        Raises:
            UserError: with how to make it again.
        """
        for name in names:
            if not self.fs.exists(f"{self.path}/{name}"):
                raise UserError(f"{self.url}/{name}: {_rerun_message('missing', self.url)}")

    def remove(self, name: str) -> None:
        """Remove a file or folder of the artifact, if it exists."""
        if self.fs.exists(f"{self.path}/{name}"):
            remove(self.fs, f"{self.path}/{name}")

    def upload(self, folder: Path, name: str) -> None:
        """Copy a local folder into the artifact."""
        upload(self.fs, folder, f"{self.path}/{name}")


def _added(seconds: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """The sums by name."""
    total = dict(seconds)
    for name, value in others.items():
        total[name] = total.get(name, 0.0) + value
    return total


def _rerun_message(what: str, url: str) -> str:
    return f"{what}; delete {url} and run again to make it again"


def other_fingerprints(storage: str, name: str, known: Collection[str]) -> list[str]:
    """Fingerprints of the finished artifacts of this name in the storage, except the known ones."""
    fs, path = open_url(storage, "runtime.storage")
    others = []
    for manifest_path in list_matching(fs, path, f"{name}-*/{MANIFEST}"):
        folder = manifest_path.rsplit("/", 2)[-2]
        found = folder.removeprefix(f"{name}-")
        if found not in known:
            others.append(found)
    return sorted(others)
