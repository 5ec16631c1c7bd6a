"""Exact match of generated final answers: each agent, the crowd, and the agents' majority vote.

Legend: K agents, n questions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ci_llm.crowd.answers import AnswerStyle, final_answer, majority, style_of
from ci_llm.crowd.generation import Decoding, num_positions
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.prompts import Prompter, last_answer
from ci_llm.crowd.scoring import paired_gain
from ci_llm.data.encoder import Example


class Examples(Protocol):
    """Tokenised rows."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Example: ...


@dataclass(frozen=True)
class Questions:
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
    def of(cls, rows: Examples, prompter: Prompter, crowd: Crowd, count: int, max_seq_length: int) -> Questions:
        """Up to `count` rows, evenly spread over the rows with a question whose last answer is complete.

        Args:
            max_seq_length: a row of so many tokens may have been cut and is left out, as is a row that leaves the base
                no position for an answer.
        """
        limit = min(max_seq_length, num_positions(crowd.model))
        usable = [number for number in range(len(rows)) if _is_usable(rows[number], limit)]
        count = min(count, len(usable))
        chosen = [rows[usable[i * len(usable) // count]] for i in range(count)]
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


@dataclass(frozen=True)
class Solved:
    """One question with the answer of the crowd, for people.

    Attributes:
        answer: all that the crowd wrote.
        wanted: the right final answer.
        right: [K+2] of whom the final answer is right: K agents, the crowd, the vote.
    """

    question: str
    answer: str
    wanted: str
    right: tuple[bool, ...]


@dataclass(frozen=True)
class AnswerScores:
    """Which final answers were right.

    Attributes:
        right: [K+2, n] bool: K agents, the crowd, the vote.
        example: the first question; None if there is none.
    """

    right: Tensor
    example: Solved | None = None

    @classmethod
    def joined(cls, parts: Iterable[AnswerScores]) -> AnswerScores:
        """The questions of all parts, in order."""
        listed = list(parts)
        example = next((part.example for part in listed if part.example is not None), None)
        return cls(torch.cat([part.right for part in listed], dim=1), example)

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


def score_answers(
    crowd: Crowd,
    prompter: Prompter,
    questions: Questions,
    batches: Iterable[Sequence[int]],
    *,
    max_new_tokens: int,
    aggregator: str,
    stop: Callable[[], bool] = lambda: False,
) -> AnswerScores | None:
    """Generate the answers of the agents and of the crowd greedily, and score them.

    Args:
        crowd: K agents generate 2·K rows for each question at a time.
        questions: the same on every process.
        batches: indices into `questions`, this process's share.
        max_new_tokens: at most so many tokens per answer.
        aggregator: a module of `ci_llm.crowd.aggregators`.
        stop: called before every token and after every batch.

    Returns:
        the scores in the order of `batches`; None if `stop` returned True.
    """
    decoding = Decoding(max_new_tokens, questions.ends, aggregator)
    parts, example = [torch.zeros(crowd.num_agents + 2, 0, dtype=torch.bool)], None
    for batch in batches:
        prompts = [questions.prompts[i] for i in batch]
        generated = crowd.generate_ids(prompts, decoding, include_agents=True, stop=stop)
        if stop():
            return None
        wanted = [questions.answers[i] for i in batch]
        answers = [
            [final_answer(prompter.text(ids), questions.style) for ids in texts]
            for texts in (*generated.agents, generated.crowd)
        ]
        answers.append([majority(each, own) for *each, own in zip(*answers, strict=True)])
        parts.append(torch.tensor([[a == w != "" for a, w in zip(line, wanted, strict=True)] for line in answers]))
        if example is None and len(batch):
            question, answer = (prompter.text(ids) for ids in (prompts[0], generated.crowd[0]))
            example = Solved(question, answer, wanted[0], tuple(parts[-1][:, 0].tolist()))
    return AnswerScores(torch.cat(parts, dim=1), example)


def _is_usable(row: Example, limit: int) -> bool:
    """Whether a row is complete and has a question: in plain text only the first token precedes the "answer"."""
    return len(row.input_ids) < limit and bool(last_answer(row).start > 1)


def merge_records(teacher_forced: dict[str, Any], generated: AnswerScores | None) -> dict[str, Any]:
    """The content of `evaluation.json`, with the scores of generated answers if there are any.

    `n` and `exact_match` are then about generated final answers, `measured_by` is "generation", and the teacher-forced
    figures, about whole solutions, are under `teacher_forced` with their own `n`. `nll` is always teacher-forced.
    """
    if generated is None:
        return {**teacher_forced, "measured_by": "teacher_forcing"}
    solutions = {key: teacher_forced[key] for key in ("n", "exact_match")}
    return {**teacher_forced, **generated.record(), "measured_by": "generation", "teacher_forced": solutions}
