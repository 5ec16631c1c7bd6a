"""The scores of each agent and of the crowd: teacher-forced solutions, heads, and generated answers.

In teacher forcing, exact match means that every token of the reference solution is the most probable one given the
tokens before it, so that greedy decoding would reproduce the solution. The crowd's most probable token is that of the
aggregated distribution.

Legend: K agents, S targets, V vocabulary, n rows or questions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, tee
from statistics import median
from typing import Any, Final, Protocol

import torch
import xxhash
from torch import Tensor

from ci_llm.core.evaluation_file import Asked, BaseScores, BestAgent, Difference, Figure, TeacherForced
from ci_llm.core.measures import JudgedBy, paired_interval
from ci_llm.crowd.aggregators import aggregate, find_vote, majority
from ci_llm.crowd.generation import Wanted, generate_each
from ci_llm.crowd.judging import Judged, judge
from ci_llm.crowd.metrics import Reader, answer_reader
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import Decoding, ends_of_base, num_positions
from ci_llm.crowd.uncertainty import Uncertainty, of_text, signals
from ci_llm.data.batches import Batch
from ci_llm.data.encoder import Example
from ci_llm.data.prompts import Prompter, last_answer
from ci_llm.data.units import Unit


@dataclass(frozen=True)
class Scores:
    """The scores of n rows; index K stands for the crowd.

    Attributes:
        right: [K+1, n] bool, True for an exact match; for heads if the class, or the order of a pair, is right; for
            rewards if it is 1.
        nll: [K+1, n] fp64, nats summed over the targets of the row; for heads the loss of the row, for rewards minus
            the reward.
        tokens: [n] int64, the number of targets of the row; 1 for heads and rewards.
        own: per agent the rows that score it, if agents are evaluated on rows of their own; empty if all rows score all
            agents. All rows score the crowd.
        judged: the judgement of pairs, rated or labelled rows of the same data; None for an objective of single rows.
    """

    right: Tensor
    nll: Tensor
    tokens: Tensor
    own: tuple[slice, ...] = ()
    judged: Judged | None = None

    @classmethod
    def joined(cls, parts: Iterable[Scores]) -> Scores:
        """The rows of all parts, in order."""
        listed = list(parts)
        judged = [part.judged for part in listed if part.judged is not None]
        # In one copy, which is the only wait for a GPU.
        right, nll = torch.cat([torch.stack([part.right.double(), part.nll]) for part in listed], dim=2).cpu()
        return cls(
            right.bool(),
            nll,
            torch.cat([part.tokens for part in listed]),
            judged=judged[0].joined(judged) if judged else None,
        )

    @classmethod
    def of_sets(cls, sets: Sequence[Scores], of_agent: Sequence[int]) -> Scores:
        """The rows of several sets, each of which scores its own agents.

        Args:
            of_agent: the number of each agent's set.
        """
        together = cls.joined(sets)
        return replace(together, own=own_rows([part.right.shape[1] for part in sets], of_agent))

    @property
    def exact_match(self) -> list[float]:
        """The share of rows that match: K agents, then the crowd."""
        return [float(line[rows].double().mean()) for line, rows in zip(self.right, self._rows_of_each, strict=True)]

    @property
    def mean_nll(self) -> list[float]:
        """Nats per target token: K agents, then the crowd."""
        lines = zip(self.nll, self._rows_of_each, strict=True)
        return [float(line[rows].double()[None].sum(1) / self.tokens[rows].sum()) for line, rows in lines]

    @property
    def _rows_of_each(self) -> tuple[slice, ...]:
        """The rows that score each agent, and then those that score the crowd."""
        return (*(self.own or [slice(None)] * (len(self.right) - 1)), slice(None))

    def rows(self, chosen: slice) -> Scores:
        """The scores of some of the rows, which then score all agents."""
        return Scores(self.right[:, chosen], self.nll[:, chosen], self.tokens[chosen])

    def nll_gain(self, over: str) -> Difference:
        """The crowd's NLL minus that of the agents' mean or of the best agent, paired over all rows: less is better.

        Long rows count more, as in `mean_nll`.

        Args:
            over: "mean" or "best". The best agent is chosen on these same rows, which favours the agent.

        Returns:
            the difference; its interval covers the choice of the rows, not of the seed.
        """
        *agents, crowd = self.nll.double()
        of_all = torch.stack(agents)
        other = of_all.mean(0) if over == "mean" else agents[int(of_all.sum(1).argmin())]
        tokens = self.tokens.double()
        weights, difference = tokens / tokens.mean(), (crowd - other) / tokens.mean()
        # The mean of a ratio, linearised: the part of a row beyond its share of the tokens.
        return paired_gain(difference, difference.mean() * (weights - 1))


def own_rows(counts: Sequence[int], of_agent: Sequence[int]) -> tuple[slice, ...]:
    """The rows of each agent's set, where sets with these numbers of rows follow one another."""
    ends = [*accumulate(counts)]
    return tuple(slice(ends[number] - counts[number], ends[number]) for number in of_agent)


def paired_gain(one: Tensor, other: Tensor) -> Difference:
    """The mean of `one - other`, each [n], over rows, and its `paired_interval`."""
    difference = one - other
    return Difference(float(difference.mean()), paired_interval(difference.tolist()))


@torch.no_grad()
def score(
    crowd: CrowdModel, batches: Iterable[Batch], aggregator: str, stop: Callable[[], bool] = lambda: False
) -> Scores | None:
    """Score every row of `batches`.

    Args:
        aggregator: one of `ci_llm.crowd.aggregators`.
        stop: called before every batch.

    Returns:
        the scores, of no row if there is no batch; None if `stop` returned True.
    """
    nothing = torch.zeros(crowd.num_agents + 1, 0, dtype=torch.float64)
    parts = list[Scores]()
    with crowd.evaluating():
        for batch in batches:
            if stop():
                return None
            parts.append(_score_batch(crowd, batch, aggregator))
    return Scores.joined(parts or [Scores(nothing.bool(), nothing, nothing[0].long())])  # a process may have no row


#: Scores are computed in chunks that fit the logits of this many agents. The number is fixed, so that an agent's chunks
#: and the bits of its NLL are the same alone and among others.
SCORED_AT_ONCE: Final = 8


def _score_batch(crowd: CrowdModel, batch: Batch, aggregator: str) -> Scores:
    """The scores of a batch; `right` and `nll` stay on the device, because only the last batch waits for it."""
    tokens = torch.bincount(batch.target_rows, minlength=batch.num_rows)
    batch = batch.to(crowd.device)
    if crowd.settings.outputs:
        judged = judge(crowd, batch)
        return Scores(*judged.outcome, torch.ones(batch.num_units, dtype=torch.long), judged=judged)
    states = crowd.states(batch)[:, batch.predict_from]
    lines = crowd.num_agents + 1
    wrong = states.new_zeros(lines, batch.num_rows, dtype=torch.float64)
    nll = torch.zeros_like(wrong)
    head = crowd.head.to(states.dtype)
    # Chunk by chunk, because the logits of all targets of all agents need not fit into memory.
    for chunk in head.chunks(batch.num_targets, SCORED_AT_ONCE):
        log_probs = head.logits(states[:, chunk]).log_softmax(-1)
        everyone = torch.cat([log_probs, aggregate(log_probs, aggregator)[None]])
        targets, rows = batch.targets[chunk], batch.target_rows[chunk]
        wrong.index_add_(1, rows, (everyone.argmax(-1) != targets).double())
        picked = everyone.gather(-1, targets.expand(lines, -1)[..., None]).squeeze(-1)
        nll.index_add_(1, rows, -picked.double())
    return Scores(wrong == 0, nll, tokens)


def fields_of(scores: Scores, answers: AnswerScores | None, *, heads: bool) -> dict[str, Any]:
    """The fields of an `Evaluation` that follow from the scores.

    With generated answers, `n` and `exact_match` are about final answers, and the figures of whole solutions are under
    `teacher_forced` with their own `n`.

    Args:
        heads: True if heads, and no tokens, were scored.
    """
    n, exact_match = scores.right.shape[1], _shares(scores.right, scores.own)
    found: dict[str, Any] = {"n": n, "exact_match": exact_match, "measured_by": _measured_by(scores, heads=heads)}
    if answers is not None:
        found |= {"n": answers.right.shape[1], "exact_match": answers.shares, "measured_by": "generation"}
        found |= {"asked": answers.asked, "teacher_forced": TeacherForced(n, exact_match)}
    if scores.judged is not None:
        found[scores.judged.part] = scores.judged.judgement()
    *agents, crowd = scores.mean_nll
    mean, best = map(scores.nll_gain, ("mean", "best"))
    return {**found, "nll": Figure(tuple(agents), crowd, crowd_minus_mean=mean, crowd_minus_best=best)}


def _measured_by(scores: Scores, *, heads: bool) -> str:
    if scores.judged is not None and scores.judged.part == "rewards":
        return "rewards"
    return "heads" if heads else "teacher_forcing"


def _shares(right: Tensor, own: Sequence[slice], vote: Tensor | None = None) -> Figure:
    """The share of right rows, from which rows are right, [K+1, n]; differences are paired over all rows."""
    *agents, crowd = right.double()
    of_each = zip(agents, own or [slice(None)] * len(agents), strict=True)
    voted = None if vote is None else vote.double()
    return Figure(
        agents=tuple(float(agent[rows].mean()) for agent, rows in of_each),
        crowd=float(crowd.mean()),
        vote=None if voted is None else float(voted.mean()),
        crowd_minus_mean=paired_gain(crowd, torch.stack(agents).mean(0)),
        crowd_minus_best=paired_gain(crowd, max(agents, key=lambda agent: float(agent.mean()))),
        crowd_minus_vote=None if voted is None else paired_gain(crowd, voted),
    )


def base_scores(scores: Scores, answers: AnswerScores | None) -> BaseScores:
    """The scores of the base, from a pass of the base alone; see `CrowdModel.without_agents`."""
    right = scores.right if answers is None else answers.right
    return BaseScores(float(right[0].double().mean()), replace(scores, own=()).mean_nll[0])


def best_agent(scores: Scores, answers: AnswerScores | None, judged_by: JudgedBy) -> BestAgent:
    """The two best agents by the measure that judges the rows, and how many rows each of them wins."""
    better = -scores.nll[:-1] if judged_by == "nll" else (scores.right[:-1] if answers is None else answers.right[:-2])
    first, second = better.double().sum(1).argsort(descending=True, stable=True)[:2].tolist()
    wins, losses = (int((better[one] > better[other]).sum()) for one, other in ((first, second), (second, first)))
    return BestAgent(first, second, wins, losses)


class Examples(Protocol):
    """Tokenised rows."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Example: ...


#: The most words that a right answer can be expected to repeat exactly.
MOST_WORDS: Final = 8


def judged_by(rows: Examples, prompter: Prompter, heads: int = 0) -> JudgedBy:
    """The measure for these rows: exact match, or NLL for free text and for numbers, which are never exactly right.

    Prompts alone are judged by rewards, of which the loss is the negative.

    Rows are free text if at least half of them ask nothing, as plain text, or have answers in several turns, or if
    their right answers have more than `MOST_WORDS` words in the median. 64 evenly spread rows are examined.

    Args:
        heads: the number of outputs of each agent's head; 0 for agents without heads.
    """
    looked = [rows[number] for number in _spread(range(len(rows)), 64)]
    if isinstance(looked[0], Unit) and looked[0].is_prompt:
        return "nll"
    if heads:
        return "nll" if heads == 1 and isinstance(looked[0], Unit) and len(looked[0].spans) == 1 else "exact_match"
    asked = [row for row in looked if _has_question(row) and last_answer(row).start == int(row.supervised.argmax())]
    if 2 * len(asked) <= len(looked):
        return "nll"
    references = [prompter.text(row.input_ids[last_answer(row)].tolist()) for row in asked]
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
        rows: Examples,
        prompter: Prompter,
        crowd: CrowdModel,
        count: int,
        max_seq_length: int,
        metric: str = "exact_match",
        sets: Sequence[range] | None = None,
    ) -> Questions:
        """Up to `count` rows, evenly spread over the rows with a question whose last answer is complete.

        Args:
            sets: the rows of several sets, if `count` holds for each; None if all rows are one set.
            max_seq_length: a row of so many tokens may have been cut and is left out (see `TokenizedRows.whole_below`),
                as is a row that leaves the base no position for an answer.
            metric: one of `ci_llm.crowd.metrics`.
        """
        limit = min(max_seq_length, num_positions(crowd.model))
        each = ((number, rows[number]) for number in range(len(rows)))
        fits = {number: len(row.input_ids) < limit for number, row in each if _has_question(row)}
        found = [[number for number in part if fits.get(number)] for part in sets or [range(len(rows))]]
        numbers, usable = [n for each in found for n in _spread(each, count)], sum(map(len, found))
        chosen = [rows[number] for number in numbers]
        answers = [row.input_ids[last_answer(row)].tolist() for row in chosen]
        references = [prompter.text(answer) for answer in answers]
        return cls(
            rows=numbers,
            prompts=[row.input_ids[: last_answer(row).start].tolist() for row in chosen],
            references=references,
            read=answer_reader(references, metric),
            ends=prompter.ends_of(chosen) | ends_of_base(crowd.model),
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


def asked_of(sets: Sequence[Questions], max_new_tokens: int) -> Asked:
    """The identity of the questions, by which scores and a predictions file are known to belong together."""
    prompts = [prompt for part in sets for prompt in part.prompts]
    references = [reference for part in sets for reference in part.references]
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps([prompts, references]).encode())
    return Asked(fingerprint, sets[0].metric, max_new_tokens)


@dataclass(frozen=True)
class Solved:
    """One question with the answer of the crowd, for people.

    Attributes:
        answer: the crowd's whole text.
        wanted: the right final answer.
        right: [K+2] whose final answers are right: K agents, the crowd, the vote.
    """

    question: str
    answer: str
    wanted: str
    right: tuple[bool, ...]


@dataclass(frozen=True)
class AnswerScores:
    """The right ones among the final answers.

    Attributes:
        right: [K+2, n] bool: K agents, the crowd, the vote.
        example: the first question; None without questions.
        own: per agent the questions that score it, if agents are evaluated on rows of their own; empty if all questions
            score all agents.
        asked: the identity of the questions; None before that of all sets is known.
    """

    right: Tensor
    example: Solved | None = None
    own: tuple[slice, ...] = ()
    asked: Asked | None = None

    @classmethod
    def of(
        cls, answers: Iterable[Answers], prompter: Prompter, questions: Questions, lines: int, stop: Callable[[], bool]
    ) -> AnswerScores | None:
        """The scores of answers, in their order; None if `stop`, called after every question, returned True.

        Args:
            questions: the questions that were answered.
            lines: K+2, which is also known where no question was answered.
        """
        right, example = list[list[bool]](), None
        for each in answers:
            if stop():
                return None
            right.append(each.right)
            if example is None:
                question = prompter.question(questions.prompts[each.number])
                example = Solved(question, each.crowd, questions.answers[each.number], tuple(each.right))
        return cls(torch.tensor(right, dtype=torch.bool).view(-1, lines).T, example)

    @classmethod
    def joined(cls, parts: Iterable[AnswerScores]) -> AnswerScores:
        """The questions of all parts, in order."""
        listed = list(parts)
        example = next((part.example for part in listed if part.example is not None), None)
        return cls(torch.cat([part.right for part in listed], dim=1), example)

    @classmethod
    def of_sets(cls, sets: Sequence[AnswerScores], of_agent: Sequence[int]) -> AnswerScores:
        """The questions of several sets, each of which scores its own agents.

        Args:
            of_agent: the number of each agent's set.
        """
        return replace(cls.joined(sets), own=own_rows([part.right.shape[1] for part in sets], of_agent))

    @property
    def shares(self) -> Figure:
        """The share of right answers; differences are paired over all questions."""
        return _shares(self.right[:-1], self.own, self.right[-1])


@dataclass(frozen=True)
class Answers:
    """The answers to one question.

    Attributes:
        number: the index of the question.
        agents: the texts of the K agents.
        crowd: the text of the crowd.
        right: [K+2] True for each that is right: K agents, the crowd, the vote.
        uncertainty: how sure the crowd was.
        signals: those of the crowd's answer, see `ci_llm.crowd.uncertainty`.
    """

    number: int
    agents: list[str]
    crowd: str
    right: list[bool]
    uncertainty: Uncertainty
    signals: list[float]


def answer_questions(
    crowd: CrowdModel,
    prompter: Prompter,
    questions: Questions,
    batches: Iterable[Sequence[int]],
    max_new_tokens: int,
    aggregator: str,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Answers]:
    """Generate the answers of the agents and of the crowd greedily, question after question.

    Args:
        crowd: K agents write 1 + K texts for each question, one alone writes one.
        batches: indices into `questions`. As many questions as the first batch has are answered at the same time, and
            the next batch is taken when there is place for one of its questions.
        max_new_tokens: at most so many tokens per answer.
        aggregator: one of `ci_llm.crowd.aggregators`.
        stop: called after every token; True ends all texts at that point.
    """
    is_one = crowd.num_agents == 1 and find_vote(aggregator) is None  # its answer is the crowd's
    wanted = Wanted(
        Decoding(max_new_tokens, questions.ends, aggregator),
        include_agents=not is_one,
        stop=stop,
        answers_of=lambda texts: [questions.read(prompter.text(ids)) for ids in texts],
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
        *agents, together = map(prompter.text, each)
        *own, crowds = map(questions.read, (*agents, together))
        wanted_answer = questions.answers[number]
        right = [answer == wanted_answer != "" for answer in (*own, crowds, majority(own, crowds))]
        sure = generated.uncertainties
        yield Answers(number, agents, together, right, of_text(sure), signals(sure))


def _spread(numbers: Sequence[int], count: int) -> list[int]:
    """At most `count` evenly spread numbers of these."""
    count = min(count, len(numbers))
    return [numbers[i * len(numbers) // count] for i in range(count)]


def _has_question(row: Example) -> bool:
    """True if a row has a question: in plain text only the first token precedes the "answer"."""
    return bool(last_answer(row).start > 1)


def parts_of_rows(scores: Scores, answers: AnswerScores | None) -> dict[str, tuple[tuple[float, ...], ...]]:
    """The contribution of each row to an agent's mean, by metric [K][n].

    The NLL, a ratio, is linearised as in `Scores.nll_gain`.
    """
    weights, nll = scores.tokens / scores.tokens.double().mean(), scores.nll[:-1] / scores.tokens.double().mean()
    right = scores.right[:-1] if answers is None else answers.right[:-2]
    by_row = nll - nll.mean(1, keepdim=True) * (weights - 1)
    found = {"nll": by_row, "exact_match": right.double()}
    if _measured_by(scores, heads=False) == "rewards":
        found |= {"reward": -scores.nll[:-1]}
    return {metric: tuple(map(tuple, rows.tolist())) for metric, rows in found.items()}
