"""What a name and a value mean: the key, and its value, by whatever names other trainers have for them."""

from __future__ import annotations

from dataclasses import replace

from ci_llm.config.aliases import ALIASES, ALWAYS, TRANSLATIONS, VALUE_ALIASES
from ci_llm.config.parsing import Entry, FlagForm, Items, Scalar, means_no_items, takes_flag
from ci_llm.config.schema import AllKeys

FIELDS = AllKeys.model_fields
SWITCH = frozenset({"true", "false"})


class UnknownNameError(Exception):
    """The name, or the name with this value, means no key."""


def normalized(name: str) -> str:
    """`--max-grad-norm` is `max_grad_norm`."""
    return name.replace("-", "_")


def canonical(name: str) -> str:
    """The key that `name` is another name of; a name that is none comes back as it is."""
    return ALIASES.get(normalized(name), normalized(name))


def resolve(entry: Entry) -> tuple[str, Entry] | None:
    """The key of an entry, and the entry with the value that its words mean; None if a run does it in any case.

    Raises:
        UnknownNameError: there is no such key, or no key for this value of it.
    """
    name = normalized(entry.name)
    text = entry.raw.text.lower() if isinstance(entry.raw, Scalar) and not entry.raw.quoted else None
    if name in TRANSLATIONS:
        meaning = TRANSLATIONS[name].get(text or "")
        if meaning is None:
            raise UnknownNameError
        key, _, translated = meaning.partition("=")
        return None if meaning == ALWAYS else (key, replace(entry, raw=Scalar(translated)))
    key = canonical(name)
    if key not in FIELDS:
        raise UnknownNameError
    if means_no_items(FIELDS[key], entry.raw):
        return key, replace(entry, raw=Items(()))
    value = VALUE_ALIASES.get(key, {}).get(text) if text is not None else None
    return key, entry if value is None else replace(entry, raw=Scalar(value))


def key_of(entry: Entry) -> str:
    """The key that an entry sets; its own name if it sets none."""
    try:
        found = resolve(entry)
    except UnknownNameError:
        found = None
    return canonical(entry.name) if found is None else found[0]


def flag_form(name: str) -> FlagForm:
    """How `--name` may stand on a command line."""
    field = FIELDS.get(canonical(name))
    if field is not None:
        words = VALUE_ALIASES.get(canonical(name), {})
        if takes_flag(field):
            return "either way" if words else "alone"
        return "either way" if "true" in words else "with a value"
    values = TRANSLATIONS.get(normalized(name), {})
    if values and SWITCH.issuperset(values):
        return "alone"
    return "either way" if "true" in values else "with a value"


def is_switched_off(key: str, entry: Entry) -> bool:
    """Whether the entry is a switch that is off: `fp16: false` says nothing against `bf16: true`."""
    off = TRANSLATIONS.get(normalized(entry.name), {}).get("false")
    return isinstance(entry.raw, Scalar) and off == f"{key}={entry.raw.text}"
