"""Figures in words: bytes, seconds and counts as people say them."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes in decimal units, as disks are sold: 2.4 MB."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"


def duration(seconds: float) -> str:
    """Seconds in the largest unit of which there is more than one: 2.5 min."""
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def count(number: float) -> str:
    """A number of parameters: 8.03 billion."""
    for word, scale in (("billion", 1e9), ("million", 1e6)):
        if number >= scale / 10:
            return f"{number / scale:.2f} {word}"
    return f"{number:,.0f}"
