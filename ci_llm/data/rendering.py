"""One rendering of a chat: its text, and which message wrote which part of it.

Where a loop of the template takes up a message, a note with its number goes into the text, and is taken out again. So
turns are found where the program writes them: texts that repeat, templates that look at the messages around, and
templates that write the results of tools into the turn of their caller cannot move them. Nothing else of the program
changes. A second rendering with all words masked proves it, and tells what the template leaves out.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Template, TemplateError, nodes
from jinja2.visitor import NodeTransformer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What a template may raise: it is a program that comes with the tokenizer.
FAILURES: Final = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
#: Stands around a note: no text has it, as Unicode gives it no character.
_NOTE: Final = "\ufdd0"
#: In place of each letter and figure of what is masked: the kinds of words that a template may leave out.
CONTENT, THOUGHTS, RESULT, SYSTEM, TOOLS = "\ue000\ue001\ue002\ue003\ue004"
#: The first of the characters for calls: each call of a message has its own.
_CALLS: Final = 0xE100
#: What templates look for in a text, which stays as it is.
_TAG: Final = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")
_WORD: Final = re.compile(r"\w")
#: Strings of this many characters are messages of a template, and not what it looks for.
_LONG: Final = 40
#: The keys of thoughts, by the templates that read them.
_OF_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning")
_WORDS: Final = {"role", "content"}
#: A template that shows what Transformers gives to a template.
_VIEW: Final = "{{ {'messages': messages, 'tools': tools} | tojson }}"


class _Turn(dict[str, Any]):
    """A message, which knows its number."""

    number: int


@dataclass(frozen=True)
class Run:
    """A part of the text from `begin` to `end`: the message that wrote it, and whether {% generation %} is around."""

    begin: int
    end: int
    message: int | None
    generated: bool


@dataclass(frozen=True)
class Rendering:
    """The text of a chat and its parts, in their order."""

    text: str
    runs: tuple[Run, ...]

    def of(self, message: int, *, generated: bool = False) -> list[Run]:
        """The parts that a message wrote; those inside of {% generation %} only, if that is asked."""
        return [run for run in self._of.get(message, ()) if run.generated or not generated]

    @cached_property
    def _of(self) -> Mapping[int | None, Sequence[Run]]:
        found = defaultdict[int | None, list[Run]](list)
        for run in self.runs:
            found[run.message].append(run)
        return found

    def said_by(self, message: int) -> str:
        return "".join(self.text[run.begin : run.end] for run in self.of(message))

    @property
    def after(self) -> str:
        """What follows the last message: the prompt for generation, where one is added."""
        return self.text[max((run.end for run in self.runs if run.message is not None), default=0) :]


@lru_cache(maxsize=16)
def _compiled(template: str) -> tuple[Template, bool, tuple[str, ...]]:
    """The template with its notes, whether it marks what is generated, and the tags and signs it looks for in texts."""
    from transformers.utils.chat_template_utils import _compile_jinja_template  # takes seconds: not for help alone

    environment = _compile_jinja_template(template).environment.overlay()  # the sandbox of Transformers
    tree, noting = environment.parse(template), _Noting()
    asking = tree.find_all((nodes.Compare, nodes.Call, nodes.Filter))
    words = {part.value for each in asking for part in each.find_all(nodes.Const) if isinstance(part.value, str)}
    marks = {word for word in words if word.strip() and not word.replace("_", "").isalnum() and len(word) < _LONG}
    noting.visit(tree)
    tree.set_environment(environment)
    code = environment.compile(tree)
    compiled = Template.from_code(environment, code, environment.make_globals(None))
    return compiled, noting.generations > 0, (*sorted({"<", *marks}),)


class ChatTemplate:
    """A template that says which message wrote what.

    Args:
        date: what its clock says; None: the time of the call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, date: datetime | None) -> None:
        self._tokenizer = tokenizer
        self._template, self.marks_answers, self.marks = _compiled(template)
        self._now = lambda form: (date or datetime.now()).strftime(form)

    def view(self, turns: Sequence[Mapping[str, Any]], tools: Sequence[Any]) -> dict[str, Any]:
        """The messages and tools as Transformers gives them to a template; it leaves words alone as they are."""
        if not tools and all(turn.keys() == _WORDS and isinstance(turn["content"], str) for turn in turns):
            return {"messages": turns, "tools": None}
        shown = self._tokenizer.apply_chat_template(
            list(turns), tools=list(tools) or None, chat_template=_VIEW, tokenize=False
        )
        seen: dict[str, Any] = json.loads(shown)
        return seen

    def render(self, view: Mapping[str, Any], *, add_generation_prompt: bool = False) -> Rendering:
        """The chat as Transformers renders it. It raises what a template may raise."""
        turns = []
        for number, message in enumerate(view["messages"]):
            turns.append(_Turn(message))
            turns[-1].number = number
        notes = _Notes()
        noted = self._template.render(
            **self._tokenizer.special_tokens_map,
            strftime_now=self._now,
            _note_taken=notes.taken,
            _note_set=notes.set,
            _note_left=notes.left,
            messages=turns,
            tools=view["tools"],
            documents=None,
            add_generation_prompt=add_generation_prompt,
        )
        return _read(noted)


class _Notes:
    """Writes the notes of one rendering. A loop is known by its number, as it may be in another one."""

    def __init__(self) -> None:
        self.bound = dict[int, int]()

    def taken(self, loop: int, item: Any) -> str:
        """A loop takes up something, which may be a message."""
        if isinstance(item, _Turn):
            self.bound[loop] = item.number
            return f"{_NOTE}{loop} {item.number}{_NOTE}"
        return self.left(loop)

    def set(self, loop: int, item: Any) -> str:
        """A loop over something else, such as numbers, takes up a message by its place."""
        return "" if loop in self.bound or not isinstance(item, _Turn) else self.taken(loop, item)

    def left(self, loop: int) -> str:
        return f"{_NOTE}{loop}{_NOTE}" if self.bound.pop(loop, None) is not None else ""


class _Noting(NodeTransformer):
    """Puts the notes into a template; a node is visited with the number of the loop that it is in."""

    def __init__(self) -> None:
        self.loops = self.generations = 0

    def visit_For(self, node: nodes.For, loop: int | None = None) -> Any:  # noqa: N802 - jinja2 calls it by the class
        if not (isinstance(node.target, nodes.Name) and _speaks(node)):
            return self.generic_visit(node, loop)
        self.loops += 1
        number = self.loops
        self.generic_visit(node, number)
        node.body.insert(0, _note(node, "_note_taken", number, node.target.name))
        return [node, _note(node, "_note_left", number)]

    def visit_Assign(self, node: nodes.Assign, loop: int | None = None) -> Any:  # noqa: N802
        self.generic_visit(node, loop)
        if not (loop and isinstance(node.target, nodes.Name)):
            return node
        return [node, _note(node, "_note_set", loop, node.target.name)]

    def visit_CallBlock(self, node: nodes.CallBlock, loop: int | None = None) -> Any:  # noqa: N802
        self.generic_visit(node, loop)
        if getattr(node.call.node, "name", "") == "_generation_support":
            self.generations += 1
            around = [nodes.Output([nodes.TemplateData(f"{_NOTE}{edge}{_NOTE}")], lineno=node.lineno) for edge in "+-"]
            node.body = [around[0], *node.body, around[1]]
        return node


def _speaks(loop: Any) -> bool:
    """True if a loop writes something: others only look at the messages, perhaps at all of them for each."""
    written = (part for output in loop.find_all(nodes.Output) for part in output.nodes)
    return any(not isinstance(part, nodes.TemplateData) or part.data.strip() for part in written)


def _note(at: Any, name: str, loop: int, item: str = "") -> Any:
    arguments = [nodes.Const(loop), *([nodes.Name(item, "load")] if item else [])]
    call = nodes.Call(nodes.Name(name, "load"), arguments, [], None, None)
    return nodes.Output([call]).set_lineno(at.lineno)


def _read(noted: str) -> Rendering:
    """Take the notes out of a text."""
    runs, parts = list[Run](), list[str]()
    speakers = list[tuple[int, int]]()
    generated = False
    at = 0
    for number, part in enumerate(noted.split(_NOTE)):
        if number % 2 == 0:
            if part:
                runs.append(Run(at, at + len(part), speakers[-1][1] if speakers else None, generated))
                parts.append(part)
                at += len(part)
        elif part in "+-":
            generated = part == "+"
        else:
            loop, *message = map(int, part.split())
            outer = [each[0] for each in speakers]
            del speakers[outer.index(loop) if loop in outer else len(outer) :]
            speakers += [(loop, each) for each in message]
    return Rendering("".join(parts), tuple(runs))


def mask_of_call(number: int) -> str:
    """The character in place of the letters of a message's call."""
    return chr(_CALLS + number)


def masked(view: Mapping[str, Any]) -> dict[str, Any]:
    """A chat of as many characters, in which every letter and figure says what kind of word it is of."""
    return {"messages": [*map(_masked, view["messages"])], "tools": _all(view["tools"], TOOLS)}


def _masked(message: Mapping[str, Any]) -> dict[str, Any]:
    kind = {"assistant": CONTENT, "tool": RESULT, "system": SYSTEM}.get(message["role"], "")
    kinds = dict.fromkeys(_OF_THOUGHTS, THOUGHTS) | {"content": kind}
    turn = {key: _all(value, kinds[key]) if kinds.get(key) else value for key, value in message.items()}
    if calls := message.get("tool_calls"):
        turn["tool_calls"] = [_all(call, mask_of_call(number)) for number, call in enumerate(calls)]
    return turn


#: What templates compare, or look up.
_KEPT: Final = ("type", "id", "required", "enum", "default")


def _all(value: Any, kind: str) -> Any:
    """Every text in a value masked, but keys, and what templates compare or look up."""
    if isinstance(value, str):
        return "".join(part if n % 2 else _WORD.sub(kind, part) for n, part in enumerate(_TAG.split(value)))
    if isinstance(value, Mapping):
        return {key: part if key in _KEPT else _all(part, kind) for key, part in value.items()}
    return [_all(part, kind) for part in value] if isinstance(value, list) else value
