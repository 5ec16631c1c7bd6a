"""Cells as text, numbers and messages: OpenAI's and ShareGPT's keys, content in parts, JSON strings, calls of tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from ci_llm.data.rows import Message

#: Names of speakers, as in ShareGPT and its relatives, and the roles that chat templates know.
ROLES: Final[Mapping[str, str]] = {
    "human": "user",
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

#: Keys by which an answer is marked as not to be learned, by 0 or false: OpenAI's, and Axolotl's.
_MARKS: Final = ("weight", "train", "training")
#: Keys that are read here; all others are for the chat template.
_READ: Final = {"role", "from", "content", "value", "tool_calls", "function_call", *_MARKS}


def text_of(value: Any) -> str:
    """A cell as text: numbers as they print, the text parts of a list of parts, and "" for nothing."""
    if value is None:
        return ""
    if isinstance(value, str | int | float):
        return str(value)
    if isinstance(value, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in value):
        return "".join(text_of(part.get("text")) for part in value)
    raise ValueError(f"expected text, found {type(value).__name__}: {str(value)[:60]}")


def numbers_of(value: Any) -> list[int] | None:
    """A cell as whole numbers, or as true and false: a list of them, or the JSON of one; None for nothing."""
    value = _from_json(value)
    if value is not None and not (isinstance(value, list) and {int, bool}.issuperset(map(type, value))):
        raise ValueError(f"expected a list of whole numbers, found {str(value)[:60]}")
    return value


def messages_of(value: Any) -> tuple[Message, ...]:
    """A cell as messages: a list of them, or the JSON of one."""
    value = _from_json(value)
    if value is not None and not isinstance(value, list):
        raise ValueError(f"expected a list of messages, found {type(value).__name__}")
    return tuple(_message(message) for message in value or ())


def tools_of(value: Any) -> tuple[Any, ...]:
    """A cell as descriptions of tools: a list of them, or the JSON of one."""
    value = _without_nothing(_from_json(value)) or []
    if not isinstance(value, list):
        raise ValueError(f"expected a list of tools, found {type(value).__name__}")
    return tuple(map(_from_json, value))


def _message(raw: Any) -> Message:
    if not isinstance(raw, Mapping):
        raise ValueError(f"expected a message with role and content, found {str(raw)[:60]!r}")
    role = text_of(raw.get("role") or raw.get("from"))
    if not role:
        raise ValueError(f"a message has no role; its keys are {', '.join(raw)}")
    content = raw.get("value") if raw.get("content") is None else raw["content"]  # Arrow adds keys of other rows
    calls = raw.get("tool_calls") or ([raw["function_call"]] if raw.get("function_call") else [])
    if role in _CALLERS:
        calls, content = content, None
    kind = ROLES.get(role.lower(), role)
    others = sorted(set(raw) - _READ)  # sorted: the same row in another file has the same fingerprint
    more = {key: raw[key] for key in others if isinstance(raw[key], str | int | float)}
    learned = kind != "assistant" or not any(_says_no(raw.get(key)) for key in _MARKS)
    return Message(kind, text_of(content), _calls(calls), more, learned)


def _says_no(mark: Any) -> bool:
    """Whether a mark is 0 or false, also as text: a column of Arrow or CSV may hold nothing else."""
    return mark.strip().lower() in ("0", "0.0", "false") if isinstance(mark, str) else mark == 0


def _calls(value: Any) -> tuple[Any, ...]:
    """Calls of tools as chat templates want them: a function with a name and arguments that are no JSON string."""
    value = _without_nothing(_from_json(value)) or []
    return tuple(map(_call, value if isinstance(value, list) else [value]))


def _call(raw: Any) -> dict[str, Any]:
    raw = _from_json(raw)
    function = raw.get("function", raw) if isinstance(raw, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise ValueError(f"expected a call of a tool with a name, found {str(raw)[:60]!r}")
    called = {"name": function["name"], "arguments": _from_json(function.get("arguments", {}))}
    return {**({"id": raw["id"]} if "id" in raw else {}), "type": "function", "function": called}


def _from_json(value: Any) -> Any:
    """What a string with a JSON list or object holds; anything else as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except ValueError:  # a text that begins with a bracket
        return value


def _without_nothing(value: Any) -> Any:
    """Without the keys that Arrow adds as null, because other rows have them."""
    if isinstance(value, Mapping):
        return {key: _without_nothing(part) for key, part in value.items() if part is not None}
    return [_without_nothing(part) for part in value] if isinstance(value, list) else value
