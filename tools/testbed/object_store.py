"""A real S3 server on this machine, as a process of its own, and a proxy before it that strikes the n-th request."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from tools.testbed.events import DEADLINE_S

BUCKET = "bucket"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "a-secret-that-no-log-may-show",
    "AWS_REGION": "us-east-1",
}
#: What may happen to a request. "kill" strikes the client before the server has heard, "kill after" when it has;
#: "lost": the server has heard, and its answer is lost; "cut": the answer breaks off; "short": half of a body arrives,
#: and nothing in HTTP tells; "flipped": one bit of a body differs; "stale": the listing as it was at the beginning.
FAULTS = ("kill", "kill after", "500", "503", "403", "lost", "timeout", "cut", "short", "flipped", "stale")
_HOP_BY_HOP = frozenset({"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"})


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """moto's S3 server with an empty bucket; its address."""
    with subprocess.Popen(
        [sys.executable, "-m", "tools.testbed.object_store"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.stdin.close()
            server.wait()


def _serve() -> None:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0)
    sys.stdout, told = sys.stderr, sys.stdout
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    os.environ.update(CREDENTIALS)
    boto3.client("s3", endpoint_url=address, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    print(address, file=told, flush=True)
    sys.stdin.read()  # until the client's end is closed
    os._exit(0)


@dataclass
class Plan:
    """A plan of one fault, and the requests so far.

    Attributes:
        fault: of FAULTS; None: nothing strikes.
        at: the number of the first request that it strikes, from 1.
        times: how many requests in a row.
        kill: kills the client.
    """

    fault: str | None = None
    at: int = 0
    times: int = 1
    kill: Callable[[], object] = lambda: None
    requests: list[str] = field(default_factory=list)
    struck: list[str] = field(default_factory=list)
    sent_bytes: int = 0


class FaultProxy:
    """A server before the server; a context manager. Set `plan` before each trial.

    Attributes:
        address: for AWS_ENDPOINT_URL.
    """

    def __init__(self, target: str) -> None:
        self.plan = Plan()
        self._first_listing: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self._target, self._lock = urlsplit(target).netloc, threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 20  # head and body in one packet
            disable_nagle_algorithm = True

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    super().handle_one_request()

            def _any(self) -> None:
                proxy._handle(self)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _any  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = "http://{}:{}".format(*self._server.server_address[:2])

    def __enter__(self) -> FaultProxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        plan = self.plan
        with self._lock:
            plan.requests.append(f"{request.command} {request.path.partition('?')[0]}")
            number = len(plan.requests)
            plan.sent_bytes += len(body)
            fault = plan.fault if plan.at <= number < plan.at + plan.times else None
            if fault is not None:
                plan.struck.append(plan.requests[-1])
        if fault == "kill":
            plan.kill()
            request.close_connection = True
        elif fault == "timeout":
            _wait_for_hang_up(request.connection)
            request.close_connection = True
        elif fault in ("500", "503", "403"):
            self._answer(request, int(fault), {}, b"<Error><Code>Injected</Code></Error>")
        else:
            self._forward(request, body, fault)

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes, fault: str | None) -> None:
        status, headers, answer = self._ask(request, _damaged(body, fault))
        if fault == "kill after":
            self.plan.kill()
        if fault in ("kill after", "lost"):
            request.close_connection = True
            return
        listing = request.command == "GET" and "list-type" in request.path
        if listing:
            first = self._first_listing.setdefault(request.path, (status, headers, answer))
            status, headers, answer = first if fault == "stale" else (status, headers, answer)
        if request.command == "GET" and status == 200 and not listing:
            answer = _damaged(answer, fault, bit=2)
        self._answer(request, status, headers, answer, cut=fault == "cut")

    def _ask(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self._target, timeout=DEADLINE_S)
        try:
            headers = {k: v for k, v in request.headers.items() if k.lower() not in _HOP_BY_HOP}
            connection.request(request.command, request.path, body or None, {**headers, "Content-Length": len(body)})  # type: ignore[dict-item]
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def _answer(
        self, request: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, *, cut: bool = False
    ) -> None:
        request.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in _HOP_BY_HOP:
                request.send_header(name, value)
        length = headers.get("Content-Length", "0") if request.command == "HEAD" else str(len(body))
        request.send_header("Content-Length", length)
        request.end_headers()
        if cut:
            request.close_connection = True
        if request.command != "HEAD":
            request.wfile.write(body[: len(body) // 2] if cut else body)


def _wait_for_hang_up(connection: socket.socket) -> None:
    """Return when the client, whose request has been read, gives it up."""
    connection.settimeout(DEADLINE_S)
    connection.recv(1)


def _damaged(body: bytes, fault: str | None, bit: int = 1) -> bytes:
    """A body as it arrives; an answer loses another bit than a request, or the two damages would cancel out."""
    if fault == "short":
        return body[: len(body) // 2]
    if fault == "flipped" and body:
        middle = len(body) // 2
        return body[:middle] + bytes([body[middle] ^ bit]) + body[middle + 1 :]
    return body


if __name__ == "__main__":
    _serve()
