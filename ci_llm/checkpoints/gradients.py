"""Gradients of an unfinished accumulation window: kept with a checkpoint that is made inside of one, and put back.

    for micro_step in range(start, n):
        loss(...).backward()
        if (micro_step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        manager.save(micro_step, objects)      # may come due between two steps of the optimizer

Where gradients wait for the next step, weights and moments alone do not continue the training. So the gradients of
every optimizer in the state (or of the manager's `optimizers`) are saved beside it, under a key of their own, if they
have changed since that optimizer's last step. Where they are `None`, or left over from that step, nothing is added. On
several processes each has gradients of its own, and all are kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from ci_llm.checkpoints.state_files import read_snapshot, take_snapshot
from ci_llm.distributed.side_channel import ProcessGroup, SideChannel, has_other_processes, run_collectively
from ci_llm.errors import ForeignCheckpoint

KEY = "unfinished_gradients"
#: Stands for a gradient of nothing but zeros.
ZEROS = 0

#: A gradient, not kept alive, and its version.
_Mark: TypeAlias = "tuple[weakref.ref[Tensor], int]"


class Restored(NamedTuple):
    """The gradients of one process, by optimizer and number of the parameter."""

    gradients: dict[Optimizer, dict[int, Any]]
    accelerator_step: int | None


class Gradients:
    """The gradients of one loop.

    Args:
        optimizers: of the loop, beside those that stand in its state.
        accelerator: its count of micro-steps decides where a window ends; saved and restored as well.
    """

    def __init__(self, processes: ProcessGroup, optimizers: Iterable[Any] = (), accelerator: Any = None) -> None:
        self._processes, self._accelerator = processes, accelerator
        self._own: list[Optimizer] = []
        self._line: SideChannel | None = None
        #: For each parameter its gradient after the last step, and the version of that; the hooks that note them.
        self._after_step: weakref.WeakKeyDictionary[Optimizer, list[_Mark | None]] = weakref.WeakKeyDictionary()
        self._hooks: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        for optimizer in optimizers:
            self.watch(optimizer)

    def watch(self, optimizer: Any) -> None:
        """Add an optimizer that need not be in the state. What gradients it has now are left over from before."""
        self._own.append(inner := _inner(optimizer))
        self._look_after_steps(inner)
        self._note(inner)

    def close(self) -> None:
        """Leave the optimizers alone."""
        for optimizer in list(self._hooks):
            self._look_no_more(optimizer)

    def beside(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """`state`, with the gradients if any process is inside a window. A collective."""
        found = self._named(state)
        [inside] = run_collectively(self._processes, lambda: [self._is_inside(found.values())])
        if not inside:
            return state
        own = {"gradients": {name: _gradients(each) for name, each in found.items()}}
        if self._accelerator is not None:
            own["accelerator_step"] = self._accelerator.step
        everyones = {f"process{i}": told for i, told in enumerate(self._of_all(own))}
        return {KEY: everyones, **state} if isinstance(state, Mapping) else state  # which is refused in a moment

    def own_part(self, saved: Any, objects: Any, *, some: bool) -> Restored:
        """What `requeue` is to do; nothing is touched yet.

        Args:
            saved: what a checkpoint holds under KEY; None: it was made where no gradient waited.
            objects: what is being restored.
            some: these are some items of the checkpoint; the gradients of others are left out.

        Raises:
            ForeignCheckpoint: they are of other optimizers, or of another number of processes.
        """
        found = dict(_optimizers_in(objects, "")) if some else self._named(objects)
        if saved is None:
            return Restored({optimizer: {} for optimizer in found.values()}, None)
        own = saved.get(f"process{self._processes.index}", {"gradients": {}})
        names = [name for name in own["gradients"] if name in found or not some]
        if ((names or not some) and len(saved) != self._count()) or set(names) - set(found):
            raise ForeignCheckpoint(
                f"saved inside an accumulation window, with the gradients of {names} on {len(saved)} processes;"
                f" here are {sorted(found)} on {self._count()}",
                where=KEY,
                hint="restore into the same optimizers on as many processes, or restore a step at the end of a window",
            )
        by_optimizer = {optimizer: own["gradients"].get(name, {}) for name, optimizer in found.items()}
        return Restored(by_optimizer, own.get("accelerator_step"))

    def requeue(self, part: Restored) -> None:
        """Make the gradients those that were saved, and `None` where there were none."""
        for optimizer, gradients in part.gradients.items():
            self._look_after_steps(optimizer)
            self._after_step.pop(optimizer, None)  # what comes back is no leftover
            for index, parameter in enumerate(_parameters(optimizer)):
                parameter.grad = _as_gradient(gradients.get(index), parameter)
        if self._accelerator is not None and part.accelerator_step is not None:
            self._accelerator.step = part.accelerator_step

    def _named(self, state: Any) -> dict[str, Optimizer]:
        """The optimizers by their address in the state, then those that are not in it."""
        found = dict(_optimizers_in(state, ""))
        known = {id(optimizer) for optimizer in found.values()}
        others = [optimizer for optimizer in self._own if id(optimizer) not in known]
        return found | {f"optimizers[{i}]": optimizer for i, optimizer in enumerate(others)}

    def _is_inside(self, optimizers: Iterable[Optimizer]) -> bool:
        waiting = [self._waits(optimizer) for optimizer in optimizers]  # each is looked at, and watched from then on
        return any(waiting)

    def _waits(self, optimizer: Optimizer) -> bool:
        """Whether gradients were added since its last step; where nobody looked then, all that are there count."""
        gradients = [parameter.grad for parameter in _parameters(optimizer)]
        before = self._after_step.get(optimizer, [])
        if all(gradient is None for gradient in gradients):
            if any(before):  # the loop clears them after a step, so that nothing is ever left over
                self._look_no_more(optimizer)
            else:
                self._look_after_steps(optimizer)
            return False
        self._look_after_steps(optimizer)
        return len(before) != len(gradients) or not all(map(_is_left_over, gradients, before))

    def _look_after_steps(self, optimizer: Optimizer) -> None:
        if optimizer not in self._hooks:
            self._hooks[optimizer] = optimizer.register_step_post_hook(lambda stepped, *_: self._note(stepped))

    def _note(self, optimizer: Optimizer) -> None:
        self._after_step[optimizer] = [_mark(parameter.grad) for parameter in _parameters(optimizer)]

    def _look_no_more(self, optimizer: Optimizer) -> None:
        if (hook := self._hooks.pop(optimizer, None)) is not None:
            hook.remove()
            self._after_step.pop(optimizer, None)

    def _count(self) -> int:
        return torch.distributed.get_world_size() if has_other_processes() else 1

    def _of_all(self, own: dict[str, Any]) -> list[Any]:
        if not has_other_processes():
            return [own]
        self._line = self._line or SideChannel()
        return [_unpack(told) for told in self._line.exchange(_pack(own))]


def _inner(optimizer: Any) -> Optimizer:
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wraps the one that steps
    return inner


def _optimizers_in(value: Any, where: str) -> Iterator[tuple[str, Optimizer]]:
    if isinstance(value, Optimizer):
        yield where, _inner(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _optimizers_in(item, f"{where}.{key}" if where else str(key))
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _optimizers_in(item, f"{where}[{i}]")


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _mark(gradient: Tensor | None) -> _Mark | None:
    return None if gradient is None else (weakref.ref(gradient), gradient._version)


def _is_left_over(gradient: Tensor | None, mark: _Mark | None) -> bool:
    return gradient is None or (mark is not None and mark[0]() is gradient and mark[1] == gradient._version)


def _gradients(optimizer: Optimizer) -> dict[int, Any]:
    """By the number of the parameter, as in the optimizer's own state."""
    numbered = [(i, parameter.grad) for i, parameter in enumerate(_parameters(optimizer))]
    return {i: gradient.detach() if bool(gradient.any()) else ZEROS for i, gradient in numbered if gradient is not None}


def _as_gradient(saved: Any, parameter: Tensor) -> Tensor | None:
    if saved is None:
        return None
    if not isinstance(saved, Tensor):
        return torch.zeros_like(parameter)
    return saved.to(device=parameter.device, copy=True)


def _pack(own: dict[str, Any]) -> bytes:
    files = take_snapshot({"own": own})
    parts = {name: b"".join(image.parts) for name, image in files.files.items()}
    text = parts["own.json"]
    return len(text).to_bytes(8, "little") + text + parts.get("own.safetensors", b"")


def _unpack(told: bytes) -> Any:
    end = 8 + int.from_bytes(told[:8], "little")
    files = {"own.json": told[8:end], "own.safetensors": told[end:]}
    return read_snapshot({"own": "tree" if told[end:] else "plain"}, files)["own"]
