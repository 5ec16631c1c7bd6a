"""The checkpoint from which a segment begins: the trials that continue, taken from several checkpoints.

A checkpoint numbers its agents, of which each is a trial. Everything of an agent goes with it: for `agent3` the files
`agent3/...`, the entries `agent3` of the checkpoint's trees, and the fourth value of each list with one per agent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.checkpoint import Checkpoint, decode, write_checkpoint
from ci_llm.checkpoints.layout import find_checkpoint, step_folder
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.config import Config
from ci_llm.config.config import BY_MACHINE
from ci_llm.config.schema import FOUND
from ci_llm.core.durable import remove_tree
from ci_llm.crowd.given_path import META
from ci_llm.errors import CheckpointError, ForeignCheckpoint
from ci_llm.run.run_checkpoint import config_of_checkpoint
from ci_llm.run.step.state import RecoveryState, TrainState, Validation

_NUMBERED: Final = re.compile(r"agent(\d+)(/.*)?")

_SIZES: Final = "parameters_per_agent"
#: The paths of lists with one value per agent: a key of a run's state and those below it, joined by dots. A value that
#: is not a list holds for every agent of its checkpoint; an empty list stays empty.
_PER_AGENT: Final = (f"{META}.agents", f"{META}.lora.agents", f"{META}.{_SIZES}", "train_state.agents")


def gather_agents(agents: Sequence[tuple[Checkpoint, int]]) -> dict[str, Any]:
    """A state with these agents, numbered in their order; what is of no agent is that of the first checkpoint.

    Args:
        agents: for each the checkpoint, read and verified, and its number there.

    Returns:
        a new state; its tensors are those of the checkpoints.

    Raises:
        ForeignCheckpoint: the checkpoints are of different steps, or an agent is not in its checkpoint.
    """
    steps = {checkpoint.manifest.step for checkpoint, _ in agents}
    if len(steps) > 1:
        folders = ", ".join(dict.fromkeys(str(checkpoint.folder) for checkpoint, _ in agents))
        raise ForeignCheckpoint(
            f"agents of different steps cannot train together: {', '.join(map(str, sorted(steps)))}", where=folders
        )
    files = [_files_of(checkpoint, number, place) for place, (checkpoint, number) in enumerate(agents)]
    state = {
        key: _picked(key, value, [(checkpoint.state.get(key), number) for checkpoint, number in agents])
        for key, value in agents[0][0].state.items()
        if not _NUMBERED.fullmatch(key)
    }
    for own in files:
        state |= own
    return state


def _files_of(checkpoint: Checkpoint, number: int, place: int) -> dict[str, Any]:
    """The files of one agent of a checkpoint, under its new number. Bytes are left out: they copy common files."""
    old, new = f"agent{number}/", f"agent{place}/"
    found = {
        new + key.removeprefix(old): value
        for key, value in checkpoint.state.items()
        if key.startswith(old) and not isinstance(value, bytes)
    }
    if not found:
        raise ForeignCheckpoint(f"there is no agent{number}", where=str(checkpoint.folder))
    return found


def _picked(path: str, first: Any, sources: Sequence[tuple[Any, int]]) -> Any:
    """The value at a path of the new state: those of the agents, and for the rest that of the first checkpoint.

    Args:
        sources: for every agent the value at this path in its checkpoint, and its number there.
    """
    if path in _PER_AGENT and (first or not isinstance(first, list | tuple)):
        return [value[number] if isinstance(value, list | tuple) else value for value, number in sources]
    if not isinstance(first, Mapping):
        return first
    trees = [(source if isinstance(source, Mapping) else {}, number) for source, number in sources]
    result = {
        key: _picked(f"{path}.{key}", value, [(tree.get(key), number) for tree, number in trees])
        for key, value in first.items()
        if not _NUMBERED.fullmatch(str(key))
    }
    own = enumerate((tree, f"agent{number}") for tree, number in trees)
    return result | {f"agent{place}": tree[name] for place, (tree, name) in own if name in tree}


def hand_over(sources: Sequence[tuple[Path, int]], config: Config, step: int) -> Path:
    """Commit the first checkpoint of a segment, unless it exists.

    Weights, moments and recovery state of every trial are, bit by bit, those at the end of its last segment.

    Args:
        sources: for every trial the folder of its last segment, and its number there.
        config: the configuration of the segment that begins; its folder gets the checkpoint.
        step: the steps that the trials have taken.

    Returns:
        the checkpoint.

    Raises:
        CheckpointError: a source holds no whole checkpoint of this step, or the disk refuses the new one.
    """
    target = step_folder(config.run_folder, step)
    if find_checkpoint(config.run_folder) is not None:
        return target  # it holds this step, or later ones that follow from it
    for leftover in config.run_folder.glob(".checkpoint_step_*"):  # of a process that was killed while it wrote
        remove_tree(leftover)
    opened = {folder: _last(folder, step) for folder in dict.fromkeys(folder for folder, _ in sources)}
    agents = [(opened[folder], number) for folder, number in sources]
    first = agents[0][0]
    before = config_of_checkpoint(first)
    by_rows = filter(config.is_open, Config.model_fields)
    settled = (*BY_MACHINE, *FOUND, *by_rows)
    config = config.model_copy(update={key: getattr(before, key) for key in settled})  # what auto was for them
    state = {key: value for key, value in gather_agents(agents).items() if key != "README.md"}
    meta = state[META]
    if len({*meta[_SIZES]}) == 1:
        meta = {**meta, _SIZES: meta[_SIZES][0]}
    state |= {
        META: {**meta, "num_agents": len(agents), "lora": {**meta["lora"], "num_agents": len(agents)}},
        "train_state": _train_state(state["train_state"], [checkpoint for checkpoint, _ in agents]),
        "config.yaml": config.dump().encode(),
        "trackers": {},
    }
    # The digest is that of another crowd; the names that decide the bits are the same.
    recorded: Any = first.manifest.info["surroundings"]
    surroundings = {key: value for key, value in recorded.items() if key != "layer"}
    write_checkpoint(target, state, step=step, info={**first.manifest.info, "surroundings": surroundings})
    return target


def _last(folder: Path, step: int) -> Checkpoint:
    """The checkpoint with which a segment has ended. There are two of it, so that one may be damaged."""
    store = CheckpointStore(folder)
    if store.latest_step(quarantine=False) != step:
        raise CheckpointError(
            f"the segment holds no whole checkpoint of step {step}",
            where=str(folder),
            hint="segments of a sweep are needed until it is complete; experiment_name=NAME begins a new one",
        )
    return decode(store.read(step))


def _train_state(values: Mapping[str, Any], checkpoints: Sequence[Checkpoint]) -> dict[str, Any]:
    """The position of the new segment. Of the recovery of whole packs only the measures against memory are kept."""
    state = TrainState.from_dict(values)
    each = [TrainState.from_dict(one.state["train_state"]).recovery for one in checkpoints]
    limits = [recovery.micro_batch_size for recovery in each if recovery.micro_batch_size is not None]
    recovery = RecoveryState(
        micro_batch_size=min(limits, default=None),
        parts_of_group=max(recovery.parts_of_group for recovery in each),
        pass_per_agent=any(recovery.pass_per_agent for recovery in each),
        recompute=any(recovery.recompute for recovery in each),
    )
    agents = tuple(replace(agent, number=place) for place, agent in enumerate(state.agents))
    validation = Validation(state.validation.metric, step=state.validation.step)
    return replace(state, agents=agents, recovery=recovery, validation=validation).to_dict()
