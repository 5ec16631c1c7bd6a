"""The best step of a run: found by the evaluations, its checkpoint kept, its weights taken as the result."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ci_llm.checkpoints.checkpoint import Checkpoint
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
    names = [*state.names, "crowd"]
    values = [float(metrics[f"eval/{name}/{validation.metric}"]) for name in names]
    *agents, crowd = processes.broadcast_object(values)
    return validation if validation.step == state.step else validation.after(state.step, crowd, agents, threshold)


def kept_steps(config: Config, validation: Validation) -> tuple[int, ...]:
    """Steps whose checkpoints pruning spares."""
    best = validation.best_step
    return (best,) if config.keeps_best and best is not None else ()


def result_of(config: Config, state: TrainState, manager: CheckpointManager, processes: Processes) -> Checkpoint | None:
    """The checkpoint whose weights are the result of the run; None for the last step. A collective.

    With `load_best_model_at_end` that of the best step, as long as it is whole. Every process reads it once.
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
    if damages := [each for each in processes.gather_object(damage) if each is not None]:
        logger.warning(f"the best step, {best}, cannot be the result, so the last one is: {damages[0]}")
        return None
    return found


@contextmanager
def weights_of(checkpoint: Checkpoint, crowd: Crowd) -> Iterator[None]:
    """Give the agents the weights of a checkpoint within the block; afterwards they have their own again."""
    agents = crowd.agents
    own = agents.weights.clone()
    try:
        for k, name in enumerate(crowd.names):
            agents.load_agent(k, checkpoint.state[f"{name}/adapter_model"], str(checkpoint.folder))
        yield
    finally:
        agents.weights.copy_(own)
