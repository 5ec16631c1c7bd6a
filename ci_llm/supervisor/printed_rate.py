"""The learning rate that a script prints, and whether a cut is to be seen in it."""

from __future__ import annotations

import re
from typing import Final

_RATE: Final = re.compile(
    r"(?<![\w-])(?<!min )(?<!max )(?<!base )(?<!peak )(?<!initial )"
    r"(?:lr|learning[ _-]?rate)(?:[-/]\w+)?[\"']?\s*[=:|]?\s*[\[(\"']*(\d+(?:\.\d*)?(?:e[-+]?\d+)?)(?![\w%])",
    re.IGNORECASE,
)
#: A rate that is rounded, or was set a little higher by a schedule, is still the one that was asked for.
_LEEWAY: Final = 1.2


def printed_rate(line: str) -> str | None:
    """The learning rate that a line of output names, as written there: `lr: 1.00e-03`, `'learning_rate': 5e-05`."""
    small = line.lower()
    found = _RATE.search(line) if "lr" in small or "learning" in small else None
    return found[1] if found else None


class CutWatch:
    """Whether what the attempts print follows the learning rate that they were given.

    A schedule keeps it below that rate. A script whose first rate was above it counts in a unit of its own (per
    sample, times the processes): there only the very same rate, after a cut, gives it away.

    Args:
        given: to the first attempt; None where nobody knows it.
    """

    def __init__(self, given: float | None) -> None:
        self._first_given = given
        self._first_printed: str | None = None

    def doubt(self, given: float | None, printed: str | None) -> str | None:
        """Why it is not believed that an attempt, which printed this at last, trained with the rate it was given."""
        if given is None or printed is None or self._first_given is None:
            return None
        first = self._first_printed = self._first_printed or printed
        if given == self._first_given:
            return None
        same_unit = float(first) <= _LEEWAY * self._first_given
        too_high = float(printed) > _LEEWAY * given if same_unit else printed == first
        return f"it printed learning rate {printed}, and {given:.3g} was asked for" if too_high else None
