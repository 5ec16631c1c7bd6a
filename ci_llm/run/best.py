"""The best step by validation and what hangs on it: a checkpoint that stays, the end of patience, the result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ci_llm.checkpoints.lone import load_checkpoint
from ci_llm.errors import CheckpointError
from ci_llm.run.run import Run


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
    step = _usable_best(run)
    if step is None:
        yield run.state.step
        return
    folder, agents = run.manager.store.path(step), run.crowd.agents
    saved, last = load_checkpoint(folder).state, agents.weights.clone()
    try:
        for k in range(run.crowd.num_agents):
            agents.load_agent(k, saved[f"agent{k}/adapter_model"], str(folder))
        yield step
    finally:
        agents.weights.copy_(last)


def _usable_best(run: Run) -> int | None:
    best = run.state.validation.best_step
    if not run.config.load_best_model_at_end or best in (None, run.state.step):
        return None
    with run.pulse.resting():
        run.manager.wait_until_finished()  # what the last save raises says nothing about the best one
    hindrance = None
    if run.processes.is_main:
        try:
            run.manager.verify(best)
        except CheckpointError as error:
            hindrance = str(error)
    if (hindrance := run.processes.broadcast_object(hindrance)) is not None:
        run.log.say(f"the best step, {best}, cannot be the result, so the last one is: {hindrance}")
        return None
    return best
