"""A sweep as it is written: the keys that have a space of values, and how its trials are run.

A key has a space where its value is a list, `log(low, high)`, `uniform(low, high)` or `{low: , high: , log: true}`;
beside it stand the keys of `SweepKeys`. Every other key is one of a run.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from annotated_types import Gt, Lt
from pydantic import Field

from ci_llm.config import parsing
from ci_llm.config.config import Config, entries_of
from ci_llm.config.foreign import FIELDS, key_of, normalized
from ci_llm.config.load import IN_CALL, FileEntries, build_reading, given_in_call, read_sources
from ci_llm.config.own_keys import OWN_KEYS
from ci_llm.config.problems import Problem, given_twice, sound_values
from ci_llm.config.schema import Count, DataKeys, Keys, Metric, with_trait
from ci_llm.config.yaml_file import read_flow

#: The keys that may have a space: what an agent may have of its own, except which rows it reads. These are the same for
#: all trials, so that their scores compare.
SPACE_KEYS: Final = tuple(key for key in OWN_KEYS if key not in DataKeys.__annotations__)
DEFAULT_TRIALS: Final = 16
_RANGE: Final = re.compile(r"(log|loguniform|uniform)\(\s*([^,()\s]+)\s*,\s*([^,()\s]+)\s*\)")
#: What can only be meant for a space of numbers or words.
_BEGUN: Final = re.compile(r"\[|(log|loguniform|uniform)\(")
_HOW: Final = "a list [a,b,c], log(low,high) or uniform(low,high)"


class SweepKeys(Keys):
    """How the trials of a sweep are run"""

    trials: Count | None = Field(None, description="trials that begin; null: the whole grid, or 16")
    agents_per_pass: Count | Literal["auto"] = Field(
        "auto", description="trials that train together as one crowd; auto: as many as fit into memory"
    )
    rungs: Count = Field(3, description="how often the trials are compared, the end of the sweep included")
    keep: Annotated[float, Gt(0), Lt(1)] = Field(
        0.25, description="share of the trials that continue after a rung, and length of a rung compared with the next"
    )
    metric: Metric = Field("nll", description="measure on the evaluation rows by which trials are compared")
    sampler: Literal["grid", "random", "tpe"] | None = Field(
        None,
        description="who chooses values: grid, random, or tpe, which learns from earlier trials (needs the extra"
        " ci-llm[sweep]); null: grid if every space is a list and trials allows it, else random",
    )


@dataclass(frozen=True)
class Choices:
    """A space of listed values."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Range:
    """A space of numbers between two bounds, both included; drawn in their logarithm with `log`."""

    low: float
    high: float
    log: bool
    whole: bool

    def at(self, share: float) -> float | int:
        """The value at this share of the way from `low` to `high`; of six digits, so that it can be typed."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = low + share * (high - low)
        return self.rounded(math.exp(value) if self.log else value)

    def rounded(self, value: float) -> float | int:
        """The value as a trial has it."""
        inside = min(max(value, self.low), self.high)
        return round(inside) if self.whole else float(f"{inside:.6g}")


Space = Choices | Range


@dataclass(frozen=True)
class SweepReading:
    """A sweep that can be run.

    Attributes:
        config: what all trials share, with one agent and the defaults of the keys that have a space.
        spaces: by key, in the order in which they were written.
        keys: how the trials are run; `trials` and `sampler` are decided.
        lines: for people, as of `Reading`.
        trials_wanted: that were asked for, if the spaces have fewer settings; else None.
    """

    config: Config
    spaces: Mapping[str, Space]
    keys: SweepKeys
    lines: tuple[str, ...] = ()
    trials_wanted: int | None = None

    def warmup_steps(self, total_steps: int) -> int:
        """Optimizer steps after which the learning rate has risen, in whichever trial that takes longest."""
        keys = {"num_warmup_steps", "num_warmup_steps_ratio"} & {*self.spaces}
        swept = [(key, self.spaces[key]) for key in sorted(keys)]
        longest = [(key, space.values if isinstance(space, Choices) else (space.high,)) for key, space in swept]
        entries = ({}, *({key: value} for key, values in longest for value in values))
        trials = self.config.model_copy(update={"agents": entries, "num_agents": len(entries)})
        return max(trial.warmup_steps(total_steps) for trial in trials.each_agent)


@dataclass(frozen=True)
class _Space:
    """A space as it was written: its values, or its two bounds."""

    entry: parsing.Entry
    values: tuple[parsing.Raw, ...]
    is_range: bool = False
    log: bool = False


def read_sweep(
    path: str | Path | None, arguments: Sequence[str], launcher: Mapping[str, str] | None = None
) -> SweepReading:
    """The sweep of a command line over a file; for the arguments see `read_config`.

    Raises:
        ConfigError: everything that is wrong, at once, each with its place and its hint.
    """
    problems: list[Problem] = []
    file, typed = read_sources(path, arguments, problems)
    return _read(file, typed, launcher or {}, problems, parsing.COMMAND_LINE)


def read_sweep_call(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None,
    overrides: Mapping[str, Any],
    launcher: Mapping[str, str] | None = None,
) -> SweepReading:
    """The sweep of a call in Python: `overrides` over `config`, which is a file, a mapping, a Config or None.

    Raises:
        ConfigError: everything that is wrong, at once, each with its place and its hint.
    """
    problems: list[Problem] = []
    file, typed = given_in_call(config, problems), entries_of(overrides, IN_CALL)
    return _read(file, typed, launcher or {}, problems, "Sweep(...)")


def _read(
    file: FileEntries, typed: Sequence[parsing.Entry], launcher: Mapping[str, str], problems: list[Problem], where: str
) -> SweepReading:
    spaces: dict[str, _Space] = {}
    of_sweep: dict[str, parsing.Entry] = {}
    rest_of_file = [*_without_spaces(file.entries, spaces, of_sweep, problems)]
    rest = [*_without_spaces(typed, spaces, of_sweep, problems)]
    if not spaces:
        what = "no key has a space of values: there is nothing to sweep"
        problems.append(Problem(where, what, f"write 'learning_rate=log(5e-4,1.6e-2)', or another key as {_HOW}"))
    given = SweepKeys(**sound_values(of_sweep, problems, SweepKeys))
    keys = _decided(given, spaces, of_sweep, problems)
    reading = build_reading(
        replace(
            file, entries=[*(entry for entry in rest_of_file if key_of(entry) != "num_agents"), _candidates(spaces)]
        ),
        [entry for entry in rest if key_of(entry) != "num_agents"],
        launcher,
        problems,
        check=lambda config: _unfit(config, [*rest_of_file, *rest]),
    )
    candidates = iter(reading.config.agents)
    values = {key: tuple(next(candidates)[key] for _ in space.values) for key, space in spaces.items()}
    config = reading.config.model_copy(update={"agents": (), "num_agents": 1})
    found = {key: _space(spaces[key], values[key]) for key in spaces}
    return SweepReading(config, found, keys, reading.lines, given.trials if given.trials != keys.trials else None)


def _space(written: _Space, values: tuple[Any, ...]) -> Space:
    if not written.is_range:
        return Choices(values)
    whole = all(isinstance(value, int) for value in values)
    return Range(float(values[0]), float(values[1]), written.log, whole)


def _candidates(spaces: Mapping[str, _Space]) -> parsing.Entry:
    """All values of all spaces as agents, each with one value: whatever reads agents then reads and judges them."""
    mapped = [parsing.Mapped((replace(space.entry, raw=value),)) for space in spaces.values() for value in space.values]
    return parsing.Entry("agents", parsing.Items(tuple(mapped)), parsing.COMMAND_LINE)


def _without_spaces(
    entries: Iterable[parsing.Entry],
    spaces: dict[str, _Space],
    keys: dict[str, parsing.Entry],
    problems: list[Problem],
) -> Iterator[parsing.Entry]:
    """The entries that are keys of a run; the spaces and the keys of the sweep replace those that are there."""
    first: dict[str, parsing.Entry] = {}
    single: set[str] = set()  # keys of a run with one value: of two of them the run's own reading says so
    for entry in entries:
        of_sweep = normalized(entry.name) in SweepKeys.model_fields
        key = normalized(entry.name) if of_sweep else key_of(entry)
        found = None if of_sweep else _space_of(entry, key, problems)
        is_single = not of_sweep and found is None
        before = first.setdefault(key, entry)
        is_twice = before is not entry and not (is_single and key in single)
        if is_twice and entry.where != parsing.COMMAND_LINE:  # on the command line the last one counts
            problems.append(given_twice(key, before, entry))
        if of_sweep:
            keys[key] = entry
        elif found is None:
            single.add(key)
            spaces.pop(key, None)  # one value on the command line sets a space of the file aside
            yield entry
        elif key in SPACE_KEYS:
            spaces[key] = found
        elif key == "agents":
            problems.append(Problem(entry.where, "a sweep makes its agents of the spaces", "leave `agents` out"))
        else:
            problems.append(Problem(entry.where, f"{key} cannot differ between trials", "give it one value"))


def _space_of(entry: parsing.Entry, key: str, problems: list[Problem]) -> _Space | None:
    """The space that an entry means; None if its value is one value."""
    raw = read_flow(entry.raw)
    if isinstance(raw, parsing.Scalar) and not raw.quoted and (found := _RANGE.fullmatch(raw.text.strip())):
        return _range(entry, key, found[2], found[3], problems, log=found[1] != "uniform")
    if isinstance(raw, parsing.Scalar) and key in SPACE_KEYS and _BEGUN.match(raw.text):
        problems.append(Problem(entry.where, f"{key} has a space that is not whole, {raw}", f"write {_HOW}"))
        return _Space(entry, ())
    if isinstance(raw, parsing.Mapped) and key in FIELDS:
        return _mapped_range(entry, raw, key, problems)
    if isinstance(raw, parsing.Items) and (
        key == "agents" or (key in FIELDS and parsing.lists_values(FIELDS[key], raw))
    ):
        if not raw.values:
            problems.append(Problem(entry.where, f"{key} has an empty space", f"write {_HOW}"))
        return _Space(entry, raw.values)
    return None


def _mapped_range(entry: parsing.Entry, raw: parsing.Mapped, key: str, problems: list[Problem]) -> _Space:
    given = {each.name: each.raw.text if isinstance(each.raw, parsing.Scalar) else "" for each in raw.entries}
    odd = {*given} - {"low", "high", "log"}
    if odd or not {"low", "high"} <= {*given} or given.get("log", "true").lower() not in ("true", "false"):
        what = f"{key} is {{{', '.join(f'{name}: {text}' for name, text in given.items())}}}"
        problems.append(Problem(entry.where, what, "a range is written {low: 1e-4, high: 1e-2, log: true}"))
        return _Space(entry, ())
    return _range(entry, key, given["low"], given["high"], problems, log=given.get("log", "").lower() == "true")


def _range(entry: parsing.Entry, key: str, low: str, high: str, problems: list[Problem], *, log: bool) -> _Space:
    def refuse(what: str, instead: str) -> _Space:
        problems.append(Problem(entry.where, what, instead))
        return _Space(entry, ())

    if key in SPACE_KEYS and not any(kind.type in (int, float) for kind in parsing.kinds_of(FIELDS[key])):
        return refuse(f"{key} takes no range, because its values are not numbers", "list them: [a,b,c]")
    try:
        bounds = float(low), float(high)
    except ValueError:
        return refuse(f"{key} has a range from {low} to {high}", "give two numbers")
    if not bounds[0] < bounds[1] or (log and bounds[0] <= 0):
        wanted = "0 < low < high" if log else "low < high"
        return refuse(f"{key} has an empty space: {low} to {high}", f"a range needs {wanted}")
    return _Space(entry, (parsing.Scalar(low), parsing.Scalar(high)), is_range=True, log=log)


def _decided(
    keys: SweepKeys, spaces: Mapping[str, _Space], given: Mapping[str, parsing.Entry], problems: list[Problem]
) -> SweepKeys:
    """The keys with a sampler and a number of trials, or a problem."""
    ranges = [key for key, space in spaces.items() if space.is_range]
    size = math.prod(len(space.values) for space in spaces.values())
    sampler = keys.sampler or ("grid" if not ranges and size <= (keys.trials or size) else "random")
    where = given["sampler"].where if "sampler" in given else parsing.COMMAND_LINE
    if sampler == "grid" and ranges:
        what = f"sampler grid takes lists, and {', '.join(ranges)} has a range"
        problems.append(Problem(where, what, "list its values, or take sampler=random"))
    if sampler == "tpe" and find_spec("optuna") is None:
        problems.append(
            Problem(where, "sampler tpe needs Optuna, which is not installed", 'pip install "ci-llm[sweep]"')
        )
    trials = keys.trials or (size if sampler == "grid" else DEFAULT_TRIALS)
    trials = trials if ranges else min(trials, size)  # every value of a finite space once
    return keys.model_copy(update={"sampler": sampler, "trials": max(trials, 1)})


#: Keys of a run that a sweep cannot take, with the reason and what to do.
_UNFIT: Final[Mapping[str, tuple[str, str]]] = with_trait("no_sweep")


def _unfit(config: Config, entries: Sequence[parsing.Entry]) -> Iterator[Problem]:
    """The keys that were given and that no sweep can have."""
    for entry in entries:
        key = key_of(entry)
        if key in _UNFIT and (getattr(config, key) != FIELDS[key].default or key == "num_agents"):
            if key == "num_agents" and entry.where not in (parsing.COMMAND_LINE, IN_CALL):
                continue  # of a file that is also trained with
            why, instead = _UNFIT[key]
            yield Problem(entry.where, f"{key} has no place in a sweep: {why}", instead)
