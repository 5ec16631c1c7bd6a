"""A small double of the hub's interface, as huggingface_hub speaks it: repositories, and commits of small files."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_a_token_that_nobody_may_see"


class HubServer:
    """A context manager. `refuse` is the status of every commit while it is set."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}  # and whether each is private
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.refuse: int | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                authorized = self.headers.get("authorization") == f"Bearer {TOKEN}"
                status, answer = hub._answer(self.command, self.path.partition("?")[0], body, authorized)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_HEAD = do_POST = _any  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, command: str, path: str, body: bytes, authorized: bool) -> tuple[int, Any]:
        if command == "HEAD" or not path.startswith(("/api/repos", "/api/models")):
            return 200, {}
        if not authorized:
            return 401, {"error": "Invalid credentials"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            known = name in self.repositories
            self.repositories.setdefault(name, asked.get("visibility") == "private" or bool(asked.get("private")))
            return (409 if known else 200), {"url": f"{self.address}/{name}"}
        name = "/".join(path.split("/")[3:5])
        if "/preupload/" in path:
            asked = json.loads(body)["files"]
            return 200, {
                "files": [{"path": each["path"], "uploadMode": "regular", "shouldIgnore": False} for each in asked]
            }
        if "/commit/" in path:
            return self._commit(name, body)
        if "/tree/" in path:
            found = self.files.get(name, {})
            return 200, [{"type": "file", "path": path, "size": len(found[path]), "oid": "2" * 40} for path in found]
        return 200, {"id": name, "private": self.repositories[name], "sha": "0" * 40, "siblings": [], "tags": []}

    def _commit(self, name: str, body: bytes) -> tuple[int, Any]:
        if self.refuse:
            return self.refuse, {"error": "not now"}
        lines = [json.loads(line) for line in body.splitlines()]
        added = {each["value"]["path"]: each["value"]["content"] for each in lines if each["key"] == "file"}
        files = self.files.setdefault(name, {})
        for each in lines:
            if each["key"] == "deletedFile":
                del files[each["value"]["path"]]
        files |= {path: base64.b64decode(data) for path, data in added.items()}
        self.commits.append(lines[0]["value"]["summary"])
        return 200, {"commitOid": "1" * 40, "commitUrl": f"{self.address}/{name}/commit/{'1' * 40}"}
