"""A Hugging Face hub on loopback that takes and gives small files, as huggingface_hub 2.4 sends and asks for them."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils.tqdm import disable_progress_bars

from tests.support.servers import running

TOKEN = "a-token"
COMMIT = "0123" * 10  # the commit of every repository


@dataclass
class Hub:
    """What is there. files: by repository, then by path. private: by repository. downloaded: paths of files.

    status: the status with which all downloads are answered, instead of the files.
    """

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    downloaded: list[str] = field(default_factory=list)
    status: int | None = None

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """The status and what the hub answers to a request."""
        if path == "/api/repos/create":
            sent = json.loads(body)
            repository = f"{sent['organization']}/{sent['name']}"
            if repository in self.private:
                return 409, {"error": "You already created this model repo", "url": f"{self.address}/{repository}"}
            self.files[repository] = {}
            self.private[repository] = sent.get("private") or sent.get("visibility") == "private"
            return 200, {"url": f"{self.address}/{repository}", "id": repository}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        _, _, _, owner, name, *actions = path.split("/")
        repository = f"{owner}/{name}"
        if repository not in self.files:
            return 404, {"error": "Repository not found"}
        if not actions:
            return 200, {"id": repository, "sha": COMMIT, "private": self.private.get(repository), "siblings": []}
        action = actions[0]
        if action == "revision":
            answer: Any = {"id": repository, "sha": COMMIT, "siblings": []}
        elif action == "tree":
            _, _, *folders = actions  # after the name of the revision
            prefix = "".join(f"{folder}/" for folder in folders)
            answer = [file for file in self.tree(repository) if file["path"].startswith(prefix)]
        elif action == "preupload":
            files = json.loads(body)["files"]
            answer = {
                "files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
            }
        else:
            assert action == "commit", path
            answer = self.commit(repository, body)
        return 200, answer

    def tree(self, repository: str) -> list[dict[str, Any]]:
        """All files of a repository, and the folders that they are in."""
        files = self.files[repository]
        folders = sorted({file.rpartition("/")[0] for file in files if "/" in file})
        listed: list[dict[str, Any]] = [
            {"type": "directory", "path": folder, "oid": _etag(folder.encode())} for folder in folders
        ]
        for file, content in files.items():
            listed.append({"type": "file", "path": file, "size": len(content), "oid": _etag(content)})
        return listed

    def commit(self, repository: str, body: bytes) -> dict[str, Any]:
        """Store and delete the files of a commit."""
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[repository][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del self.files[repository][line["value"]["path"]]
        return {"commitUrl": f"{self.address}/{repository}/commit/{COMMIT}", "commitOid": COMMIT, "success": True}


def _etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self.read_chunks()
        if self.headers.get("Authorization") == f"Bearer {TOKEN}":
            self.reply(*self.hub.answer(self.path.partition("?")[0], body))
        else:
            self.reply(401, {"error": "Invalid credentials"})

    def do_GET(self) -> None:  # the names are those of http.server
        path = self.path.partition("?")[0]
        if "/resolve/" not in path:
            self.do_POST()
            return
        _, owner, name, _, _, file = path.removeprefix("/datasets").split("/", 5)
        content = self.hub.files[f"{owner}/{name}"][file]
        headers = {"ETag": _etag(content), "X-Repo-Commit": COMMIT}
        if self.command == "GET":
            self.hub.downloaded.append(file)
            if self.hub.status is not None:
                self.reply(self.hub.status, {"error": "not now"})
                return
        status = 200
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked:
            first, last = int(asked[1]), min(int(asked[2]), len(content) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
            status, content = 206, content[first : last + 1]
        self.send_content(status, content, headers)

    do_HEAD = do_GET

    def read_chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def reply(self, status: int, answer: Any) -> None:
        headers = {"X-Error-Code": "RepoNotFound"} if status == 404 else {}
        self.send_content(status, json.dumps(answer).encode(), headers)

    def send_content(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged."""


@contextmanager
def hub_server() -> Iterator[Hub]:
    """The hub, until the end of the context. It refuses requests without `TOKEN`."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with running(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as hub.address:
        yield hub


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """What HF_ENDPOINT, HF_TOKEN and HF_HUB_CACHE set; the tests' own environment forbids the hub."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    disable_progress_bars()
