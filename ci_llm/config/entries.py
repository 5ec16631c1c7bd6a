"""From the entries of one source to sound values by key, and to the problems with all others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from ci_llm.config.aliases import TRANSLATIONS
from ci_llm.config.names import FIELDS, UnknownNameError, is_switched_off, normalized, resolve
from ci_llm.config.parsing import Entry, UnreadableError, read_value
from ci_llm.config.problems import Problem, given_twice, misfit, unknown
from ci_llm.config.schema import AllKeys


def by_key(entries: Iterable[Entry], problems: list[Problem], *, last_wins: bool) -> dict[str, Entry]:
    """The entries of one source by their key; unknown names and doubles are problems.

    Args:
        last_wins: a name that is repeated is no problem, as on a command line.
    """
    given: dict[str, Entry] = {}
    for entry in entries:
        try:
            found = resolve(entry)
        except UnknownNameError:
            problems.append(unknown(entry))
            continue
        if found is not None:
            _add(given, *found, problems, last_wins)
    return given


def _add(given: dict[str, Entry], key: str, entry: Entry, problems: list[Problem], last_wins: bool) -> None:
    first = given.get(key)
    if first is None or (last_wins and normalized(first.name) == normalized(entry.name)) or _yields(first, entry, key):
        given[key] = entry
    elif not _yields(entry, first, key):
        problems.append(given_twice(key, first, entry))


def _yields(one: Entry, other: Entry, key: str) -> bool:
    """Whether `one` is a switch that is off, beside another switch: `fp16: false` beside `bf16: true`."""
    return normalized(other.name) in TRANSLATIONS and is_switched_off(key, one)


def read_values(given: Mapping[str, Entry], problems: list[Problem]) -> dict[str, Any]:
    """The value of each entry, by the type of its key; its range is not checked yet."""
    values = {}
    for key, entry in given.items():
        try:
            values[key] = read_value(FIELDS[key], entry.raw)
        except UnreadableError:
            problems.append(misfit(key, entry))
    return values


def sound_values(values: Mapping[str, Any], given: Mapping[str, Entry], problems: list[Problem]) -> dict[str, Any]:
    """The values that their keys take, as validated; each of the others is a problem."""
    try:
        checked = AllKeys.model_validate(values)
    except ValidationError as error:
        wrong = {str(detail["loc"][0]) for detail in error.errors()}
        problems += [misfit(key, given[key]) for key in values if key in wrong]
        checked = AllKeys.model_validate({key: value for key, value in values.items() if key not in wrong})
    return {key: getattr(checked, key) for key in values if key in checked.model_fields_set}
