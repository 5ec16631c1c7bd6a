"""The gradients of an unfinished accumulation window: found in a loop, saved beside its state, and put back.

Inside a window weights and moments alone do not continue the training, because gradients wait for the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ci_llm.checkpoints.state_files import from_bytes, to_bytes
from ci_llm.distributed.side_channel import ProcessGroup, SideChannel, num_processes
from ci_llm.errors import ForeignCheckpoint

KEY = "unfinished_gradients"
#: Stands for a gradient of nothing but zeros.
ZEROS = 0

#: A gradient, not kept alive, and its version.
_Mark: TypeAlias = "tuple[weakref.ref[Tensor], int]"


class Gradients:
    """The gradients of one training loop.

    They are saved with a checkpoint that is made inside an unfinished accumulation window, and restored:

        for micro_step in range(start, n):
            loss(...).backward()
            if (micro_step + 1) % 4 == 0:
                optimizer.step()
                optimizer.zero_grad()
            manager.save(micro_step, objects)      # may come due between two steps of the optimizer

    The gradients of every optimizer in the state (or of the manager's `optimizers`) are saved beside it, under a key of
    their own, if they have changed since that optimizer's last step. If they are `None`, or left over from that step,
    nothing is added. A manager knows of the steps since it was made: gradients that an optimizer in the state had
    before wait; gradients that its `optimizers` had before are left over. On several processes each has gradients of
    its own, and all of them are saved.

    Args:
        accelerator: its count of micro-steps decides where a window ends, so it is saved and restored as well.
    """

    def __init__(self, processes: ProcessGroup, accelerator: Any = None) -> None:
        self._processes = processes
        self._accelerator = accelerator
        self._own: list[Optimizer] = []
        #: For each parameter its gradient after the last step, and the version of that tensor; a gradient of the same
        #: version has not been added to since.
        self._after_step: weakref.WeakKeyDictionary[Optimizer, list[_Mark | None]] = weakref.WeakKeyDictionary()
        _follow_steps()
        _FOLLOWING.add(self)

    def watch(self, optimizer: Optimizer) -> None:
        """Add an optimizer that need not be in the state. The gradients that it has now count as left over."""
        self._own.append(optimizer)
        self.note(optimizer)

    def note(self, stepped: Optimizer) -> None:
        """Take the gradients that an optimizer has now as left over from its last step."""
        self._after_step[stepped] = [_mark(parameter.grad) for parameter in _parameters(stepped)]

    def stop_following(self) -> None:
        """Follow the steps of optimizers no longer."""
        _FOLLOWING.discard(self)

    def are_waiting(self, state: Any) -> bool:
        """True if this process is inside an accumulation window: gradients wait for the next step of an optimizer."""
        return any(map(self._waits, self._named(state).values()))

    def of_everyone(self, state: Any, channel: SideChannel) -> dict[str, Any]:
        """The gradients of every process, which a checkpoint holds under KEY. A collective."""

        def own() -> bytes:
            gradients = {name: _gradients(each) for name, each in self._named(state).items()}
            content: dict[str, Any] = {"gradients": gradients}
            if self._accelerator is not None:
                content["accelerator_step"] = self._accelerator.step
            return to_bytes(content)

        received = channel.exchange_result_of(own)
        return {f"process{index}": from_bytes(message) for index, message in enumerate(received)}

    def putting_back(self, saved: Any, objects: Any) -> Callable[[], None]:
        """The function that makes the gradients those that were saved, and `None` where there were none.

        Args:
            saved: what a checkpoint holds under KEY; None if no gradient waited when it was made.
            objects: what is being restored.

        Raises:
            ForeignCheckpoint: they are of other optimizers, or of another number of processes.
        """
        found = self._named(objects)
        if saved is None:
            return partial(self._put_back, {optimizer: {} for optimizer in found.values()}, None)
        own = saved.get(f"process{self._processes.process_index}", {"gradients": {}})
        names = [*own["gradients"]]
        if len(saved) != num_processes() or set(names) - set(found):
            raise ForeignCheckpoint(
                f"saved inside an accumulation window, with the gradients of {names} on {len(saved)} processes;"
                f" here are {sorted(found)} on {num_processes()}",
                where=KEY,
                hint="restore into the same optimizers on as many processes, or restore a step at the end of a window",
            )
        by_optimizer = {optimizer: own["gradients"].get(name, {}) for name, optimizer in found.items()}
        return partial(self._put_back, by_optimizer, own.get("accelerator_step"))

    def _put_back(self, saved: Mapping[Optimizer, Mapping[int, Any]], accelerator_step: int | None) -> None:
        for optimizer, gradients in saved.items():
            self._after_step.pop(optimizer, None)  # what comes back waits for the next step, and is not left over
            for index, parameter in enumerate(_parameters(optimizer)):
                parameter.grad = _as_gradient(gradients.get(index), parameter)
        if self._accelerator is not None and accelerator_step is not None:
            self._accelerator.step = accelerator_step

    def _named(self, state: Any) -> dict[str, Optimizer]:
        """The optimizers by their address in the state, then those that are not in it."""
        found = dict(_optimizers_in(state, ""))
        known = {id(optimizer) for optimizer in found.values()}
        others = [optimizer for optimizer in self._own if id(optimizer) not in known]
        return found | {f"optimizers[{i}]": optimizer for i, optimizer in enumerate(others)}

    def _waits(self, optimizer: Optimizer) -> bool:
        """True if gradients were added since its last step; if nothing was noted then, all that are there count."""
        gradients = [parameter.grad for parameter in _parameters(optimizer)]
        before = self._after_step.get(optimizer, [])
        all_left_over = len(before) == len(gradients) and all(map(_is_left_over, gradients, before))
        return not all_left_over and any(gradient is not None for gradient in gradients)


#: The gradients of every open manager; a manager that is garbage leaves the set by itself.
_FOLLOWING: Final[weakref.WeakSet[Gradients]] = weakref.WeakSet()


@cache
def _follow_steps() -> None:
    """Hook into the steps of all optimizers, also of those that no manager has seen yet.

    One hook for good serves all managers: a hook that went with its manager could be removed by the garbage collector
    while torch goes through its hooks, and end that step with an error.
    """

    def note(stepped: Optimizer, *_: Any) -> None:
        for gradients in list(_FOLLOWING):
            gradients.note(stepped)

    register_optimizer_step_post_hook(note)


def inner_optimizer(optimizer: Any) -> Optimizer:
    """The optimizer that steps. Accelerate's wrapper of it never runs torch's constructor, so it can carry no hook."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _optimizers_in(value: Any, where: str) -> Iterator[tuple[str, Optimizer]]:
    if isinstance(value, Optimizer):
        yield where, inner_optimizer(value)
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
    """The gradients of an optimizer, keyed by the number of the parameter as in the optimizer's own state."""
    numbered = [(i, parameter.grad) for i, parameter in enumerate(_parameters(optimizer))]
    return {i: gradient.detach() if bool(gradient.any()) else ZEROS for i, gradient in numbered if gradient is not None}


def _as_gradient(saved: Any, parameter: Tensor) -> Tensor | None:
    if saved is None:
        return None
    if not isinstance(saved, Tensor):
        return torch.zeros_like(parameter)
    return saved.to(device=parameter.device, copy=True)
