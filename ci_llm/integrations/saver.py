"""Checkpoints in loops of other libraries, the common part: saving, generators, trained tensors, refusals."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from torch import Tensor, nn

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.state_files import from_bytes, to_bytes
from ci_llm.core import determinism
from ci_llm.distributed.side_channel import SideChannel, TorchProcessGroup, run_collectively
from ci_llm.errors import ConfigError, ForeignCheckpoint
from ci_llm.interrupts import Interrupts

#: Frameworks that write the checkpoints themselves, by the names of Accelerate's `DistributedType`.
OWN_CHECKPOINTS: Final = frozenset({"FSDP", "DEEPSPEED", "MEGATRON_LM"})


class LoopSaver:
    """The checkpoints of one attempt, for a callback: opened before the training, asked at each step, closed after it.

    The constructor is a collective, and so are the methods that say so.

    Args:
        directory: the folder of the run.
        settings: the arguments of a `CheckpointManager`.
        device: the device of the collectives.

    Attributes:
        step: the step to resume from, the same on every process; None for a fresh start.
    """

    def __init__(self, directory: Path | str, settings: Mapping[str, Any], device: torch.device) -> None:
        self._interrupts = Interrupts()
        processes = TorchProcessGroup(device)
        self.manager = CheckpointManager(directory, interrupts=self._interrupts, **{"processes": processes, **settings})

        def look() -> list[int]:
            """Whether there is a step, and which: looked up by process 0; zeros on the others, so that sums keep it."""
            step = self.manager.latest_step() if processes.process_index == 0 else None
            return [step is not None, step or 0]

        there_is_one, newest = run_collectively(processes, look)
        self.step = self._saved = newest if there_is_one else None

    def restore(self, kind: str, about: str, loop: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """The checkpoint of `step`, whose trained tensors are in `model` again.

        Args:
            kind: a key that only this library's checkpoints have.
            about: the key of what it says about its loop.
            loop: the settings of the present loop.

        Raises:
            ForeignCheckpoint: it is of another library, loop or model.
        """
        assert self.step is not None
        where, saved = str(self.manager.store.path(self.step)), self.manager.read(self.step).state
        if kind not in saved:
            raise ForeignCheckpoint(
                f"this checkpoint is not of {kind.capitalize()}", where=where, hint="give another folder"
            )
        require_same(saved[about]["loop"], loop, where)
        load_trained(model, saved["model"], where)
        return saved

    def listen(self) -> None:
        """Handle signals from here on, in the place of any other handler."""
        self._interrupts.install()

    def told_to_stop(self, step: int) -> str | None:
        """The reason to end the training after `step`; None if no process got a signal. A collective."""
        if not self.manager.reached_preemption(step):
            return None
        return self._interrupts.stop_reason or "another process was told to stop"

    def save(self, step: int, contents: Callable[[], dict[str, Any]], *, force: bool = False) -> None:
        """Save what `contents` returns as `step`, if any process finds that due. A collective, and so is `contents`."""
        wanted = step != self._saved and (force or self.manager.due.is_due(step))
        if wanted and self.manager.save(step, contents(), force=True):  # a full disk drops it: the end tries again
            self._saved = step

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by index. A collective."""
        return gather(self.manager.saver.connect(), value)

    def close(self) -> None:
        """Finish the save in flight; release the folder and restore the signal handlers."""
        try:
            self.manager.close()
        finally:
            self._interrupts.restore()


class LoopCheckpoints:
    """The common part of the callbacks: their settings, and the training that is under way."""

    def __init__(self, directory: Path | str, settings: Mapping[str, Any]) -> None:
        self._directory, self._settings = Path(directory), settings
        self.interrupted: str | None = None
        self._attempt: Any = None

    def _begin(self, attempt: Any) -> None:
        self._attempt, self.interrupted = attempt, None

    def _end(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()


def gather(channel: SideChannel, value: Any) -> list[Any]:
    """The values of all processes, by index, as a checkpoint would hold them. A collective; nothing is unpickled."""
    return [from_bytes(message) for message in channel.exchange_result_of(lambda: to_bytes(value))]


def restore_generators(saved: dict[str, Any], where: str) -> None:
    """Put every global generator of this process back.

    Raises:
        ForeignCheckpoint: a generator could not be restored.
    """
    if (missing := determinism.restore(saved)) is not None:
        what = f"not every generator could be restored: {missing}"
        raise ForeignCheckpoint(what, where=where, hint="resume with as many GPUs visible to each process as before")


def require_same(there: Mapping[str, Any], here: Mapping[str, Any], where: str) -> None:
    """Refuse a checkpoint of a loop with other settings.

    Raises:
        ForeignCheckpoint: values differ; all of them are named.
    """
    odd = [f"{name} was {there.get(name)!r}, is {value!r}" for name, value in here.items() if there.get(name) != value]
    if odd:
        what = f"the saved training is another one: {'; '.join(odd)}"
        raise ForeignCheckpoint(what, where=where, hint="put the old values back, or give another folder for a new run")


def not_resumed(where: str, call: str) -> ConfigError:
    """The error of a training that was not begun by the call which resumes it."""
    return ConfigError("the run would not resume from its newest checkpoint", where=where, hint=call)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters, and the buffers of the state dict; a shared tensor is there once."""
    kept = model.state_dict(keep_vars=True).keys()
    named = {name: tensor.detach() for name, tensor in model.named_parameters() if tensor.requires_grad}
    return named | {name: tensor for name, tensor in model.named_buffers() if name in kept}


def frozen_digest(model: nn.Module) -> str:
    """A digest of name, shape, dtype and bytes of every frozen parameter."""
    whole = hashlib.sha256()
    for name, tensor in sorted(model.named_parameters()):
        if not tensor.requires_grad:
            raw = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
            whole.update(
                f"{name} {tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(raw.data)}\n".encode()
            )
    return whole.hexdigest()[:32]


@torch.no_grad()
def load_trained(model: nn.Module, saved: dict[str, Tensor], where: str) -> None:
    """Copy saved tensors into the model, in place; nothing is touched unless all of them fit.

    Raises:
        ForeignCheckpoint: names, shapes or types differ.
    """
    own = trained_tensors(model)
    forms = [{name: (tensor.shape, tensor.dtype) for name, tensor in each.items()} for each in (own, saved)]
    if odd := sorted(name for name in own.keys() | saved.keys() if forms[0].get(name) != forms[1].get(name)):
        raise ForeignCheckpoint(
            f"the model is another one: {len(odd)} trained tensors differ in name, shape or type, first {odd[0]}",
            where=where,
            hint="build the model as the saved run did, with the same layers frozen",
        )
    for name, tensor in own.items():
        tensor.copy_(saved[name])
