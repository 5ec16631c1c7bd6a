"""Many clients at once, clients that vanish, a server that is told to stop, and a disk that is full."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import psutil
import pytest

from ci_llm.crowd.decoder import Decoder
from ci_llm.embedded import rows
from ci_llm.errors import BadInput
from ci_llm.serve import Options
from ci_llm.serve.app import of_run, run_until_signal
from tests.serve.listening import Listening, chat
from tests.support import campaign
from tests.support.children import Child, command
from tests.support.crowds import disturbed_crowd
from tools.testbed.events import DEADLINE_S
from tools.testbed.forkserver import ForkServer

pytestmark = pytest.mark.slow

QUESTIONS: list[str] = [row["question"] for row in rows("test")[:4]]
MODELS = ("crowd", "agent0", "agent1", "agent2", "base")
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def wide() -> Iterator[Listening]:
    """Room for 200 clients."""
    with Listening(of_run(disturbed_crowd(), Options(slots=32, queue=160))) as listening:
        yield listening
        assert listening.load() == (0, 0), "a slot is not free"


def test_200_clients_get_their_own_answers_and_no_error_but_429(wide: Listening) -> None:
    wanted = {
        (model, question): wide.ask(question, model=model, max_tokens=12)["choices"][0]["message"]["content"]
        for model in MODELS
        for question in QUESTIONS
    }
    count, statuses, memory = campaign.size(200, 10_000), Counter[int](), list[int]()
    waiting = cycle(wanted)

    async def client(session: aiohttp.ClientSession) -> None:
        while statuses[200] < count:
            model, question = next(waiting)
            body = chat(question, model=model, max_tokens=12)
            while True:
                async with session.post(f"{wide.url}/v1/chat/completions", json=body) as answer:
                    statuses[answer.status] += 1
                    found = await answer.json()
                if answer.status != 429:
                    break
                await asyncio.sleep(0.05 * int(answer.headers["Retry-After"]))
            assert found["choices"][0]["message"]["content"] == wanted[model, question]
            if statuses[200] % 100 == 0:
                memory.append(psutil.Process().memory_info().rss)

    async def all_clients() -> None:
        unlimited = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(DEADLINE_S)) as session:
            await asyncio.gather(*(client(session) for _ in range(200)))

    asyncio.run(all_clients())
    assert {*statuses} <= {200, 429}
    assert statuses[200] >= count
    wide.wait_for((0, 0))
    if campaign.in_full:
        settled = memory[len(memory) // 10 :]
        assert settled[-1] - settled[0] < count / 1000 * 1_000_000


def test_requests_from_pages_of_other_sites_are_refused_without_a_key(wide: Listening) -> None:
    def status(**headers: str) -> int:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return wide.http.post("/v1/chat/completions", json=chat(max_tokens=1), headers=given).status_code

    assert status() == 200
    assert status(origin=wide.url) == status(sec_fetch_site="same-origin") == 200
    assert status(origin="https://behind.a.proxy", sec_fetch_site="same-origin") == 200
    assert status(origin="https://elsewhere.example") == status(origin="null") == 403
    assert status(origin=wide.url, sec_fetch_site="cross-site") == status(sec_fetch_site="same-site") == 403


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/"])
def test_a_foreign_host_name_is_refused_without_a_key(wide: Listening, served: Listening, path: str) -> None:
    def answer(host: str, listening: Listening = wide) -> httpx.Response:
        return listening.http.get(path, headers={"host": host})

    for host in ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000"):
        assert answer(host).status_code == 200
    for host in ("rebound.example", "rebound.example:8000", "127.0.0.1.example", "localhost.example:80", "[::2]:8000"):
        refusal = answer(host)
        assert refusal.status_code == 403
        assert refusal.json()["error"]["code"] == "unknown_host"
    assert answer("rebound.example", served).status_code == 200, "its page does not know the key"
    elsewhere = of_run(disturbed_crowd(), Options(host="0.0.0.0"))
    with Listening(elsewhere) as listening:
        assert answer("our.machine:8000", listening).status_code == 200, "its names are not known"


def test_clients_that_go_away_free_their_slots(served: Listening) -> None:
    async def vanish(stream: bool) -> None:
        async with aiohttp.ClientSession(headers=served.headers) as session:
            body = chat(stream=stream, n=4, **LONG)
            asked = asyncio.ensure_future(session.post(f"{served.url}/v1/chat/completions", json=body))
            await asyncio.to_thread(served.wait_for, (4, 0))
            asked.cancel()
            if stream and asked.done() and not asked.cancelled():
                asked.result().close()

    aborted = served.metric("request_success_total", finished_reason="abort")
    for stream in (True, False):
        asyncio.run(vanish(stream))
        served.wait_for((0, 0))
    assert served.metric("request_success_total", finished_reason="abort") == aborted + 8


def test_an_error_in_a_step_fails_one_text_and_not_the_others(
    served: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, failures = Decoder.step, iter([RuntimeError("no memory")])

    def failing(self: Decoder) -> Any:
        if len(self.open) == 3 and (failure := next(failures, None)):
            raise failure
        return step(self)

    wanted = served.ask(n=3)["choices"]
    monkeypatch.setattr(Decoder, "step", failing)
    monkeypatch.setattr("ci_llm.serve.engine.logger.exception", lambda *_: None)

    async def ask() -> list[tuple[int, Any]]:
        async with aiohttp.ClientSession(headers=served.headers) as session:

            async def one() -> tuple[int, Any]:
                async with session.post(f"{served.url}/v1/chat/completions", json=chat()) as answer:
                    return answer.status, await answer.json()

            return [*await asyncio.gather(one(), one(), one())]

    found = asyncio.run(ask())
    assert sorted(status for status, _ in found) == [200, 200, 500]
    [error] = [body["error"] for status, body in found if status == 500]
    assert (error["type"], error["code"]) == ("server_error", "generation_failed")
    assert "no memory" not in error["message"], "what it says may tell of this machine"
    good = [body["choices"][0]["message"] for status, body in found if status == 200]
    assert good == [wanted[0]["message"]] * 2


# As a process of its own


def serving(server: ForkServer, saved: Path, *options: str) -> Child:
    return Child.forked(server, command, words=["serve", str(saved), "--port", "0", *options])


def address(child: Child) -> str:
    found = re.search(r"http://[\d.:]+", child.read_until(" serves "))
    assert found is not None
    return found.group()


def test_sigterm_finishes_open_requests_and_ends_the_process(server: ForkServer, saved: Path) -> None:
    with serving(server, saved, "--max-num-seqs", "2", "--drain-seconds", "60") as child:
        url = address(child)

        async def ask() -> list[str]:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as session:

                async def one(number: int) -> str:
                    body = chat(stream=True, max_tokens=60, temperature=2.0, seed=number)
                    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                        first = await answer.content.readline()
                        if number == 0:
                            child.process.send_signal(signal.SIGTERM)
                        return (first + await answer.content.read()).decode()

                return [*await asyncio.gather(*(one(number) for number in range(4)))]

        for told in asyncio.run(ask()):
            assert told.endswith("data: [DONE]\n\n")
        assert child.process.wait(DEADLINE_S) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz", trust_env=False)
    log = "".join(child.seen)
    assert "SIGTERM: answering what is under way" in log
    assert "Ann" not in log, "no content is in the log"


def test_the_drain_has_a_bound(server: ForkServer, saved: Path) -> None:
    with serving(server, saved, "--drain-seconds", "0") as child:
        url = address(child)
        body = chat(stream=True, n=16, **{**LONG, "max_tokens": 470})
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=body, timeout=DEADLINE_S, trust_env=False
        ) as answer:
            lines = answer.iter_lines()
            next(lines)
            child.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.HTTPError):  # noqa: PT012 - it breaks anywhere in the rest
                rest = [*lines]
                assert "data: [DONE]" in rest, "it may also have been told why"
                raise httpx.ReadError("ended")
        assert child.process.wait(DEADLINE_S) == 0


def test_a_port_that_is_taken_is_refused(served: Listening) -> None:
    service = of_run(disturbed_crowd(), Options(port=int(served.url.rpartition(":")[2])))
    with pytest.raises(BadInput, match="cannot listen") as refusal:
        run_until_signal(service)
    assert refusal.value.hint == "another program listens there: give another --port"
