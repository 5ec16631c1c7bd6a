"""Answer-level exact match: what was the final answer, and was it right? The agents alone, the crowd, a majority vote.

What counts as an answer is read off the references, once for all rows (`style_of`):

    marked    "... #### 1,234"  as in GSM8K: what follows the mark; the last number where a text forgot the mark
    number    "... is 42."      every reference ends with a number: the last number of a text
    text      anything else: the whole text, white space evened out

Numbers are compared as numbers: 1,234 = $1234.00.  Legend: K agents, n rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ci_llm.crowd.aggregate import Aggregator
from ci_llm.crowd.generation import Decoding, num_positions
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.prompts import Prompter, last_answer
from ci_llm.crowd.scoring import paired_gain
from ci_llm.data.encoder import Example

AnswerStyle = Literal["marked", "number", "text"]

_MARK = re.compile(r"####[ \t]*(.*)")
#: A sign right after a digit is an operation: 10-3 ends with 3.
_NUMBER = re.compile(
    r"(?P<sign>(?<![0-9])[-+])?\$?(?P<digits>(?:[0-9]+(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
)
_BEGINS_WITH_NUMBER = re.compile(rf"{_NUMBER.pattern}(?![.,]?[\w/:^*+=-])")
_ENDS_WITH_NUMBER = re.compile(rf"{_NUMBER.pattern}\s*%?[.!]?\s*$")


class Examples(Protocol):
    """Tokenised rows."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Example: ...


# What a text answers


def style_of(references: Sequence[str]) -> AnswerStyle:
    """How the answers of a task are written."""
    if all(_MARK.search(text) for text in references):
        return "marked"
    return "number" if all(_ENDS_WITH_NUMBER.search(text) for text in references) else "text"


def final_answer(text: str, style: AnswerStyle) -> str:
    """The answer that `text` ends up with, normalised; "" where there is none."""
    if style == "marked" and (mark := _MARK.search(text)):
        # The first: a text that goes on after its answer begins with the next question.
        return _number(_BEGINS_WITH_NUMBER.match(mark[1])) or _even(mark[1])
    if style == "text":
        return _even(text)
    *_, last = [None, *_NUMBER.finditer(text)]
    return _number(last)


def majority(answers: Sequence[str], crowd: str) -> str:
    """The answer that most agents give; on a tie the crowd's own if it is among them, else the first agent's.

    An agent without an answer does not vote; "" if none has one.
    """
    votes = Counter(answer for answer in answers if answer)
    tied = [answer for answer, count in votes.items() if count == max(votes.values())]
    return crowd if crowd in tied else next(iter(tied), "")


def _number(found: re.Match[str] | None) -> str:
    """1,234.50 as 1234.5; digit by digit, as a float would take long numbers for equal."""
    if found is None:
        return ""
    whole, _, part = found["digits"].replace(",", "").partition(".")
    value = f"{whole.lstrip('0') or '0'}.{part.rstrip('0')}".rstrip(".")
    return f"-{value}" if found["sign"] == "-" and value != "0" else value


def _even(text: str) -> str:
    return " ".join(text.split())


# Scores


@dataclass(frozen=True)
class AnswerScores:
    """Whose final answer was right: `right` bool [K+2, n], the last two lines being the crowd and the vote."""

    right: Tensor

    @classmethod
    def joined(cls, parts: Iterable[AnswerScores]) -> AnswerScores:
        return cls(torch.cat([part.right for part in parts], dim=1))

    def record(self) -> dict[str, Any]:
        """`n` and `exact_match` of `evaluation.json`; the gains are paired over rows, with 95 % intervals."""
        *agents, crowd, vote = self.right.double()
        means = [float(agent.mean()) for agent in agents]
        best = agents[means.index(max(means))]
        return {
            "n": self.right.shape[1],
            "exact_match": {
                "agents": means,
                "crowd": float(crowd.mean()),
                "vote": float(vote.mean()),
                "crowd_minus_mean": paired_gain(crowd, torch.stack(agents).mean(0)),
                "crowd_minus_best": paired_gain(crowd, best),
                "crowd_minus_vote": paired_gain(crowd, vote),
            },
        }


def merged(teacher_forced: dict[str, Any], generated: AnswerScores | None) -> dict[str, Any]:
    """`evaluation.json`: `n` and `exact_match` are about generated final answers where there are any.

    `measured_by` says it; the teacher-forced figures, about whole solutions, then stand under `teacher_forced` with
    the `n` of their own. `nll` is always teacher-forced.
    """
    if generated is None:
        return {**teacher_forced, "measured_by": "teacher_forcing"}
    solutions = {key: teacher_forced[key] for key in ("n", "exact_match")}
    return {**teacher_forced, **generated.record(), "measured_by": "generation", "teacher_forced": solutions}


# The examination


@dataclass(frozen=True)
class Examination:
    """Questions with their right answers, the same on every process.

    Attributes:
        prompts: token ids of the questions.
        answers: the right answers, normalised.
        style: how answers of this task are written.
        ends: token ids that end an answer in these rows.
    """

    prompts: list[list[int]]
    answers: list[str]
    style: AnswerStyle
    ends: frozenset[int]

    @classmethod
    def of(cls, rows: Examples, prompter: Prompter, crowd: Crowd, count: int, max_seq_length: int) -> Examination:
        """Up to `count` rows, evenly spread over those that ask something and whose last answer is whole.

        A row of `max_seq_length` tokens may have been cut, and one as long as the base can read leaves no room.
        """
        limit = min(max_seq_length, num_positions(crowd.model))
        asking = [number for number in range(len(rows)) if _asks(rows[number], limit)]
        count = min(count, len(asking))
        chosen = [rows[asking[i * len(asking) // count]] for i in range(count)]
        references = [prompter.text(row.input_ids[last_answer(row)].tolist()) for row in chosen]
        style = style_of(references)
        return cls(
            prompts=[row.input_ids[: last_answer(row).start].tolist() for row in chosen],
            answers=[final_answer(text, style) for text in references],
            style=style,
            ends=prompter.ends_of(chosen),
        )

    def __len__(self) -> int:
        return len(self.prompts)


def examine(
    crowd: Crowd,
    prompter: Prompter,
    examination: Examination,
    batches: Iterable[Sequence[int]],
    *,
    max_new_tokens: int,
    aggregator: Aggregator,
    stop: Callable[[], bool] = lambda: False,
) -> AnswerScores | None:
    """Let agents and crowd write their answers, greedily, and score them; None when `stop` asked to leave.

    Args:
        batches: numbers of questions, this process's share; K agents write 2·K answers to each at a time.
    """
    decoding = Decoding(max_new_tokens, examination.ends, aggregator)
    parts = [torch.zeros(crowd.num_agents + 2, 0, dtype=torch.bool)]
    for batch in batches:
        written = crowd.write([examination.prompts[i] for i in batch], decoding, alone=True, stop=stop)
        if stop():
            return None
        wanted = [examination.answers[i] for i in batch]
        answers = [
            [final_answer(prompter.text(ids), examination.style) for ids in texts]
            for texts in (*written.alone, written.together)
        ]
        answers.append([majority(each, own) for *each, own in zip(*answers, strict=True)])
        parts.append(torch.tensor([[a == w != "" for a, w in zip(line, wanted, strict=True)] for line in answers]))
    return AnswerScores(torch.cat(parts, dim=1))


def _asks(row: Example, limit: int) -> bool:
    """Whether it is whole and something precedes its last answer: of plain text, only the first token does."""
    return len(row.input_ids) < limit and bool(last_answer(row).start > 1)
