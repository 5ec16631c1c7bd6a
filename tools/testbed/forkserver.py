"""A fork server for tests: one process imports torch and the rooms once, and forks every trial from there.

Starting Python with torch takes ten seconds, a fork milliseconds. The server runs no operation of torch and has
one thread, so that a child is as fresh as a process of its own. Client and server speak JSON, a line each way.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ci_llm.core.imports import importing
from tools.testbed.events import DEADLINE_S

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
}


class ForkServer:
    """The client's end; a context manager, at whose end the server and all its children are gone.

    Args:
        modules: what the server imports at once; the module of a trial follows when it is first asked for.
        environment: variables for the server and its children, beside those of this process.
    """

    def __init__(self, *modules: str, environment: Mapping[str, str] | None = None) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tools.testbed.forkserver", *modules],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._receive()  # the modules are there

    def run(self, trial: Callable[..., int], log: Path, *, ranks: int = 1, **arguments: Any) -> list[int]:
        """Call `trial(**arguments)` in a forked child per rank and wait for all of them.

        Args:
            log: file for what the children say; appended to.
            ranks: processes that form one world; each finds RANK, WORLD_SIZE and a free MASTER_PORT.
            arguments: values that JSON can carry.

        Returns:
            the exit code of each child, minus the signal's number for one that a signal killed.

        Raises:
            AssertionError: a child, or a child of a child, is still there after the deadline.
        """
        target = [trial.__module__, trial.__qualname__]
        answer = self._ask({"target": target, "arguments": arguments, "ranks": ranks, "log": str(log.resolve())})
        assert not answer["late"], f"still running after {DEADLINE_S} s; it said:\n{log.read_text()}"
        codes: list[int] = answer["codes"]
        return codes

    def start(
        self, trial: Callable[..., int], output: Path, *, environment: Mapping[str, str] | None = None, **arguments: Any
    ) -> Started:
        """Call `trial(**arguments)` in a forked child that goes on beside the test, in a session of its own.

        Args:
            output: a named pipe that is open for reading.
            environment: variables of the child, beside the server's.
        """
        target = [trial.__module__, trial.__qualname__]
        own = {"output": str(output), "environment": {**(environment or {})}}
        return Started(self, self._ask({"target": target, "arguments": arguments, **own})["pid"])

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(request, default=str) + "\n")
        self._server.stdin.flush()
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert line, f"the fork server ended with exit code {self._server.wait(DEADLINE_S)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait(DEADLINE_S)
        for pipe in (self._server.stdin, self._server.stdout):
            assert pipe is not None
            pipe.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Started:
    """A child that goes on beside its test: as much of a `Popen` as one that is not the test's own child can be."""

    stdin = None

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self._code: int | None = None

    def send_signal(self, number: int) -> None:
        if self._code is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """The exit code of the child, minus the signal's number for one that a signal killed.

        Raises:
            subprocess.TimeoutExpired: it is still there; it has been killed.
        """
        if self._code is None:
            answer = self._server._ask({"wait": self.pid, "timeout": timeout})
            self._code = answer["code"]
            if answer["late"]:
                raise subprocess.TimeoutExpired("a forked child", timeout)
        return self._code


# --------------------------------------------------------------------------------------------- in the server


def serve(modules: Sequence[str]) -> None:
    """Import `modules`, then fork as asked until the client closes its end."""
    with importing():
        for module in modules:
            importlib.import_module(module)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if "wait" in request:
        return _wait_for_one(request["wait"], request["timeout"])
    importlib.import_module(request["target"][0])
    gc.freeze()  # no child looks through what was there before it, whose pages it would copy
    return _fork_beside(request) if "output" in request else _fork_all(request)


def _fork_beside(request: dict[str, Any]) -> dict[str, Any]:
    output = os.open(request["output"], os.O_WRONLY)  # before the client reads, which else would find no writer
    pid = os.fork()
    if not pid:
        end_with(lambda: _go_on_beside(request, output))
    os.close(output)
    return {"pid": pid}


def _go_on_beside(request: dict[str, Any], output: int) -> int:
    os.setsid()
    _speak_to(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.update(request["environment"])
    return _called(request)


def _speak_to(output: int) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)


def _called(request: dict[str, Any]) -> int:
    module, name = request["target"]
    code: int = getattr(sys.modules[module], name)(**request["arguments"])
    return code


def _wait_for_one(pid: int, timeout: float) -> dict[str, Any]:
    watched = os.pidfd_open(pid)
    late = not select.select([watched], [], [], timeout)[0]
    os.close(watched)
    if late:
        os.kill(pid, signal.SIGKILL)
    return {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "late": late}


def _fork_all(request: dict[str, Any]) -> dict[str, Any]:
    # Every descendant holds this pipe open: its end says that the last of the family is gone, workers included.
    family, held = os.pipe()
    port = str(free_port())
    pids = []
    for rank in range(request["ranks"]):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.close(family)
            _become(request, rank, port)
    os.close(held)
    late = not _wait_for_end(family, pids)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.close(family)
    return {"codes": codes, "late": late}


def _wait_for_end(family: int, pids: list[int]) -> bool:
    """True if the family ended in time; if not, its heads are killed, and loader workers follow theirs."""
    ready, _, _ = select.select([family], [], [], DEADLINE_S)
    if not ready:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    return bool(ready)


#: Descriptors of the sockets that claim the ports that this process has given out last.
_claims: list[int] = []
_KEPT = 32


def free_port() -> int:
    """A port that nobody has right now, that no outgoing connection will be given, and that no other test has claimed.

    The world of a test listens at its port seconds later. Of two worlds with one port, the processes of the one that
    comes second join the other world, and wait there for each other.
    """
    while len(_claims) >= _KEPT:
        os.close(_claims.pop(0))
    while True:
        # Linux gives out 32768 and above; the global generator may be seeded, in two workers alike.
        port = random.SystemRandom().randrange(16000, 32000)
        # An abstract name, which is free again when this process and all that it has forked are gone.
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, contextlib.suppress(OSError):
            claim.bind(f"\0ci-llm-tests-{port}")
            probe.bind(("127.0.0.1", port))
            _claims.append(claim.detach())
            return port
        claim.close()


def _become(request: dict[str, Any], rank: int, port: str) -> None:
    """Turn this fork into the trial's process; never returns."""

    def trial() -> int:
        _speak_to(os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        if request["ranks"] > 1:
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(request["ranks"])}
            os.environ.update(place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        return _called(request)

    end_with(trial)


def end_with(act: Callable[[], int]) -> NoReturn:
    """Do it in a fork, and end with the exit code that it returns: 1 after an error, whose traceback is printed."""
    code = 1
    try:
        code = act()
    except BaseException:  # noqa: BLE001  the child must end here, whatever it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
