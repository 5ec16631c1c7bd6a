"""What a word that is no key was meant to be: right, or not said at all."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Final

#: How alike two words must be: every part of the one to a part of the other, and the whole to the whole.
PART: Final = 0.65
WHOLE: Final = 0.75
RUN_TOGETHER: Final = 0.88


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` is a slip of; None if `name` says something else.

    A part of `name` that the known one lacks carries a meaning: `eval_batch_size` is no slip of `batch_size`. A part
    that was left out, as in `max_grad` for `max_grad_norm`, may be one.
    """
    alike = [(_ratio(name.lower(), other.lower()), other) for other in known if _is_slip(name.lower(), other.lower())]
    return max(alike)[1] if alike else None


def _is_slip(name: str, other: str) -> bool:
    parts, others = name.split("_"), other.split("_")
    if len(parts) != len(others) and _ratio("".join(parts), "".join(others)) >= RUN_TOGETHER:
        return len(parts) < len(others)
    return _ratio(name, other) >= WHOLE and _fit(parts, others)


def _fit(parts: list[str], others: list[str]) -> bool:
    """Whether each part has one of the others that is like it, in order; one word alone does not stand for several."""
    if len(parts) == 1 < len(others):
        return False
    rest = iter(others)
    return all(any(_ratio(part, other) >= PART for other in rest) for part in parts)


def _ratio(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other).ratio()
