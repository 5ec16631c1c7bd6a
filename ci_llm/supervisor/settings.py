"""What another script is set to: keys and values on its command line, in Hydra's sweeper, in its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ci_llm.errors import ConfigError
from ci_llm.supervisor.script_config import overrides, value_of

LEARNING_RATE_KEYS: Final = ("training.learning_rate", "learning_rate")
BATCH_SIZE_KEYS: Final = ("training.meta_batch_size", "training.batch_size", "batch_size")
_SCALED_KEY: Final = ("training.", ".constant_product")
_SWEEPER: Final = "hydra.sweeper.params"


@dataclass(frozen=True)
class Settings:
    """Values by dotted key, as text.

    Attributes:
        line: the command line.
        in_file: of the configuration file.
        in_groups: of the files that Hydra adds to it.
    """

    line: Sequence[str]
    in_file: Mapping[str, str]
    in_groups: Mapping[str, str]

    def value(self, key: str | None) -> str | None:
        """The value in force: the command line wins over a sweep, and a sweep over the files."""
        if key is None:
            return None
        found = (value_of(self.line, key), self.swept(key), self.in_file.get(key), self.in_groups.get(key))
        return next((value for value in found if value is not None), None)

    def swept(self, key: str) -> str | None:
        """What Hydra's sweeper sets the key to in a multirun."""
        if not self._is_multirun():
            return None
        dotted = f"{_SWEEPER}.{key}"
        in_braces = re.search(rf"[{{,]\s*{re.escape(key)}\s*:([^,}}]+)", value_of(self.line, _SWEEPER) or "")
        on_line = in_braces[1].strip() if in_braces else value_of(self.line, dotted)
        return on_line or self.in_file.get(dotted) or self.in_groups.get(dotted)

    def find_key(self, named: str | None, option: str, usual: Iterable[str]) -> str | None:
        """The key that was named, or the first usual one that has a number.

        Raises:
            ConfigError: a key that was named has none.
        """
        if named is None:
            return next((key for key in usual if number(self.value(key)) is not None), None)
        return self._require(named, option)

    def find_scaled_keys(self, named: Sequence[str]) -> list[str]:
        """The keys that shrink with the batch.

        Raises:
            ConfigError: as above.
        """
        if named:
            return [self._require(key, "--scale-with-batch") for key in named]
        known = dict.fromkeys([*self.in_file, *self.in_groups, *(one.key for one in overrides(self.line))])
        return [key for key in known if key.startswith(_SCALED_KEY[0]) and key.endswith(_SCALED_KEY[1])]

    def _require(self, key: str, option: str) -> str:
        """A key that was named must have a value to start from."""
        if number(self.value(key)) is None:
            swept = self.swept(key)
            raise ConfigError(
                f"{key} has no value that is a number" + (f": Hydra sweeps over {swept}" if swept else ""),
                where=f"{option} {key}",
                hint=f"{key}=VALUE on the command line, or in the configuration, says where to start from",
            )
        return key

    def _is_multirun(self) -> bool:
        if {"-m", "--multirun"} & set(self.line):
            return True
        modes = (value_of(self.line, "hydra.mode"), self.in_file.get("hydra.mode"), self.in_groups.get("hydra.mode"))
        return next((mode for mode in modes if mode is not None), "").upper() == "MULTIRUN"


def number(text: str | None) -> float | None:
    """A positive number; None for everything else."""
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 < value < float("inf") else None


def integer(text: str | None) -> int | None:
    """A positive whole number; None for everything else."""
    value = number(text)
    return int(value) if value is not None and value == int(value) else None
