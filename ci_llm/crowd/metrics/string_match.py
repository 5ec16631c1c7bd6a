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
    """Every task alike: the references are not looked at."""
    return _normalised


def _normalised(text: str) -> str:
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())
