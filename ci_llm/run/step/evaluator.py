"""Evaluations within a run, by all of its processes: scores of agents and crowd, and the best step by them.

Rows are teacher-forced during the run; at its end questions are answered by generation as well. The work is dealt in
rounds, one batch per process, until one of them wants to stop or runs out of memory: then all leave in the same round.
The checkpoint of the best step is kept, and its weights can be the result of the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any, Final, TypeVar

from ci_llm.checkpoints.checkpoint import Checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.config import Config
from ci_llm.core.evaluation_file import BaseScores, Evaluation, Figure, RowSet
from ci_llm.core.measures import LEAST_ROWS, JudgedBy, measures_of
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.core.quantities import count
from ci_llm.core.work import working
from ci_llm.crowd import scoring
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.judging import Ranking, rank
from ci_llm.crowd.objective import GrpoObjective, NextToken, Preferences, TrainedObjective
from ci_llm.crowd.rewarding import RewardScorer
from ci_llm.crowd.scoring import AnswerScores, Questions, Scores, Solved, answer_questions, asked_of, score
from ci_llm.crowd.state import load_state
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.data.batches import pack
from ci_llm.data.order import share
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.ballot import Ballot, Verdict
from ci_llm.distributed.processes import Processes
from ci_llm.errors import CheckpointError, RewardFailed
from ci_llm.interrupts import Interrupts
from ci_llm.objectives.grpo.rewards import failed_elsewhere
from ci_llm.run.end.watchdog import Heartbeat
from ci_llm.run.step.out_of_memory import MemoryRelief
from ci_llm.run.step.state import TrainState, Validation

logger = logging.getLogger(__name__)


class StopVote:
    """Asks all processes, between two steps, whether the run shall stop. Each vote is also a sign of life.

    Args:
        interrupts: the requests to stop that this process has received.
    """

    def __init__(self, processes: Processes, interrupts: Interrupts, heartbeat: Heartbeat) -> None:
        self.processes = processes
        self._interrupts, self._heartbeat = interrupts, heartbeat

    def vote(self, *, out_of_memory: bool = False, failed: bool = False) -> Verdict:
        """The verdict of all processes. A collective."""
        self._heartbeat.tick()
        reason = self._interrupts.stop_reason
        return self.processes.agree(Ballot(0, stop=reason, out_of_memory=out_of_memory, failed=failed))

    def reason(self) -> str | None:
        """The reason to stop that any process has received; None if there is none. A collective."""
        return self.vote().stop

    def requested_here(self) -> bool:
        """Whether this process was asked to stop; the other processes learn it by the next vote."""
        self._heartbeat.tick()
        return self._interrupts.stop_reason is not None


class Rounds:
    """The numbers below `count`, dealt to the processes batch by batch.

    All processes vote in every round, with or without a batch left for them, and once more at the end: a batch may be
    asked for before those in front of it are done, and left half done afterwards. So all leave in the same round.

    Args:
        report: called before every round with the count of numbers that all processes have done.

    Attributes:
        batches: this process's share.
        stop: the reason for which all processes have left; None if they have stayed.
        out_of_memory: whether all processes have left because a batch did not fit.
        failed: whether all processes have left because of an error.
    """

    def __init__(
        self, vote: StopVote, count: int, batch_size: int, report: Callable[[int], None] = lambda _: None
    ) -> None:
        self._vote, self._here, self._report = vote, dict[str, bool](), report
        self._count, self._per_round = count, batch_size * vote.processes.num_processes
        self.stop: str | None = None
        self.out_of_memory = self.failed = False
        index, num_processes = vote.processes.process_index, vote.processes.num_processes
        own = share(range(count), index, num_processes, batch_size)
        longest = share(range(count), 0, num_processes, batch_size)
        self.batches = self._deal(own, len(longest))

    def _deal(self, own: list[list[int]], count: int) -> Iterator[list[int]]:
        for number in range(count):
            if self._all_leave():
                return
            self._report(min(number * self._per_round, self._count))
            if number < len(own):  # a process without a batch left still votes
                yield own[number]

    def _all_leave(self) -> bool:
        """Vote: whether one process stops, its memory ran out, or it had an error."""
        verdict = self._vote.vote(**self._here)
        self.stop, self.out_of_memory, self.failed = verdict.stop, verdict.out_of_memory, verdict.failed
        return self._have_left

    @property
    def _have_left(self) -> bool:
        return self.stop is not None or self.out_of_memory or self.failed

    def stop_requested_here(self) -> bool:
        """Whether this process was asked to stop, or all are about to leave: it may leave its texts unfinished."""
        return self._have_left or self._vote.requested_here()

    def end(self, *, out_of_memory: bool, failed: bool = False) -> None:
        """Vote in the rounds that are left, without computing their batches, and once more if all have stayed."""
        self._here = {"out_of_memory": out_of_memory, "failed": failed}
        for _ in self.batches:
            pass
        if not self._have_left:
            self._all_leave()


def evaluated(state: TrainState, metrics: Mapping[str, Any], processes: Processes) -> TrainState:
    """The state with the evaluation after the present step. A collective.

    All processes take the numbers of the main one: they must not end a run at different steps because the last bits of
    their means differ.

    Args:
        metrics: the numbers of the evaluation, by the names of metrics.jsonl.
    """
    names, metric = [*state.names, "crowd"], state.validation.metric
    values = [float(metrics.get(f"eval/{name}/{metric}", math.nan)) for name in names]  # NaN is never best
    *agents, crowd = processes.broadcast_object(values)
    return state.evaluated(crowd, agents)


def kept_steps(config: Config, validation: Validation) -> tuple[int, ...]:
    """The steps whose checkpoints are not pruned."""
    best = validation.best_step
    return (best,) if config.keeps_best and best is not None else ()


def result_of(config: Config, state: TrainState, manager: CheckpointManager, processes: Processes) -> Checkpoint | None:
    """The checkpoint whose weights are the result of the run; None for the last step. A collective.

    With `load_best_model_at_end` it is that of the best step, unless it is damaged. Every process reads it once.
    """
    best = state.validation.best_step
    if not config.load_best_model_at_end or best is None or best == state.step:
        return None
    manager.wait_until_finished()  # an error of the last save says nothing about the best one
    found, damage = None, None
    try:
        found = manager.read(best)
    except CheckpointError as error:
        damage = str(error)
    damages = [each for each in processes.gather_object(damage) if each is not None]
    if damages:
        logger.warning(f"the best step, {best}, cannot be the result, so the last one is: {damages[0]}")
        return None
    return found


@contextmanager
def weights_of(checkpoint: Checkpoint, crowd: Crowd) -> Iterator[None]:
    """Give the agents the weights of a checkpoint within the block; afterwards they have their own again."""
    weights = crowd.storage.weights
    own = weights.clone()
    try:
        load_state(crowd, checkpoint.state, str(checkpoint.folder))
        yield
    finally:
        weights.copy_(own)


S = TypeVar("S")
T = TypeVar("T")

_SHOWN_CHARACTERS: Final = 400


class Evaluator:
    """Scores agents and crowd; each process takes its share of the rows.

    Args:
        rows: the rows to evaluate on. Where agents have sets of their own, all agents answer every set, in the batches
            that its owners would have alone. A set scores its owners, and all sets together score the crowd.
        vote: asks before each batch whether the run shall stop.
        memory: decides what is done when a batch does not fit.

    Attributes:
        at_most: the most rows at a time; None: as many as the configuration asks for.
        objective: judges pairs and rated rows.
        judged: sets of pairs or rated rows; all agents judge all sets.
        last_scores: those of the last evaluation in the middle of the run; None: this attempt has made none.
        note: called with fields of status.json before and after an evaluation, so that the attempt after a kill
            evaluates fewer rows at a time.
    """

    at_most: int | None = None
    objective: TrainedObjective = NextToken()
    judged: Sequence[TokenizedRows] = ()
    note: Callable[..., None] = staticmethod(lambda **_: None)

    def __init__(
        self, config: Config, crowd: Crowd, rows: EvaluationRows, vote: StopVote, memory: MemoryRelief
    ) -> None:
        self._config, self._crowd, self.rows = config, crowd, rows
        self.vote, self._memory = vote, memory
        self.last_scores: Scores | None = None

    def scores(self, step: int, micro_batch_size: int) -> Scores | None:
        """Scores by teacher forcing; None if a stop was asked for. A collective.

        Args:
            step: the optimizer steps taken, for messages.
            micro_batch_size: rows that fit into a training step at once; without gradients, more do.

        Raises:
            OutOfMemory: on every process, when the batches cannot be made smaller.
        """
        sets = _on_each(self.rows.sets, lambda rows: self._scores_on(rows, step, micro_batch_size))
        if sets is None:
            return None
        scores = sets[0] if self.rows.are_common else Scores.of_sets(sets, self.rows.of_agent)
        objective = self.objective
        if isinstance(objective, Preferences) and self.judged and not self._crowd.settings.outputs:
            parts = _on_each(self.judged, lambda rows: self._ranking_on(objective, rows, step, micro_batch_size))
            return None if parts is None else replace(scores, judged=Ranking.joined(parts))
        return scores

    def _ranking_on(
        self, objective: Preferences, rows: TokenizedRows, step: int, micro_batch_size: int
    ) -> Ranking | None:
        def work(rounds: Rounds) -> Ranking | None:
            batches = (pack([rows[i] for i in part], part) for part in rounds.batches)
            return rank(objective, batches, stop=rounds.stop_requested_here)

        found = self._on_all_processes("judge", step, len(rows), 2 * micro_batch_size, work)
        return None if found is None else Ranking.joined(found)

    def _scores_on(self, rows: TokenizedRows, step: int, micro_batch_size: int) -> Scores | None:
        if isinstance(self.objective, GrpoObjective):
            return self._rewarded(self.objective, rows, step, micro_batch_size)

        def work(rounds: Rounds) -> Scores | None:
            batches = (pack([rows[i] for i in part], part) for part in rounds.batches)
            return score(self._crowd, batches, self._config.aggregator, stop=rounds.stop_requested_here)

        found = self._on_all_processes("score", step, len(rows), 4 * micro_batch_size, work)
        return None if found is None else Scores.joined(found)

    def _rewarded(self, policy: GrpoObjective, rows: TokenizedRows, step: int, micro_batch_size: int) -> Scores | None:
        scorer = RewardScorer(self._config, policy.objective, policy.rewards)

        def work(rounds: Rounds) -> Scores | None:
            return scorer.scores(self._crowd, rows, rounds.batches, rounds.stop_requested_here)

        found = self._on_all_processes("answer", step, len(rows), 4 * micro_batch_size, work)
        return None if found is None else Scores.joined(found)

    @property
    def _writes_no_answers(self) -> bool:
        """True if heads or rewards alone judge: there are no answers of their own to score."""
        return bool(self._crowd.settings.outputs) or isinstance(self.objective, GrpoObjective)

    def answers(self, step: int, micro_batch_size: int) -> AnswerScores | None:
        """Scores of generated answers. A collective.

        None if a set of rows asks nothing, answers are free text, the agents have heads, or a stop was asked for.

        Raises:
            OutOfMemory: on every process, when the batches cannot be made smaller.
        """
        if self._writes_no_answers:
            return None
        of_sets = self._asked
        if self._config.generation_eval_samples:
            self._tell_too_long(of_sets)
        if self.judged_by == "nll":
            logger.info("evaluate  by NLL alone: these rows are free text, which no other text has to match")
        if self.judged_by == "nll" or not all(map(len, of_sets)):
            return None
        for asked in of_sets:
            most = f"of at most {self._limit} tokens"
            logger.info(f"evaluate  the answers that they generate to {len(asked)} of these, {most}")
        return self._answers(step, micro_batch_size)

    def base(self, step: int, micro_batch_size: int, *, answers: bool) -> BaseScores | None:
        """The scores of a pass without agents over the same rows. A collective.

        None if the agents have heads, because a base has no heads, or if a stop was asked for.

        Args:
            answers: whether answers are generated.

        Raises:
            OutOfMemory: on every process, when the batches cannot be made smaller.
        """
        if self._crowd.settings.outputs:
            return None
        logger.info("evaluate  the base alone, on the same rows")
        own, self._config = self._config, self._config.model_copy(update={"aggregator": "probability"})
        try:
            with self._crowd.without_agents():
                scores = self.scores(step, micro_batch_size)
                found = self._answers(step, micro_batch_size) if answers and scores is not None else None
        finally:
            self._config = own
        return None if scores is None or (answers and found is None) else scoring.base_scores(scores, found)

    @cached_property
    def judged_by(self) -> JudgedBy:
        """The measure that judges the rows: that of all sets if they have the same one, else the NLL."""
        assert self._crowd.prompter is not None
        heads = self._crowd.settings.outputs
        found = {scoring.judged_by(rows, self._crowd.prompter, heads=heads) for rows in self.rows.sets}
        return found.pop() if len(found) == 1 else "nll"

    @cached_property
    def _asked(self) -> list[Questions]:
        return [self._questions(rows, self._config.generation_eval_samples) for rows in self.rows.sets]

    @cached_property
    def _limit(self) -> int:
        """The most tokens of a generated answer."""
        return self._config.answer_tokens(max(asked.longest for asked in self._asked))

    def _answers(self, step: int, micro_batch_size: int) -> AnswerScores | None:
        sets = _on_each(self._asked, lambda asked: self._score_answers(asked, step, micro_batch_size, self._limit))
        if sets is None:
            return None
        scores = sets[0] if self.rows.are_common else AnswerScores.of_sets(sets, self.rows.of_agent)
        return replace(scores, asked=asked_of(self._asked, self._limit))

    def _tell_too_long(self, of_sets: Sequence[Questions]) -> None:
        """Log how many rows ask something but are cut; warn if that leaves no row to ask."""
        within = f"no place for a whole answer within {self._config.max_seq_length} tokens"
        if too_long := sum(asked.too_long for asked in of_sets):
            logger.info(f"evaluate  not asked: {count(too_long, 'row')}, {within}")
        if any(asked.too_long and not len(asked) for asked in of_sets):
            logger.warning(
                "evaluate  no answers are generated, as no row is left to ask: the scores are by teacher forcing,"
                " of whole solutions; raise max_seq_length, or evaluate on shorter rows"
            )

    def example(self, step: int) -> Solved | None:
        """The answer to one question, the same question in every evaluation. A collective.

        None if the rows ask nothing, the agents have heads, or a stop was asked for.

        Raises:
            OutOfMemory: on every process.
        """
        if self._writes_no_answers:
            return None
        asked = self._example_asked
        limit = self._config.answer_tokens(asked.longest)
        answers = self._score_answers(asked, step, 1, limit) if len(asked) else None
        return None if answers is None else answers.example

    @cached_property
    def _example_asked(self) -> Questions:
        return self._questions(self.rows.sets[0], min(1, self._config.generation_eval_samples))

    def _questions(self, rows: TokenizedRows, count: int) -> Questions:
        assert self._crowd.prompter is not None
        whole_below = rows.whole_below(self._config.max_seq_length)
        return Questions.of(rows, self._crowd.prompter, self._crowd, count, whole_below)

    def _score_answers(self, asked: Questions, step: int, batch_size: int, max_new_tokens: int) -> AnswerScores | None:
        prompter = self._crowd.prompter
        assert prompter is not None

        def work(rounds: Rounds) -> AnswerScores | None:
            crowd, stop, aggregator = self._crowd, rounds.stop_requested_here, self._config.aggregator
            answers = answer_questions(crowd, prompter, asked, rounds.batches, max_new_tokens, aggregator, stop=stop)
            return AnswerScores.of(answers, prompter, asked, crowd.num_agents + 2, stop)

        found = self._on_all_processes("generate", step, len(asked), batch_size, work)
        return None if found is None else AnswerScores.joined(found)

    def _on_all_processes(
        self, what: str, step: int, count: int, batch_size: int, work: Callable[[Rounds], T | None]
    ) -> list[T] | None:
        """The results of `work` on every process; repeated in smaller batches where memory ran out. None at a stop.

        Plain kernels compute them: scores and answers are those of the saved crowd, to the last digit.

        Raises:
            RewardFailed: on every process.
        """
        processes = self.vote.processes
        size = min(batch_size, -(-count // processes.num_processes), self.at_most or batch_size)
        while True:
            self.note(phase="evaluation", evaluation_batch_size=size)
            with working(what, count, "rows") as shown:
                rounds = Rounds(self.vote, count, size, shown.advance_to)
                own, complaint, failure = None, None, None
                try:
                    with processes.autocast(), self._crowd.plain():
                        own, complaint = unless_out_of_memory(partial(work, rounds))
                except RewardFailed as error:  # the others learn it by the next vote
                    failure = error
                rounds.end(out_of_memory=complaint is not None, failed=failure is not None)
            if rounds.failed:
                raise failure or failed_elsewhere(f"evaluation after step {step}")
            if rounds.stop is not None or not rounds.out_of_memory:
                break
            self.at_most = size = self._memory.smaller_batch(step, size, complaint)
        self.note(phase=None, evaluation_batch_size=self.at_most)
        if rounds.stop is not None:
            return None
        assert own is not None
        return processes.gather_object(own)


def _on_each(sets: Iterable[S], work: Callable[[S], T | None]) -> list[T] | None:
    """The results of `work` on every set; None as soon as one is None, because a stop was asked for."""
    results = []
    for each in sets:
        result = work(each)
        if result is None:
            return None
        results.append(result)
    return results


def describe_scores(step: int, scores: Scores, judged_by: JudgedBy = "exact_match") -> str:
    """A line for people: the scores of the crowd and the means of its agents; free text has only an NLL.

    If there are few rows, the line says how many.
    """
    *agents, exact = scores.exact_match
    *agents_nll, nll = scores.mean_nll
    rows = scores.right.shape[1]
    few = f", on {count(rows, 'row')}" if rows < LEAST_ROWS else ""
    where = f"evaluate  step {step}{few}:"
    if scores.judged is not None:
        if int(scores.tokens.max()) > 1:
            return f"{where} {scores.judged}; crowd nll {nll:.3f}, of the better answers"
        return f"{where} {scores.judged}; crowd {measures_of(scores.judged.objective).loss} {nll:.3f}"
    if judged_by == "nll":
        return f"{where} crowd nll {nll:.3f}; agents nll {fmean(agents_nll):.3f}"
    crowd = f"crowd nll {nll:.3f}, exact {exact:.3f}"
    return f"{where} {crowd}; agents nll {fmean(agents_nll):.3f}, exact {fmean(agents):.3f}"


def describe_example(example: Solved, judged_by: JudgedBy = "exact_match") -> str:
    """A question, the answer of the crowd, and whether it is right; for free text the answer of the row."""
    *agents, crowd, _ = example.right
    verdict = "right" if crowd else f"wrong: {example.wanted} is right"
    verdict += f"; of {len(agents)} agents alone, {sum(agents)} answer right" if len(agents) > 1 else ""
    return "\n".join(
        [
            f"question  {_end_of(example.question)}",
            f"answer    {_end_of(example.answer)}",
            f"          {verdict}" if judged_by == "exact_match" else f"reference {_end_of(example.wanted)}",
        ]
    )


def _end_of(text: str) -> str:
    """The text in one line; if it is long only its end, where the question or the answer stands."""
    line = text.strip().replace("\n", "⏎")
    return line if len(line) <= _SHOWN_CHARACTERS else f"... {line[-_SHOWN_CHARACTERS:]}"


def evaluation_metrics(scores: Scores, names: Sequence[str]) -> dict[str, float]:
    """The scores as metrics: nats per target token, and the share of rows that are reproduced exactly.

    Args:
        names: the names of the agents.
    """
    metrics = {}
    for name, exact, nll in zip([*names, "crowd"], scores.exact_match, scores.mean_nll, strict=True):
        metrics[f"eval/{name}/nll"] = nll
        metrics[f"eval/{name}/exact_match"] = exact
    return metrics if scores.judged is None else metrics | scores.judged.metrics(names)


def result_metrics(evaluation: Evaluation, names: Sequence[str]) -> dict[str, float]:
    """The scores of an evaluation as metrics for trackers: `final/crowd/exact_match` and the like.

    Args:
        names: the names of the agents.
    """
    metrics = dict[str, float | None]()
    for measure, found in (("exact_match", evaluation.exact_match), ("nll", evaluation.nll)):
        named = dict(zip(names, found.agents, strict=True)) | {"crowd": found.crowd, "vote": found.vote}
        named["base"] = getattr(evaluation.base, measure, None)
        metrics |= {f"final/{name}/{measure}": value for name, value in named.items()}
    return {name: value for name, value in metrics.items() if value is not None}


def scores_of_sets(scores: Scores, rows: EvaluationRows) -> Iterator[RowSet]:
    """The teacher-forced scores of all agents on each set of rows; none if all agents share one."""
    start = 0
    for number, evaluated in enumerate(() if rows.are_common else rows.sets):
        part = scores.rows(slice(start, start := start + len(evaluated)))
        *agents, crowd = part.exact_match
        *agents_nll, crowd_nll = part.mean_nll
        yield RowSet(
            rows=evaluated.rows.where,
            n=len(evaluated),
            rows_trained_on=evaluated.rows.trained_on,
            measured_by="teacher_forcing",
            agents=tuple(k for k, own in enumerate(rows.of_agent) if own == number),
            exact_match=Figure(tuple(agents), crowd),
            nll=Figure(tuple(agents_nll), crowd_nll),
        )
