"""As much of a W&B server as its public API asks for: who am I, one run, delete it. Remembers what it was asked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from tests.support.asking_http import JsonHandler, answering


class WandbServer:
    """The runs of a server, which answers within `serving`.

    Attributes:
        runs: "entity/project/id" -> unix time of creation; a deleted run is gone from it.
        deleted: the paths of deleted runs, in order.
    """

    def __init__(self, runs: dict[str, float]) -> None:
        self.runs, self.deleted = runs, list[str]()

    @contextmanager
    def serving(self) -> Iterator[str]:
        """The address of the server."""
        server = self

        class Handler(JsonHandler):
            def do_POST(self) -> None:  # noqa: N802 - the name of the standard library
                self.reply({"data": server._answer(self.body()) if self.path == "/graphql" else {}})

        with answering(Handler) as url:
            yield url

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
