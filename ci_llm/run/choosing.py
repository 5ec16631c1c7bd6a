"""`crowd: auto`: whether the crowd is kept, or one of its agents goes on alone and takes the steps of the others.

It is decided once, by an evaluation after a quarter of the steps. Agents that know their training rows better than the
crowd knows new ones have learned what these rows can teach one agent: more steps would go into memorising, and a crowd
averages that away. Agents that know their training rows no better are still learning: more steps of one agent help more
than more agents. The change acts after the next step, as a change that people ask for does. It is on record before it
acts, so that an attempt which goes on from an older checkpoint makes it at the same step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from ci_llm.config import Config
from ci_llm.distributed.processes import Processes
from ci_llm.run.crowd_requests import Decision, put_on_record, read_record
from ci_llm.run.members import CrowdChange, Members
from ci_llm.run.state import Choice, TrainState

logger = logging.getLogger(__name__)

#: The metric that the decision takes beside those of an evaluation: nats per target token, mean over agents.
TRAINING_NLL: Final = "choice/training_nll"
_ID: Final = "crowd-auto"


def decided(
    config: Config,
    state: TrainState,
    metrics: Mapping[str, Any],
    dropped: Collection[int],
    processes: Processes,
    may_write: Callable[[], bool],
) -> TrainState:
    """The state in which it is decided about the crowd, with the change that is planned for it. A collective.

    Args:
        metrics: of the evaluation after the present step, by the names of metrics.jsonl.
        dropped: places of the agents that take no steps any more.
        may_write: whether this attempt holds the run's folder.
    """
    members = state.members or Members.configured(config)
    train = {each.folder: each.number for k, each in enumerate(members.agents) if k not in dropped}
    choice = processes.on_main(partial(_decide, config, state.step, train, metrics, may_write))
    logger.info(f"crowd     {choice}")
    return state.with_choice(choice, members.with_planned(changes_of(choice, config)))


def choose(step: int, training: float, crowd: float, agents: Mapping[int, float]) -> Choice:
    """What the evaluation after `step` decides.

    Args:
        training: NLL of the agents on training rows, their mean.
        crowd: NLL of the crowd on validation rows.
        agents: the same of the agents that can go on, by number.
    """
    sound = {number: nll for number, nll in agents.items() if math.isfinite(nll)}
    alone = training >= crowd and sound
    return Choice(step, training, crowd, min(sound, key=lambda number: sound[number]) if alone else None)


def changes_of(choice: Choice, config: Config) -> list[CrowdChange]:
    """The change of the crowd that follows: none, if it is kept.

    One agent then takes K times the steps that it would have taken in the crowd, and its learning rate is divided by
    the root of K.
    """
    if choice.agent is None:
        return []
    own = {"learning_rate": config.learning_rate / math.sqrt(config.num_agents)}
    return [CrowdChange(choice.step + 1, "single_out", choice.agent, own)]


def _decide(
    config: Config, step: int, train: Mapping[str, int], metrics: Mapping[str, Any], may_write: Callable[[], bool]
) -> Choice:
    """On the main process: as an earlier attempt has decided, if one has; on record before it acts.

    Args:
        train: name -> number of the agents that train.
    """
    agents = {number: float(metrics[f"eval/{name}/nll"]) for name, number in train.items()}
    choice = choose(step, float(metrics[TRAINING_NLL]), float(metrics["eval/crowd/nll"]), agents)
    if (known := _known(config.run_folder, step)) is not None:
        return Choice(step, choice.training, choice.crowd, known.agent if known.refused is None else None)
    if may_write():
        _record(config, choice)
    return choice


def _known(folder: Path, step: int) -> Decision | None:
    found = [each for each in read_record(folder) if each.id == _ID and each.step == step + 1]
    return found[-1] if found else None


def _record(config: Config, choice: Choice) -> None:
    decision = Decision(_ID, choice.step + 1, "single_out", 0, refused=str(choice))
    for change in changes_of(choice, config):
        decision = Decision(_ID, change.step, change.verb, change.agent, change.own)
    try:
        put_on_record(config.run_folder, decision)
    except OSError as error:
        logger.warning(f"crowd     what was decided cannot be put on record, the run goes on: {error.strerror}")
