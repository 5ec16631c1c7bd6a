"""Where the answers of the assistant are in a rendered chat, from the end of the prompt to the end of the turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

from ci_llm.data import rendering
from ci_llm.data.rendering import FAILURES, ChatTemplate, Rendering, mask_of_call, masked
from ci_llm.data.rows import Chat, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
#: About a chat whose prompt opens a thought that the answer does not have, or closes one that it has; and what its
#: template leaves out.
Remark = Literal["without thoughts", "with thoughts", "thoughts", "system message", "descriptions of tools"]
View = Mapping[str, Any]

#: Tags, words and single spaces: what a template writes it writes whole.
_PIECE: Final = re.compile(r"<[^<>]*>|\s|[^<\s]+|<")

#: Small chats, to see what a template does.
_ASKED, _ANSWER = Message("user", "Q"), Message("assistant", "A")
#: A call of a tool.
CALL: Final = {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": {"name": "it"}}}
_CALLING = Message("assistant", "", (CALL,))
_RESULT = Message("tool", "R", more={"name": "find", "tool_call_id": "call00001"})


class RefusedRowError(Exception):
    """The row cannot be encoded: the chat template fails on it or leaves something out; the text says why."""


@dataclass(frozen=True)
class Placed:
    """A rendered chat.

    Attributes:
        answers: the parts of the text that each message of the assistant is learned by, by its number.
        prompt: where the prompt for the last message ends, if that is the assistant's.
    """

    text: str
    answers: Mapping[int, Sequence[Span]]
    prompt: int | None = None
    remarks: tuple[Remark, ...] = ()


class Turns:
    """Finds the answers of chats.

    Args:
        template: the chat template in force.
        date: what the template's clock says; None: the time of the call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, date: datetime | None = None) -> None:
        self._tokenizer, self._text, self._date = tokenizer, template, date
        self._known, self._asks = dict[int, tuple[Remark, ...]](), dict[int, str]()
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        ends = "|".join(map(re.escape, sorted(special, reverse=True))) or "(?!)"  # the longer of two that begin alike
        self._ends_turn, self._follows = re.compile(rf"(?:{ends})\Z"), re.compile(rf"\s*(?:{ends})")

    def text(self, chat: Chat) -> str:
        """The chat by the template.

        Raises:
            RefusedRowError: the template fails.
        """
        return self._render(self._view(chat)).text

    def place(self, chat: Chat) -> Placed:
        """The chat by the template, and where its answers are.

        Raises:
            RefusedRowError: the template fails, or leaves something out.
        """
        view = self._view(chat)
        whole = self._render(view)
        kind = self._kind(view)
        remarks = self._require_shown(view, kind)
        answers = dict[int, Sequence[Span]]()
        text, prompt = whole.text, None
        for number, message in enumerate(chat.messages):
            if message.role != "assistant":
                continue
            start = _start(whole, number)
            is_last = number == len(chat.messages) - 1
            after_tool = number > 0 and chat.messages[number - 1].role == "tool"
            asked = self._asked(kind, view, whole.text[:start]) if is_last else self._usual[after_tool]
            asked, shared = self._header(asked, text[start:])
            begin = start + shared
            if is_last:
                prompt = begin
                if shared < len(asked):
                    remarks = (*remarks, "with thoughts" if "</" in asked else "without thoughts")
            runs = whole.of(number, generated=self._template.marks_answers)
            spans = [(max(run.begin, begin), run.end) for run in runs if run.end > begin]
            if spans:
                end, closing = self._end(message, text, spans[-1], is_last=is_last)
                spans[-1] = (spans[-1][0], end)
                text += closing
            answers[number] = spans
        return Placed(text, answers, prompt, remarks)

    def prompt(self, chat: Chat, *, thinks: bool | None = None) -> str:
        """The text that an answer to this chat follows.

        Args:
            thinks: end it where answers with thoughts, or without them, begin to differ from what the template opens;
                None: all that the template opens.

        Raises:
            RefusedRowError: the template fails.
        """
        answer = replace(_ANSWER, content="<think>\nA\n</think>\n\nA") if thinks else _ANSWER
        view = self._view(replace(chat, messages=(*chat.messages, answer)))
        whole = self._render(view)
        start = _start(whole, len(chat.messages))
        asked, shared = self._header(self._proved(view, whole.text[:start]), whole.text[start:])
        return whole.text[:start] + (asked if thinks is None else asked[:shared])

    def _end(self, message: Message, text: str, span: Span, *, is_last: bool) -> tuple[int, str]:
        """The end of the turn whose last part this is, and what the template leaves out there.

        The end of a turn may be a special token at its end, or one that belongs to the next turn, as in GLM.
        """
        begin, end = span
        written = text[begin:end].rstrip()
        if self._ends_turn.search(written):
            return begin + len(written), ""
        said = message.content.rstrip()
        found = text.rfind(said, begin, end) if said and not message.tool_calls else -1
        last = begin + len(written) if found < 0 else found + len(said)
        if found >= 0 and text.startswith(space := message.content[len(said) :], last):
            last = min(end, last + len(space))
        if text[last:end].strip():
            return last, ""
        if follows := self._follows.match(text, end):
            return follows.end(), ""
        closing = self._closing[bool(message.tool_calls)] if is_last and not text[end:] else ""
        return (end + len(closing), closing) if closing else (last, "")

    def _probed(self, *messages: Message, asks: bool = False) -> Rendering | None:
        """A small chat by the template, which shows what it does; None if it shows no such chat."""
        try:
            return self._render(self._view(Chat(messages)), add_generation_prompt=asks)
        except RefusedRowError:
            return None

    @cached_property
    def _closing(self) -> Sequence[str]:
        """The special token that follows an answer, and a call, where the template leaves the last one open."""
        found = []
        for probe in (self._probed(_ASKED, _ANSWER, _ASKED), self._probed(_ASKED, _CALLING, _RESULT)):
            runs = probe.of(1) if probe else []
            end = self._follows.match(probe.text, runs[-1].end) if probe and runs else None
            found.append(end.group() if end else "")
        return found

    @cached_property
    def _usual(self) -> Sequence[str]:
        """What the template adds for generation, after a question and after the result of a tool."""
        probes = self._probed(_ASKED, asks=True), self._probed(_ASKED, _CALLING, _RESULT, asks=True)
        return [probe.after if probe else "" for probe in probes]

    def _header(self, asked: str, written: str) -> tuple[str, int]:
        """What the template adds for generation, and how much of it the turn begins with.

        Some add nothing after the result of a tool, and write a header there nevertheless.
        """
        usual = self._usual[False]
        shared, as_usual = _shared(asked, written), _shared(usual, written)
        return (usual, as_usual) if as_usual > shared else (asked, shared)

    def _asked(self, kind: int, view: View, given: str) -> str:
        """What the template adds for generation to the messages before the last one; chats alike are proved once."""
        if kind not in self._asks:
            self._asks[kind] = self._proved(view, given)
        return self._asks[kind]

    def _proved(self, view: View, given: str) -> str:
        """What is added to the messages before the last one, whose text is what the whole chat begins with.

        Templates such as that of gpt-oss show the thoughts before a call until an answer follows.
        """
        before = view["messages"][:-1]
        if not before:
            return ""
        for find in (list, _bare):
            asked = self._render({**view, "messages": find(before)}, add_generation_prompt=True)
            if asked.text.removesuffix(asked.after) == given:
                return asked.after
        raise RefusedRowError(
            "the prompt it makes for an answer is not what precedes the answer in the whole chat "
            f"(prompt ends {asked.text[-40:]!r})"
        )

    def _require_shown(self, view: View, kind: int) -> tuple[Remark, ...]:
        """What the template leaves out of chats of this kind; they are looked at once.

        Raises:
            RefusedRowError: an answer, a call or a result: it would teach answers to what it leaves out, or empty ones.
        """
        if kind not in self._known:
            self._known[kind] = self._left_out(masked(view))
        return self._known[kind]

    def _left_out(self, hidden: View) -> tuple[Remark, ...]:
        proof = self._render(hidden)
        for number, message in enumerate(hidden["messages"]):
            said, calls = proof.said_by(number), message.get("tool_calls") or []
            if message["role"] == "assistant" and not calls and not proof.of(number):
                raise RefusedRowError("it leaves out what the assistant says")
            if rendering.CONTENT in str(message.get("content")) and rendering.CONTENT not in said and not calls:
                raise RefusedRowError("it leaves out what the assistant says")
            for place, call in enumerate(calls):
                if mask_of_call(place) in json.dumps(call, ensure_ascii=False) and mask_of_call(place) not in said:
                    raise RefusedRowError(f"it leaves out {'the calls of tools' if place == 0 else 'all but one call'}")
        everything = json.dumps(hidden, ensure_ascii=False)
        lacks = {mask for mask in _PARTS if mask in everything and mask not in proof.text}
        if rendering.RESULT in lacks:
            raise RefusedRowError("it leaves out the results of tools")
        return tuple(what for mask, what in _PARTS.items() if mask in lacks and what)

    def _kind(self, view: View) -> int:
        """What the template may look at to decide what it shows of a chat, and how."""
        found: list[object] = [bool(view["tools"])]
        for message in view["messages"]:
            content, calls = message.get("content") or "", len(message.get("tool_calls") or ())
            said = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
            words = [mark in said for mark in self._template.marks]
            found += [message["role"], bool(said.strip()), said.strip() == said, *words, calls]
            found += [key for key, part in message.items() if part]
        return hash((*found,))

    @cached_property
    def _template(self) -> ChatTemplate:
        try:
            return ChatTemplate(self._tokenizer, self._text, self._date)
        except FAILURES as error:
            raise RefusedRowError(f"it fails: {error}") from error

    def _render(self, view: View, *, add_generation_prompt: bool = False) -> Rendering:
        try:
            return self._template.render(view, add_generation_prompt=add_generation_prompt)
        except FAILURES as error:
            raise RefusedRowError(f"it fails: {error}") from error

    def _view(self, chat: Chat) -> View:
        """The chat as this template reads it."""
        return self._seen(chat, in_parts=self._wants_parts, calls_as_text=chat.uses_tools and self._wants_text)

    def _seen(self, chat: Chat, *, in_parts: bool = False, calls_as_text: bool = False) -> View:
        turns = [message.as_turn() for message in chat.messages]
        for turn in turns:
            if in_parts:
                turn["content"] = [{"type": "text", "text": turn["content"]}]
            if calls_as_text and "tool_calls" in turn:
                turn["tool_calls"] = [*map(_with_text, turn["tool_calls"])]
        try:
            return self._template.view(turns, chat.tools)
        except FAILURES as error:
            raise RefusedRowError(f"it fails: {error}") from error

    @cached_property
    def _wants_parts(self) -> bool:
        """True if content has to be a list of parts, as templates for pictures have it."""
        return self._wants(Chat((_ASKED, _ANSWER)), in_parts=True)

    @cached_property
    def _wants_text(self) -> bool:
        """True if the arguments of calls have to be text, as in DeepSeek's."""
        return self._wants(Chat((_ASKED, _CALLING, _RESULT, _ANSWER)), calls_as_text=True)

    def _wants(self, probe: Chat, **how: bool) -> bool:
        """True if the template shows a small chat in this way, and not as it is."""
        for options, wanted in ({}, False), (how, True):
            with suppress(RefusedRowError):
                seen = self._seen(probe, **options)
                self._require_shown(seen, self._kind(seen))
                return wanted
        return False


#: Parts of a chat that are somewhere in its text.
_PARTS: Final[Mapping[str, Remark | None]] = {
    rendering.RESULT: None,
    rendering.THOUGHTS: "thoughts",
    rendering.SYSTEM: "system message",
    rendering.TOOLS: "descriptions of tools",
}


def _start(whole: Rendering, number: int) -> int:
    runs = whole.of(number)
    if not runs:
        raise RefusedRowError("it leaves out what the assistant says")
    return runs[0].begin


def _bare(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages without what a template may show of an answer until another answer follows."""
    answers = ("role", "content"), ("role", "tool_calls")
    return [
        {key: message[key] for key in answers["tool_calls" in message] if key in message}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]


def _shared(asked: str, written: str) -> int:
    """The characters of a prompt that a turn begins with: whole pieces, so that words that begin alike stay whole."""
    if written.startswith(asked):
        return len(asked)
    shared = 0
    for piece in _PIECE.finditer(asked):
        if not written.startswith(piece.group(), piece.start()):
            break
        shared = piece.end()
    return shared


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JSON."""
    function, arguments = call["function"], call["function"]["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}
