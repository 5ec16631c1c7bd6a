"""The whole text without case, punctuation, English articles and surplus white space.

This is how SQuAD compares answers (Rajpurkar et al. 2016, its evaluation script).
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def reader(references: Sequence[str]) -> Callable[[str], str]:
    """The same normalisation for every task; the references are unused."""
    return _normalised


def _normalised(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())
