"""Which source decides a key: the command line over the file over the launcher over the defaults; and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from ci_llm.config.parsing import Entry

Given = Mapping[str, Entry]

#: Two keys for one thing: within one source the first decides, unless it is null.
STRONGER: Mapping[str, str] = {
    "max_train_steps": "epochs",
    "global_batch_size": "gradient_accumulation_steps",
    "num_warmup_steps": "num_warmup_steps_ratio",
}

#: Two ways to the same thing, of which one source may name one.
RIVALS: tuple[tuple[str, str], ...] = (("val_set_size", "eval_dataset_name"), ("val_set_size", "eval_split"))


def merge_sources(launcher: Given, file: Given, line: Given) -> dict[str, Entry]:
    """The entries that count, by key. A stronger source also sets aside the other key for the same thing."""
    given: dict[str, Entry] = {}
    for source in (launcher, file, line):
        for other, _ in _set_aside_by(source):
            given.pop(other, None)
        given |= source
    return given


def describe_sources(path: Path | None, launcher: Given, file: Given, line: Given) -> Iterator[str]:
    """A line that says where the values come from; then one for each entry that was given and has no effect."""
    parts = [str(path) if path else "no file: there is no configs.yaml here"]
    if line:
        parts.append(f"command line: {_all(line)}")
    given = merge_sources(launcher, file, line)
    if taken := {key: entry for key, entry in launcher.items() if given.get(key) is entry}:
        parts.append(f"accelerate launch: {_all(taken)}")
    yield "; ".join([*parts, "defaults for all other keys"])
    for other, key in _set_aside_by(line):
        if other in file and other not in given and not file[other].is_null:
            yield f"{_one(other, file[other])} ({file[other].where}) is set aside: the command line says {key}"
    for strong, weak in STRONGER.items():
        for source in (file, line):
            if weak in source and strong in source and not source[strong].is_null:
                yield f"{weak} has no effect: {strong} decides ({source[strong].where})"
    for key, entry in launcher.items():
        for decides in (key, *(strong for strong, weak in STRONGER.items() if weak == key)):
            if (by := given.get(decides)) is not None and not by.is_null and by.text != entry.text:
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
