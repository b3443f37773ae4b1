import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from pos2distill.errors import UserError
from pos2distill.tasks.data_files import _most_similar, data_files, file_digest
from pos2distill.tasks.readers import read_records
from tests.support.privileges import respecting_modes


def read(url: str) -> list[Any]:
    return list(read_records(url))


def test_data_files_of_a_pattern_in_a_folder_that_may_not_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    (folder / "a.jsonl").write_text("{}")
    folder.chmod(0)
    with respecting_modes(), pytest.raises(UserError) as caught:
        data_files(f"{folder}/*.jsonl")
    reason = "cannot be used (Permission denied) (data.path); check the permissions of the file and of its folder"
    assert str(caught.value) == f"{folder}/*.jsonl: {reason}"
    folder.chmod(0o700)
    assert data_files(f"{folder}/*.jsonl") == [f"{folder}/a.jsonl"]


def test_data_files_of_a_pattern_name_the_folders_that_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_text("{}")
    (tmp_path / "closed").chmod(0)
    with respecting_modes():
        assert data_files(f"{tmp_path}/*/*.jsonl") == [f"{tmp_path}/open/a.jsonl"]
    warning = f"warning: {tmp_path}/closed: may not be read, so its files are left out (data.path)\n"
    assert capsys.readouterr().err == warning


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", ["a.jsonl", "link.jsonl"]),
        ("*/q.jsonl", ["linked/q.jsonl", "plain/q.jsonl"]),
        ("**/q.jsonl", ["plain/q.jsonl"]),
        ("**", ["a.jsonl", "link.jsonl", "plain/q.jsonl"]),
        ("**/**/a.jsonl", ["a.jsonl"]),
        (".*.jsonl", [".hidden.jsonl"]),
        (".h*/q.jsonl", [".h/q.jsonl"]),
        ("*/.r.jsonl", ["plain/.r.jsonl"]),
    ],
)
def test_data_files_of_a_pattern_are_those_of_a_shell(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    folder = tmp_path / "data"
    for name in ("plain/q.jsonl", "plain/.r.jsonl", ".h/q.jsonl", ".h/.r.jsonl", "a.jsonl", ".hidden.jsonl"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "q.jsonl").write_text("{}")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "link.jsonl").symlink_to(folder / "a.jsonl")
    assert data_files(f"{folder}/{pattern}") == [f"{folder}/{name}" for name in expected]
    assert data_files(f"file://{folder}/{pattern}") == [f"{folder}/{name}" for name in expected]


def test_data_files_of_a_pattern_end_where_links_form_a_circle(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "a").mkdir(parents=True)
    (folder / "a" / "q.jsonl").write_text("{}")
    (folder / "a" / "up").symlink_to("..")
    (folder / "a" / "self").symlink_to(".")
    assert data_files(f"{folder}/**/*.jsonl") == [f"{folder}/a/q.jsonl"]
    assert data_files(f"{folder}/a/*/q.jsonl") == [f"{folder}/a/self/q.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("*/q.jsonl", ["plain/q.jsonl"]), (".h*/q.jsonl", [".h/q.jsonl"]), ("*/.r.jsonl", ["plain/.r.jsonl"])],
)
def test_data_files_of_a_remote_pattern_are_hidden_only_where_it_is(pattern: str, expected: list[str]) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    for name in ("plain/q.jsonl", "plain/.r.jsonl", ".h/q.jsonl", ".h/.r.jsonl"):
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(b"{}")
    found = data_files(f"{root}/{pattern}")
    assert [path.removeprefix("memory://").lstrip("/").partition("/")[2] for path in found] == expected


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/data.jsonl?match=a*b", "https://h/d.jsonl?match=*"])
def test_an_asterisk_in_a_web_address_is_no_pattern(url: str) -> None:
    assert data_files(url) == [url]


def test_file_digest_is_of_the_bytes_as_stored(tmp_path: Path) -> None:
    path = tmp_path / "abc.jsonl.gz"
    path.write_bytes(b"abc")
    assert file_digest(str(path)) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    path.write_bytes(b"abd")
    assert file_digest(str(path)) == "a52d159f262b2c6ddb724a61840befc36eb30c88877a4030b65cbe86298449c9"


@pytest.mark.parametrize(
    ("typed", "nearest"),
    [
        ("data.trian.jsonl", "data.train.jsonl"),
        ("data.train.jsonl.gz", "data.train.jsonl"),
        ("data.evla.parquet", "data.eval.parquet"),
        ("DATA.eval.json", "data.eval.parquet"),
        ("v1.1-nq.jsonl", "v1.0-nq.jsonl"),
        ("dates.jsonl", None),
        ("questions.jsonl", None),
        (".jsonl", None),
        ("link.json1", "lnk.jsonl"),
        ("other.jsonl", None),
    ],
)
def test_a_missing_file_suggests_a_file_of_records(tmp_path: Path, typed: str, nearest: str | None) -> None:
    names = ("data.train.jsonl", "data.train.py", "data.eval.parquet", "dates.png", "v1.0-nq.jsonl", ".gitignore")
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "questions").mkdir()
    (tmp_path / "lnk.jsonl").symlink_to(tmp_path / "data.train.jsonl")
    (tmp_path / "._other.jsonl").touch()
    hint = f"; did you mean '{nearest}'?" if nearest else ""
    with pytest.raises(UserError) as error:
        read(f"{tmp_path}/{typed}")
    assert str(error.value) == f"{tmp_path}/{typed}: no such file (data.path){hint}"


@pytest.mark.parametrize(
    ("wanted", "names", "nearest"),
    [
        ("nq.json", ["nq.jsonl", "nq.parquet"], "nq.jsonl"),
        ("nq.parquet.gz", ["nq.jsonl", "nq.parquet"], "nq.parquet"),
        ("nq.jsnl", ["mq.png", "nq.jsonl.gz"], "nq.jsonl.gz"),
        ("nq.jsonl", ["nq.jsonl"], None),
        ("nq.jsonl", ["nq.jsonl", "nq.jsonl.gz"], "nq.jsonl.gz"),
        ("nq.jsonl", ["questions.jsonl"], None),
        ("nq.jsonl", [], None),
    ],
)
def test_most_similar_compares_stems_and_never_finds_the_name_itself(
    wanted: str, names: list[str], nearest: str | None
) -> None:
    assert _most_similar(wanted, names) == nearest


@pytest.mark.parametrize("use", [read, file_digest])
@pytest.mark.parametrize("path", ["broken.jsonl", "*.jsonl"])
def test_read_records_and_file_digest_name_the_missing_target_of_a_link(
    tmp_path: Path, use: Callable[[str], Any], path: str
) -> None:
    (tmp_path / "broken.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(UserError) as caught:
        use(f"{tmp_path}/{path}")
    line = f"{tmp_path}/broken.jsonl: is a link to '{tmp_path}/gone.jsonl', which is missing (data.path)"
    assert str(caught.value) == line


@pytest.mark.parametrize("use", [read, file_digest])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dta.jsonl", r"dta.jsonl: no such file \(data.path\); did you mean 'data.jsonl'\?$"),
        ("DATA.parquet", r"DATA.parquet: no such file \(data.path\); did you mean 'data.jsonl'\?$"),
        ("data.jsonl.gz", r"data.jsonl.gz: no such file \(data.path\); did you mean 'data.jsonl'\?$"),
        ("code.jsonl", r"code.jsonl: no such file \(data.path\)$"),
        ("elsewhere/data.jsonl", r"data.jsonl: no such file \(data.path\)$"),
        ("", r": cannot be used \(Is a directory\) \(data.path\); expected a file, not a folder$"),
        ("data.jsonl/inside.jsonl", r"inside.jsonl: "),
        ("nosuch://bucket/data.jsonl", r"^nosuch://bucket/data.jsonl: cannot be opened \(Protocol not known: nosuch"),
    ],
)
def test_read_records_and_file_digest_reject_unreadable_files(
    tmp_path: Path, use: Callable[[str], Any], name: str, message: str
) -> None:
    (tmp_path / "data.jsonl").write_text("{}")
    with pytest.raises(UserError, match=message):
        use(name if "://" in name else f"{tmp_path}/{name}")


class _Refusing(BaseHTTPRequestHandler):
    """Answers with the status that the path begins with; lists no folder."""

    def do_GET(self) -> None:  # the names are those of http.server
        first = self.path.split("/")[1]
        self.send_error(int(first) if first.isdigit() and not self.path.endswith("/") else 403)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("404/data.jsonl", "no such file (data.path)"),
        ("410/data.jsonl.gz", "no such file (data.path)"),
        ("403/data.jsonl", "cannot be used (403, message='Forbidden'"),
        ("500/data.jsonl", "cannot be used (500, message='Internal Server Error'"),
    ],
)
def test_file_digest_tells_a_missing_file_of_a_web_server_from_a_refused_one(path: str, reason: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{path}"
        with pytest.raises(UserError) as caught:
            file_digest(url)
        server.shutdown()
    assert str(caught.value).startswith(f"{url}: {reason}")
    assert "did you mean" not in str(caught.value)
