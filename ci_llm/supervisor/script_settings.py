"""The settings of an external script: values by key on its command line, in Hydra's sweeper, in its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ci_llm.errors import ConfigError

LEARNING_RATE_KEYS: Final = ("training.learning_rate", "learning_rate")
BATCH_SIZE_KEYS: Final = ("training.meta_batch_size", "training.batch_size", "batch_size")
#: Keys that shrink with the batch unless the user names others: "training.schedule.constant_product", for instance.
_SCALED_KEY: Final = ("training.", ".constant_product")
_SWEEPER: Final = "hydra.sweeper.params"
_ASSIGNMENT: Final = re.compile(r"(\+{0,2}|--)([A-Za-z_][\w./@-]*)=(.*)", re.DOTALL)
_OPTION: Final = re.compile(r"--([A-Za-z_][\w./-]*)")
#: A rate that was rounded, or raised a little by a schedule, is still the one that was asked for.
_TOLERANCE: Final = 1.2


@dataclass(frozen=True)
class Override:
    """A key with its value on a command line: `a.b=1`, `+a.b=1`, `--a=1` or `--a 1`.

    Attributes:
        position: index of the word that holds the value.
        before: the text before the value in that word.
    """

    key: str
    value: str
    position: int
    before: str


def overrides(words: Sequence[str]) -> Iterator[Override]:
    """Yield all keys with a value, in the order of the command line."""
    for position, word in enumerate(words):
        if match := _ASSIGNMENT.fullmatch(word):
            yield Override(match[2], match[3], position, word[: match.start(3)])
        elif (match := _OPTION.fullmatch(word)) and position + 1 < len(words):
            value = words[position + 1]
            if not value.startswith("--"):
                yield Override(match[1], value, position + 1, "")


def value_of(words: Sequence[str], key: str) -> str | None:
    """Return the value of a key on a command line, or None. The last one counts."""
    return next((one.value for one in reversed(list(overrides(words))) if same_key(one.key, key)), None)


def rewritten(words: Sequence[str], new: Mapping[str, str]) -> list[str]:
    """Return the command line with new values for those keys that stand on it."""
    changed = list(words)
    for one in overrides(words):
        for key, value in new.items():
            if same_key(one.key, key):
                changed[one.position] = one.before + value
    return changed


def same_key(one: str, other: str) -> bool:
    """Whether two keys mean the same: argparse makes `batch_size` of `--batch-size`."""
    return one.lstrip("-").replace("-", "_") == other.lstrip("-").replace("-", "_")


@dataclass(frozen=True)
class Settings:
    """Values by dotted key, as text, from every place that a script reads.

    Attributes:
        line: the command line.
        in_file: the values of the configuration file.
        in_groups: the values of the group files that Hydra adds to it.
    """

    line: Sequence[str]
    in_file: Mapping[str, str]
    in_groups: Mapping[str, str]

    def value(self, key: str | None) -> str | None:
        """Return the value in force. The command line wins over a sweep, a sweep over the files."""
        if key is None:
            return None
        found = (value_of(self.line, key), self.swept(key), self.in_file.get(key), self.in_groups.get(key))
        return next((value for value in found if value is not None), None)

    def swept(self, key: str) -> str | None:
        """Return what Hydra's sweeper sets the key to in a multirun, or None."""
        if not self._is_multirun():
            return None
        # Either as a mapping in one word, `hydra.sweeper.params={lr:1e-3}`, or by its dotted key.
        dotted = f"{_SWEEPER}.{key}"
        in_braces = re.search(rf"[{{,]\s*{re.escape(key)}\s*:([^,}}]+)", value_of(self.line, _SWEEPER) or "")
        on_line = in_braces[1].strip() if in_braces else value_of(self.line, dotted)
        return on_line or self.in_file.get(dotted) or self.in_groups.get(dotted)

    def find_key(self, named: str | None, option: str, usual: Iterable[str]) -> str | None:
        """Return the key that the user named, or the first usual one whose value is a number.

        Args:
            option: the option that names the key, for the error.

        Raises:
            ConfigError: the named key has no number to start from.
        """
        if named is None:
            return next((key for key in usual if number(self.value(key)) is not None), None)
        return self._require(named, option)

    def find_scaled_keys(self, named: Sequence[str]) -> list[str]:
        """Return the keys that shrink with the batch: those that the user named, or the usual ones.

        Raises:
            ConfigError: a named key has no number to start from.
        """
        if named:
            return [self._require(key, "--scale-with-batch") for key in named]
        known = dict.fromkeys([*self.in_file, *self.in_groups, *(one.key for one in overrides(self.line))])
        return [key for key in known if key.startswith(_SCALED_KEY[0]) and key.endswith(_SCALED_KEY[1])]

    def _require(self, key: str, option: str) -> str:
        if number(self.value(key)) is None:
            swept = self.swept(key)
            raise ConfigError(
                f"{key} has no value that is a number" + (f": Hydra sweeps over {swept}" if swept else ""),
                where=f"{option} {key}",
                hint=f"write the value to start from: {key}=VALUE, --{key} VALUE, or in the configuration",
            )
        return key

    def _is_multirun(self) -> bool:
        if {"-m", "--multirun"} & set(self.line):
            return True
        modes = (value_of(self.line, "hydra.mode"), self.in_file.get("hydra.mode"), self.in_groups.get("hydra.mode"))
        return next((mode for mode in modes if mode is not None), "").upper() == "MULTIRUN"


class CutCheck:
    """Checks whether the learning rate that the attempts print follows the one that they were given.

    A schedule keeps the printed rate below the given one. Some scripts count in another unit (per sample, or times the
    number of processes): their first printed rate is above the given one. Of those only a rate that stays exactly the
    same after a cut shows that the cut did not arrive.

    Args:
        given: the rate of the first attempt; None if it is unknown.
    """

    def __init__(self, given: float | None) -> None:
        self._first_given = given
        self._first_printed: str | None = None

    def doubt(self, given: float | None, printed: str | None) -> str | None:
        """Return why an attempt did not train with the rate it was given, or None if nothing speaks against it.

        Args:
            given: the rate of this attempt.
            printed: the last rate in its output.
        """
        if given is None or printed is None or self._first_given is None:
            return None
        first = self._first_printed = self._first_printed or printed
        if given == self._first_given:
            return None
        # Compared with a tolerance in the same unit; in another one only digits that did not change prove something.
        same_unit = float(first) <= _TOLERANCE * self._first_given
        too_high = float(printed) > _TOLERANCE * given if same_unit else printed == first
        return f"it printed learning rate {printed}, and {given:.3g} was asked for" if too_high else None


def number(text: str | None) -> float | None:
    """Return a positive number; None for everything else."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 < value < float("inf") else None


def integer(text: str | None) -> int | None:
    """Return a positive whole number; None for everything else."""
    value = number(text)
    return int(value) if value is not None and value == int(value) else None
