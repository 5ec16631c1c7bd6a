"""The final answer of a text, and the majority of several answers.

How the answers of a task are written is read off its references, once for all rows (`style_of`):

    marked    "... #### 1,234"  as in GSM8K: what follows the mark; the last number if a text has no mark
    number    "... is 42."      every reference ends with a number: the last number of a text
    text      anything else, such as fractions, dates and times: the whole text, with white space evened out

Numbers are compared as numbers: 1,234 = $1234.00.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

AnswerStyle = Literal["marked", "number", "text"]

_MARK = re.compile(r"####[ \t]*(.*)")
#: A sign right after a digit is an operation: 10-3 ends with 3.
_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9])[-+])?\$?(?P<digits>(?:[0-9]+(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_BEGINS_WITH_NUMBER = re.compile(rf"{_NUMBER.pattern}(?![.,]?[\w/:^*+=-])")
#: The number is the answer, and not its last part as in 3/4, 9:30 or 10-3; "Answer:42" and "US$5" end with a whole one.
_IS_WHOLE = r"(?:(?<![\w/^*.,+$-])(?<!\d:)|(?<![\d/:^*.,+-])(?=\$))"
_ENDS_WITH_NUMBER = re.compile(rf"{_IS_WHOLE}{_NUMBER.pattern}\s*%?[.!]?\s*$")


def style_of(references: Sequence[str]) -> AnswerStyle:
    """How the answers of a task are written, judged by all its reference answers."""
    if all(_MARK.search(text) for text in references):
        return "marked"
    return "number" if all(_ENDS_WITH_NUMBER.search(text) for text in references) else "text"


def final_answer(text: str, style: AnswerStyle) -> str:
    """The final answer of `text`, normalised; "" if there is none."""
    if style == "marked" and (mark := _MARK.search(text)):
        # The first mark counts: a text that goes on after its answer goes on with the next question.
        return _number(_BEGINS_WITH_NUMBER.match(mark[1])) or _even(mark[1])
    if style == "text":
        return _even(text)
    *_, last = [None, *_NUMBER.finditer(text)]
    return _number(last)


def majority(answers: Sequence[str], crowd: str) -> str:
    """The answer that most agents give; on a tie the crowd's if it is among the tied, else that of the first agent.

    Args:
        answers: one per agent; "" is no vote.
        crowd: the crowd's own answer, which breaks ties.

    Returns:
        the answer; "" if no agent has one.
    """
    votes = Counter(answer for answer in answers if answer)
    tied = [answer for answer, count in votes.items() if count == max(votes.values())]
    return crowd if crowd in tied else next(iter(tied), "")


def _number(found: re.Match[str] | None) -> str:
    """1,234.50 as 1234.5, by its digits: different long numbers can be equal as floats."""
    if found is None:
        return ""
    whole, _, part = found["digits"].replace(",", "").partition(".")
    value = f"{whole.lstrip('0') or '0'}.{part.rstrip('0')}".rstrip(".")
    return f"-{value}" if found["sign"] == "-" and value != "0" else value


def _even(text: str) -> str:
    return " ".join(text.split())
