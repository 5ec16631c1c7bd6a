"""Agents on another server, such as vLLM with LoRA models: they write their texts there, and the vote is taken here.

Each agent writes its own text, in K requests. For `rerank` and `weighted_vote`, K further requests ask for the
log-probabilities of every distinct text. The mean of the agents' probabilities of given tokens needs nothing else, so
the crowd's score of a text is exact. Choosing token by token would need K requests per token and the whole vocabulary,
and is not offered.

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
from ci_llm.crowd.detokenizer import cut
from ci_llm.crowd.generation import final_answers
from ci_llm.crowd.pretrained import open_wording
from ci_llm.errors import BadInput, CiLlmError
from ci_llm.serve import Options
from ci_llm.serve.app import Service
from ci_llm.serve.engine import Ended, Job, Metrics, Piece, about
from ci_llm.serve.request import BASE, ApiProblem, Served

#: The votes that are offered, the default first. The last needs the agents' texts only.
VOTES: Final = ("rerank", "weighted_vote", "majority")
#: What an answer raises that lacks a field, an element or a type of OpenAI's API.
_MALFORMED: Final = (LookupError, TypeError, ValueError, AttributeError)
_PATIENCE: Final = aiohttp.ClientTimeout(total=600, connect=10)
_STARTS: Final = aiohttp.ClientTimeout(total=60, connect=10)


@dataclass(frozen=True)
class Text:
    """The text that one agent wrote.

    Attributes:
        ids: its token ids, with the end token if it has one.
        is_complete: true if the text ended by itself or at a stop string, and not at a length limit.
        log_probability: the agent's own log-probability of the text, in nats.
    """

    ids: tuple[int, ...]
    text: str
    is_complete: bool
    log_probability: float

    def told(self, confidence: float | None, agents: int, answers: Sequence[str] | None = None) -> tuple[Piece, Ended]:
        """The events that report this text as the answer.

        Args:
            agents: how many agents wrote it.
        """
        reason = "stop" if self.is_complete else "length"
        return Piece(self.text), Ended(reason, len(self.ids), about(confidence, agents), answers)


def of_engine(options: Options) -> Service:
    """A service on the agents of the server at `options.engine`, which is first asked whether it can serve them.

    Raises:
        BadInput: the server lacks an agent, or cannot score given tokens. CiLlmError: it does not answer.
    """
    prompter, names = open_wording(options.run, options.base_model)
    base, limit = asyncio.run(_asked(options, names, prompter.ids("2 + 2?")))
    served = Served(
        prompter=prompter,
        names=names,
        crowd=options.name,
        context=min(options.within(limit), limit - 1),  # scoring a text asks for one token more
        vocabulary=len(prompter.tokenizer),
        ends=prompter.ends,
        choices=options.slots + options.queue,
        aggregators=VOTES,
        has_base=base is not None,
    )
    metrics = Metrics(options.name)
    return Service(served, RemoteAgents(options, served, base, metrics), metrics, options)


class EngineClient:
    """A client of the server that holds the agents, by OpenAI's API; it is made on the event loop."""

    def __init__(self, options: Options, timeout: aiohttp.ClientTimeout) -> None:
        self.url = (options.engine or "").rstrip("/")
        headers = {"Authorization": f"Bearer {options.engine_key}"} if options.engine_key is not None else {}
        self.session = aiohttp.ClientSession(headers=headers, timeout=timeout)

    async def ask(self, path: str, body: Any = None) -> list[dict[str, Any]]:
        """The models, or the choices of a completion in order.

        Raises:
            ApiProblem: the engine refuses, or does not answer as OpenAI's API does.
        """
        try:
            method, url = "GET" if body is None else "POST", f"{self.url}/v1/{path}"
            async with self.session.request(method, url, json=body) as answer:
                if answer.status == 200 and body is None:
                    return list((await answer.json())["data"])
                if answer.status == 200:
                    return sorted((await answer.json())["choices"], key=lambda choice: int(choice["index"]))
                said = f"the engine answered {answer.status}: {(await answer.text())[:300]}"
        except (aiohttp.ClientError, TimeoutError, *_MALFORMED) as error:
            raise _malformed(error) from error
        if answer.status == 429:
            raise ApiProblem(429, said, code="rate_limit_exceeded", retry_after=1)
        raise ApiProblem(502, said, code="engine_error")


async def _asked(options: Options, names: Sequence[str], prompt: Sequence[int]) -> tuple[str | None, int]:
    """The name of the base on the server, None if it has none, and how many tokens every agent reads at most."""
    engine = EngineClient(options, _STARTS)
    where = f"--engine {options.engine}"
    try:
        limits = {str(model["id"]): model.get("max_model_len") for model in await engine.ask("models")}
    except (ApiProblem, *_MALFORMED) as problem:
        hint = "start it first, and give its address; its key is in CI_LLM_ENGINE_API_KEY"
        raise CiLlmError(f"the engine does not list its models: {problem}", where=where, hint=hint) from problem
    else:
        if missing := [name for name in names if name not in limits]:
            hint = "vllm serve BASE --enable-lora --lora-modules agent0=... : ci-llm export writes it into README.md"
            raise BadInput(f"the engine has no model {', '.join(missing)}", where=where, hint=hint)
        body = {"model": names[0], "prompt": [prompt], "max_tokens": 1, "echo": True, "logprobs": 1}
        try:
            [choice] = await engine.ask("completions", body)
            _given(choice, 0, len(prompt))
        except (ApiProblem, *_MALFORMED) as problem:
            hint = "it must give log-probabilities of a prompt, as vLLM does"
            raise BadInput(f"the engine cannot serve a crowd: {problem}", where=where, hint=hint) from problem
    finally:
        await engine.session.close()
    others = [name for name in limits if name not in names]
    own = [int(limit) for name, limit in limits.items() if name in names and limit]
    return BASE if BASE in others else next(iter(others), None), min(own, default=1 << 12)


class RemoteAgents:
    """The writer of a `Service` whose agents are on another server.

    Args:
        base: the name of the base on that server; None if it is not served.
    """

    def __init__(self, options: Options, served: Served, base: str | None, metrics: Metrics) -> None:
        self._options = options
        self._served = served
        self._base = base
        self._metrics = metrics
        self._free = asyncio.Semaphore(options.slots)
        self._tasks = dict[Job, asyncio.Task[None]]()

    @property
    def is_ready(self) -> bool:
        """True if new texts are accepted."""
        return not self._engine.session.closed

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Open the connections; called on the event loop."""
        self._loop = loop
        self._engine = EngineClient(self._options, _PATIENCE)

    def submit(self, jobs: Sequence[Job]) -> None:
        """Start writing all of these texts, or refuse all.

        Raises:
            ApiProblem: there are too many, or they ask for log-probabilities.
        """
        body = jobs[0].call.body
        if body.echo or body.top is not None:
            what = "log-probabilities are the engine's: ask it for those of an agent"
            raise ApiProblem(400, what, "logprobs", "unsupported_parameter")
        if len(self._tasks) + len(jobs) > self._served.choices:
            raise ApiProblem(429, "too many texts wait already", code="rate_limit_exceeded", retry_after=1)
        for job in jobs:
            self._tasks[job] = task = asyncio.ensure_future(self._write(job))
            task.add_done_callback(partial(self._forget, job))
        self._count()

    def _forget(self, job: Job, task: asyncio.Task[None]) -> None:
        del self._tasks[job]
        if task.cancelled():
            self._metrics.ended(job.call.body.model, "abort")
        self._count()

    def _count(self) -> None:
        """Report to the metrics how many texts are being written and how many wait for a slot."""
        running = min(len(self._tasks), self._options.slots)
        self._metrics.load(running, len(self._tasks) - running)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Give up these texts and their requests to the engine."""
        for job in jobs:
            if task := self._tasks.get(job):
                task.cancel()

    def stop(self, bound_s: float) -> None:
        """Close the connections. Call it from another thread than the event loop's."""
        asyncio.run_coroutine_threadsafe(self._engine.session.close(), self._loop).result(bound_s)

    async def _write(self, job: Job) -> None:
        """Write the text of one job and report it, or the reason why there is none."""
        tell = job.call.out.put_nowait
        try:
            async with self._free:
                piece, ended = await (self._vote(job) if job.call.votes else self._one(job))
        except (ApiProblem, *_MALFORMED) as error:
            self._metrics.ended(job.call.body.model, "error")
            tell((job, error if isinstance(error, ApiProblem) else _malformed(error)))
        else:
            tell((job, piece))
            self._metrics.ended(job.call.body.model, ended.reason, prompt=len(job.prompt), new=ended.tokens)
            tell((job, ended))

    async def _one(self, job: Job) -> tuple[Piece, Ended]:
        """The text of one agent, or of the base; each of several texts of a request has a seed of its own."""
        call, how = job.call, job.call.decoding
        drawing: dict[str, Any] = {"temperature": 0}
        if how.do_sample:
            drawing = {"temperature": how.temperature, "top_p": how.top_p, "min_p": how.min_p}
            drawing |= {"seed": how.seed + job.number} | ({} if how.top_k is None else {"top_k": how.top_k})
        text = await self._text(str(self._base if call.body.model == BASE else call.body.model), job, **drawing)
        return text.told(math.exp(text.log_probability), agents=int(call.body.model != BASE))

    async def _vote(self, job: Job) -> tuple[Piece, Ended]:
        """The text that wins the vote of all agents."""
        call, names = job.call, self._served.names
        texts = await asyncio.gather(*(self._text(name, job, temperature=0) for name in names))
        together = None if call.decoding.aggregator == "majority" else await self._scored(job, texts)
        scores = [text.log_probability if together is None else together[text.ids] for text in texts]
        vote = find_vote(call.decoding.aggregator)
        assert vote is not None, "only votes are offered"
        wins = vote(final_answers([text.text for text in texts]), scores)
        answers = [text.text for text in texts] if call.own.include_agents else None
        return texts[wins].told(None if together is None else math.exp(scores[wins]), len(names), answers)

    async def _scored(self, job: Job, texts: Sequence[Text]) -> dict[tuple[int, ...], float]:
        """The crowd's log-probability of each distinct text: the sum over its tokens of the log of the agents' mean."""
        distinct = list(dict.fromkeys(text.ids for text in texts))
        start = len(job.prompt)
        body = {"prompt": [[*job.prompt, *ids] for ids in distinct], "max_tokens": 1, "echo": True, "logprobs": 1}
        replies = await asyncio.gather(
            *(self._engine.ask("completions", {"model": name, **body}) for name in self._served.names)
        )
        found = {}
        for number, ids in enumerate(distinct):
            rows = [_given(choices[number], start, start + len(ids)) for choices in replies]
            found[ids] = float((np.logaddexp.reduce(np.asarray(rows), axis=0) - math.log(len(rows))).sum())
        return found

    async def _text(self, name: str, job: Job, **drawing: Any) -> Text:
        """The text that the model `name` writes after the prompt of a job."""
        call = job.call
        body = {
            "model": name,
            "prompt": [list(job.prompt)],
            "max_tokens": call.decoding.max_new_tokens,
            "stop_token_ids": sorted(call.decoding.ends),
            "logprobs": 1,
            "return_token_ids": True,
            **({"stop": call.body.stop} if call.body.stop else {}),
            **({"ignore_eos": True} if call.body.ignore_eos else {}),
            **drawing,
        }
        [choice] = await self._engine.ask("completions", body)
        text = cut(str(choice["text"]), call.body.stop)
        complete = choice["finish_reason"] == "stop"
        tokenizer = self._served.prompter.tokenizer
        ids = choice.get("token_ids") or tokenizer(text, add_special_tokens=False)["input_ids"]
        if complete and not call.body.stop and not {*ids[-1:]} & call.decoding.ends:
            ids = [*ids, tokenizer.eos_token_id]
        own = [value for value in choice["logprobs"]["token_logprobs"] if value is not None]
        return Text(tuple(int(each) for each in ids), text, complete, math.fsum(own))


def _malformed(error: Exception) -> ApiProblem:
    what = f"the engine does not answer as OpenAI's API does ({type(error).__name__}: {error})"
    return ApiProblem(502, what, code="engine_error")


def _given(choice: Mapping[str, Any], start: int, end: int) -> list[float]:
    """The log-probabilities of the prompt's tokens `start` to `end`; the first token of a prompt has none.

    Raises:
        ApiProblem: the choice does not have them.
    """
    found = (choice.get("logprobs") or {}).get("token_logprobs") or []
    values = found[max(1, start) : end]
    if len(found) < end or None in values:
        raise ApiProblem(502, "it gives no log-probabilities of a prompt", code="engine_error")
    return [float(value) for value in values]
