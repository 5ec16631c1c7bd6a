"""The meaning of what is written in a file or on a command line: keys with values by the type of each key.

A value arrives as it was written (`Scalar`, `Items` or `Unusable`), from YAML or from the command line (`--any-key V`,
`--any_key=V`, `any_key=V`, and `--flag` alone for true). Only this module decides what it means, from the declared type
of its key: `no` is a word for one key and false for another. pydantic checks the ranges; its own conversion would take
0123, '4' and 4.0 for whole numbers, and t, y and 1 for true. Where several sources give a key, this module decides as
well which of them counts.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from ci_llm.config.schema import DURATION, SEVERAL, with_trait

#: Lowest similarity, 0 to 1: of each part to a part of the other name, of the whole names, and of names without `_`.
PART: Final = 0.65
WHOLE: Final = 0.75
RUN_TOGETHER: Final = 0.88

_SPACE: Final = re.compile(r"(log|uniform)\(")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name of which `name` is a misspelling; None if `name` means something else.

    No suggestion is better than a wrong one.

    A part of `name` that the known one lacks has a meaning: `eval_batch_size` is not a misspelling of `batch_size`. A
    part may be left out, as in `max_grad` for `max_grad_norm`.
    """
    alike = [(_ratio(name.lower(), other.lower()), other) for other in known if _is_slip(name.lower(), other.lower())]
    return max(alike)[1] if alike else None


def hint_for_missing(missing: Path, otherwise: str) -> str:
    """The hint of a file that does not exist: the one beside it that has a similar name, or one that begins alike."""
    names = sorted(found.name for found in missing.parent.glob(f"*{missing.suffix}"))
    longer = (name for name in names if name.startswith(missing.stem) and missing.suffix)
    # Without the ending that all of them have: it would make short names alike.
    stems = {name.removesuffix(missing.suffix): name for name in names}
    near = stems.get(nearest(missing.stem, stems) or "") or next(longer, None)
    return f"did you mean {missing.with_name(near)}?" if near else otherwise


def _is_slip(name: str, other: str) -> bool:
    parts, others = name.split("_"), other.split("_")
    if len(parts) != len(others) and _ratio("".join(parts), "".join(others)) >= RUN_TOGETHER:
        return len(parts) < len(others)
    return _ratio(name, other) >= WHOLE and _fit(parts, others)


def _fit(parts: list[str], others: list[str]) -> bool:
    """True if each part has one of the others that is like it, in order; one word alone does not stand for several."""
    if len(parts) == 1 < len(others):
        return False
    rest = iter(others)
    return all(any(_ratio(part, other) >= PART for other in rest) for part in parts)


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()


@dataclass(frozen=True)
class Scalar:
    """One value as text; `quoted` if YAML's quotes made it a string whatever it looks like."""

    text: str
    quoted: bool = False

    @property
    def is_null(self) -> bool:
        """True if it is a word for null."""
        return not self.quoted and self.text.lower() in NULL_WORDS

    def __str__(self) -> str:
        return repr(self.text if len(self.text) <= 60 else self.text[:57] + "...") if self.text else "empty"


@dataclass(frozen=True)
class Unusable:
    """A value that no key takes; `what` names it: `the YAML tag !x`."""

    what: str

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class Items:
    """A list of values."""

    values: tuple[Raw, ...]

    def __str__(self) -> str:
        shown = ["a nested list" if isinstance(value, Items) else str(value) for value in self.values[:5]]
        return "[" + ", ".join(shown) + (", ...]" if len(self.values) > 5 else "]")


@dataclass(frozen=True)
class Mapped:
    """A mapping: the settings of one agent, a range of a sweep, or a group of keys, which is none here."""

    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        return "a nested mapping"


Raw = Scalar | Items | Mapped | Unusable


@dataclass(frozen=True)
class Entry:
    """One key as its source has it: the name as written, the value as written, and the place."""

    name: str
    raw: Raw
    where: str

    @property
    def text(self) -> str:
        """The value as it is shown to people."""
        return self.raw.text if isinstance(self.raw, Scalar) else "none" if self.raw == Items(()) else str(self.raw)

    @property
    def is_null(self) -> bool:
        """True if the value is null."""
        return isinstance(self.raw, Scalar) and self.raw.is_null


#: In place of a value: what is written is none of the key's type.
UNREADABLE: Final = object()


@dataclass(frozen=True)
class _Kind:
    """One alternative of a field's type, such as `int` with its bounds, or the choices of a Literal."""

    type: Any
    metadata: tuple[Any, ...] = ()
    choices: tuple[str, ...] = ()
    item: _Kind | None = None


def _kinds(annotation: Any, metadata: tuple[Any, ...] = ()) -> Iterator[_Kind]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        yield from _kinds(inner, (*marks, *metadata))
    elif origin in (Union, types.UnionType):
        for alternative in get_args(annotation):
            yield from _kinds(alternative)
    elif origin is Literal:
        yield _Kind(Literal, choices=get_args(annotation))
    elif origin is tuple:
        yield _Kind(tuple, metadata, item=next(_kinds(get_args(annotation)[0])))
    else:
        yield _Kind(origin or annotation, metadata)


def kinds_of(field: FieldInfo) -> list[_Kind]:
    """The alternatives of a field's type: choices first, then null, then the rest as declared."""
    order = {Literal: 0, types.NoneType: 1}
    return sorted(_kinds(field.annotation, tuple(field.metadata)), key=lambda kind: order.get(kind.type, 2))


def takes_flag(field: FieldInfo) -> bool:
    """True if `--key` without a value means true."""
    return any(kind.type is bool for kind in kinds_of(field))


NULL_WORDS = frozenset({"", "~", "null", "none"})
TRUTH_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_INTEGER = re.compile(r"[-+]?(0|[1-9](_?[0-9]){0,30})")
_NUMBER = re.compile(r"[-+]?([0-9](_?[0-9])*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]{1,5})?")
_CLOCK = re.compile(r"(?:([0-9]{1,4})-)?([0-9]{1,4}):([0-5][0-9]):([0-5][0-9])")
_SPAN = re.compile(r"(?:([0-9]{1,4})d)?(?:([0-9]{1,6})h)?(?:([0-9]{1,8})m)?(?:([0-9]{1,9})s)?")


def takes_list(field: FieldInfo) -> bool:
    """True if the value of the key may be a list itself."""
    return any(kind.item is not None or SEVERAL in kind.metadata for kind in kinds_of(field))


def means_no_items(field: FieldInfo, raw: Raw) -> bool:
    """True if `raw` is none where the field takes a list of choices: with quotes, in brackets, or an empty list."""
    if isinstance(raw, Items) and len(raw.values) == 1:
        [raw] = raw.values
    is_none = isinstance(raw, Scalar) and raw.text.strip("[]'\" ").lower() in NULL_WORDS
    return is_none and any(kind.item is not None and kind.item.choices for kind in kinds_of(field))


def lists_values(field: FieldInfo, raw: Items) -> bool:
    """True if a list holds several values of the key, and is not one value that is a list itself."""
    words = {Scalar(choice) for kind in kinds_of(field) for choice in kind.choices}
    return not takes_list(field) or any(isinstance(value, Items) or value in words for value in raw.values)


def read_value(field: FieldInfo, raw: Raw) -> object:
    """The value of `field` that `raw` means; UNREADABLE if no alternative of its type can be written like that."""
    for kind in kinds_of(field):
        value = _read_items(kind, raw) if isinstance(raw, Items) else _read_one(kind, raw)
        if value is not UNREADABLE:
            return value
    return UNREADABLE


def _read_one(kind: _Kind, raw: Raw) -> object:
    return _READERS[kind.type](kind, raw) if isinstance(raw, Scalar) else UNREADABLE


def _read_items(kind: _Kind, raw: Items) -> object:
    if SEVERAL in kind.metadata and raw.values and all(isinstance(value, Scalar) for value in raw.values):
        return ",".join(value.text for value in raw.values if isinstance(value, Scalar))
    if kind.item is None:
        return UNREADABLE
    values = tuple(_read_one(kind.item, value) for value in raw.values)
    return UNREADABLE if UNREADABLE in values else values


def _read_number(kind: _Kind, raw: Scalar) -> object:
    if not raw.quoted and _NUMBER.fullmatch(raw.text) and not re.match(r"[-+]?0[0-9]", raw.text):
        return float(raw.text.replace("_", ""))
    return _read_duration(raw.text) if DURATION in kind.metadata else UNREADABLE


def _read_duration(text: str) -> object:
    match = _CLOCK.fullmatch(text) or (_SPAN.fullmatch(text) if text else None)
    if match is None:
        return UNREADABLE
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _read_text(kind: _Kind, raw: Scalar) -> object:
    if not raw.text.isprintable() or raw.is_null:
        return UNREADABLE
    if SEVERAL in kind.metadata and (listed := re.fullmatch(r"\[(.*)\]", raw.text)):
        return ",".join(name.strip(" '\"") for name in listed[1].split(","))
    return raw.text


def _read_list(kind: _Kind, raw: Scalar) -> object:
    """`a,b` and `[a, b]` as written on a command line; none is the empty list."""
    if raw.is_null:
        return ()
    text = raw.text.strip()
    names = _parts(text[1:-1] if text.startswith("[") and text.endswith("]") else text)  # [0-4] may end a pattern
    return _read_items(kind, Items(tuple(Scalar(name.strip(" '\"")) for name in names)))


def _parts(text: str) -> list[str]:
    """The parts between commas. A comma in brackets separates nothing, as in a pattern with {1,3}, if they match."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return text.split(",") if depth else parts


_READERS: dict[Any, Callable[[_Kind, Scalar], object]] = {
    Literal: lambda kind, raw: raw.text if raw.text in kind.choices else UNREADABLE,
    types.NoneType: lambda _, raw: None if raw.is_null else UNREADABLE,
    bool: lambda _, raw: UNREADABLE if raw.quoted else TRUTH_WORDS.get(raw.text.lower(), UNREADABLE),
    int: lambda _, raw: int(raw.text) if not raw.quoted and _INTEGER.fullmatch(raw.text) else UNREADABLE,
    float: _read_number,
    str: _read_text,
    tuple: _read_list,
    dict: lambda *_: UNREADABLE,
}


_NOUNS: dict[Any, str] = {
    bool: "true | false",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "null",
    dict: "a mapping",
}
#: The bounds of a number in words, from its marks.
_BOUNDS: Final = {Ge: "of at least {0.ge}", Gt: "above {0.gt}", Le: "and at most {0.le}", Lt: "and below {0.lt}"}


def expected(field: FieldInfo) -> str:
    """The values that the field takes, in words: `a whole number of at least 1, or auto, or null`."""
    null_last = sorted(kinds_of(field), key=lambda kind: (kind.type is types.NoneType, kind.choices == ("auto",)))
    return ", or ".join(_words(kind) for kind in null_last)


def _words(kind: _Kind) -> str:
    if kind.choices:
        return " | ".join(kind.choices)
    if kind.item is not None:
        listed = "a list of" if kind.item.choices else "a list, each"
        return "a list of names" if kind.item.type is str else f"{listed} {_words(kind.item)}"
    noun = (
        "seconds" if DURATION in kind.metadata else "text or a list" if SEVERAL in kind.metadata else _NOUNS[kind.type]
    )
    bounds = (_BOUNDS[type(mark)].format(mark) for mark in kind.metadata if type(mark) in _BOUNDS)
    words = " ".join([noun, *bounds])
    return f"{words} (or 1h30m, or HH:MM:SS)" if DURATION in kind.metadata else words


def hint(field: FieldInfo, raw: Raw) -> str | None:
    """The right spelling after a common slip: quotes, a leading zero, 1e3 for 1000, 1,5 for 1.5, BF16, a typo."""
    if not isinstance(raw, Scalar) and raw != NO_VALUE and any(SEVERAL in kind.metadata for kind in kinds_of(field)):
        mapped = [value for value in raw.values if isinstance(value, Mapped)] if isinstance(raw, Items) else []
        if any(entry.name == "path" for value in mapped for entry in value.entries):
            return "give paths or names alone: the format of each is recognised by its columns"
        return "give paths or names; data in memory gets a path by ds.save_to_disk(FOLDER), or as a .jsonl file"
    if isinstance(raw, Mapped):
        return "keys are flat: one value per key"
    if isinstance(raw, Scalar) and _SPACE.match(raw.text):
        return "ci-llm sweep takes such a space of values, and tries some of them"
    if isinstance(raw, Scalar) and read_value(field, raw) is UNREADABLE:
        for text in _respellings(raw.text):
            if read_value(field, Scalar(text)) is not UNREADABLE:
                return f"write {text} without quotes" if raw.quoted else f"write {text}"
        choices = [choice for kind in kinds_of(field) for choice in (kind.item or kind).choices]
        if close := get_close_matches(raw.text.lower(), choices, n=1, cutoff=WHOLE):
            return f"did you mean {close[0]}?"
    return None


def _respellings(text: str) -> Iterator[str]:
    yield text
    yield text.strip().lower()
    yield text.replace(",", ".")
    yield text.replace("\u2212", "-")  # the minus sign of a text program
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?%", text):
        yield f"{float(text[:-1]) / 100:g}"
    if re.fullmatch(r"[0-9.]+", text):
        yield text.lstrip("0")
    number = float(text.replace("_", "")) if _NUMBER.fullmatch(text) and len(text) < 20 else math.nan
    if number.is_integer():
        yield f"{number:.0f}"


COMMAND_LINE = "command line"
NO_VALUE = Unusable("without a value")
FlagForm = Literal["alone", "either way", "with a value"]
_ASSIGNMENT = re.compile(r"(?:--)?([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_OPTION = re.compile(r"--([A-Za-z_][\w.-]*)")


def parts_of(
    arguments: Sequence[str], flag_form: Callable[[str], FlagForm]
) -> Iterator[tuple[list[str], Entry | None]]:
    """The parts of a command line: the words of each entry with the entry; None for a word that belongs to none.

    Args:
        arguments: the words after the program's name.
        flag_form: how `--key` may stand: alone (it means true, unless true or false follows), with a value, or
            either way.
    """
    words = list(arguments)
    while words:
        before, word = list(words), words.pop(0)
        entry = None
        if match := _ASSIGNMENT.fullmatch(word):
            entry = Entry(match[1], Scalar(match[2]) if match[2] else NO_VALUE, COMMAND_LINE)
        elif match := _OPTION.fullmatch(word):
            entry = Entry(match[1], _take_value(flag_form(match[1]), words), COMMAND_LINE)
        yield before[: len(before) - len(words)], entry


def _take_value(form: FlagForm, words: list[str]) -> Raw:
    follows = bool(words) and not words[0].startswith("--") and not _ASSIGNMENT.fullmatch(words[0])
    if form == "alone":
        follows = follows and words[0].lower() in {*TRUTH_WORDS, "auto"}
    if follows:
        return Scalar(words.pop(0))
    return NO_VALUE if form == "with a value" else Scalar("true")


Given = Mapping[str, Entry]

#: Two keys for one thing: within one source the first decides, unless it is null.
STRONGER: Mapping[str, str] = with_trait("stronger_than")

#: Two ways to the same thing, of which one source may name one.
RIVALS: Final = tuple((key, other) for key, others in with_trait("rivals").items() for other in others)


def merge_sources(*sources: Given) -> dict[str, Entry]:
    """The entries that count, by key, the weakest source first.

    A stronger source also sets aside the other key for the same thing.
    """
    given: dict[str, Entry] = {}
    for source in sources:
        for other, _ in _set_aside_by(source):
            given.pop(other, None)
        given |= source
    return given


def describe_sources(name: str, launcher: Given, file: Given, typed: Given) -> Iterator[str]:
    """A line that says where the values come from; then one for each entry that was given and has no effect.

    Args:
        name: the name of the file.
        typed: the entries of a command line, or of a call in Python.
    """
    parts = [name]
    if typed:
        parts.append(f"{next(iter(typed.values())).where}: {_all(typed)}")
    given = merge_sources(launcher, file, typed)
    if taken := {key: entry for key, entry in launcher.items() if given.get(key) is entry}:
        parts.append(f"accelerate launch: {_all(taken)}")
    yield "; ".join([*parts, "defaults for all other keys"])
    for other, key in _set_aside_by(typed):
        if other in file and other not in given and not file[other].is_null:
            yield f"{_one(other, file[other])} ({file[other].where}) is set aside: {typed[key].where} says {key}"
    for strong, weak in STRONGER.items():
        for source in (file, typed):
            if weak in source and strong in source and not source[strong].is_null:
                yield f"{weak} has no effect: {strong} decides ({source[strong].where})"
    for key, entry in launcher.items():
        for decides in (key, *(strong for strong, weak in STRONGER.items() if weak == key)):
            by = given.get(decides)
            if by is not None and (decides == key or not by.is_null) and by.text != entry.text:
                yield f"{_one(key, entry)} ({entry.where}) has no effect: {_one(decides, by)} decides ({by.where})"


def _set_aside_by(source: Given) -> Iterator[tuple[str, str]]:
    """(key that weaker sources give in vain, key of this source that replaces it)."""
    for strong, weak in STRONGER.items():
        if weak in source and strong not in source:
            yield strong, weak
    for one, other in (*RIVALS, *((b, a) for a, b in RIVALS)):
        if other in source and one not in source and not source[other].is_null:
            yield one, other


def _all(entries: Given) -> str:
    return " ".join(_one(key, entry) for key, entry in entries.items())


def _one(key: str, entry: Entry) -> str:
    return f"{key}={entry.text}"
