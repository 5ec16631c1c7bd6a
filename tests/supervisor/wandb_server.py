"""As much of a W&B server as its public API asks for: who am I, one run, delete it. Remembers what it was asked."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbServer:
    """A server on a free port of this machine; a context manager.

    Attributes:
        runs: "entity/project/id" -> unix time of creation; a deleted run is gone from it.
        deleted: the paths of deleted runs, in order.
    """

    def __init__(self, runs: dict[str, float]) -> None:
        self.runs, self.deleted = runs, list[str]()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = server._answer(json.loads(body)) if self.path == "/graphql" else {}
                data = json.dumps({"data": answer}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: Any) -> None:
                """Tests are quiet."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        query, variables = request["query"], request.get("variables") or {}
        if "deleteRun" in query:
            path = variables["id"].removeprefix("storage of ")
            del self.runs[path]
            self.deleted.append(path)
            return {"deleteRun": {"clientMutationId": None}}
        if "viewer" in query:
            return {"viewer": {"id": "u", "entity": "team", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        path = f"{variables['entity']}/{variables['project']}/{variables['name']}"
        return {"project": {"run": self._run(path) if path in self.runs else None}}

    def _run(self, path: str) -> dict[str, Any]:
        created = datetime.fromtimestamp(self.runs[path], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        texts = dict.fromkeys(("config", "systemMetrics", "summaryMetrics", "description", "notes", "group"), "{}")
        return texts | {
            "id": f"storage of {path}",
            "name": path.rpartition("/")[2],
            "displayName": "calm-sky-3",
            "projectId": "1",
            "state": "crashed",
            "tags": [],
            "sweepName": None,
            "jobType": None,
            "commit": None,
            "readOnly": False,
            "createdAt": created,
            "heartbeatAt": created,
            "historyLineCount": 0,
            "historyKeys": None,
            "user": {"name": "me", "username": "me"},
        }

    def __enter__(self) -> WandbServer:
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
