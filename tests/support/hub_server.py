"""A Hugging Face hub on loopback that takes commits of small files, which huggingface_hub 2.4 sends to it."""

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "a-token"


@dataclass
class Hub:
    """What was sent. files: by repository, then by path. private: by repository."""

    address: str = ""
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)

    def answer(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
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
        if not actions:
            return 200, {"id": f"{owner}/{name}", "private": self.private[f"{owner}/{name}"], "siblings": []}
        action = actions[0]
        if action == "preupload":
            files = json.loads(body)["files"]
            return 200, {
                "files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in files]
            }
        assert action == "commit", path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.files[f"{owner}/{name}"][line["value"]["path"]] = content
        return 200, {"commitUrl": f"{self.address}/{owner}/{name}/commit/0123", "commitOid": "0123", "success": True}


@contextmanager
def hub_server() -> Iterator[Hub]:
    """The hub, until the end of the context. It refuses requests without `TOKEN`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = self.read_chunks()
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                self.reply(*hub.answer(self.path.partition("?")[0], body))
            else:
                self.reply(401, {"error": "Invalid credentials"})

        do_GET = do_POST  # the names are those of http.server

        def read_chunks(self) -> bytes:
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def reply(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
