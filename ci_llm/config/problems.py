"""The problems of a configuration: for each the place, what is wrong, and what to write instead.

The entries of one source become values here, because an entry becomes either a sound value or a problem.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from ci_llm.config import foreign
from ci_llm.config.own_keys import OWN_KEYS
from ci_llm.config.parsing import (
    COMMAND_LINE,
    UNREADABLE,
    Entry,
    Items,
    Mapped,
    Raw,
    Scalar,
    expected,
    hint,
    nearest,
    read_value,
    takes_list,
)
from ci_llm.config.schema import AllKeys, Keys
from ci_llm.config.validation import Clash
from ci_llm.config.yaml_file import dump_value
from ci_llm.errors import ConfigError

ALL_KEYS = "all keys: --help all"
#: Signs that look like the dashes before a key, as text programs make them out of `--`.
_DASHES = re.compile("^[\u2010-\u2015\u2212\uff0d]+")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with the configuration."""

    where: str
    what: str
    hint: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.hint}"


def error_of(problems: Collection[Problem]) -> ConfigError:
    """One error that lists all problems."""
    first, *others = problems
    if not others:
        return ConfigError(first.what, where=first.where, hint=first.hint)
    lines = "".join(f"\n  {problem}" for problem in problems)
    return ConfigError(f"{len(problems)} problems in the configuration:{lines}", hint=ALL_KEYS)


def misfit(key: str, field: FieldInfo, entry: Entry) -> Problem:
    """The key does not take this value."""
    name = key if key == foreign.normalized(entry.name) else f"{key} (written {entry.name})"
    what = f"{name} is {entry.raw}, but takes {expected(field)}"
    removed = foreign.REMOVED_VALUES.get(key, {}).get(entry.text)
    instead = removed or hint(field, entry.raw) or f"the default is {dump_value(field.default)}"
    if str(entry.raw).strip("'").startswith("[") and not takes_list(field) and key not in OWN_KEYS:
        instead = "give one value: it cannot differ between agents"
    if key == "num_warmup_steps" and re.fullmatch(r"0?\.[0-9]+", entry.text):  # a share, as in Transformers 5
        instead = f"write num_warmup_steps_ratio={entry.text}"
    return Problem(entry.where, what, instead)


def given_twice(key: str, first: Entry, second: Entry) -> Problem:
    """Two entries of one source set the same key."""
    names = key if first.name == second.name else f"{key} (as {first.name} and {second.name})"
    place = second.where if first.where == second.where else f"{first.where} and {second.where}"
    return Problem(place, f"{names} is given twice", "keep one of them")


def unknown(entry: Entry) -> Problem:
    """The name is not a key, or no key has this value of it."""
    name = foreign.normalized(entry.name)
    if name in foreign.UNSUPPORTED:
        is_there, instead = foreign.UNSUPPORTED[name]
        value = f" with the value {entry.raw}" if name in foreign.TRANSLATIONS else ""
        return Problem(entry.where, f"{entry.name} is not a key here{value}; it is {is_there}", instead)
    if name in foreign.TRANSLATIONS:
        values = foreign.TRANSLATIONS[name]
        means = "; ".join(f"{value} means {meaning}" for value, meaning in values.items() if meaning != foreign.ALWAYS)
        return Problem(entry.where, f"{entry.name} is {entry.raw}, but takes {' | '.join(values)}", means)
    if isinstance(entry.raw, Mapped):
        return Problem(
            entry.where,
            f"{entry.name} is not a key, but a group of keys",
            f"keys are flat: remove `{entry.name}:`, and write the keys below it without indentation",
        )
    near = _nearest(name)
    return Problem(entry.where, f"{entry.name} is not a key", f"did you mean {near}?" if near else ALL_KEYS)


#: What a file of this ending is when it stands alone on a command line.
_FILES = {
    **dict.fromkeys((".yaml", ".yml"), "--config "),
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".txt"), "dataset_name="),
    ".gguf": "model_name=",
}


#: `${NAME}`, a variable of the environment; or anything else of this form, which is none.
_REFERENCE = re.compile(r"\$\{(\w+)\}|\$\{[^}]*\}?")


def expanded(entries: Iterable[Entry], problems: list[Problem]) -> list[Entry]:
    """What a person wrote, with the variables of the environment that it names; any other `${...}` is a problem."""
    found = []
    for entry in entries:
        unknown: list[str] = []
        raw = _with_variables(entry.raw, unknown, problems)
        if unknown:
            what = f"{entry.name} has {unknown[0]}, which is no variable of the environment"
            problems.append(Problem(entry.where, what, "export it and write ${NAME}, or write the value itself"))
        else:
            found.append(replace(entry, raw=raw))
    return found


def _with_variables(raw: Raw, unknown: list[str], problems: list[Problem]) -> Raw:
    """The value with the variables in it; references to others are added to `unknown`."""
    if isinstance(raw, Items):
        return Items(tuple(_with_variables(value, unknown, problems) for value in raw.values))
    if isinstance(raw, Mapped):
        return Mapped(tuple(expanded(raw.entries, problems)))
    if not isinstance(raw, Scalar) or "{{" in raw.text or "{%" in raw.text:  # the text of a chat template
        return raw
    found = {each[0]: os.environ.get(each[1] or "") for each in _REFERENCE.finditer(raw.text)}
    unknown += [reference for reference, value in found.items() if value is None]
    return replace(raw, text=_REFERENCE.sub(lambda each: found[each[0]] or "", raw.text))


def strays_of(words: Sequence[str]) -> list[Problem]:
    """The words of a command line that are neither a key nor a value, in order; `key = value` is one problem."""
    at = words.index("=") if "=" in words else 0
    if 0 < at < len(words) - 1:
        key, value = words[at - 1], words[at + 1]
        spaced = Problem(COMMAND_LINE, f"there are spaces around = in {key} = {value}", f"write {key}={value}")
        return [*strays_of(words[: at - 1]), spaced, *strays_of(words[at + 2 :])]
    return [_stray(word) for word in words]


def _stray(word: str) -> Problem:
    if means := _FILES.get(PurePath(word).suffix):
        return Problem(COMMAND_LINE, f"{word!r} stands alone", f"write {means}{word}")
    if word in ("...", "\u2026"):
        return Problem(COMMAND_LINE, f"{word!r} stands for words that an example leaves out", "leave it out as well")
    if word.endswith(".py"):
        instead = f"write key=value; another script is supervised by safe_train.py --train-script {word}"
        return Problem(COMMAND_LINE, f"{word!r} is neither a key nor a value", instead)
    plain = _DASHES.sub("--", word).replace("\uff1d", "=")
    instead = "write key=value, --key value or --flag" if plain == word else f"write {plain}, with plain - and ="
    return Problem(COMMAND_LINE, f"{word!r} is neither a key nor a value", instead)


def clashing(clash: Clash, given: Mapping[str, Entry]) -> Problem:
    """Values exclude one another."""
    places = [given[key].where for key in clash.keys if key in given]
    return Problem(" and ".join(dict.fromkeys(places)) or "defaults", clash.what, clash.hint)


def _nearest(name: str) -> str | None:
    """The key or alias most like `name`; `training.lr` is looked up as lr, `no_compile` as compile=false."""
    last = name.rpartition(".")[2]
    switch = last.removeprefix("no_")
    key = foreign.canonical(switch)
    if switch != last and key in foreign.ACCEPTED and foreign.flag_form(switch) == "alone":
        return f"{key}=false"
    near = nearest(last, [*foreign.ACCEPTED, *foreign.ALIASES, *foreign.TRANSLATIONS])
    return f"{near}, which is {foreign.ALIASES[near]}" if near in foreign.ALIASES else near


def by_key(entries: Iterable[Entry], problems: list[Problem], *, last_wins: bool) -> dict[str, Entry]:
    """The entries of one source by their key; unknown names and doubles are problems.

    Args:
        last_wins: a repeated name is not a problem, as on a command line.
    """
    given: dict[str, Entry] = {}
    for entry in entries:
        found = foreign.resolve(entry)
        if found is None:
            problems.append(unknown(entry))
        elif found[0] != foreign.ALWAYS:
            _add(given, *found, problems, last_wins)
    return given


def _add(given: dict[str, Entry], key: str, entry: Entry, problems: list[Problem], last_wins: bool) -> None:
    first = given.get(key)
    again = first is not None and foreign.normalized(first.name) == foreign.normalized(entry.name)
    if first is None or (last_wins and again) or _yields(first, entry, key):
        given[key] = entry
    elif not _yields(entry, first, key):
        problems.append(given_twice(key, first, entry))


def _yields(one: Entry, other: Entry, key: str) -> bool:
    """True if `one` is a switch that is off, beside another switch: `fp16: false` beside `bf16: true`."""
    return foreign.normalized(other.name) in foreign.TRANSLATIONS and foreign.is_switched_off(key, one)


def sound_values(given: Mapping[str, Entry], problems: list[Problem], keys: type[Keys] = AllKeys) -> dict[str, Any]:
    """The values of the entries that set one of `keys`; an entry that its key does not take is a problem.

    The type of a key decides what is written, and pydantic checks the range.
    """
    fields = keys.model_fields
    values = {key: read_value(fields[key], entry.raw) for key, entry in given.items() if key in fields}
    wrong = {key for key, value in values.items() if value is UNREADABLE}
    readable = {key: value for key, value in values.items() if key not in wrong}
    try:
        checked = keys.model_validate(readable)
    except ValidationError as error:
        wrong |= {str(detail["loc"][0]) for detail in error.errors()}
        checked = keys.model_validate({key: value for key, value in readable.items() if key not in wrong})
    problems += [misfit(key, fields[key], given[key]) for key in values if key in wrong]
    return {key: getattr(checked, key) for key in values if key not in wrong}
