import errno
import json
import os
import re
import socket
import ssl
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import constants

from pos2distill.config import ModelSection
from pos2distill.errors import TransientError, UserError
from pos2distill.models import files
from pos2distill.models.architecture import context_length, load_config
from pos2distill.models.files import copy_other_configs, files_version, local_folder, model_digest, read_license
from pos2distill.models.load import load_model, load_tokenizer
from pos2distill.scratch import user_folder
from tests.support.hub_server import COMMIT, hub_server, use_hub


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "gpt2", "a/b/c"])
def test_local_folder_names_a_missing_folder(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".git").mkdir()  # which is not what anyone means
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        local_folder(ModelSection(path=path))
    hint = "; a model of the hub is OWNER/NAME" if path == "gpt2" else ""
    assert str(caught.value) == f"{os.path.abspath(path)}: no such model folder (model.path){hint}"


def test_local_folder_names_a_hub_model_that_cannot_be_loaded() -> None:
    with pytest.raises(
        UserError, match=r"^nobody/nothing: neither a folder nor a model that the hub provides"
    ) as caught:
        local_folder(ModelSection(path="nobody/nothing"))
    assert "\n" not in str(caught.value)


def test_model_digest_names_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my-model").mkdir()
    for path, nearest in (
        (f"{tmp_path}/my_modl/", f"{tmp_path}/my-model"),
        ("./my_modl", "./my-model"),
        ("my_modl", "my-model"),
    ):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UserError) as caught:
            model_digest(ModelSection(path=path))
        assert str(caught.value) == f"{tmp_path}/my_modl: no such model folder (model.path); did you mean '{nearest}'?"


def test_model_digest_names_the_folder_of_a_file(tiny_model_path: str) -> None:
    expected = r"config\.json: is a file, expected a model folder \(model\.path\); did you mean '"
    with pytest.raises(UserError, match=f"{expected}{tiny_model_path}'\\?$"):
        model_digest(ModelSection(path=f"{tiny_model_path}/config.json"))


@pytest.fixture
def remote(tiny_model_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSection:
    """The tiny model in memory, as if on an object store; local copies go to `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url = f"memory://{uuid.uuid4().hex}/model"
    for file in Path(tiny_model_path).iterdir():
        with fsspec.open(f"{url}/{file.name}", "wb") as target:
            target.write(file.read_bytes())
    return ModelSection(path=url)


def test_local_folder_copies_a_url_once(remote: ModelSection, tiny_model_path: str) -> None:
    folder = Path(local_folder(remote))
    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in Path(tiny_model_path).iterdir())
    assert all((folder / name).read_bytes() == Path(tiny_model_path, name).read_bytes() for name in names)
    assert local_folder(remote) == str(folder)
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f"{folder.name}.lock"}  # no partial copy


def test_local_folder_copies_only_what_a_model_needs(remote: ModelSection, tiny_model_path: str) -> None:
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md", "original/consolidated.00.pth"):
        with fsspec.open(f"{remote.path}/{name}", "wb") as target:
            target.write(b"x")
    copied = {file.name for file in Path(local_folder(remote)).iterdir()}
    assert copied == {file.name for file in Path(tiny_model_path).iterdir()}


def test_local_folder_without_weights_copies_none_unless_they_are_there(remote: ModelSection) -> None:
    folder = Path(local_folder(remote, weights=False))
    assert (folder / "config.json").exists()
    assert (folder / "tokenizer.json").exists()
    assert not list(folder.glob("*.safetensors"))
    whole = local_folder(remote)
    assert list(Path(whole).glob("*.safetensors"))
    assert local_folder(remote, weights=False) == whole


def test_local_folder_starts_again_after_a_process_that_died_while_it_copied(
    remote: ModelSection, tmp_path: Path
) -> None:
    partial = user_folder("models") / f"{model_digest(remote)}.partial"
    partial.mkdir()
    (partial / "model-00001-of-00002.safetensors").write_bytes(b"of a dead process")
    folder = Path(local_folder(remote))
    assert not partial.exists()
    assert not (folder / "model-00001-of-00002.safetensors").exists()


def test_local_folder_copies_once_for_all_processes(
    remote: ModelSection, tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ranks of one node ask at the same time. flock excludes threads as it does processes."""
    copied: list[str] = []
    get_file = MemoryFileSystem.get_file

    def count(fs: MemoryFileSystem, path: str, *arguments: str) -> None:
        copied.append(path)
        get_file(fs, path, *arguments)

    monkeypatch.setattr(MemoryFileSystem, "get_file", count)
    with ThreadPoolExecutor(8) as ranks:
        folders = list(ranks.map(lambda _: local_folder(remote), range(8)))
    assert len(set(folders)) == 1
    assert len(copied) == len(list(Path(tiny_model_path).iterdir()))


def test_local_folder_names_an_empty_url(remote: ModelSection, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such model folder \(model.path\)"):
        local_folder(remote.model_copy(update={"path": f"{remote.path}-gone"}))
    assert not list(tmp_path.glob("pos2distill-*/models/*"))  # and no partial copy is left


def test_local_folder_copies_a_url_again_if_the_model_changed(remote: ModelSection) -> None:
    local_folder(remote)
    with fsspec.open(f"{remote.path}/config.json", "w") as file:
        file.write('{"model_type": "changed"}')
    assert json.loads(Path(local_folder(remote), "config.json").read_text()) == {"model_type": "changed"}


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are read from memory, one for each request."""
    paths: list[str] = []
    cat_file, get_file = MemoryFileSystem.cat_file, MemoryFileSystem.get_file

    def count_cat(fs: MemoryFileSystem, path: str, **options: Any) -> bytes:
        paths.append(path)
        return bytes(cat_file(fs, path, **options))

    def count_get(fs: MemoryFileSystem, path: str, *arguments: str) -> None:
        paths.append(path)
        get_file(fs, path, *arguments)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", count_cat)
    monkeypatch.setattr(MemoryFileSystem, "get_file", count_get)
    return paths


def test_model_digest_reads_an_unchanged_url_once(remote: ModelSection, reads: list[str]) -> None:
    digest = model_digest(remote)
    assert len(reads) > 50  # samples of the weights
    reads.clear()
    assert model_digest(remote) == digest
    assert reads == []
    fs, root = fsspec.url_to_fs(remote.path)
    template = fs.cat_file(f"{root}/chat_template.jinja")
    fs.pipe_file(f"{root}/chat_template.jinja", template[:-1] + b"?")
    assert model_digest(remote) != digest
    fs.pipe_file(f"{root}/chat_template.jinja", template)
    assert model_digest(remote) == digest


def test_model_digest_reads_a_url_each_time_whose_listing_does_not_tell_of_changes(
    remote: ModelSection, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = MemoryFileSystem.find

    def find_without_times(fs: MemoryFileSystem, path: str, **options: Any) -> Any:
        found = find(fs, path, **options)
        if not options.get("detail"):
            return found
        return {name: {"name": name, "size": state["size"], "type": "file"} for name, state in found.items()}

    monkeypatch.setattr(MemoryFileSystem, "find", find_without_times)
    digest = model_digest(remote)
    fs, root = fsspec.url_to_fs(remote.path)
    fs.pipe_file(f"{root}/chat_template.jinja", b"?" * fs.size(f"{root}/chat_template.jinja"))
    assert model_digest(remote) != digest


def test_a_model_at_a_url_is_hashed_and_copied_once(
    remote: ModelSection, tiny_model_path: str, reads: list[str]
) -> None:
    model = remote.model_copy(update={"dtype": "float32"})
    load_config(model)
    assert len(reads) > 50  # samples of the weights
    reads.clear()
    load_config(model)
    load_tokenizer(model)
    assert context_length(model) == 512
    assert reads == []
    load_model(model)
    assert sorted(Path(path).name for path in reads) == sorted(path.name for path in Path(tiny_model_path).iterdir())
    reads.clear()
    load_model(model, packed=True)
    assert reads == []


def test_model_digest_depends_on_content_and_not_on_the_path(
    copy_model: Callable[..., ModelSection], remote: ModelSection, tiny_model_path: str
) -> None:
    model = copy_model()
    digest = model_digest(model)
    assert digest == model_digest(ModelSection(path=tiny_model_path)) == model_digest(remote)
    Path(model.path, "README.md").write_text("a note")
    assert model_digest(model) == digest
    weights = bytearray(Path(model.path, "model.safetensors").read_bytes())
    weights[-1] ^= 1
    Path(model.path, "model.safetensors").write_bytes(weights)
    assert model_digest(model) != digest


def test_model_digest_changes_with_the_chat_template(copy_model: Callable[..., ModelSection]) -> None:
    model = copy_model()
    digest = model_digest(model)
    Path(model.path, "chat_template.jinja").write_text("{{ messages }}")
    assert model_digest(model) != digest


def test_model_digest_of_a_hub_model_is_its_name_and_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cache, laid out by hand: `main` is a name that moves, a commit is not."""
    commits = {"main": "a" * 40, "v2": "b" * 40}
    cached = tmp_path / "models--org--name"
    for name, commit in commits.items():
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "config.json").write_text("{}")
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert model_digest(ModelSection(path="org/name")) == f"org/name@{commits['main']}"
    assert model_digest(ModelSection(path="org/name", revision="v2")) == f"org/name@{commits['v2']}"


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_model_digest_differs_wherever_trained_weights_differ(tmp_path: Path, fraction: float) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    weights = bytearray(40 << 20)
    (folder / "model.safetensors").write_bytes(weights)
    before = model_digest(ModelSection(path=str(folder)))
    start = int(fraction * (38 << 20))
    weights[start : start + (2 << 20)] = b"\1" * (2 << 20)  # one small matrix of many
    (folder / "model.safetensors").write_bytes(weights)
    assert model_digest(ModelSection(path=str(folder))) != before


def test_model_digest_depends_on_every_byte_of_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b"a" * (3 << 20))
    before = model_digest(ModelSection(path=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_bytes(b"a" * (1 << 20) + b"b" + b"a" * ((2 << 20) - 1))
    assert model_digest(ModelSection(path=str(tmp_path))) != before


@pytest.mark.parametrize("remote_files", [True, False])
def test_files_version_changes_with_every_file_that_counts(
    remote: ModelSection, copy_model: Callable[..., ModelSection], remote_files: bool
) -> None:
    model = remote if remote_files else copy_model()
    fs, root = fsspec.url_to_fs(model.path)
    versions = [files_version(model)]
    fs.pipe_file(f"{root}/README.md", b"a note")
    assert files_version(model) == versions[0]
    for name in ("chat_template.jinja", "tokenizer.json", "model.safetensors"):
        content = fs.cat_file(f"{root}/{name}")
        fs.pipe_file(f"{root}/{name}", content[:-1] + b"?")  # as long as before
        versions.append(files_version(model))
    fs.pipe_file(f"{root}/generation_config.json", b"{}")
    versions.append(files_version(model))
    assert len(set(versions)) == len(versions) == 5


def test_copy_other_configs_copies_those_that_are_there(
    copy_model: Callable[..., ModelSection], tmp_path: Path
) -> None:
    model, exported = copy_model(), tmp_path / "exported"
    exported.mkdir()
    others = {"processor_config.json": '{"image_seq_length": 4}', "video_preprocessor_config.json": '{"fps": 2}'}
    for name, text in others.items():
        (Path(model.path) / name).write_text(text)
    (Path(model.path) / "generation_config.json").unlink()
    (exported / "generation_config.json").write_text("{}")  # as it is written with the weights
    copy_other_configs(model, exported)
    assert {path.name: path.read_text() for path in exported.iterdir()} == others


def test_files_version_changes_with_the_file_that_a_link_names(
    copy_model: Callable[..., ModelSection], tmp_path: Path
) -> None:
    model = copy_model()
    link, template = Path(model.path, "chat_template.jinja"), tmp_path / "template"
    link.rename(template)
    link.symlink_to(template)
    before = files_version(model)
    template.write_text("?" * len(template.read_text()))
    assert files_version(model) != before


def test_files_version_reads_no_file(remote: ModelSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(MemoryFileSystem, "cat_file")
    monkeypatch.delattr(MemoryFileSystem, "_open")
    files_version(remote)


def test_files_version_of_a_hub_model_is_its_snapshot_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = ModelSection(path="org/name")
    versions = [files_version(model)]  # nothing is there
    for commit in ("a" * 40, "b" * 40):
        cached = tmp_path / "models--org--name"
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "config.json").write_text("{}")
        (cached / "refs").mkdir(exist_ok=True)
        (cached / "refs" / "main").write_text(commit)
        versions.append(files_version(model))
    assert len(set(versions)) == 3


def test_local_folder_copies_no_weights(remote: ModelSection, tiny_model_path: str) -> None:
    folder = Path(local_folder(remote, weights=False))
    names = sorted(file.name for file in folder.iterdir())
    assert names == sorted(file.name for file in Path(tiny_model_path).iterdir() if file.suffix != ".safetensors")
    # No partial copy is left, only the lock.
    assert sorted(path.suffix for path in folder.parent.iterdir() if path != folder) == [".lock"]
    assert load_tokenizer(remote).chat_template
    assert not list(folder.parent.glob("*/*.safetensors"))


def test_local_folder_asks_the_hub_for_no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert local_folder(ModelSection(path="owner/name"), weights=False) == str(tmp_path)
    assert "*.json" in asked["allow_patterns"]
    assert not any("safetensors" in pattern for pattern in asked["allow_patterns"])


@contextmanager
def silent_hub(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[str]:
    """The address of a hub that accepts connections and says nothing, and refuses them once it is closed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        use_hub(monkeypatch, address, cache)
        yield address


def test_local_folder_names_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelled folder of two parts looks like a name on the hub, so the message is of both."""
    with silent_hub(monkeypatch, tmp_path) as address:
        pass  # it is closed
    expected = (
        rf"^models/mine: neither a folder nor a model that the hub provides \(model.path\): {address} cannot be "
        r"reached \([^\n]+\); check the path, or the network$"
    )
    with pytest.raises(TransientError, match=expected):
        local_folder(ModelSection(path="models/mine"), weights=False)


def test_local_folder_gives_up_on_a_hub_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It accepts connections and says nothing. What is in the cache can be used."""
    monkeypatch.setattr(files, "_HUB_SECONDS", 0.5)
    with silent_hub(monkeypatch, tmp_path) as address:
        message = (
            f"me/a-model: neither a folder nor a model that the hub provides (model.path): {address} does not answer, "
            f"and the model is not in the cache of this machine"
        )
        with pytest.raises(TransientError, match=f"^{re.escape(message)}$"):
            local_folder(ModelSection(path="me/a-model"), weights=False)
        cached = tmp_path / "models--me--a-model"
        (cached / "snapshots" / COMMIT).mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text(COMMIT)
        assert local_folder(ModelSection(path="me/a-model")) == str(cached / "snapshots" / COMMIT)


@pytest.mark.parametrize(("status", "is_transient"), [(503, True), (500, True), (403, False), (451, False)])
def test_local_folder_tells_a_hub_that_is_overloaded_from_one_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, is_transient: bool
) -> None:
    """A job on a cluster is tried again after the one, and not after the other."""
    with hub_server() as hub:
        use_hub(monkeypatch, hub.address, tmp_path)
        hub.files["me/a-model"] = {"config.json": b"{}"}
        hub.status = status
        with pytest.raises(UserError, match=r"^me/a-model: neither a folder nor a model that the hub prov") as caught:
            local_folder(ModelSection(path="me/a-model"), weights=False)
    assert isinstance(caught.value, TransientError) == is_transient


def download_fails(monkeypatch: pytest.MonkeyPatch, error: Exception) -> UserError:
    """What `local_folder` raises if the hub's library raises this."""

    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    monkeypatch.setattr(files, "_times_out", lambda address: False)
    with pytest.raises(UserError) as caught:
        local_folder(ModelSection(path="me/a-model"))
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        OSError("Consistency check failed: file should be of size 9 but has size 3"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        OSError(errno.EMFILE, "Too many open files"),
        ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
    ],
)
def test_a_download_that_breaks_off_may_succeed_the_next_time(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    assert isinstance(download_fails(monkeypatch, error), TransientError)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EROFS, "Read-only file system"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.ENOTDIR, "Not a directory"),
        OSError(errno.EEXIST, "File exists"),
        OSError(errno.EISDIR, "Is a directory"),
        OSError(errno.ENAMETOOLONG, "File name too long"),
        OSError(errno.ELOOP, "Too many levels of symbolic links"),
        OSError("Data processing error: No space left on device (os error 28)"),
        PermissionError(errno.EACCES, "Permission denied", "/cache/models--me--a-model"),
    ],
)
def test_a_cache_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    found = download_fails(monkeypatch, error)
    assert type(found) is UserError
    words = getattr(error, "strerror", None) or str(error)
    assert str(found).startswith(f"me/a-model: cannot be stored in {constants.HF_HUB_CACHE}: {words}")


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# A model\n", "apache-2.0"),
        ("---\ntags: [a]\n---\n", None),
        ("# A model\n---\nlicense: mit\n---\n", None),  # a rule in the text
        ("---\nlicense: [\n---\n", None),
        ("---\ndate: 2024-13-45\nlicense: mit\n---\n", None),
        ("---\nlicense: " + "[" * 5000 + "\n---\n", None),
        (None, None),
    ],
)
def test_read_license_is_what_the_card_says(tmp_path: Path, card: str | None, license: str | None) -> None:
    if card is not None:
        (tmp_path / "README.md").write_text(card)
    assert read_license(ModelSection(path=str(tmp_path))) == license


def test_read_license_of_a_hub_model_is_not_known() -> None:
    assert read_license(ModelSection(path="owner/name")) is None
