"""The scores of agents and crowd within a run, computed by all of its processes.

Rows are teacher-forced during the run; at its end questions are answered by generation as well. The work is dealt in
rounds, one batch per process, until one of them wants to stop or runs out of memory: then all leave in the same round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

from ci_llm.config import Config
from ci_llm.core.evaluation_file import BaseScores
from ci_llm.core.measures import JudgedBy
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.core.quantities import count
from ci_llm.core.work import working
from ci_llm.crowd import questions
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.judging import Ranking, rank
from ci_llm.crowd.objective import GrpoObjective, Preferences, TrainedObjective
from ci_llm.crowd.questions import Questions, asked_of, score_answers
from ci_llm.crowd.rewarding import RewardScorer
from ci_llm.crowd.scoring import AnswerScores, Scores, base_scores, own_rows, score
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.data.batches import Batch, pack
from ci_llm.data.order import share
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.ballot import Ballot, Verdict
from ci_llm.distributed.processes import Processes
from ci_llm.errors import RewardFailed
from ci_llm.interrupts import Interrupts
from ci_llm.objectives.grpo.rewards import failed_elsewhere
from ci_llm.run.step.out_of_memory import MemoryRelief

logger = logging.getLogger(__name__)


S = TypeVar("S")
T = TypeVar("T")


class StopVote:
    """Asks all processes, between two steps, whether the run shall stop. Each vote is also a sign of life.

    Args:
        interrupts: the requests to stop that this process has received.
        tick: gives the sign of life.
    """

    def __init__(self, processes: Processes, interrupts: Interrupts, tick: Callable[[], object]) -> None:
        self.processes, self._interrupts, self._tick = processes, interrupts, tick

    def vote(self, *, out_of_memory: bool = False, failed: bool = False) -> Verdict:
        """The verdict of all processes. A collective."""
        self._tick()
        reason = self._interrupts.stop_reason
        return self.processes.agree(Ballot(0, stop=reason, out_of_memory=out_of_memory, failed=failed))

    def reason(self) -> str | None:
        """The reason to stop that any process has received; None if there is none. A collective."""
        return self.vote().stop

    def requested_here(self) -> bool:
        """True if this process was asked to stop; the other processes learn it by the next vote."""
        self._tick()
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
        out_of_memory: all processes have left because a batch did not fit.
        failed: all processes have left because of an error.
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
        self.batches = self._deal(own)

    def _deal(self, own: list[list[int]]) -> Iterator[list[int]]:
        for number in range(-(-self._count // self._per_round)):
            if self._all_leave():
                return
            self._report(min(number * self._per_round, self._count))
            if number < len(own):  # a process without a batch left still votes
                yield own[number]

    def _all_leave(self) -> bool:
        """Vote; true if one process stops, its memory ran out, or it had an error."""
        verdict = self._vote.vote(**self._here)
        self.stop, self.out_of_memory, self.failed = verdict.stop, verdict.out_of_memory, verdict.failed
        return self._have_left

    @property
    def _have_left(self) -> bool:
        return self.stop is not None or self.out_of_memory or self.failed

    def stop_requested_here(self) -> bool:
        """True if this process was asked to stop, or all are about to leave: it may leave its texts unfinished."""
        return self._have_left or self._vote.requested_here()

    def end(self, *, out_of_memory: bool, failed: bool = False) -> None:
        """Vote in the rounds that are left, without computing their batches, and once more if all have stayed."""
        self._here = {"out_of_memory": out_of_memory, "failed": failed}
        for _ in self.batches:
            pass
        if not self._have_left:
            self._all_leave()


class Evaluator:
    """Scores agents and crowd; each process takes its share of the rows.

    Args:
        rows: the rows to evaluate on. Where agents have sets of their own, all agents answer every set, in the batches
            that its owners would have alone. A set scores its owners, and all sets together score the crowd.
        objective: judges pairs and rated rows.
        judged: pairs or rated rows of every agent; all agents judge all different sets.
        vote: asks before each batch whether the run shall stop.
        memory: decides what is done when a batch does not fit.
        note: called with fields of status.json before and after an evaluation, so that the attempt after a kill
            evaluates fewer rows at a time.

    Attributes:
        at_most: the most rows at a time; None: as many as the configuration asks for.
        last_scores: those of the last evaluation in the middle of the run; None: this attempt has made none.
    """

    def __init__(
        self,
        config: Config,
        crowd: Crowd,
        rows: EvaluationRows,
        objective: TrainedObjective,
        judged: Sequence[TokenizedRows],
        vote: StopVote,
        memory: MemoryRelief,
        note: Callable[..., None],
    ) -> None:
        self._config, self._crowd, self.rows, self.objective = config, crowd, rows, objective
        self._judged = [*{id(own): own for own in judged}.values()]
        self.vote, self._memory, self._note = vote, memory, note
        self.at_most: int | None = None
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
        scores = replace(Scores.joined(sets), own=own_rows(sets, self.rows.of_agent))
        objective = self.objective
        if isinstance(objective, Preferences) and self._judged and not self._crowd.settings.outputs:
            parts = _on_each(self._judged, lambda rows: self._ranking_on(objective, rows, step, micro_batch_size))
            return None if parts is None else replace(scores, judged=Ranking.joined(parts))
        return scores

    def _ranking_on(
        self, objective: Preferences, rows: TokenizedRows, step: int, micro_batch_size: int
    ) -> Ranking | None:
        def work(rounds: Rounds) -> Ranking | None:
            return rank(objective, _packed(rows, rounds), stop=rounds.stop_requested_here)

        return self._on_all_processes("judge", step, len(rows), 2 * micro_batch_size, work, Ranking.joined)

    def _scores_on(self, rows: TokenizedRows, step: int, micro_batch_size: int) -> Scores | None:
        crowd, config, objective = self._crowd, self._config, self.objective
        if isinstance(objective, GrpoObjective):
            what, scorer = "answer", RewardScorer(config, objective.grpo, objective.rewards)

            def work(rounds: Rounds) -> Scores | None:
                return scorer.scores(crowd, rows, rounds.batches, rounds.stop_requested_here)

        else:
            what = "score"

            def work(rounds: Rounds) -> Scores | None:
                return score(crowd, _packed(rows, rounds), config.aggregator, stop=rounds.stop_requested_here)

        return self._on_all_processes(what, step, len(rows), 4 * micro_batch_size, work, Scores.joined)

    def answers(self, step: int, micro_batch_size: int) -> AnswerScores | None:
        """Scores of generated answers. A collective.

        None if a set of rows asks nothing, answers are free text, the agents have heads, or a stop was asked for.

        Raises:
            OutOfMemory: on every process, when the batches cannot be made smaller.
        """
        if self._crowd.settings.outputs or isinstance(self.objective, GrpoObjective):
            return None  # heads or rewards alone judge
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
            answers: true where answers are generated.

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
        return None if scores is None or (answers and found is None) else base_scores(scores, found)

    @cached_property
    def judged_by(self) -> JudgedBy:
        """The measure that judges the rows: that of all sets if they have the same one, else the NLL."""
        found = {questions.judged_by(rows, self._crowd) for rows in self.rows.sets}
        return found.pop() if len(found) == 1 else "nll"

    @cached_property
    def _asked(self) -> list[Questions]:
        count, limit = self._config.generation_eval_samples, self._config.max_seq_length
        return [Questions.of(rows, self._crowd, count, rows.whole_below(limit)) for rows in self.rows.sets]

    @cached_property
    def _limit(self) -> int:
        """The most tokens of a generated answer."""
        return self._config.answer_tokens(max(asked.longest for asked in self._asked))

    def _answers(self, step: int, micro_batch_size: int) -> AnswerScores | None:
        sets = _on_each(self._asked, lambda asked: self._score_answers(asked, step, micro_batch_size, self._limit))
        if sets is None:
            return None
        return replace(
            AnswerScores.joined(sets), own=own_rows(sets, self.rows.of_agent), asked=asked_of(self._asked, self._limit)
        )

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

    def _score_answers(self, asked: Questions, step: int, batch_size: int, max_new_tokens: int) -> AnswerScores | None:
        def work(rounds: Rounds) -> AnswerScores | None:
            crowd, stop, aggregator = self._crowd, rounds.stop_requested_here, self._config.aggregator
            return score_answers(crowd, asked, rounds.batches, max_new_tokens, aggregator, stop)

        return self._on_all_processes("generate", step, len(asked), batch_size, work, AnswerScores.joined)

    def _on_all_processes(
        self,
        what: str,
        step: int,
        count: int,
        batch_size: int,
        work: Callable[[Rounds], T | None],
        join: Callable[[list[T]], T],
    ) -> T | None:
        """`work` on every process, joined; repeated in smaller batches where memory ran out. None at a stop.

        Plain kernels compute them: scores and answers are those of the saved crowd, to the last digit.

        Raises:
            RewardFailed: on every process.
        """
        processes = self.vote.processes
        size = min(batch_size, -(-count // processes.num_processes), self.at_most or batch_size)
        while True:
            self._note(phase="evaluation", evaluation_batch_size=size)
            with working(what, count, "rows") as shown:
                rounds = Rounds(self.vote, count, size, shown.advance_to)
                own, complaint, failure = None, None, None
                try:
                    with processes.autocast(), self._crowd.base_model.plain():
                        own, complaint = unless_out_of_memory(partial(work, rounds))
                except RewardFailed as error:  # the others learn it by the next vote
                    failure = error
                rounds.end(out_of_memory=complaint is not None, failed=failure is not None)
            if rounds.failed:
                raise failure or failed_elsewhere(f"evaluation after step {step}")
            if rounds.stop is not None or not rounds.out_of_memory:
                break
            self.at_most = size = self._memory.smaller_batch(step, size, complaint)
        self._note(phase=None, evaluation_batch_size=self.at_most)
        if rounds.stop is not None:
            return None
        assert own is not None
        return join(processes.gather_object(own))


def _packed(rows: TokenizedRows, rounds: Rounds) -> Iterator[Batch]:
    return (pack([rows[number] for number in part], part) for part in rounds.batches)


def _on_each(sets: Iterable[S], work: Callable[[S], T | None]) -> list[T] | None:
    """The results of `work` on every set; None as soon as one is None, because a stop was asked for."""
    results = []
    for each in sets:
        result = work(each)
        if result is None:
            return None
        results.append(result)
    return results
