"""The checkpoint from which a segment begins: the trials that go on, taken out of the segments they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.checkpoint import Checkpoint, decode, find_checkpoint, write_checkpoint
from ci_llm.checkpoints.compose import CheckpointMember, compose
from ci_llm.checkpoints.folders import step_folder
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.config import Config
from ci_llm.core.durable import remove_tree
from ci_llm.crowd.recognise import META
from ci_llm.distributed.precision import CHOICES
from ci_llm.errors import CheckpointError
from ci_llm.run.nonfinite_policy import RecoveryState
from ci_llm.run.resume import Source, recorded_config
from ci_llm.run.state import TrainState, Validation

_SIZES: Final = "parameters_per_agent"
#: Where a checkpoint of a run has one value per agent, beside what is named after agents.
_PER_AGENT: Final = (
    *(f"{META}.agents", f"{META}.lora.agents", f"{META}.{_SIZES}"),
    *("train_state.skipped", "train_state.healing.agents", "train_state.validation.agents"),
)
_FROM_A_RUN: Final = frozenset({"README.md"})


def hand_over(sources: Sequence[tuple[Path, int]], config: Config, step: int) -> Path:
    """Commit the first checkpoint of a segment, unless it is there.

    Weights, moments and recovery state of every trial are the bits that its last segment has left.

    Args:
        sources: of every trial the folder of its last segment, and its number there.
        config: of the segment that begins; its folder gets the checkpoint.
        step: after which the trials stand.

    Returns:
        the checkpoint.

    Raises:
        CheckpointError: a source holds no whole checkpoint of this step, or the disk refuses the new one.
    """
    target = step_folder(config.run_folder, step)
    if find_checkpoint(config.run_folder) is not None:
        return target  # it holds this step, or later ones that follow from it
    _clear(config.run_folder)
    opened = {folder: _last(folder, step) for folder in dict.fromkeys(folder for folder, _ in sources)}
    members = [CheckpointMember(opened[folder], number) for folder, number in sources]
    before = recorded_config(Source(members[0].checkpoint, sources[0][0]))
    config = config.model_copy(update={key: getattr(before, key) for key in CHOICES})  # what auto was for them
    state = {key: value for key, value in compose(members, _PER_AGENT).items() if key not in _FROM_A_RUN}
    state |= {
        META: _meta(state[META], len(members)),
        "train_state": _train_state(state["train_state"], members),
        "config.yaml": config.dump().encode(),
        "trackers": {},
    }
    first = members[0].checkpoint.manifest
    write_checkpoint(target, state, step=step, info=first.info)
    return target


def _last(folder: Path, step: int) -> Checkpoint:
    """The checkpoint with which a segment has ended; it is there twice, and one of the two may be damaged."""
    opened = CheckpointStore(folder).open_newest(heal=False)
    if opened is None or opened.manifest.step != step:
        raise CheckpointError(
            f"the segment holds no whole checkpoint of step {step}",
            where=str(folder),
            hint="segments of a sweep are needed until it is complete; experiment_name=NAME begins a new one",
        )
    return decode(opened)


def _clear(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote the checkpoint."""
    for leftover in folder.glob(".checkpoint_step_*"):
        remove_tree(leftover)


def _meta(meta: Mapping[str, Any], count: int) -> dict[str, Any]:
    sizes = meta[_SIZES]
    return {**meta, "num_agents": count, _SIZES: sizes if len({*sizes}) > 1 else sizes[0]} | {
        "lora": {**meta["lora"], "num_agents": count}
    }


def _train_state(values: Mapping[str, Any], members: Sequence[CheckpointMember]) -> dict[str, Any]:
    """The position of the new segment. What concerned the packs as a whole stays behind, except a lack of memory."""
    state = TrainState.from_dict({**values, "skipped": tuple(values["skipped"])})
    each = [TrainState.from_dict(one.checkpoint.state["train_state"]).recovery for one in members]
    limits = [recovery.micro_batch_size for recovery in each if recovery.micro_batch_size is not None]
    recovery = RecoveryState(
        agents=state.recovery.agents,
        micro_batch_size=min(limits, default=None),
        recompute=any(recovery.recompute for recovery in each),
    )
    validation = Validation(state.validation.metric, step=state.validation.step, agents=state.validation.agents)
    return replace(state, recovery=recovery, validation=validation).to_dict()
