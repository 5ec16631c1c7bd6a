"""The metrics: each finds the answer in a text, so that equal answers are right.

One of your own is a file in this folder, `metrics/<name>.py`, and `ci-llm evaluate RUN --metric <name>` selects it. It
defines

    def reader(references: Sequence[str]) -> Callable[[str], str]

It is called once with the reference answers of all rows, because only all of them show how answers are written. It
returns a function that finds the normalised answer in a text, "" if there is none. A row is right if the answers of its
text and of its reference are equal and not "".
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from ci_llm.core.imports import load_plugin, plugin_names

Reader: TypeAlias = Callable[[str], str]

METRICS = plugin_names(__name__)
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")


def answer_reader(references: Sequence[str], metric: str = "exact_match") -> Reader:
    """A function that finds the answer in a text, for rows with these references.

    Raises:
        BadInput: there is no metric of that name.
    """
    if metric == "string_match":
        return _normalised
    if metric == "exact_match":  # what follows `####`, the last number, or the whole text
        from ci_llm.crowd.answers import final_answer, style_of  # they load torch, which the names do without

        return partial(final_answer, style=style_of(references))
    make: Callable[[Sequence[str]], Reader] = load_plugin(__name__, metric, "reader")
    return make(references)


def _normalised(text: str) -> str:
    """The text without case, punctuation, English articles and surplus white space, as SQuAD compares answers.

    Source: Rajpurkar et al. 2016, its evaluation script.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())
