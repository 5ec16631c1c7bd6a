"""A service on a port of this machine, in a thread of this process, with a client that speaks plain HTTP."""

from __future__ import annotations

import json
import re
import socket
import threading
from typing import Any

import httpx

from ci_llm.serve.app import Service, server_of
from tools.testbed.events import DEADLINE_S, wait_until

QUESTION = "Ann has 7 pens. Then the number becomes 3 times as big. Ann breaks 6. How many pens are left?"


def chat(question: str = QUESTION, **fields: Any) -> dict[str, Any]:
    """The body of a chat with one message."""
    return {"model": "crowd", "messages": [{"role": "user", "content": question}], **fields}


class Listening:
    """A context manager: the service answers inside.

    Attributes:
        url: without a slash at its end.
        http: a client that sends the key.
    """

    def __init__(self, service: Service, key: str | None = None) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._server = server_of(service)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self.key, self.headers = key, {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=self.url, headers=self.headers, timeout=DEADLINE_S, trust_env=False)

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, content=body if isinstance(body, bytes) else json.dumps(body))

    def ask(self, question: str = QUESTION, **fields: Any) -> dict[str, Any]:
        """The answer to a chat, whole."""
        answer = self.post("/v1/chat/completions", chat(question, **fields))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def complete(self, **fields: Any) -> dict[str, Any]:
        answer = self.post("/v1/completions", {"model": "crowd", **fields})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The chunks of a stream, which has to end as one."""
        lines = [line for line in self.post(path, body).text.split("\n\n") if line]
        assert lines.pop() == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric over all its labels but these."""
        lines = re.findall(rf"^ci_llm:{name}(?:{{(.*?)}})? (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        wanted = {f'{label}="{value}"' for label, value in labels.items()}
        return sum(float(value) for found, value in lines if wanted <= {*found.split(",")})

    def load(self) -> tuple[float, float]:
        """The numbers of texts that are being written and that wait."""
        return self.metric("num_requests_running"), self.metric("num_requests_waiting")

    def wait_for(self, load: tuple[float, float]) -> None:
        """Return when so many texts are being written and wait."""
        wait_until(f"{load} texts grow and wait", lambda: self.load() == load)

    def __enter__(self) -> Listening:
        self._thread.start()
        self.http.get("/healthz").raise_for_status()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
        self._server.should_exit = True
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
