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
from typing import Literal, TypeAlias

from ci_llm.core.answers import NUMBER, last_number, normalised
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
        return partial(final_answer, style=style_of(references))
    make: Callable[[Sequence[str]], Reader] = load_plugin(__name__, metric, "reader")
    return make(references)


def _normalised(text: str) -> str:
    """The text without case, punctuation, English articles and surplus white space, as SQuAD compares answers.

    Source: Rajpurkar et al. 2016, its evaluation script.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


AnswerStyle = Literal["marked", "number", "text"]

_MARK = re.compile(r"####[ \t]*(.*)")
_BEGINS_WITH_NUMBER = re.compile(rf"{NUMBER.pattern}(?![.,]?[\w/:^*+=-])")
#: Before a number that is the whole answer, and not a part of it as in 3/4, 9:30 or 10-3; "Answer:42" and "US$5" do.
_IS_WHOLE = r"(?:(?<![\w/^*.,+$-])(?<!\d:)|(?<![\d/:^*.,+-])(?=\$))"
_ENDS_WITH_NUMBER = re.compile(rf"{_IS_WHOLE}{NUMBER.pattern}\s*%?[.!]?\s*$")


def style_of(references: Sequence[str]) -> AnswerStyle:
    """The style of the answers of a task, judged by all its reference answers.

    marked    "... #### 1,234"  as in GSM8K: the text after the mark; the last number if a text has no mark
    number    "... is 42."      every reference ends with a number: the last number of a text
    text      anything else, such as fractions, dates and times: the whole text, with white space evened out
    """
    if all(_MARK.search(text) for text in references):
        return "marked"
    return "number" if all(_ENDS_WITH_NUMBER.search(text) for text in references) else "text"


def final_answer(text: str, style: AnswerStyle) -> str:
    """The final answer of `text`, normalised; "" if there is none.

    Numbers are compared as numbers: 1,234 = $1234.00.
    """
    if style == "marked" and (mark := _MARK.search(text)):
        # The first mark counts: a text that continues after its answer continues with the next question.
        return normalised(_BEGINS_WITH_NUMBER.match(mark[1])) or _even(mark[1])
    return _even(text) if style == "text" else last_number(text) or ""


def _even(text: str) -> str:
    """The text with single spaces between its words."""
    return " ".join(text.split())
