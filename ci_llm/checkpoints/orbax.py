"""Orbax's names for our checkpoints, so that a script changes nothing but one import.

    from ci_llm import orbax as ocp

    manager = ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(max_to_keep=3))
    manager.save(step, args=ocp.args.StandardSave(state))
    state = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(state))

Calls are translated, and formats are not: the checkpoints are ours. docs/coming_from.md says what differs.

Examples:
    >>> manager = ci_llm.orbax.CheckpointManager(folder / "orbax")
    >>> manager.save(0, args=ci_llm.orbax.args.StandardSave({"x": torch.ones(2)}))
    True
    >>> manager.wait_until_finished()
    >>> manager.restore(0, args=ci_llm.orbax.args.StandardRestore())["x"].tolist()
    [1.0, 1.0]
    >>> manager.close()
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from ci_llm.checkpoints import orbax_arguments
from ci_llm.checkpoints.checkpoint import load_checkpoint, write_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager as CheckpointManager
from ci_llm.checkpoints.manager import put
from ci_llm.checkpoints.orbax_arguments import CheckpointManagerOptions as CheckpointManagerOptions
from ci_llm.checkpoints.orbax_arguments import state_of
from ci_llm.errors import CheckpointError


class Checkpointer:
    """One checkpoint at a path, committed and verified. All kinds of Orbax's are this one.

    Args:
        handler: not used: there is one format.
    """

    def __init__(self, handler: Any = None) -> None:
        del handler

    def save(self, directory: Path | str, state: Any = None, *, args: Any = None, force: bool = False) -> None:
        """Write `state`; it is durable when this returns.

        Raises:
            CheckpointError: something is there already, and `force` is not given; the disk failed.
        """
        folder = Path(directory)
        if folder.exists() and not force:
            raise CheckpointError("something is there already", where=str(folder), hint="force=True replaces it")
        write_checkpoint(folder, state_of(state, args))

    def restore(
        self, directory: Path | str, item: MutableMapping[str, Any] | None = None, *, args: Any = None
    ) -> MutableMapping[str, Any]:
        """Read and verify; fills `item` in place if there is one. Raises DamagedCheckpoint, ForeignCheckpoint."""
        return put(load_checkpoint(Path(directory)).state, item, args)

    def wait_until_finished(self) -> None:
        """Nothing is ever in flight."""

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class PyTreeCheckpointHandler:
    """Says to Orbax how a tree is written; there is one way here."""


args = orbax_arguments
AsyncCheckpointer = PyTreeCheckpointer = StandardCheckpointer = Checkpointer
StandardCheckpointHandler = JsonCheckpointHandler = PyTreeCheckpointHandler


def __getattr__(name: str) -> Any:
    raise AttributeError(f"{name} of orbax.checkpoint has no counterpart here; docs/coming_from.md has what has")
