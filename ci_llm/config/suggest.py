"""The key that a misspelt name means; no suggestion is better than a wrong one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from typing import Final

#: Lowest similarity, 0 to 1: of each part to a part of the other name, of the whole names, and of names without `_`.
PART: Final = 0.65
WHOLE: Final = 0.75
RUN_TOGETHER: Final = 0.88


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name of which `name` is a misspelling; None if `name` means something else.

    A part of `name` that the known one lacks has a meaning: `eval_batch_size` is no misspelling of `batch_size`. A part
    may be left out, as in `max_grad` for `max_grad_norm`.
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
