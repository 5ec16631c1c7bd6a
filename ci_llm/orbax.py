"""Orbax's names for our checkpoints, so that a script changes nothing but one import.

    import ci_llm.orbax as ocp

    options = ocp.CheckpointManagerOptions(save_interval_steps=100, max_to_keep=3)
    manager = ocp.CheckpointManager(directory, ocp.PyTreeCheckpointer(), options)

The manager is `ci_llm.CheckpointManager`, and so are the files. What Orbax has beside these names is refused by name.

Examples:
    >>> options = ci_llm.orbax.CheckpointManagerOptions(save_interval_steps=2)
    >>> manager = ci_llm.orbax.CheckpointManager(folder / "orbax", ci_llm.orbax.PyTreeCheckpointer(), options)
    >>> [manager.save(step, {"x": torch.ones(2) * step}) for step in range(3)]
    [True, False, True]
    >>> manager.wait_until_finished()
    >>> manager.restore(manager.latest_step())["x"].tolist()
    [2.0, 2.0]
    >>> manager.close()
"""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from ci_llm.checkpoints import manager
from ci_llm.checkpoints.state_files import State
from ci_llm.errors import CheckpointError


class PyTreeCheckpointer:
    """Orbax's argument for the way a tree is written. There is one way here, so it takes nothing."""

    def __init__(self, *others: Any, **named: Any) -> None:
        _refuse([*(f"a {type(each).__name__}" for each in others), *named], "PyTreeCheckpointer()")


class CheckpointManagerOptions:
    """The options of a manager: when it saves, and how many checkpoints it keeps.

    Raises:
        CheckpointError: another field; the message names it.
    """

    def __init__(self, save_interval_steps: int = 1, max_to_keep: int | None = None, **others: Any) -> None:
        _refuse(others, "CheckpointManagerOptions(save_interval_steps=, max_to_keep=)")
        self.save_interval_steps, self.max_to_keep = save_interval_steps, max_to_keep


class CheckpointManager(manager.CheckpointManager):
    """`ci_llm.CheckpointManager`, called as Orbax's; its own keywords may follow.

    Raises:
        CheckpointError: an argument that it does not have; the message names it.
    """

    def __init__(
        self,
        directory: Path | str,
        checkpointers: PyTreeCheckpointer | None = None,
        options: CheckpointManagerOptions | None = None,
        **keywords: Any,
    ) -> None:
        for given, kind in ((checkpointers, PyTreeCheckpointer), (options, CheckpointManagerOptions)):
            if given is not None and not isinstance(given, kind):
                _refuse([f"a {type(given).__name__}"], "CheckpointManager(directory, PyTreeCheckpointer(), options)")
        _refuse(keywords.keys() - inspect.signature(manager.CheckpointManager).parameters, "CheckpointManager")
        super().__init__(directory, **vars(options or CheckpointManagerOptions()) | keywords)

    def save(self, step: int, state: State | None = None, **keywords: Any) -> bool:
        """See `ci_llm.CheckpointManager`. Raises CheckpointError for an argument that it does not have."""
        _refuse(keywords.keys() - inspect.signature(manager.CheckpointManager.save).parameters, "save(step, state)")
        if state is None:
            raise CheckpointError("there is no state", where="save(step, state)")
        return super().save(step, state, **keywords)

    def restore(
        self, step: int | None = None, into: MutableMapping[str, Any] | None = None, **others: Any
    ) -> MutableMapping[str, Any]:
        """See `ci_llm.CheckpointManager`. Raises CheckpointError for an argument that it does not have."""
        _refuse(others, "restore(step, into)")
        return super().restore(step, into)


def _refuse(others: Any, where: str) -> None:
    if names := sorted(others):
        raise CheckpointError(
            f"{', '.join(names)} of Orbax has no counterpart here",
            where=where,
            hint="leave it out; docs/coming_from.md has what is there instead",
        )


def __getattr__(name: str) -> Any:
    raise AttributeError(f"{name} of orbax.checkpoint has no counterpart here; docs/coming_from.md has what has")
