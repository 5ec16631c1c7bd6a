"""`crowd: auto`: one agent begins; it stays alone and takes the steps of all, or the others join it.

It is decided once, by an evaluation after an eighth of the agent-steps. An agent that knows its training rows much
better than new ones learns them by heart: more of its steps would go into that, and a crowd averages it away. One that
knows them about as well is still learning: more steps of one agent help more than more agents. Until then it trains
as one agent that stays alone from the start would, and after that as well, to the same bits.

The decision is on record before it acts, so that an attempt which goes on from an older checkpoint repeats it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from ci_llm.config import Config
from ci_llm.distributed.processes import Processes
from ci_llm.run.crowd_requests import Decision, put_on_record, read_record
from ci_llm.run.members import CrowdChange, Members
from ci_llm.run.state import Choice, TrainState

logger = logging.getLogger(__name__)

#: The metric that the decision takes beside those of an evaluation: nats per target token.
TRAINING_NLL: Final = "choice/training_nll"
#: An agent learns its rows by heart when its nll on them is below this share of that on new rows.
BY_HEART: Final = 0.5
_ID: Final = "crowd-auto"


def decide_crowd(
    config: Config,
    state: TrainState,
    metrics: Mapping[str, Any],
    processes: Processes,
    may_write: Callable[[], bool],
) -> TrainState:
    """The state in which it is decided about the crowd. A collective.

    Args:
        metrics: of the evaluation after the present step, by the names of metrics.jsonl.
        may_write: whether this attempt holds the run's folder.
    """
    members = state.members
    assert members is not None  # with `crowd: auto` a run begins with one agent
    choice = processes.on_main(partial(_decide_on_main, config, state.step, members, metrics, may_write))
    logger.info(f"crowd     {choice}")
    return state.with_choice(choice, members.with_planned([change_of(choice)]))


def choice_from_nll(step: int, training: float, validation: float) -> Choice:
    """What the evaluation after `step` decides about an agent with these nll; not a number: the others join."""
    return Choice(step, training, validation, alone=training >= BY_HEART * validation)


def change_of(choice: Choice) -> CrowdChange:
    """What follows: it acts after one more step, as changes do that people ask for."""
    return CrowdChange(choice.step + 1, "stay_alone" if choice.alone else "join")


def _decide_on_main(
    config: Config, step: int, members: Members, metrics: Mapping[str, Any], may_write: Callable[[], bool]
) -> Choice:
    """On the main process: as an earlier attempt has decided, if one has; on record before it acts."""
    (name,) = members.folders
    choice = choice_from_nll(step, float(metrics[TRAINING_NLL]), float(metrics[f"eval/{name}/nll"]))
    if (known := _recorded_decision(config.run_folder, step)) is not None:
        return Choice(step, choice.training, choice.validation, alone=known.verb == "stay_alone")
    if may_write():
        _write_decision(config, choice)
    return choice


def _recorded_decision(folder: Path, step: int) -> Decision | None:
    found = [each for each in read_record(folder) if each.id == _ID and each.step == step + 1]
    return found[-1] if found else None


def _write_decision(config: Config, choice: Choice) -> None:
    change = change_of(choice)
    try:
        put_on_record(config.run_folder, Decision(_ID, change.step, change.verb, change.agent))
    except OSError as error:
        logger.warning(f"crowd     what was decided cannot be put on record, the run goes on: {error.strerror}")
