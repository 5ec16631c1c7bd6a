"""Orbax's arguments of `save` and `restore`, read as what they hold: a state, or named items of one."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from ci_llm.checkpoints.restore import load_into
from ci_llm.errors import CheckpointError, ForeignCheckpoint


@dataclass(frozen=True)
class StandardSave:
    """A state that is to be saved."""

    item: Any


@dataclass(frozen=True)
class StandardRestore:
    """A state that is to be restored.

    Args:
        item: filled in place, as by `restore(step, into=item)`; None: new dicts and tensors.
    """

    item: Any = None


class PyTreeSave(StandardSave):
    """The same."""


class PyTreeRestore(StandardRestore):
    """The same."""


class JsonSave(StandardSave):
    """Plain values."""


class JsonRestore(StandardRestore):
    """Plain values."""


class Composite(dict[str, Any]):
    """Items by name; each is an attribute as well."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no item {name!r}; items: {', '.join(self) or 'none'}") from None


def state_of(state: Any, args: Any) -> Any:
    """The state that a call of `save` means.

    Raises:
        CheckpointError: it gives a state and `args`, or neither; or `args` that hold no item.
    """
    if (state is None) == (args is None):
        raise CheckpointError("save takes a state or args=, and one of them only", where="save")
    return state if args is None else _item(args)


def _item(args: Any) -> Any:
    if isinstance(args, Mapping):
        return {name: _item(part) for name, part in args.items()}
    if hasattr(args, "item"):
        return args.item
    raise CheckpointError(
        f"a {type(args).__name__} holds no item",
        where="args=",
        hint="StandardSave(state), JsonSave(values), or Composite(name=..., ...) of these",
    )


def put(state: dict[str, Any], into: MutableMapping[str, Any] | None, args: Any) -> MutableMapping[str, Any]:
    """What a call of `restore` returns, with `state` in it.

    Raises:
        ForeignCheckpoint: an item that the checkpoint does not hold; or as `load_into`.
        CheckpointError: both `into` and `args`.
    """
    if into is not None and args is not None:
        raise CheckpointError("restore takes into= or args=, and one of them only", where="restore")
    wanted: Any = into if args is None else _item(args)
    if not isinstance(args, Mapping):
        if wanted is None:
            return state
        load_into(wanted, state)
        filled: MutableMapping[str, Any] = wanted
        return filled
    if missing := sorted(set(wanted) - set(state)):
        raise ForeignCheckpoint(f"the checkpoint does not hold {missing}; it holds {sorted(state)}", where="args=")
    templates = {name: item for name, item in wanted.items() if item is not None}
    load_into(templates, {name: state[name] for name in templates})
    return Composite(**{name: templates.get(name, state[name]) for name in wanted})
