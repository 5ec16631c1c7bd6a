"""Answers in OpenAI's form: whole, or as server-sent events while their texts grow."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

from ci_llm.crowd.uncertainty import agreement
from ci_llm.serve.engine import Ended, Job, Piece, TokenLine
from ci_llm.serve.request import ApiProblem, Call, Served

DONE: Final = "data: [DONE]\n\n"
_LOWEST: Final = -9999.0  # JSON has no -inf; OpenAI's number for it


@dataclass
class Choice:
    """One answer of a request, as far as it is written; `offset` is where the text of the next token begins."""

    index: int
    job: Job
    text: str = ""
    offset: int = 0
    lines: list[TokenLine] = field(default_factory=list)
    ended: Ended | None = None


class Answer:
    """The answer to one call.

    Args:
        jobs: those that write the choices.
    """

    def __init__(self, call: Call, jobs: Sequence[Job], served: Served) -> None:
        self._call = call
        self._tokenizer = served.prompter.tokenizer
        self._names = served.names
        self.choices = [Choice(index, job) for index, job in enumerate(jobs)]

    async def whole(self) -> dict[str, Any]:
        """Wait for the whole answer and return it.

        Raises:
            ApiProblem: a text could not be written.
        """
        async for _ in self._events():
            pass
        return self._head("chat.completion") | {"choices": list(map(self._whole, self.choices)), "usage": self.usage}

    async def stream(self) -> AsyncIterator[str]:
        """Yield chunks as server-sent events; an error is the last chunk."""
        body = self._call.body
        if self._call.is_chat:
            for choice in self.choices:
                yield self._chunk(choice, {"role": "assistant", "content": ""})
        try:
            async for choice, event in self._events():
                if isinstance(event, Piece):
                    yield self._chunk(choice, {"content": event.text}, event.tokens)
                else:
                    yield self._chunk(choice, {})
        except ApiProblem as problem:
            yield _event({"error": problem.error})
            return
        if body.stream_options.include_usage:
            yield _event(self._head("chat.completion.chunk") | {"choices": [], "usage": self.usage})
        yield DONE

    @property
    def is_whole(self) -> bool:
        return all(choice.ended is not None for choice in self.choices)

    @property
    def usage(self) -> dict[str, int]:
        prompt = sum(map(len, self._call.prompts))
        new = sum(choice.ended.tokens for choice in self.choices if choice.ended)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    async def _events(self) -> AsyncIterator[tuple[Choice, Piece | Ended]]:
        """Yield pieces of all choices as they come, and their ends."""
        writing = {choice.job: choice for choice in self.choices}
        while writing:
            job, event = await self._call.out.get()
            if isinstance(event, ApiProblem):
                raise event
            choice = writing[job]
            if isinstance(event, Piece):
                choice.text += event.text
                choice.lines += event.tokens
            else:
                choice.ended = event
                del writing[job]
            yield choice, event

    def _whole(self, choice: Choice) -> dict[str, Any]:
        if self._call.is_chat:
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            return self._choice(choice, {"message": message}, choice.lines)
        ids = {"token_ids": [line.id for line in choice.lines]} if self._call.body.return_token_ids else {}
        return self._choice(choice, {"text": choice.text, **ids}, choice.lines)

    def _chunk(self, choice: Choice, delta: dict[str, str], lines: Sequence[TokenLine] = ()) -> str:
        said = {"delta": delta} if self._call.is_chat else {"text": delta.get("content", "")}
        found = self._head("chat.completion.chunk") | {"choices": [self._choice(choice, said, lines)]}
        return _event(found | ({"usage": None} if self._call.body.stream_options.include_usage else {}))

    def _choice(self, choice: Choice, said: Mapping[str, object], lines: Sequence[TokenLine]) -> dict[str, Any]:
        """The fields of a choice; once it has ended, also the reason and the field `ci_llm`."""
        found = {"index": choice.index, **said, "logprobs": self._logprobs(choice, lines), "finish_reason": None}
        ended = choice.ended
        if ended is None:
            return found
        own = dict(ended.own)
        if ended.answers is not None:
            own["agreement"] = None if own["abstained"] else agreement(choice.text, ended.answers)
            own["answers"] = dict(zip(self._names, ended.answers, strict=True))
        return found | {"finish_reason": ended.reason, "ci_llm": own}

    def _head(self, chat_kind: str) -> dict[str, Any]:
        call = self._call
        kind = chat_kind if call.is_chat else "text_completion"
        return {"id": call.id, "object": kind, "created": call.created, "model": call.body.model}

    def _logprobs(self, choice: Choice, lines: Sequence[TokenLine]) -> dict[str, Any] | None:
        if self._call.body.top is None or not lines:
            return None
        if self._call.is_chat:
            content = [
                self._token(line.id, line.logprob) | {"top_logprobs": [self._token(*each) for each in line.top]}
                for line in lines
            ]
            return {"content": content, "refusal": None}
        texts = [self._decoded(line.id) for line in lines]
        *offsets, choice.offset = accumulate(map(len, texts), initial=choice.offset)
        tops = [{self._decoded(token): max(log, _LOWEST) for token, log in line.top} for line in lines]
        return {
            "tokens": texts,
            "token_logprobs": [None if line.logprob is None else max(line.logprob, _LOWEST) for line in lines],
            "top_logprobs": [None if line.logprob is None else top for line, top in zip(lines, tops, strict=True)],
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        text = self._decoded(token)
        return {"token": text, "logprob": max(logprob or 0.0, _LOWEST), "bytes": list(text.encode())}

    def _decoded(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))


def _event(chunk: Mapping[str, object]) -> str:
    return f"data: {json.dumps(chunk, separators=(',', ':'), ensure_ascii=False)}\n\n"
