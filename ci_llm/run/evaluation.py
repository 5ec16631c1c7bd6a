"""Evaluations of agents and crowd over all processes: by teacher forcing during the run, by generation at its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

from ci_llm.config import Config
from ci_llm.core.work import working
from ci_llm.crowd.answer_scores import AnswerScores, Questions, score_answers
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.scoring import Scores, score
from ci_llm.data.batches import pack
from ci_llm.data.tokens import TokenizedRows
from ci_llm.run.out_of_memory import MemoryRelief, unless_out_of_memory
from ci_llm.run.rounds import Rounds, StopVote

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Evaluator:
    """Scores agents and crowd; each process takes its share of the rows.

    Args:
        rows: of the evaluation.
        vote: asks before each batch whether the run shall stop.
        memory: decides what is done when a batch does not fit.
    """

    def __init__(self, config: Config, crowd: Crowd, rows: TokenizedRows, vote: StopVote, memory: MemoryRelief) -> None:
        self._config, self._crowd, self._rows = config, crowd, rows
        self._vote, self._memory = vote, memory

    def scores(self, step: int, micro_batch_size: int) -> Scores | None:
        """Scores by teacher forcing; None if a stop was asked for. A collective.

        Args:
            step: the optimizer steps taken, for messages.
            micro_batch_size: rows that fit into a training step at once; without gradients, more do.

        Raises:
            OutOfMemory: on every process, when the batches cannot be made smaller.
        """

        def work(rounds: Rounds) -> Scores | None:
            batches = (pack([self._rows[i] for i in part], part) for part in rounds.batches)
            return score(self._crowd, batches, self._config.aggregator, stop=rounds.stop_requested_here)

        found = self._on_all_processes("score", step, len(self._rows), 4 * micro_batch_size, work)
        return None if found is None else Scores.joined(found)

    def answers(self, step: int, micro_batch_size: int) -> AnswerScores | None:
        """Scores of generated answers; None if the rows ask nothing, or a stop was asked for. A collective.

        Raises:
            OutOfMemory: on every process, when the batches cannot be made smaller.
        """
        config, crowd, prompter = self._config, self._crowd, self._crowd.prompter
        assert prompter is not None
        asked = Questions.of(self._rows, prompter, crowd, config.generation_eval_samples, config.max_seq_length)
        if not len(asked):
            return None
        logger.info(f"evaluate  the answers that they generate to {len(asked)} of these")

        def work(rounds: Rounds) -> AnswerScores | None:
            return score_answers(
                crowd,
                prompter,
                asked,
                rounds.batches,
                max_new_tokens=config.max_new_tokens_eval,
                aggregator=config.aggregator,
                stop=rounds.stop_requested_here,
            )

        found = self._on_all_processes("generate", step, len(asked), micro_batch_size, work)
        return None if found is None else AnswerScores.joined(found)

    def _on_all_processes(
        self, what: str, step: int, count: int, batch_size: int, work: Callable[[Rounds], T | None]
    ) -> list[T] | None:
        """What `work` returns on every process, repeated in smaller batches where memory ran out; None at a stop."""
        processes = self._vote.processes
        size = min(batch_size, -(-count // processes.count))
        while True:
            with working(what, count, "rows") as shown:
                rounds = Rounds(self._vote, count, size, shown.advance_to)
                with processes.autocast():
                    own, complaint = unless_out_of_memory(partial(work, rounds))
                rounds.end(out_of_memory=complaint is not None)
            if rounds.stop is not None:
                return None
            if not rounds.out_of_memory:
                assert own is not None
                return processes.gather_object(own)
            size = self._memory.smaller_batch(step, size, complaint)


def describe_scores(step: int, scores: Scores) -> str:
    """A line for people: the crowd, and the mean of its agents."""
    *agents, exact = scores.exact_match
    *agents_nll, nll = scores.mean_nll
    crowd = f"crowd nll {nll:.3f}, exact {exact:.3f}"
    return f"evaluate  step {step}: {crowd}; agents {fmean(agents_nll):.3f}, {fmean(agents):.3f}"


def evaluation_metrics(scores: Scores, names: Sequence[str]) -> dict[str, float]:
    """The scores as metrics: nats per target token, and the share of rows reproduced exactly.

    Args:
        names: of the agents.
    """
    metrics = {}
    for name, exact, nll in zip([*names, "crowd"], scores.exact_match, scores.mean_nll, strict=True):
        metrics[f"eval/{name}/nll"] = nll
        metrics[f"eval/{name}/exact_match"] = exact
    return metrics


def result_metrics(record: Mapping[str, Any], names: Sequence[str]) -> dict[str, float]:
    """The scores of an `evaluation.json` as metrics for trackers: `final/crowd/exact_match` and the like."""
    metrics = dict[str, float]()
    for measure in ("exact_match", "nll"):
        found = record[measure]
        of_agents = dict(zip(names, found["agents"], strict=True))
        named = of_agents | {name: found[name] for name in ("crowd", "vote") if name in found}
        metrics |= {f"final/{name}/{measure}": value for name, value in named.items()}
    return metrics
