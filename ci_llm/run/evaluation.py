"""Evaluations of agents and crowd: by teacher forcing during the run, by generation at its end.

They also decide the best step: its checkpoint is kept, early stopping counts from it, and it can become the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ci_llm.checkpoints.checkpoint import Checkpoint
from ci_llm.crowd.answers import AnswerScores, Examination, examine
from ci_llm.crowd.scoring import Scores, score
from ci_llm.data.batches import pack
from ci_llm.data.order import share
from ci_llm.distributed.ballot import Ballot, Verdict
from ci_llm.errors import CheckpointError
from ci_llm.run.context import Run
from ci_llm.run.out_of_memory import smaller_batch, unless_out_of_memory
from ci_llm.run.state import Validation

T = TypeVar("T")


def asked_to_stop(run: Run) -> str | None:
    """Why the run shall end, whichever process was told so. A collective."""
    return _vote(run).stop


def _vote(run: Run, *, out_of_memory: bool = False) -> Verdict:
    run.heartbeat.tick()
    return run.processes.agree(Ballot(labelled_tokens=0, stop=run.interrupts.stop_reason, out_of_memory=out_of_memory))


class Rounds:
    """The numbers below `count`, dealt to the processes batch by batch, until one wants to stop or runs out of memory.

    All vote in every round, with or without a batch left for it, so that all leave in the same one.

    Attributes:
        batches: this process's share.
        stop: the reason for which all have left.
        out_of_memory: whether all have left because a batch did not fit.
    """

    def __init__(self, run: Run, count: int, batch_size: int) -> None:
        self._run, self._failed = run, False
        self.stop: str | None = None
        self.out_of_memory = False
        # Process 0 has the longest share. One round more: somebody may have left the last batch half done.
        own, longest = (share(range(count), i, run.processes.count, batch_size) for i in (run.processes.index, 0))
        self.batches = self._deal(own, 1 + len(longest))

    def _deal(self, own: list[list[int]], count: int) -> Iterator[list[int]]:
        for number in range(count):
            verdict = _vote(self._run, out_of_memory=self._failed)
            self.stop, self.out_of_memory = verdict.stop, verdict.out_of_memory
            if self.stop is not None or self.out_of_memory:
                return
            yield from own[number : number + 1]

    def stop_here(self) -> bool:
        """Whether this process was told to stop, so that it may leave its batch now, for the next vote."""
        self._run.heartbeat.tick()
        return self._run.interrupts.stop_reason is not None

    def end(self, *, out_of_memory: bool) -> None:
        """Vote to the end, whether or not this process was dealt all of its batches."""
        self._failed = out_of_memory
        for _ in self.batches:
            pass


def _judged(run: Run, count: int, batch_size: int, judge: Callable[[Rounds], T | None]) -> list[T] | None:
    """What `judge` finds on every process, again in smaller batches where memory ran out; None if the run shall stop.

    Raises:
        OutOfMemory: on every process, when the batches cannot be made smaller.
    """
    size = min(batch_size, -(-count // run.processes.count))
    while True:
        rounds = Rounds(run, count, size)
        with run.processes.autocast():
            own, complaint = unless_out_of_memory(partial(judge, rounds))
        rounds.end(out_of_memory=complaint is not None)
        if rounds.stop is not None:
            return None
        if not rounds.out_of_memory:
            assert own is not None
            return run.processes.gather_object(own)
        size = smaller_batch(run, size, complaint)


def evaluate_and_log(run: Run) -> str | None:
    """Score agents and crowd in the middle of a run; returns the reason if a stop was asked for meanwhile."""
    run.interrupts.plan = f"saving step {run.state.step}"
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

    def judge(rounds: Rounds) -> Scores | None:
        batches = (pack([run.eval_rows[i] for i in part], part) for part in rounds.batches)
        return score(run.crowd, batches, run.config.aggregator, stop=rounds.stop_here)

    found = _judged(run, len(run.eval_rows), 4 * run.micro_batch_size, judge)
    return None if found is None else Scores.joined(found)


def examine_crowd(run: Run) -> AnswerScores | None:
    """Generated answers scored over all processes; None if the rows ask nothing, or a stop was asked for."""
    assert run.crowd.prompter is not None
    config, prompter = run.config, run.crowd.prompter
    asked = Examination.of(run.eval_rows, prompter, run.crowd, config.generation_eval_samples, config.max_seq_length)
    if not len(asked):
        return None
    run.log.say(f"judging   the answers that they generate to {len(asked)} of these")

    def judge(rounds: Rounds) -> AnswerScores | None:
        return examine(
            run.crowd,
            prompter,
            asked,
            rounds.batches,
            max_new_tokens=config.max_new_tokens_eval,
            aggregator=config.aggregator,
            stop=rounds.stop_here,
        )

    found = _judged(run, len(asked), run.micro_batch_size, judge)
    return None if found is None else AnswerScores.joined(found)


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


def recollect(run: Run, *, from_log: bool) -> None:
    """At the start of an attempt: what the one before has seen of the step that this one goes on from. A collective.

    The checkpoint of that step may be older than the evaluation after it, which then stands in metrics.jsonl.

    Args:
        from_log: the checkpoint is the run's own, and so is what its metrics.jsonl tells of that step.
    """
    metric = run.config.metric_for_best_model
    if run.state.validation.metric != metric:
        run.log.say(f"          best so far was by {run.state.validation.metric}: from here on by {metric}, anew")
        run.state = replace(run.state, validation=Validation(metric))
    if from_log and evaluation_missed(run):
        known = run.processes.broadcast_object(run.log.metrics_of(run.state.step))
        if f"eval/crowd/{metric}" in known:
            count_in(run, known)


# ---------------------------------------------------------------------------------------------------- best


def count_in(run: Run, metrics: Mapping[str, Any]) -> None:
    """Let the evaluation after the present step say which step is best, once. A collective.

    All processes take the main one's numbers: whether a run ends here must not hang on the last bit of a mean.
    """
    validation, step = run.state.validation, run.state.step
    agents = [f"agent{k}" for k in range(run.crowd.num_agents)]
    values = [float(metrics[f"eval/{name}/{validation.metric}"]) for name in (*agents, "crowd")]
    *alone, crowd = run.processes.broadcast_object(values)
    if validation.step != step:
        validation = validation.after(step, crowd, alone, run.config.early_stopping_threshold)
        run.state = replace(run.state, validation=validation)
        run.status.best_step = validation.best_step


def is_best(run: Run) -> bool:
    """Whether the present step is the best one so far, and the run keeps the checkpoint of that one."""
    return run.state.step in kept_steps(run)


def kept_steps(run: Run) -> tuple[int, ...]:
    """Steps whose checkpoints pruning spares."""
    best = run.state.validation.best_step
    return (best,) if run.config.keeps_best and best is not None else ()


def is_over(run: Run) -> bool:
    """Whether no step is left to take: the last one is taken, or patience with the evaluations is at its end."""
    patience = run.config.early_stopping_patience
    impatient = patience is not None and run.state.validation.without_better >= patience
    return impatient or run.state.step >= run.total_steps


@contextmanager
def result_in_place(run: Run) -> Iterator[int]:
    """Put the weights that are the result of the run in place, for a while; yields their step. A collective.

    With `load_best_model_at_end` those of the best step, as long as its checkpoint is whole; else those of the last.
    """
    best = _usable_best(run)
    if best is None:
        yield run.state.step
        return
    agents = run.crowd.agents
    last = agents.weights.clone()
    try:
        for k in range(run.crowd.num_agents):
            agents.load_agent(k, best.state[f"agent{k}/adapter_model"], str(best.folder))
        yield best.manifest.step
    finally:
        agents.weights.copy_(last)


def _usable_best(run: Run) -> Checkpoint | None:
    """The best step, read and verified once by every process. A collective."""
    best = run.state.validation.best_step
    if not run.config.load_best_model_at_end or best in (None, run.state.step):
        return None
    with run.heartbeat.resting():
        run.manager.wait_until_finished()  # what the last save raises says nothing about the best one
    found, hindrance = None, None
    try:
        found = run.manager.read(best)
    except CheckpointError as error:
        hindrance = str(error)
    hindrances = [each for each in run.processes.gather_object(hindrance) if each is not None]
    if hindrances:
        run.log.say(f"the best step, {best}, cannot be the result, so the last one is: {hindrances[0]}")
        return None
    return found
