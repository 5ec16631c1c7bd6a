"""The best step of a run: found by the evaluations, its checkpoint kept, its weights taken as the result."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.config import Config
from ci_llm.crowd.model import Crowd
from ci_llm.distributed.processes import Processes
from ci_llm.errors import CheckpointError
from ci_llm.run.state import TrainState, Validation

logger = logging.getLogger(__name__)


def validation_after(
    state: TrainState, metrics: Mapping[str, Any], threshold: float, processes: Processes
) -> Validation:
    """The validation state with the evaluation after the present step; an evaluation counts once. A collective.

    All processes take the main one's numbers: the last bit of a mean must not decide on one of them that a run ends.

    Args:
        metrics: of the evaluation, by the names of metrics.jsonl.
        threshold: `early_stopping_threshold`.
    """
    validation = state.validation
    names = [*(f"agent{k}" for k in range(len(state.skipped))), "crowd"]
    values = [float(metrics[f"eval/{name}/{validation.metric}"]) for name in names]
    *agents, crowd = processes.broadcast_object(values)
    return validation if validation.step == state.step else validation.after(state.step, crowd, agents, threshold)


def kept_steps(config: Config, validation: Validation) -> tuple[int, ...]:
    """Steps whose checkpoints pruning spares."""
    best = validation.best_step
    return (best,) if config.keeps_best and best is not None else ()


def result_step(config: Config, state: TrainState, manager: CheckpointManager, processes: Processes) -> int:
    """The step whose weights are the result of the run. A collective.

    With `load_best_model_at_end` the best step, as long as its checkpoint is whole; else the last one.
    """
    best = state.validation.best_step
    if not config.load_best_model_at_end or best is None or best == state.step:
        return state.step
    manager.wait_until_finished()  # an error of the last save says nothing about the best one
    damage = None
    if processes.is_main:
        try:
            manager.verify(best)
        except CheckpointError as error:
            damage = str(error)
    if (damage := processes.broadcast_object(damage)) is None:
        return best
    logger.warning(f"the best step, {best}, cannot be the result, so the last one is: {damage}")
    return state.step


@contextmanager
def weights_of(folder: Path, crowd: Crowd) -> Iterator[None]:
    """Give the agents the weights of a checkpoint within the block; afterwards they have their own again."""
    saved, agents = load_checkpoint(folder).state, crowd.agents
    own = agents.weights.clone()
    try:
        for k in range(crowd.num_agents):
            agents.load_agent(k, saved[f"agent{k}/adapter_model"], str(folder))
        yield
    finally:
        agents.weights.copy_(own)
