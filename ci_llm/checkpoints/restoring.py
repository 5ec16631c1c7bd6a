"""The way of a restored state back into the objects that it was saved from: nothing changes unless all of it fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ci_llm.checkpoints.saver import EachProcess, own_parts
from ci_llm.distributed.side_channel import num_processes
from ci_llm.errors import ForeignCheckpoint


def give_own_parts(state: dict[str, Any], objects: Any, index: int) -> None:
    """Keep of a restored state what this process had of its own, wherever `objects` hold an `EachProcess`.

    Raises:
        ForeignCheckpoint: it was collected on another number of processes, or was not collected.
    """
    here = {f"process{number}" for number in range(num_processes())}
    for key in own_parts(objects).keys() & state.keys():
        collected = state[key]
        if not isinstance(collected, dict) or collected.keys() != here:
            had = f"what {len(collected)} had" if isinstance(collected, dict) else f"a {type(collected).__name__}"
            raise ForeignCheckpoint(
                f"here {len(here)} processes have something of their own, and the checkpoint holds {had}",
                where=key,
                hint="restore without `into`, and give each process what it needs of it",
            )
        state[key] = EachProcess(collected[f"process{index}"])


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
    if missing := sorted(objects.keys() - state.keys()):
        raise ForeignCheckpoint(f"the checkpoint does not hold {missing}")
    for key, target in objects.items():
        _check_fit(target, state[key], key)
    objects.update({key: _put(target, state[key], key) for key, target in objects.items()})


def _check_fit(target: object, saved: Any, where: str) -> None:
    """Raise ForeignCheckpoint if `saved` cannot be put into `target`; an object checks its own state later."""
    here = _describe(target)
    # A container may be of another type than it was, but not of another kind: a checkpoint does not hold the type.
    fits = not any(isinstance(target, kind) and not isinstance(saved, kind) for kind in (Mapping, list, tuple))
    items: Iterable[tuple[Any, Any, str]] = ()
    if isinstance(target, Tensor):
        fits = isinstance(saved, Tensor) and (saved.shape, saved.dtype) == (target.shape, target.dtype)
    elif isinstance(target, MutableMapping) and _holds_objects(target):
        fits = isinstance(saved, dict) and saved.keys() == target.keys()
        items = ((item, saved[key], f"{where}.{key}") for key, item in target.items())
    elif isinstance(target, Mapping) and _holds_objects(target):
        fits, here = False, f"a {type(target).__name__}, which cannot be filled"
    elif isinstance(target, (list, tuple)) and _holds_objects(target):
        fits = fits and len(saved) == len(target)
        items = ((item, saved[i], f"{where}[{i}]") for i, item in enumerate(target))
    if not fits:
        raise ForeignCheckpoint(f"here is {here}, the checkpoint holds {_describe(saved)}", where=where)
    for item, value, place in items:
        _check_fit(item, value, place)


def _holds_objects(value: object) -> bool:
    """True if anything in `value` has to be filled in place; otherwise it is plain, and replaced as a whole."""
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
