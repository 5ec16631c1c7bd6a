"""What earlier attempts and the supervisor leave to the next attempt in the run's folder, beside its checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.config import Config
from ci_llm.core.durable import read_json, write_json
from ci_llm.core.recovery import Recovery, read_recovery
from ci_llm.core.run_status import last_attempt
from ci_llm.distributed.processes import Processes
from ci_llm.errors import CheckpointError
from ci_llm.run.beginning import Beginning, Start, find_start, known_beginning, require_same_step
from ci_llm.run.crowd_requests import read_record
from ci_llm.run.members import CrowdChange, Members
from ci_llm.run.mirroring import RunMirror
from ci_llm.run.nonfinite_policy import BadBatch, RecoveryState
from ci_llm.run.state import TrainState

logger = logging.getLogger(__name__)

SKIPPED_BATCHES: Final = "skipped_batches.json"


@dataclass(frozen=True)
class Requests:
    """What lies in the run's folder for this attempt.

    Attributes:
        recovery: what the supervisor asks for.
        at_most: the newest step from which this attempt may resume; None: any. It holds for one attempt only, which
            ends it by writing its status.
        bad_batches: steps that earlier attempts have skipped.
        beginning: how the run began; None: no attempt has recorded it.
        changes: of the crowd, that earlier attempts have accepted.
    """

    recovery: Recovery = field(default_factory=Recovery)
    at_most: int | None = None
    bad_batches: tuple[BadBatch, ...] = ()
    beginning: Beginning | None = None
    changes: tuple[CrowdChange, ...] = ()


def read_requests(manager: CheckpointManager, config: Config) -> Requests:
    """Read all of them.

    Raises:
        CheckpointError: a file is not of this program, and this attempt depends on it.
    """
    run_folder = manager.directory
    recovery = read_recovery(run_folder)
    at_most = recovery.latest_step_allowed(last_attempt(run_folder))
    skipped = tuple(read_skipped_batches(run_folder))
    changes = tuple(each.change for each in read_record(run_folder) if each.refused is None)
    return Requests(recovery, at_most, skipped, known_beginning(manager, config), changes)


def apply_requests(state: TrainState, requests: Requests, config: Config) -> TrainState:
    """The state with what is asked for, on top of what the checkpoint holds."""
    asked, members = requests.recovery, state.members
    recovery = state.recovery.with_requests(asked.learning_rate_factor, asked.micro_batch_size)
    if requests.changes:
        members = (members or Members.configured(config)).with_planned(requests.changes)
    return replace(state, recovery=recovery.with_batches(requests.bad_batches), members=members)


def in_force(state: TrainState, batch_size: int) -> Iterator[str]:
    """Lines for people: what the run does otherwise than its configuration says.

    Args:
        batch_size: as configured.
    """
    recovery = state.recovery
    if recovery.requested_lr_factor != 1.0:
        yield f"learning rate x {recovery.requested_lr_factor:.3g} for all agents"
    for name, agent in zip(state.names, recovery.agents, strict=True):
        if agent.lr_factor != 1.0:
            yield f"learning rate x {agent.lr_factor:.3g} for {name}"
    if (limit := recovery.limit(batch_size)) < batch_size:
        yield f"micro-batch of at most {limit} row(s), the effective batch holds"
    if recovery.recompute:
        yield "layers are recomputed in the backward pass"
    if recovery.bad_batches:
        yield f"steps skipped: {', '.join(str(batch.step + 1) for batch in recovery.bad_batches)}"


def read_skipped_batches(run_folder: Path) -> list[BadBatch]:
    """The batches that earlier attempts have skipped, whichever checkpoint the run goes on from.

    Raises:
        CheckpointError: the file is not of this program.
    """
    path = run_folder / SKIPPED_BATCHES
    try:
        value: Any = read_json(path)
        return [BadBatch(int(batch["step"]), tuple(batch["rows"])) for batch in value]
    except FileNotFoundError:
        return []
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"no record of skipped batches: {error}", where=str(path), hint="move it away") from error


def write_skipped_batches(run_folder: Path, recovery: RecoveryState) -> None:
    """Record the bad batches; a disk that refuses it is reported, and the run goes on."""
    try:
        write_json(run_folder / SKIPPED_BATCHES, recovery.to_dict()["bad_batches"])
    except OSError as error:
        logger.warning(f"{SKIPPED_BATCHES} cannot be written, the run goes on: {error}")


def find_beginning(
    config: Config, processes: Processes, manager: CheckpointManager, mirror: RunMirror
) -> tuple[Start, Requests]:
    """Where an attempt begins, and what is asked of it. A collective."""
    processes.on_main(mirror.fill_disk)
    requests = processes.on_main(partial(read_requests, manager, config))
    with processes.main_process_first():
        start = find_start(manager, config, requests.beginning, requests.at_most)
    require_same_step(processes, config.run_folder, start.source.step if start.source else None)
    if start.sets_aside:  # the requests are for the run that moves aside
        requests = Requests()
    if start.goes_back:  # it does not go the same way again
        requests = replace(requests, changes=())
    return start, requests
