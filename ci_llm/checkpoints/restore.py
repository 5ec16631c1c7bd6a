"""A state put back into the objects it came from, strictly: what can be compared is compared before any is touched."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ci_llm.checkpoints.orbax_arguments import Composite, items_of
from ci_llm.errors import CheckpointError, ForeignCheckpoint


def load_into(objects: MutableMapping[str, Any], state: Mapping[str, Any]) -> None:
    """Put a state back where it came from, strictly.

    Tensors are copied in place, objects get `load_state_dict`, plain values are replaced in their container.
    Only files kept verbatim may stay unused.

    Raises:
        ForeignCheckpoint: a key, shape or type on one side has no counterpart on the other, and nothing was touched;
            or an object does not take its state, which it may have done in part, and those before it wholly.
    """
    unused = {key for key, value in state.items() if not isinstance(value, bytes)} - objects.keys()
    if unused:
        raise ForeignCheckpoint(
            f"the checkpoint holds {sorted(unused)}, which nothing here takes up",
            hint="restore without `into` to get all of it as plain values",
        )
    taken = {key: state[key] for key in objects if key in state}
    if missing := sorted(objects.keys() - taken.keys()):
        raise ForeignCheckpoint(f"the checkpoint does not hold {missing}")
    for key, target in objects.items():
        _check_fit(target, taken[key], key)
    objects.update({key: _put(target, taken[key], key) for key, target in objects.items()})


def _check_fit(target: object, saved: object, where: str) -> None:
    if isinstance(target, Tensor):
        same = isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (target.shape, target.dtype)
        if not same:
            raise _misfit(where, _describe(target), _describe(saved))
    elif not _holds_objects(target):
        if _is_of_other_kind(saved, target):
            raise _misfit(where, _describe(target), _describe(saved))
    elif isinstance(target, MutableMapping):
        if not isinstance(saved, dict) or saved.keys() != target.keys():
            raise _misfit(where, _describe(target), _describe(saved))
        for key, item in target.items():
            _check_fit(item, saved[key], f"{where}.{key}")
    elif isinstance(target, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or _is_of_other_kind(saved, target) or len(saved) != len(target):
            raise _misfit(where, _describe(target), _describe(saved))
        for i, item in enumerate(target):
            _check_fit(item, saved[i], f"{where}[{i}]")
    elif isinstance(target, Mapping):
        raise _misfit(where, f"a {type(target).__name__}, which cannot be filled", _describe(saved))


def _is_of_other_kind(saved: object, target: object) -> bool:
    """Whether `target` is a container and `saved` is none of its kind; a checkpoint does not hold the exact type."""
    return any(isinstance(target, kind) and not isinstance(saved, kind) for kind in (Mapping, list, tuple))


def _holds_objects(value: object) -> bool:
    """Whether anything in `value` has to be filled in place; otherwise it is plain, and replaced as a whole."""
    if isinstance(value, Mapping):
        return any(map(_holds_objects, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_objects, value))
    return isinstance(value, Tensor) or hasattr(value, "load_state_dict")


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} of {value.dtype}"
    if isinstance(value, Mapping):
        return f"a dict with the keys {sorted(map(str, value))}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _misfit(where: str, here: str, there: str) -> ForeignCheckpoint:
    return ForeignCheckpoint(f"here is {here}, the checkpoint holds {there}", where=where)


def _put(target: Any, saved: Any, where: str) -> Any:
    """Load `saved` into `target` where that can be done in place; returns what belongs in its container."""
    if hasattr(target, "load_state_dict"):
        try:
            target.load_state_dict(saved)
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ForeignCheckpoint(f"{_describe(target)} does not take its state: {error}", where=where) from error
        return target
    if isinstance(target, Tensor):
        with torch.no_grad():
            return target.copy_(saved)
    if not _holds_objects(target):
        return saved
    if isinstance(target, MutableMapping):
        target.update({key: _put(item, saved[key], f"{where}.{key}") for key, item in target.items()})
        return target
    filled = [_put(item, value, f"{where}[{i}]") for i, (item, value) in enumerate(zip(target, saved, strict=True))]
    if isinstance(target, tuple):
        return type(target)(*filled) if hasattr(target, "_fields") else tuple(filled)
    target[:] = filled
    return target


def put(state: dict[str, Any], into: MutableMapping[str, Any] | None, args: Any) -> MutableMapping[str, Any]:
    """What a call of `restore` returns, with `state` in it.

    Raises:
        ForeignCheckpoint: an item that the checkpoint does not hold; or as `load_into`.
        CheckpointError: both `into` and `args`.
    """
    if into is not None and args is not None:
        raise CheckpointError("restore takes into= or args=, and one of them only", where="restore")
    wanted: Any = into if args is None else items_of(args)
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
