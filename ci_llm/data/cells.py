"""Cells of a data set as text, numbers, messages of a chat, and descriptions of tools.

Messages may be under OpenAI's or ShareGPT's keys, with content in parts, as JSON in a string, and with calls of tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ci_llm.data.rows import Message, RawRow, from_json, without_nothing

#: Names of speakers, as in ShareGPT and its relatives, and the roles that chat templates know.
ROLES: Final[Mapping[str, str]] = {
    "human": "user",
    "ai": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
} | {role: role for role in ("user", "assistant", "system", "tool")}

#: Speakers of ShareGPT whose words are a call of a tool, as JSON.
_CALLERS: Final = ("function_call", "tool_call")

#: Keys by which an answer is marked as not to be learned, by 0 or false: OpenAI's, Axolotl's, ms-swift's and
#: LLaMA-Factory's.
_MARKS: Final = ("weight", "train", "training", "loss", "loss_weight")
#: What a mark says; a column of Arrow or CSV may hold nothing but text.
_SAYS: Final[Mapping[Any, bool]] = dict.fromkeys((1, "1", "1.0", "true"), True) | dict.fromkeys(
    (0, "0", "0.0", "false"), False
)
#: Names of other keys that may be such a mark, perhaps for a part of an answer.
_LIKE_MARKS: Final = re.compile("train|loss|learn|weight|mask|ignore", re.IGNORECASE)
#: Keys of an answer that may be false, and mark nothing: of prompts that an API continues, and of WildChat.
_NO_MARKS: Final = ("prefix", "partial", "redacted", "toxic")
#: Keys that are read here; all others are for the chat template.
_READ: Final = {"role", "from", "content", "value", "tool_calls", "function_call", *_MARKS}


#: Keys of a message that belong to what is said, and that no template is given.
_OF_TURNS: Final = re.compile("(image|audio|video|document|file|attachment|tool)s?")


def text_of(value: Any) -> str:
    """A cell as text: numbers as they print, the text parts of a list of parts, and "" for nothing."""
    if value is None:
        return ""
    if isinstance(value, str | int | float):
        return str(value)
    parts = [part for part in value if isinstance(part, Mapping) and "type" in part] if isinstance(value, list) else []
    kinds = dict.fromkeys(part["type"] for part in parts)
    if kinds.keys() - {"text"}:
        raise ValueError(f"a message has parts of the types {', '.join(kinds)}; only text is learned here")
    if isinstance(value, list) and len(parts) == len(value):
        return "".join(map(_text_of_part, parts))
    raise ValueError(f"expected text, found {type(value).__name__}: {str(value)[:60]}")


def _text_of_part(part: RawRow) -> str:
    texts = {text_of(part[key]) for key in ("text", "value") if part.get(key) is not None}
    if len(texts) != 1:
        raise ValueError(
            f'expected one text in a part, as in {{"type": "text", "text": "..."}}, found {str(part)[:60]}'
        )
    return texts.pop()


def is_unicode(value: Any) -> bool:
    """True if all text of a value can be written: JSON may hold half a character, a lone surrogate."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def numbers_of(value: Any) -> list[int] | None:
    """A cell as whole numbers, or as true and false: a list of them, or the JSON of one; None for nothing."""
    value = from_json(value)
    if value is not None and not (isinstance(value, list) and {int, bool}.issuperset(map(type, value))):
        raise ValueError(f"expected a list of whole numbers, found {str(value)[:60]}")
    return value


def messages_of(value: Any) -> tuple[Message, ...]:
    """A cell as messages: a list of them, or the JSON of one."""
    value = from_json(value)
    if value is not None and not isinstance(value, list):
        is_list = isinstance(value, str) and value.lstrip().startswith("[")
        what = f"a text that is not JSON: {value[:60]}" if is_list else type(value).__name__
        raise ValueError(f"expected a list of messages, found {what}")
    return tuple(_message(message) for message in value or ())


def tools_of(value: Any) -> tuple[Any, ...]:
    """A cell as descriptions of tools: a list of them, or the JSON of one."""
    value = without_nothing(from_json(value)) or []
    if not isinstance(value, list):
        raise ValueError(f"expected a list of tools, found {type(value).__name__}")
    return tuple(map(from_json, value))


def _message(raw: Any) -> Message:
    if not isinstance(raw, Mapping):
        raise ValueError(f"expected a message with role and content, found {str(raw)[:60]!r}")
    raw = _given(raw)  # Arrow adds keys of other rows
    role = text_of(raw.get("role") or raw.get("from"))
    if not role:
        raise ValueError(f"a message has no role; its keys are {', '.join(raw)}")
    content = raw.get("content", raw.get("value"))
    calls = raw.get("tool_calls") or ([raw["function_call"]] if raw.get("function_call") else [])
    if role in _CALLERS:
        calls, content = content, None
    if content is None and not calls and "text" in raw:
        raise ValueError("a message has text in place of content, which no chat template reads; call it content")
    kind = ROLES.get(role.lower(), role)
    others = sorted(set(raw) - _READ)  # sorted: the same row in another file has the same fingerprint
    more = {key: raw[key] for key in others if isinstance(raw[key], str | int | float)}
    if odd := [key for key in others if _OF_TURNS.fullmatch(key) and raw[key] and key not in more]:
        raise ValueError(f"a message has {odd[0]}, and only its text is read here; write it into the content")
    learned = kind != "assistant" or _is_learned(raw, others)
    calls = from_json(calls) or []
    return Message(
        kind, text_of(content), tuple(map(_call, calls if isinstance(calls, list) else [calls])), more, learned
    )


def _is_learned(raw: RawRow, others: Iterable[str]) -> bool:
    """True if no mark of an answer says no.

    Args:
        others: the keys that are not read.
    """
    for key in others:
        if _LIKE_MARKS.search(key) or (raw[key] is False and key not in _NO_MARKS):
            raise ValueError(
                f"an answer has {key} {str(raw[key])[:40]!r}, which may mark it as not to be learned; the marks are"
                f" {', '.join(_MARKS)}, by true or false: write one of them, or leave {key} out"
            )
    for key in (key for key in _MARKS if key in raw):
        mark = raw[key].strip().lower() if isinstance(raw[key], str) else raw[key]
        if not isinstance(mark, str | int | float) or mark not in _SAYS:
            raise ValueError(f"an answer has {key} {str(raw[key])[:40]!r}; a mark is 1 or 0, true or false")
        if not _SAYS[mark]:
            return False
    return True


def _call(raw: Any) -> dict[str, Any]:
    """A call of a tool as chat templates want it: a function with a name and arguments that are not a JSON string."""
    call = _given(from_json(raw))
    function = _given(call.get("function", call))
    if "name" not in function:
        raise ValueError(f"expected a call of a tool with a name, found {str(raw)[:60]!r}")
    given = from_json(function.get("arguments"))
    empty = given is None or (isinstance(given, str) and given.strip() in ("", "null"))
    called = {"name": function["name"], "arguments": {} if empty else given}
    return {**({"id": call["id"]} if "id" in call else {}), "type": "function", "function": called}


def _given(value: Any) -> RawRow:
    """An object without its keys that hold nothing; an empty one for anything else."""
    return {key: part for key, part in value.items() if part is not None} if isinstance(value, Mapping) else {}
