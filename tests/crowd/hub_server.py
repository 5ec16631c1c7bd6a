"""A small double of the hub's interface, as huggingface_hub speaks it: repositories, and commits of small files."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.asking_http import JsonHandler, answering

TOKEN = "hf_a_token_that_nobody_may_see"


class HubServer:
    """Repositories of a hub, which answers within `serving`. `refuse` is the status of every commit while it is set."""

    def __init__(self) -> None:
        self.repositories: dict[str, bool] = {}  # and whether each is private
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.refuse: int | None = None
        self.address = ""

    @contextmanager
    def serving(self) -> Iterator[HubServer]:
        """With its address."""
        hub = self

        class Handler(JsonHandler):
            def do_POST(self) -> None:  # noqa: N802 - the name of the standard library
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                authorized = self.headers.get("authorization") == f"Bearer {TOKEN}"
                status, answer = hub._answer(self.path.partition("?")[0], body, authorized)
                self.reply(answer, status)

            do_GET = do_POST  # noqa: N815

        with answering(Handler) as hub.address:
            yield hub

    def _answer(self, path: str, body: bytes, authorized: bool) -> tuple[int, Any]:
        if not path.startswith(("/api/repos", "/api/models")):
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
