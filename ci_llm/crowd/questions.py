"""The questions in rows, and the answers of each agent and of the crowd to them, generated and scored.

Legend: K agents, n questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, tee
from statistics import median
from typing import Final

import torch
import xxhash

from ci_llm.core.evaluation_file import AnsweredQuestions
from ci_llm.core.measures import PrimaryMetric
from ci_llm.crowd.aggregators import find_vote, majority
from ci_llm.crowd.generation import Wanted, generate_each
from ci_llm.crowd.metrics import Reader, answer_reader
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import Decoding, ends_of_base, num_positions
from ci_llm.crowd.scoring import AnswerScores, Solved
from ci_llm.crowd.uncertainty import TokenUncertainty
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import last_answer
from ci_llm.data.tokens import TokenizedRows
from ci_llm.data.units import Unit

#: The most words that a right answer can be expected to repeat exactly.
MOST_WORDS: Final = 8


def primary_metric(rows: Sequence[Example] | TokenizedRows, crowd: CrowdModel) -> PrimaryMetric:
    """The measure for these rows: exact match, or NLL for free text and for numbers, which are never exactly right.

    Prompts alone are judged by rewards, of which the loss is the negative.

    Rows are free text if at least half of them ask nothing, as plain text, or have answers in several turns, or if
    their right answers have more than `MOST_WORDS` words in the median. 64 evenly spread rows are examined.
    """
    heads = crowd.settings.outputs
    looked = [rows[number] for number in _spread(range(len(rows)), 64)]
    if isinstance(looked[0], Unit) and looked[0].is_prompt:
        return "nll"
    if heads:
        return "nll" if heads == 1 and isinstance(looked[0], Unit) and len(looked[0].spans) == 1 else "exact_match"
    asked = [row for row in looked if _has_question(row) and last_answer(row).start == int(row.supervised.argmax())]
    if 2 * len(asked) <= len(looked):
        return "nll"
    references = [crowd.prompter.text(row.input_ids[last_answer(row)].tolist()) for row in asked]
    read = answer_reader(references, "exact_match")
    return "nll" if median(len(read(text).split()) for text in references) > MOST_WORDS else "exact_match"


@dataclass(frozen=True)
class Questions:
    """Questions with their right answers, the same on every process.

    Attributes:
        rows: the number of each question's row.
        prompts: the token ids of the questions.
        references: the right answers, as the rows have them.
        read: finds the normalised answer in a text.
        ends: the token ids that end an answer in these rows, or by the settings of the base.
        left_out: the number of rows that have no question, or no place for an answer.
        too_long: the number of these that have a question.
        metric: the metric that `read` comes from, one of `ci_llm.crowd.metrics`.
        longest: the number of tokens of the longest reference.
    """

    rows: list[int]
    prompts: list[list[int]]
    references: list[str]
    read: Reader
    ends: frozenset[int]
    left_out: int = 0
    too_long: int = 0
    metric: str = "exact_match"
    longest: int = 0

    @classmethod
    def of(
        cls,
        rows: Sequence[Example] | TokenizedRows,
        crowd: CrowdModel,
        count: int,
        max_seq_length: int,
        metric: str = "exact_match",
        sets: Sequence[range] | None = None,
    ) -> Questions:
        """Up to `count` rows, evenly spread over the rows with a question whose last answer is complete.

        Args:
            sets: the rows of several sets, if `count` holds for each; None if all rows are one set.
            max_seq_length: a row of this many tokens may have been cut and is left out, see
                `TokenizedRows.whole_below`; so is a row that leaves the base no position for an answer.
            metric: one of `ci_llm.crowd.metrics`.
        """
        limit = min(max_seq_length, num_positions(crowd.model))
        each = ((number, rows[number]) for number in range(len(rows)))
        fits = {number: len(row.input_ids) < limit for number, row in each if _has_question(row)}
        found = [[number for number in part if fits.get(number)] for part in sets or [range(len(rows))]]
        numbers, usable = [n for each in found for n in _spread(each, count)], sum(map(len, found))
        chosen = [rows[number] for number in numbers]
        answers = [row.input_ids[last_answer(row)].tolist() for row in chosen]
        references = [*map(crowd.prompter.text, answers)]
        return cls(
            rows=numbers,
            prompts=[row.input_ids[: last_answer(row).start].tolist() for row in chosen],
            references=references,
            read=answer_reader(references, metric),
            ends=crowd.prompter.ends_of(chosen) | ends_of_base(crowd.model),
            left_out=len(rows) - usable,
            too_long=len(fits) - usable,
            metric=metric,
            longest=max(map(len, answers), default=0),
        )

    @cached_property
    def answers(self) -> list[str]:
        """The right answers, normalised."""
        return [self.read(text) for text in self.references]

    def __len__(self) -> int:
        return len(self.prompts)


def identity_of(sets: Sequence[Questions], max_new_tokens: int) -> AnsweredQuestions:
    """The identity of the questions, by which scores and a predictions file are known to belong together."""
    prompts = [prompt for part in sets for prompt in part.prompts]
    references = [reference for part in sets for reference in part.references]
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps([prompts, references]).encode())
    return AnsweredQuestions(fingerprint, sets[0].metric, max_new_tokens)


@dataclass(frozen=True)
class Answers:
    """The answers to one question.

    Attributes:
        number: the index of the question.
        agents: the texts of the K agents.
        crowd: the text of the crowd.
        right: [K+2] True for each that is right: K agents, the crowd, the vote.
        sure: how sure the crowd was of every token, see `ci_llm.crowd.uncertainty`; empty if that was not asked for.
    """

    number: int
    agents: list[str]
    crowd: str
    right: list[bool]
    sure: list[TokenUncertainty]


def answer_questions(
    crowd: CrowdModel,
    questions: Questions,
    batches: Iterable[Sequence[int]],
    max_new_tokens: int,
    aggregator: str,
    stop: Callable[[], bool] = lambda: False,
    *,
    uncertainty: bool = False,
) -> Iterator[Answers]:
    """Generate the answers of the agents and of the crowd greedily, question after question.

    Args:
        crowd: K agents write 1 + K texts for each question, one alone writes one.
        batches: indices into `questions`. As many questions as the first batch has are answered at the same time, and
            the next batch is taken when there is place for one of its questions.
        max_new_tokens: the most tokens of an answer.
        aggregator: one of `ci_llm.crowd.aggregators`.
        stop: called after every token; True ends all texts at that point.
        uncertainty: also compute how sure the crowd is of each answer.
    """
    is_one = crowd.num_agents == 1 and find_vote(aggregator) is None  # its answer is the crowd's
    wanted = Wanted(
        Decoding(max_new_tokens, questions.ends, aggregator),
        include_agents=not is_one,
        uncertainty=uncertainty,
        stop=stop,
        answers_of=lambda texts: [questions.read(crowd.prompter.text(ids)) for ids in texts],
    )
    given = iter(batches)
    first = next(given, None)
    if first is None:
        return
    # Lazily: in an evaluation during training, taking the next batch is a vote of all processes.
    asked, of = tee(i for batch in chain([first], given) for i in batch)
    written = generate_each(crowd, ((i, questions.prompts[i]) for i in asked), wanted, max(1, len(first)))
    for generated in written:
        number = next(of)
        each = [*([generated.ids] if is_one else generated.agents), generated.ids]
        *agents, together = map(crowd.prompter.text, each)
        *own, crowds = map(questions.read, (*agents, together))
        wanted_answer = questions.answers[number]
        right = [answer == wanted_answer != "" for answer in (*own, crowds, majority(own, crowds))]
        yield Answers(number, agents, together, right, generated.uncertainties)


def score_answers(
    crowd: CrowdModel,
    questions: Questions,
    batches: Iterable[Sequence[int]],
    max_new_tokens: int,
    aggregator: str,
    stop: Callable[[], bool] = lambda: False,
) -> AnswerScores | None:
    """The scores of the answers of `answer_questions`, in their order; None if `stop` returned True."""
    right, example = list[list[bool]](), None
    for each in answer_questions(crowd, questions, batches, max_new_tokens, aggregator, stop):
        if stop():
            return None
        right.append(each.right)
        if example is None:
            question = crowd.prompter.question(questions.prompts[each.number])
            example = Solved(question, each.crowd, questions.answers[each.number], tuple(each.right))
    lines = crowd.num_agents + 2  # also where no question was answered
    return AnswerScores(torch.tensor(right, dtype=torch.bool).view(-1, lines).T, example)


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """At most `count` evenly spread numbers of these."""
    count = min(count, len(numbers))
    return [numbers[i * len(numbers) // count] for i in range(count)]


def _has_question(row: Example) -> bool:
    """True if a row has a question: in plain text only the first token precedes the "answer"."""
    return bool(last_answer(row).start > 1)
