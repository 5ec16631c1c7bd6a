"""The names that other trainers use: which key and value each means here, and an answer for each that means none.

The words are data, in foreign.yaml beside this file. An option without a counterpart is refused with what to do
instead; one without effect is accepted with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from ci_llm.config.parsing import TRUTH_WORDS, Entry, FlagForm, Items, Scalar, means_no_items, takes_flag
from ci_llm.config.schema import AllKeys
from ci_llm.config.yaml_file import read_texts

_WORDS: Final = read_texts(Path(__file__).with_suffix(".yaml"))
#: Other names of the same keys, as users of other trainers type them: name -> key.
ALIASES: Final[dict[str, str]] = {name: key for key, names in _WORDS["aliases"].items() for name in names}
#: Words that mean a value, by key: `--auto_resume` alone reads as true, hence latest.
VALUE_ALIASES: Final[dict[str, dict[str, str]]] = _WORDS["values"]
#: Values that a key had -> what to use instead.
REMOVED_VALUES: Final[dict[str, dict[str, str]]] = _WORDS["removed_values"]
#: Keys that this program had -> (the values that mean what every run does now, what it was, what to do instead)
REMOVED: Final[dict[str, tuple[list[str], str, str]]] = _WORDS["removed"]
#: What a run does in any case: there is nothing to set.
ALWAYS: Final = "always"
#: Options that mean a key only together with their value: name -> value -> `key=value`, or `ALWAYS`.
TRANSLATIONS: Final[dict[str, dict[str, str]]] = _WORDS["translations"] | {
    name: dict.fromkeys(usual, ALWAYS) for name, (usual, *_) in REMOVED.items()
}
#: name -> (what it is there, what to do instead)
UNSUPPORTED: Final[dict[str, tuple[str, str]]] = {
    name: tuple(told[-2:]) for name, told in (_WORDS["unsupported"] | REMOVED).items()
}
#: Options without effect, and why. Every value is accepted; one that asks for something is answered with the reason.
NO_EFFECT: Final[dict[str, str]] = _WORDS["no_effect"]


FIELDS = AllKeys.model_fields
ACCEPTED = FIELDS.keys() | NO_EFFECT.keys()  # under one of these names, or of `ALIASES` for them


def normalized(name: str) -> str:
    """`--max-grad-norm` is `max_grad_norm`."""
    return name.replace("-", "_")


def canonical(name: str) -> str:
    """The key for one of its other names; every other name is returned unchanged."""
    return ALIASES.get(normalized(name), normalized(name))


def resolve(entry: Entry) -> tuple[str, Entry] | None:
    """The key of an entry, and the entry with the value that its words mean; None if these words mean no key.

    What a run does in any case comes back as `ALWAYS`, and an option without effect under its own name.
    """
    name = normalized(entry.name)
    text = entry.raw.text.lower() if isinstance(entry.raw, Scalar) and not entry.raw.quoted else None
    if name in TRANSLATIONS:
        meaning = TRANSLATIONS[name].get(text or str(entry.raw).lower())
        if meaning is None:
            return None
        key, _, translated = meaning.partition("=")
        return key, replace(entry, raw=Scalar(translated))
    key = canonical(name)
    if key in NO_EFFECT:
        return key, entry
    if key not in FIELDS:
        return None
    if means_no_items(FIELDS[key], entry.raw):
        return key, replace(entry, raw=Items(()))
    value = VALUE_ALIASES.get(key, {}).get(text) if text is not None else None
    return key, entry if value is None else replace(entry, raw=Scalar(value))


def read_without_effect(given: Mapping[str, Entry]) -> dict[str, object]:
    """The options without effect that ask for something, with that: true, false, or the text of any other value."""
    values: dict[str, object] = {}
    for name in (name for name in NO_EFFECT if name in given and not given[name].is_null):
        value = TRUTH_WORDS.get(given[name].text.lower(), given[name].text)
        if value is not False or name in _WORDS["no_switches"]:
            values[name] = value
    return values


def key_of(entry: Entry) -> str:
    """The key that an entry sets, see `resolve`; its own name if there is none."""
    found = resolve(entry)
    return canonical(entry.name) if found is None else found[0]


def flag_form(name: str) -> FlagForm:
    """How `--name` may stand on a command line."""
    key = canonical(name)
    if key in NO_EFFECT:
        return "either way" if key in _WORDS["no_switches"] else "alone"
    is_flag = key in FIELDS and takes_flag(FIELDS[key])
    words = VALUE_ALIASES.get(key) or TRANSLATIONS.get(key, {})
    if (is_flag and not words) or (key in TRANSLATIONS and words.keys() <= {"true", "false"}):
        return "alone"
    return "either way" if is_flag or "true" in words else "with a value"


def is_switched_off(key: str, entry: Entry) -> bool:
    """True if the entry is a switch that is off: `fp16: false` says nothing against `bf16: true`."""
    off = TRANSLATIONS.get(normalized(entry.name), {}).get("false")
    return isinstance(entry.raw, Scalar) and off == f"{key}={entry.raw.text}"
