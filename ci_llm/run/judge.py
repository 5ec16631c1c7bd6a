"""How a run judges agents and crowd: teacher-forced on the way, by generation at the end; on all its processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ci_llm.ballot import Ballot
from ci_llm.crowd.answers import AnswerScores, Examination, examine
from ci_llm.crowd.evaluate import Scores, score
from ci_llm.data.batches import pack
from ci_llm.data.order import share
from ci_llm.run.best import count_in, is_over
from ci_llm.run.run import Run
from ci_llm.run.validation import Validation


def asked_to_stop(run: Run) -> str | None:
    """Why the run shall end, whichever process was told so. A collective."""
    run.pulse.beat()
    return run.processes.agree(Ballot(labelled_tokens=0, stop=run.interrupts.stop_reason)).stop


class Rounds:
    """The numbers below `count`, dealt to the processes batch by batch, until one of them wants to stop.

    All vote in every round, with or without a batch left for it, so that all leave in the same one.

    Attributes:
        batches: this process's share.
    """

    def __init__(self, run: Run, count: int, batch_size: int) -> None:
        self._run, self._stop = run, False
        # Process 0 has the longest share. One round more: somebody may have left the last batch half done.
        own, longest = (share(range(count), i, run.processes.count, batch_size) for i in (run.processes.index, 0))
        self.batches = self._deal(own, 1 + len(longest))

    def _deal(self, own: list[list[int]], count: int) -> Iterator[list[int]]:
        for number in range(count):
            self._stop = asked_to_stop(self._run) is not None
            if self._stop:
                return
            yield from own[number : number + 1]

    def stop_here(self) -> bool:
        """Whether this process was told to stop, so that it may leave its batch now, for the next vote."""
        self._run.pulse.beat()
        return self._run.interrupts.stop_reason is not None

    def all_done(self) -> bool:
        """Vote to the end; whether every batch of every process was dealt and nobody left."""
        for _ in self.batches:
            pass
        return not self._stop


def evaluate_and_log(run: Run) -> str | None:
    """Score agents and crowd in the middle of a run; returns the reason if a stop was asked for meanwhile."""
    scores = evaluate(run)
    if scores is not None:
        metrics = evaluation_metrics(scores)
        run.log.metrics(run.state.step, metrics)
        count_in(run, metrics)
        if is_over(run):
            run.log.say(f"early stopping after step {run.state.step}: {run.state.validation}")
    return asked_to_stop(run)


def evaluate(run: Run) -> Scores | None:
    """Scores over all processes, each of which takes its share of the rows; None if a stop was asked for."""
    rounds = Rounds(run, len(run.eval_rows), 4 * run.micro_batch_size)
    batches = (pack([run.eval_rows[i] for i in part], part) for part in rounds.batches)
    with run.processes.autocast():
        own = score(run.crowd, batches, run.config.aggregator, stop=rounds.stop_here)
    if not rounds.all_done():
        return None
    assert own is not None
    return Scores.joined(run.processes.gather_object(own))


def examine_crowd(run: Run) -> AnswerScores | None:
    """Generated answers scored over all processes; None if the rows ask nothing, or a stop was asked for."""
    assert run.crowd.prompter is not None
    config, prompter = run.config, run.crowd.prompter
    asked = Examination.of(run.eval_rows, prompter, run.crowd, config.generation_eval_samples, config.max_seq_length)
    if not len(asked):
        return None
    rounds = Rounds(run, len(asked), run.micro_batch_size)
    with run.processes.autocast():
        own = examine(
            run.crowd,
            prompter,
            asked,
            rounds.batches,
            max_new_tokens=config.max_new_tokens_eval,
            aggregator=config.aggregator,
            stop=rounds.stop_here,
        )
    if not rounds.all_done():
        return None
    assert own is not None
    return AnswerScores.joined(run.processes.gather_object(own))


def evaluation_metrics(scores: Scores) -> dict[str, float]:
    """The scores as metrics: nats per target token, and the share of rows reproduced exactly."""
    metrics = {}
    names = [*(f"agent{k}" for k in range(len(scores.right) - 1)), "crowd"]
    for name, exact, nll in zip(names, scores.exact_match, scores.mean_nll, strict=True):
        metrics[f"eval/{name}/nll"] = nll
        metrics[f"eval/{name}/exact_match"] = exact
    return metrics


def evaluation_due(run: Run) -> bool:
    """Whether the step just taken is one to evaluate after; the last one is judged by `job.conclude`."""
    every, step = run.config.eval_steps, run.state.step
    return every is not None and step % every == 0 and step < run.total_steps


def evaluation_missed(run: Run) -> bool:
    """Whether the attempt before ended between the step this one goes on from and the evaluation due there."""
    return run.state.step > 0 and evaluation_due(run) and run.state.validation.step != run.state.step


def recollect(run: Run) -> None:
    """At the start of an attempt: what the one before has seen of the step that this one goes on from. A collective.

    The checkpoint of that step may be older than the evaluation after it, which then stands in metrics.jsonl.
    """
    metric = run.config.metric_for_best_model
    if run.state.validation.metric != metric:
        run.log.say(f"          best so far was by {run.state.validation.metric}: from here on by {metric}, anew")
        run.state = replace(run.state, validation=Validation(metric))
    if evaluation_missed(run):
        known = run.processes.broadcast_object(run.log.metrics_of(run.state.step))
        if f"eval/crowd/{metric}" in known:
            count_in(run, known)
