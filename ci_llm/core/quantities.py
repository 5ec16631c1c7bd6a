"""Durations, sizes, counts and losses in words, the same in every message, page and table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

MOST_LISTED: Final = 8  # losses of agents; of more agents, the range is shown


def duration(seconds: float) -> str:
    """Seconds in the two largest units: 0.02 s, 3.2 s, 42 s, 4 min 10 s, 2 h 5 min, 3 d 4 h."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{seconds:.2g} s" if seconds < 10 else f"{rounded} s"
    days, hours, minutes = rounded // 86400, rounded // 3600 % 24, rounded // 60 % 60
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rounded % 60, "s")]
    first = next(place for place, (number, _) in enumerate(parts) if number)
    return " ".join(f"{number} {unit}" for number, unit in parts[first : first + 2] if number)


def countdown(seconds: float) -> timedelta:
    """The time that is left, in the form of progress bars: 0:12:31."""
    return timedelta(seconds=round(seconds))


def size(nbytes: float) -> str:
    """Bytes in decimal units, as disks are sold: 2.4 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"


def short(number: float) -> str:
    """A number with three digits: 719, 12.4k, 1.2M, 8.03B."""
    for factor, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * factor:  # 999.6 in three digits is 1k
            return f"{number / factor:.3g}{letter}"
    return f"{number:.3g}"


def count(number: float, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:.0f} {what}" + ("" if round(number) == 1 else "s")


def finite(numbers: Sequence[float]) -> list[float]:
    """The numbers that are neither NaN nor infinite."""
    return [number for number in numbers if math.isfinite(number)]


def mean_of(losses: Sequence[float]) -> float:
    """The mean over the agents; losses that are not finite count only where no other is."""
    counted = finite(losses) or losses
    return sum(counted) / len(counted)


def describe_losses(losses: Sequence[float], mean: float | None = None) -> str:
    """`loss 1.23 (1.21 1.25)`: the mean over the agents, and each of them; of many, the range. Empty without any.

    Args:
        mean: the mean, where it is known already.
    """
    if not losses:
        return ""
    listed, known = " ".join(f"{loss:.4g}" for loss in losses), finite(losses)
    if len(losses) > MOST_LISTED and known:
        without = f", {len(losses) - len(known)} not finite" if len(known) < len(losses) else ""
        listed = f"{min(known):.4g} to {max(known):.4g}, {len(losses)} agents{without}"
    known_mean = mean_of(losses) if mean is None else mean
    return f"loss {known_mean:.4g} ({listed})" if len(losses) > 1 else f"loss {listed}"
