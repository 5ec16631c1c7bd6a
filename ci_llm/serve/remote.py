"""Agents that another server holds as LoRA models, as a vLLM does: they write there, and the vote is taken here.

Each agent writes its own text, in K requests. For `rerank` and `weighted_vote` K more ask for the log-probabilities of
every distinct text: the mean of the agents' probabilities of a given token needs nothing else, so what the crowd makes
of a text is exact. Choosing token by token would need K requests a token and the whole vocabulary, and is not offered.

Legend: K agents, d distinct texts.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import aiohttp
import numpy as np

from ci_llm.crowd.aggregators import find_vote
from ci_llm.crowd.generation import cut, final_answers
from ci_llm.crowd.pretrained import open_wording
from ci_llm.errors import BadInput, CiLlmError
from ci_llm.serve.app import Service
from ci_llm.serve.call import BASE, Call, Served
from ci_llm.serve.jobs import Ended, Job, Piece
from ci_llm.serve.metrics import Metrics
from ci_llm.serve.options import Options
from ci_llm.serve.problem import ApiProblem

#: The votes that are offered, the default first. The last is content with the agents' texts.
VOTES: Final = ("rerank", "weighted_vote", "majority")
_PATIENCE: Final = aiohttp.ClientTimeout(total=600, connect=10)
_STARTS: Final = aiohttp.ClientTimeout(total=60, connect=10)


@dataclass(frozen=True)
class Text:
    """What one agent wrote.

    Attributes:
        ids: with the end, if it came to one.
        log_probability: that the agent itself gives to it, in nats.
    """

    ids: tuple[int, ...]
    text: str
    is_complete: bool
    log_probability: float


def of_engine(run: str, url: str, options: Options) -> Service:
    """A service by agents that the server at `url` holds. It is asked at once whether it has them, and can score texts.

    Raises:
        BadInput: it has not, or cannot. CiLlmError: it does not answer.
    """
    prompter, names = open_wording(run)
    metrics = Metrics(options.name)
    base, limit = asyncio.run(_asked(url.rstrip("/"), names, options.engine_key, prompter.ids("2 + 2?")))
    if options.context is not None and options.context > limit:
        hint = "give at most that"
        raise BadInput(f"the engine reads {limit} tokens", where=f"--max-model-len {options.context}", hint=hint)
    served = Served(
        prompter=prompter,
        names=names,
        crowd=options.name,
        context=options.context or limit,
        vocabulary=len(prompter.tokenizer),
        ends=prompter.ends,
        choices=options.slots + options.queue,
        aggregators=VOTES,
        has_base=base is not None,
    )
    writer = RemoteAgents(url.rstrip("/"), served, base, options, metrics)
    return Service(served, writer, metrics, options.key, options.drain_s)


async def _asked(url: str, names: Sequence[str], key: str | None, prompt: Sequence[int]) -> tuple[str | None, int]:
    """The name of the base there, and how many tokens all models read."""
    async with aiohttp.ClientSession(headers=_headers(key), timeout=_STARTS) as session:
        try:
            listed = (await _reply(session.get(f"{url}/v1/models")))["data"]
            limits = {str(model["id"]): model.get("max_model_len") for model in listed}
            if missing := [name for name in names if name not in limits]:
                hint = "vllm serve BASE --enable-lora --lora-modules agent0=... : ci-llm export prints the line"
                raise BadInput(f"the engine has no model {', '.join(missing)}", where=f"--engine {url}", hint=hint)
            body = {"model": names[0], "prompt": [prompt], "max_tokens": 1, "echo": True, "logprobs": 1}
            [choice] = (await _reply(session.post(f"{url}/v1/completions", json=body)))["choices"]
            _given(choice, 0, len(prompt))
        except ApiProblem as problem:
            what = f"the engine cannot serve a crowd: {problem}"
            hint = "it must give log-probabilities of a prompt, as vLLM does; its key is in CI_LLM_ENGINE_API_KEY"
            raise BadInput(what, where=f"--engine {url}", hint=hint) from problem
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            what = f"the engine does not answer as OpenAI's API does ({type(error).__name__}: {error})"
            raise CiLlmError(what, where=f"--engine {url}", hint="start it first, and give its address") from error
    own = [int(limit) for name, limit in limits.items() if name in names and limit]
    others = [name for name in limits if name not in names]
    base = BASE if BASE in others else next(iter(others), None)
    return base, min(own, default=1 << 12)


class RemoteAgents:
    """Who writes the texts of a `Service`: agents on another server.

    Args:
        url: of that server, without a slash at its end.
        base: the name of the base there; None: it is not served.
    """

    def __init__(self, url: str, served: Served, base: str | None, options: Options, metrics: Metrics) -> None:
        self._url, self._served, self._base, self._metrics = url, served, base, metrics
        self._options, self._tasks = options, dict[Job, asyncio.Task[None]]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(options.slots)
        self._stopping = False

    @property
    def is_ready(self) -> bool:
        """Whether it takes new work."""
        return self._session is not None and not self._stopping

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the connections; called on the event loop."""
        self._loop = loop
        self._session = aiohttp.ClientSession(headers=_headers(self._options.engine_key), timeout=_PATIENCE)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Let these texts be written, all or none of them.

        Raises:
            ApiProblem: there are too many, or the engine would not give what they want.
        """
        for call in {job.call for job in jobs}:
            if call.body.echo or call.body.top is not None:
                what = "log-probabilities are the engine's: ask it for those of an agent"
                raise ApiProblem(400, what, "logprobs", "unsupported_parameter")
        if len(self._tasks) + len(jobs) > self._served.choices:
            raise ApiProblem(429, "too many texts wait already", code="rate_limit_exceeded", retry_after=1)
        for job in jobs:
            self._tasks[job] = task = asyncio.ensure_future(self._write(job))
            task.add_done_callback(partial(self._forget, job))
        self._count()

    def _forget(self, job: Job, _: asyncio.Task[None]) -> None:
        del self._tasks[job]
        self._count()

    def _count(self) -> None:
        """What is under way, and what waits for a slot here."""
        running = min(len(self._tasks), self._options.slots)
        self._metrics.load(running, len(self._tasks) - running, self._options.slots)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Give up these texts, and the requests for them."""
        for job in jobs:
            if task := self._tasks.get(job):
                task.cancel()

    def stop(self, bound_s: float) -> None:
        """Close the connections; not called on the event loop."""
        self._stopping = True
        if self._loop is not None and self._session is not None:
            asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result(bound_s)

    async def _write(self, job: Job) -> None:
        """Tell one job its text, or why there is none."""
        try:
            async with self._slots:
                piece, ended = await (self._vote(job) if job.call.votes else self._one(job))
            job.out.put_nowait(piece)
            self._metrics.ended(job.call.model, ended.reason, prompt=len(job.prompt), new=ended.tokens)
            job.out.put_nowait(ended)
        except ApiProblem as problem:
            job.out.put_nowait(problem)
        except (aiohttp.ClientError, TimeoutError, KeyError, TypeError, ValueError) as error:
            what = f"the engine failed ({type(error).__name__}: {error})"
            job.out.put_nowait(ApiProblem(502, what, code="engine_error"))

    async def _one(self, job: Job) -> tuple[Piece, Ended]:
        """The text of one agent, or of the base."""
        call = job.call
        name = self._base if call.model == BASE else call.model
        text = await self._text(str(name), job, **_drawing(call, job.number))
        own = self._about(call, math.exp(text.log_probability), int(call.model != BASE))
        return Piece(text.text), Ended(_reason(text), len(text.ids), own)

    async def _vote(self, job: Job) -> tuple[Piece, Ended]:
        """The text that wins."""
        call, names = job.call, self._served.names
        texts = await asyncio.gather(*(self._text(name, job, temperature=0) for name in names))
        together = None if call.decoding.aggregator == "majority" else await self._scored(job, texts)
        scores = [text.log_probability if together is None else together[text.ids] for text in texts]
        vote = find_vote(call.decoding.aggregator)
        assert vote is not None, "only votes are offered"
        wins = vote.winner(final_answers([text.text for text in texts]), scores)
        confidence = None if together is None else math.exp(scores[wins])
        own, won = self._about(call, confidence, len(names)), texts[wins]
        answers = [text.text for text in texts] if call.own.include_agents else None
        return Piece(won.text), Ended(_reason(won), len(won.ids), own, answers)

    async def _scored(self, job: Job, texts: Sequence[Text]) -> dict[tuple[int, ...], float]:
        """The crowd's log-probability of each distinct text: the log of the agents' mean, token by token, in sum."""
        distinct = list(dict.fromkeys(text.ids for text in texts))
        start = len(job.prompt)
        body = {"prompt": [[*job.prompt, *ids] for ids in distinct], "max_tokens": 1, "echo": True, "logprobs": 1}
        replies = await asyncio.gather(*(self._completions(name, body) for name in self._served.names))
        found = {}
        for number, ids in enumerate(distinct):
            rows = [_given(choices[number], start, start + len(ids)) for choices in replies]
            found[ids] = float((np.logaddexp.reduce(np.asarray(rows), axis=0) - math.log(len(rows))).sum())
        return found

    async def _text(self, name: str, job: Job, **drawing: Any) -> Text:
        call = job.call
        body = {
            "prompt": [list(job.prompt)],
            "max_tokens": call.decoding.max_new_tokens,
            "stop_token_ids": sorted(call.decoding.ends),
            "logprobs": 1,
            "return_token_ids": True,
            **({"stop": call.body.stop} if call.body.stop else {}),
            **drawing,
        }
        [choice] = await self._completions(name, body)
        text, complete = cut(str(choice["text"]), call.body.stop), choice["finish_reason"] == "stop"
        tokenizer = self._served.prompter.tokenizer
        ids = choice.get("token_ids") or tokenizer(text, add_special_tokens=False)["input_ids"]
        if complete and not call.body.stop and not {*ids[-1:]} & call.decoding.ends:
            ids = [*ids, tokenizer.eos_token_id]
        own = [value for value in choice["logprobs"]["token_logprobs"] if value is not None]
        return Text(tuple(int(each) for each in ids), text, complete, math.fsum(own))

    async def _completions(self, name: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The choices of a completion, in order."""
        assert self._session is not None, "it has begun"
        reply = await _reply(self._session.post(f"{self._url}/v1/completions", json={"model": name, **body}))
        return sorted(reply["choices"], key=lambda choice: int(choice["index"]))

    def _about(self, call: Call, confidence: float | None, agents: int) -> dict[str, Any]:
        about = {"confidence": confidence, "calibrated": False, "agreement": None, "agents": agents}
        return about | {"abstained": False, "disagreement": None}


def _reason(text: Text) -> str:
    return "stop" if text.is_complete else "length"


def _drawing(call: Call, number: int) -> dict[str, Any]:
    """How an agent draws; the texts of one request by seeds of their own."""
    how = call.decoding
    if not how.do_sample:
        return {"temperature": 0}
    named = {"temperature": how.temperature, "top_p": how.top_p, "min_p": how.min_p, "seed": how.seed + number}
    return named | ({} if how.top_k is None else {"top_k": how.top_k})


def _given(choice: Mapping[str, Any], start: int, end: int) -> list[float]:
    """The log-probabilities of given tokens; of the first token of a text there is none."""
    found = (choice.get("logprobs") or {}).get("token_logprobs") or []
    values = found[max(1, start) : end]
    if len(found) < end or None in values:
        raise ApiProblem(502, "it gives no log-probabilities of a prompt", code="engine_error")
    return [float(value) for value in values]


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def _reply(asked: Any) -> dict[str, Any]:
    """The JSON of an answer.

    Raises:
        ApiProblem: the engine refuses; with its status and words.
    """
    async with asked as answer:
        if answer.status == 200:
            found: dict[str, Any] = await answer.json()
            return found
        said = (await answer.text())[:300]
        busy = answer.status == 429
        raise ApiProblem(
            429 if busy else 502,
            f"the engine answered {answer.status}: {said}",
            code="rate_limit_exceeded" if busy else "engine_error",
            retry_after=1 if busy else None,
        )
