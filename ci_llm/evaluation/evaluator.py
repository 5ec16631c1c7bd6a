"""The scores of agents and crowd on rows, by one process or by all processes of a run, and the record of them.

Rows are teacher-forced, scored by heads or rewarded. The work is dealt in rounds, one batch per process, until one of
them wants to stop or runs out of memory: then all leave in the same round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Final, TypeVar

from ci_llm.config import Config
from ci_llm.core.evaluation_file import AnsweredQuestions, BaseScores, Evaluation
from ci_llm.core.measures import PrimaryMetric
from ci_llm.core.memory import halve_until_it_fits, unless_out_of_memory
from ci_llm.core.quantities import count
from ci_llm.core.work import working
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.judging import Ranking, rank
from ci_llm.crowd.objective import GrpoObjective, Preferences, TrainedObjective
from ci_llm.crowd.questions import Questions, identity_of, primary_metric, score_answers
from ci_llm.crowd.rewarding import RewardScorer
from ci_llm.crowd.scoring import AnswerScores, Scores, base_scores, best_agent, fields_of, own_rows, score
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.data.batches import Batch, pack
from ci_llm.data.order import share
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.ballot import Ballot, Verdict
from ci_llm.distributed.processes import OneProcess, Processes
from ci_llm.errors import OutOfMemory, RewardFailed
from ci_llm.objectives.grpo.rewards import failed_elsewhere

logger = logging.getLogger(__name__)


S = TypeVar("S", bound=Sized)
T = TypeVar("T")


class Rounds:
    """The numbers below `count`, dealt to the processes batch by batch.

    All processes vote in every round, with or without a batch left for them, and once more at the end: a batch may be
    asked for before those in front of it are done, and left half done afterwards. So all leave in the same round.

    Args:
        asked: see `Evaluator`.
        report: called before every round with the count of numbers that all processes have done.

    Attributes:
        batches: this process's share.
    """

    def __init__(
        self,
        processes: Processes | OneProcess,
        asked: Callable[[], str | None],
        count: int,
        batch_size: int,
        report: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._processes, self._asked, self._report, self._count = processes, asked, report, count
        self._here, self._verdict = Ballot(0), Verdict(0)
        self._per_round = batch_size * processes.num_processes
        own = share(range(count), processes.process_index, processes.num_processes, batch_size)
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
        self._verdict = self._processes.agree(replace(self._here, stop=self._asked()))
        return self._have_left

    @property
    def _have_left(self) -> bool:
        verdict = self._verdict
        return verdict.stop is not None or verdict.out_of_memory or verdict.failed

    def stop_requested_here(self) -> bool:
        """True if this process was asked to stop, or all are about to leave: it may leave its texts unfinished."""
        return self._have_left or self._asked() is not None

    def end(self, here: Ballot) -> Verdict:
        """Vote in the rounds that are left, without computing their batches, and once more if all have stayed.

        Args:
            here: what has ended the work of this process.

        Returns:
            why all processes have left.
        """
        self._here = here
        for _ in self.batches:
            pass
        if not self._have_left:
            self._all_leave()
        return self._verdict


#: How the distributions of agents are joined where there are none: that of a base alone is its own.
OF_BASE: Final = "probability"


class Evaluator:
    """Scores agents and crowd; each process takes its share of the rows.

    Args:
        config: the configuration of the agents.
        rows: the rows to evaluate on. Where agents have sets of their own, all agents answer every set, in the batches
            that its owners would have alone. A set scores its owners, and all sets together score the crowd.
        objective: the objective of the agents, which judges pairs and rated rows.
        preferences: pairs or rated rows of every agent; all agents rank all different sets.
        processes: those that share the work; a saved crowd is evaluated by one, in the precision of its caller.
        exhausted: makes an error of the step and the allocator's message, where a single row does not fit.
        note: called with fields of status.json before and after an evaluation, so that the attempt after a kill
            evaluates fewer rows at a time.
        asked: the reason to stop that this process has received, or None. Each call is also a sign of life.

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
        preferences: Sequence[TokenizedRows],
        processes: Processes | OneProcess,
        exhausted: Callable[[int, str], OutOfMemory],
        note: Callable[..., None] = lambda **_: None,
        asked: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._config, self._crowd, self.rows, self._objective = config, crowd, rows, objective
        self._preferences = [*{id(own): own for own in preferences}.values()]
        self._processes, self._exhausted, self._asked = processes, exhausted, asked
        self.at_most: int | None = None
        self.last_scores: Scores | None = None
        self._note = note

    def stop_reason(self) -> str | None:
        """The reason to stop that any process has received; None if there is none. A collective."""
        return self._processes.agree(Ballot(0, stop=self._asked())).stop

    def keep_agents(self, config: Config, objective: TrainedObjective, kept: Sequence[int]) -> None:
        """Continue with the agents at these places, whose configuration and objective these are."""
        self._config, self._objective = config, objective
        self.rows = self.rows.of_agents(kept)
        for found in ("primary_metric", "questions"):  # of the rows before
            self.__dict__.pop(found, None)

    def scores(self, step: int, batch_size: int) -> Scores | None:
        """The scores of agents and crowd by teacher forcing, heads or rewards; None if a stop was asked for.

        A collective.

        Args:
            step: the optimizer steps taken, for messages.
            batch_size: rows that fit into a training step at once; without gradients, more do.

        Raises:
            OutOfMemory: on every process, when the batches cannot be made smaller.
        """
        objective = self._objective
        scores = self._scores(step, batch_size, self._config.aggregator)
        if scores is None or not (self._preferences and isinstance(objective, Preferences)):
            return scores

        def work(rows: TokenizedRows, rounds: Rounds) -> Ranking | None:
            return rank(objective, _packed(rows, rounds), stop=rounds.stop_requested_here)

        found = self._on_each("judge", self._preferences, step, 2 * batch_size, work, Ranking.joined)
        return None if found is None else replace(scores, units=Ranking.joined(found))

    def scores_of_base(self, step: int, batch_size: int) -> Scores | None:
        """The scores of a pass without agents over the same rows; for arguments and errors see `scores`."""
        with self._crowd.without_agents():
            return self._scores(step, batch_size, OF_BASE)

    def _scores(self, step: int, batch_size: int, aggregator: str) -> Scores | None:
        crowd, objective = self._crowd, self._objective

        def work(rows: TokenizedRows, rounds: Rounds) -> Scores | None:
            stop = rounds.stop_requested_here
            if isinstance(objective, GrpoObjective):
                scorer = RewardScorer(self._config, objective.grpo, objective.rewards, aggregator)
                return scorer.scores(crowd, rows, rounds.batches, stop)
            return score(crowd, _packed(rows, rounds), aggregator, stop=stop)

        what = "answer" if isinstance(objective, GrpoObjective) else "score"
        sets = self._on_each(what, self.rows.sets, step, 4 * batch_size, work, Scores.joined)
        return None if sets is None else replace(Scores.joined(sets), own=own_rows(sets, self.rows.of_agent))

    def answers(self, step: int, batch_size: int) -> AnswerScores | None:
        """Scores of generated answers; for arguments and errors see `scores`. A collective.

        None if a set of rows asks nothing, answers are free text, the agents have heads, or a stop was asked for.
        """
        if self._crowd.settings.outputs or isinstance(self._objective, GrpoObjective):
            return None  # heads or rewards alone judge
        if self._config.generation_eval_samples:
            self._tell_too_long()
        if self.primary_metric == "nll":
            logger.info("evaluate  by NLL alone: these rows are free text, which no other text has to match")
        if self.primary_metric == "nll" or not all(map(len, self.questions)):
            return None
        for part in self.questions:
            most = f"of at most {self.longest} tokens"
            logger.info(f"evaluate  the answers that they generate to {len(part)} of these, {most}")
        return self._answers(step, batch_size, self._config.aggregator)

    def base(self, step: int, batch_size: int, *, answers: bool) -> BaseScores | None:
        """The scores of the base alone on the same rows; for other arguments and errors see `scores`. A collective.

        None if the agents have heads, because a base has no heads, or if a stop was asked for.

        Args:
            answers: true where answers are generated.
        """
        if self._crowd.settings.outputs:
            return None
        logger.info("evaluate  the base alone, on the same rows")
        scores = self.scores_of_base(step, batch_size)
        if scores is None or not answers:
            return None if scores is None else base_scores(scores, None)
        with self._crowd.without_agents():
            found = self._answers(step, batch_size, OF_BASE)
        return None if found is None else base_scores(scores, found)

    def evaluation(self, scores: Scores, answers: AnswerScores | None, **more: Any) -> Evaluation:
        """The record of an evaluation.

        Args:
            more: fields of the record that do not follow from the scores, or take the place of those that do.
        """
        config, rows = self._config, self.rows
        is_choice = bool(config.agents) and self._crowd.num_agents > 1 and rows.are_common
        known = fields_of(scores, answers, heads=bool(self._crowd.settings.outputs)) | {
            "task": config.task,
            "data": tuple(part.rows.where for part in rows.sets),
            "rows_trained_on": rows.trained_on,
            "aggregator": config.aggregator,
            "judged_by": self.primary_metric,
            "best_agent": best_agent(scores, answers, self.primary_metric) if is_choice else None,
        }
        return Evaluation(**known | more)

    @cached_property
    def primary_metric(self) -> PrimaryMetric:
        """The measure that judges the rows: that of all sets if they have the same one, else the NLL."""
        found = {primary_metric(rows, self._crowd) for rows in self.rows.sets}
        return found.pop() if len(found) == 1 else "nll"

    @cached_property
    def questions(self) -> list[Questions]:
        """The questions in every set of rows."""
        most, limit = self._config.generation_eval_samples, self._config.max_seq_length
        return [Questions.of(rows, self._crowd, most, rows.whole_below(limit)) for rows in self.rows.sets]

    @property
    def longest(self) -> int:
        """The most tokens of a generated answer."""
        return self._config.answer_tokens(max(part.longest for part in self.questions))

    @property
    def answered(self) -> AnsweredQuestions:
        """The identity of the questions."""
        return identity_of(self.questions, self.longest)

    def _tell_too_long(self) -> None:
        """Log how many rows ask something but are cut; warn if that leaves no row to ask."""
        within = f"no place for a whole answer within {self._config.max_seq_length} tokens"
        if too_long := sum(part.too_long for part in self.questions):
            logger.info(f"evaluate  not asked: {count(too_long, 'row')}, {within}")
        if any(part.too_long and not len(part) for part in self.questions):
            logger.warning(
                "evaluate  no answers are generated, as no row is left to ask: the scores are by teacher forcing,"
                " of whole solutions; raise max_seq_length, or evaluate on shorter rows"
            )

    def _answers(self, step: int, batch_size: int, aggregator: str) -> AnswerScores | None:
        def work(part: Questions, rounds: Rounds) -> AnswerScores | None:
            stop = rounds.stop_requested_here
            return score_answers(self._crowd, part, rounds.batches, self.longest, aggregator, stop)

        sets = self._on_each("generate", self.questions, step, batch_size, work, AnswerScores.joined)
        if sets is None:
            return None
        return replace(AnswerScores.joined(sets), own=own_rows(sets, self.rows.of_agent), answered=self.answered)

    def _on_each(
        self,
        what: str,
        sets: Sequence[S],
        step: int,
        batch_size: int,
        work: Callable[[S, Rounds], T | None],
        join: Callable[[list[T]], T],
    ) -> list[T] | None:
        """`work` on every set, joined over all processes; None as soon as a stop was asked for.

        Plain kernels compute them: scores and answers are those of the saved crowd, to the last digit.

        Raises:
            RewardFailed, OutOfMemory: on every process.
        """
        results = list[T]()
        for part in sets:
            size = min(batch_size, -(-len(part) // self._processes.num_processes))
            own = self.fitting(partial(self._in_rounds, what, step, len(part), partial(work, part)), step, size)
            self._note(phase=None, evaluation_batch_size=self.at_most)
            if own is None:
                return None
            results.append(join(self._processes.gather_object(own)))
        return results

    def fitting(self, work: Callable[[int], T], step: int, size: int) -> T:
        """`work` with this many rows at a time, or with fewer where memory runs out, now or before."""
        size = min(size, self.at_most or size)
        found, fits = halve_until_it_fits(f"evaluation after step {step}", work, size, partial(self._exhausted, step))
        if fits < size:
            self.at_most = fits
        return found

    def _in_rounds(self, what: str, step: int, count: int, work: Callable[[Rounds], T | None], size: int) -> T | None:
        """This process's part of `work` in batches of this size; None at a stop.

        Raises:
            MemoryError: on every process, if memory ran out on any. RewardFailed: on every process.
        """
        self._note(phase="evaluation", evaluation_batch_size=size)
        with working(what, count, "rows") as shown:
            rounds = Rounds(self._processes, self._asked, count, size, shown.advance_to)
            own, complaint, failure = None, None, None
            try:
                with self._processes.autocast(), self._crowd.base_model.plain():
                    own, complaint = unless_out_of_memory(partial(work, rounds))
            except RewardFailed as error:  # the others learn it by the next vote
                failure = error
            verdict = rounds.end(Ballot(0, out_of_memory=complaint is not None, failed=failure is not None))
        if verdict.failed:
            raise failure or failed_elsewhere(f"evaluation after step {step}")
        if verdict.stop is not None:
            return None
        if verdict.out_of_memory:
            raise MemoryError(complaint or "on another process")
        return own


def _packed(rows: TokenizedRows, rounds: Rounds) -> Iterator[Batch]:
    return (pack([rows[number] for number in part], part) for part in rounds.batches)
