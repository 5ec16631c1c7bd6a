"""Answers in OpenAI's form: whole, or as server-sent events while their texts grow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from transformers import PreTrainedTokenizerBase

from ci_llm.crowd.answers import agreement
from ci_llm.serve.body import CompletionBody
from ci_llm.serve.call import Call
from ci_llm.serve.jobs import Ended, Job, Piece, TokenLine
from ci_llm.serve.problem import ApiProblem

DONE: Final = "data: [DONE]\n\n"
_LOWEST: Final = -9999.0  # JSON has no -inf; OpenAI's number for it


@dataclass
class Choice:
    """One answer of a request: what has come of it."""

    index: int
    jobs: Sequence[Job]
    text: str = ""
    lines: list[TokenLine] = field(default_factory=list)
    ended: Ended | None = None
    answers: Sequence[str] | None = None

    @property
    def new_tokens(self) -> int:
        return self.ended.tokens if self.ended else 0


class Answer:
    """The answer to one call.

    Args:
        groups: for each choice the job that writes it, then that of the agents beside it.
        names: of the agents.
    """

    def __init__(
        self, call: Call, groups: Sequence[Sequence[Job]], tokenizer: PreTrainedTokenizerBase, names: Sequence[str]
    ) -> None:
        self._call, self._tokenizer, self._names = call, tokenizer, names
        self.choices = [Choice(index, jobs) for index, jobs in enumerate(groups)]

    async def whole(self) -> dict[str, Any]:
        """The answer when all of it is there.

        Raises:
            ApiProblem: a text could not be written.
        """
        async for _ in self._events():
            pass
        return self._head("chat.completion" if self._call.is_chat else "text_completion") | {
            "choices": [self._whole(choice) for choice in self.choices],
            "usage": self.usage,
        }

    async def stream(self) -> AsyncIterator[str]:
        """Chunks as lines of server-sent events; an error in their midst is a chunk of its own, and the last."""
        call = self._call
        if call.is_chat:
            for choice in self.choices:
                yield self._chunk(choice.index, {"role": "assistant", "content": ""})
        try:
            async for choice, event in self._events():
                if isinstance(event, Piece):
                    yield self._chunk(choice.index, event.text, lines=event.tokens)
                else:
                    yield self._chunk(choice.index, "", ended=choice)
        except ApiProblem as problem:
            yield _event({"error": problem.error})
            return
        if call.include_usage:
            yield _event(self._head(self._chunk_kind) | {"choices": [], "usage": self.usage})
        yield DONE

    @property
    def is_whole(self) -> bool:
        return all(choice.ended is not None for choice in self.choices)

    @property
    def usage(self) -> dict[str, int]:
        prompt, new = sum(map(len, self._call.prompts)), sum(choice.new_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    async def _events(self) -> AsyncIterator[tuple[Choice, Piece | Ended]]:
        """Pieces of all choices as they come, and the end of each once the agents beside it have answered too."""
        arrived: asyncio.Queue[tuple[Choice, Piece | Ended | ApiProblem]] = asyncio.Queue()
        beside: dict[Job, asyncio.Task[Any]] = {}

        async def forward(choice: Choice) -> None:
            own, *agents = choice.jobs
            while not isinstance(event := await own.out.get(), Ended | ApiProblem):
                arrived.put_nowait((choice, event))
            if agents and isinstance(event, Ended):
                [job] = agents
                beside.setdefault(job, asyncio.ensure_future(job.out.get()))
                found = await asyncio.shield(beside[job])
                choice.answers = found.answers if isinstance(found, Ended) else None
                event = found if isinstance(found, ApiProblem) else event
            arrived.put_nowait((choice, event))

        tasks = [asyncio.ensure_future(forward(choice)) for choice in self.choices]
        try:
            left = len(tasks)
            while left:
                choice, event = await arrived.get()
                if isinstance(event, ApiProblem):
                    raise event
                if isinstance(event, Piece):
                    choice.text += event.text
                    choice.lines += event.tokens
                else:
                    choice.ended, left = event, left - 1
                    choice.answers = event.answers if choice.answers is None else choice.answers
                yield choice, event
        finally:
            for task in (*tasks, *beside.values()):
                task.cancel()

    def _whole(self, choice: Choice) -> dict[str, Any]:
        assert choice.ended is not None, "all have ended"
        written: dict[str, Any] = {"text": choice.text}
        if self._call.is_chat:
            written = {"message": {"role": "assistant", "content": choice.text, "refusal": None}}
        elif isinstance(self._call.body, CompletionBody) and self._call.body.return_token_ids:
            written["token_ids"] = [line.id for line in choice.lines]
        return {
            "index": choice.index,
            **written,
            "logprobs": self._logprobs(choice.lines),
            "finish_reason": choice.ended.reason,
            "ci_llm": self._own(choice),
        }

    def _own(self, choice: Choice) -> dict[str, Any]:
        assert choice.ended is not None, "it has ended"
        own, answers = choice.ended.own, choice.answers
        if answers is None:
            return own
        agreed = None if own["abstained"] else agreement(choice.text, answers)
        return own | {"agreement": agreed, "answers": dict(zip(self._names, answers, strict=True))}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._call.is_chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        call = self._call
        return {"id": call.id, "object": kind, "created": call.created, "model": call.model}

    def _chunk(
        self,
        index: int,
        said: str | dict[str, str],
        *,
        lines: Sequence[TokenLine] = (),
        ended: Choice | None = None,
    ) -> str:
        choice: dict[str, Any] = {"index": index}
        if self._call.is_chat:
            choice["delta"] = said if isinstance(said, dict) else {"content": said} if ended is None else {}
        else:
            choice["text"] = said
        choice["logprobs"] = self._logprobs(lines) if lines else None
        choice["finish_reason"] = ended.ended.reason if ended and ended.ended else None
        if ended is not None:
            choice["ci_llm"] = self._own(ended)
        usage = {"usage": None} if self._call.include_usage else {}
        return _event(self._head(self._chunk_kind) | {"choices": [choice]} | usage)

    def _logprobs(self, lines: Sequence[TokenLine]) -> dict[str, Any] | None:
        if self._call.logprobs is None:
            return None
        if self._call.is_chat:
            content = [
                self._token(line.id, line.logprob) | {"top_logprobs": [self._token(*each) for each in line.top]}
                for line in lines
            ]
            return {"content": content, "refusal": None}
        texts = [self._decoded(line.id) for line in lines]
        return {
            "tokens": texts,
            "token_logprobs": [None if line.logprob is None else max(line.logprob, _LOWEST) for line in lines],
            "top_logprobs": [
                {self._decoded(t): max(p, _LOWEST) for t, p in line.top} if line.logprob is not None else None
                for line in lines
            ],
            "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
        }

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._decoded(token)
        return {"token": text, "logprob": max(logprob or 0.0, _LOWEST), "bytes": list(text.encode())}

    def _decoded(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk, separators=(',', ':'), ensure_ascii=False)}\n\n"
