"""Checks of what only a GPU does: each computation is tried on the device at toy size before a run relies on it.

A check computes a result on the device and compares it with another way to the same result: full precision, a second
computation, the original of a copy. It works on a CPU as well, where the tests call it.

Legend: K agents, P numbers of an agent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ci_llm.base.load import load_base
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.core.determinism import generator_for
from ci_llm.core.memory import free_memory, is_out_of_memory
from ci_llm.core.quantities import size
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Example
from ci_llm.distributed.precision import DTYPES, autocast_dtype
from ci_llm.distributed.processes import Processes
from ci_llm.dry_run.context import CheckContext, Inapplicable
from ci_llm.errors import CheckpointError, CiLlmError, ModelError
from ci_llm.logs.hardware import Gpus
from ci_llm.lora.attention import HALVES, Trial, Way, bound_of
from ci_llm.lora.layer import LoraSettings
from ci_llm.run.setup import set_determinism

LENGTHS: Final = (17, 400, 64)  # tokens of the toy rows; a long row takes other kernels than a short one
SCALE: Final = 2.0**8  # of a loss in fp16
HALF_TOLERANCE: Final = 0.05  # of a gradient in half precision, relative to its norm
PROBE_BYTES: Final = 64 << 20
REPORT_HINT: Final = "report this GPU and its driver; deterministic=true or mixed_precision=no may avoid it"


def on_gpu(check: Callable[[torch.device], str]) -> Callable[[CheckContext], str]:
    """`check` for a context; it is inapplicable unless the run computes on a GPU."""
    return lambda context: check(_gpu_of(context))


def _gpu_of(context: CheckContext) -> torch.device:
    device = context.processes.device
    if device.type != "cuda":
        there = torch.cuda.is_available()
        raise Inapplicable(f"{'this run computes on the CPU' if there else 'no GPU here'}: not checked")
    return device


@dataclass
class Toy:
    """A crowd of two on the embedded base, agents that differ, and three rows of random tokens."""

    crowd: Crowd
    batch: Batch

    @classmethod
    def on(cls, device: torch.device) -> Toy:
        """A new toy on this device. Every check makes its own one, so that a failure of one check spoils no other."""
        base = load_base("embedded", "fp32", device)
        settings = LoraSettings(num_agents=2, rank=4, alpha=8, seed=0)
        crowd = Crowd(base.model, settings, base.name).train()
        weights = crowd.agents.weights
        weights.copy_(torch.randn(weights.shape, generator=generator_for(0, "gpu check")) * 0.02)
        vocabulary = base.model.get_input_embeddings().weight.shape[0]
        return cls(crowd, _random_batch(vocabulary).to(device))

    def gradients(self, dtype: torch.dtype | None = None) -> Tensor:
        """[K, P] gradients of the mean loss, in full precision or under autocast to `dtype`; fp16 has a loss scale."""
        scale = SCALE if dtype == torch.float16 else 1.0
        self.crowd.agents.begin_step(0)
        with torch.autocast(self.batch.input_ids.device.type, dtype=dtype, enabled=dtype is not None):
            output = self.crowd(self.batch)
        (output.loss * scale).backward()
        return self.crowd.agents.gradients.clone() / scale

    def optimizer(self) -> torch.optim.AdamW:
        """The optimizer of a run: one fused kernel, one group per agent."""
        return torch.optim.AdamW([{"params": [row]} for row in self.crowd.agents.rows], lr=1e-3, fused=True)


def _random_batch(vocabulary: int) -> Batch:
    ids = torch.randint(0, vocabulary, (sum(LENGTHS),), generator=generator_for(0, "gpu check rows"))
    rows = [Example(own.numpy(), np.arange(len(own)) > 0) for own in ids.split(LENGTHS)]
    return pack(rows, range(len(rows)))


def autocast(device: torch.device) -> str:
    """A step in each half precision that the device has: gradients near those of fp32, and agents that move."""
    found = []
    for name in ("bf16", "fp16"):
        if name == "bf16" and not has_bf16(device):
            continue
        toy = Toy.on(device)
        half, full = toy.gradients(DTYPES[name]).double(), toy.gradients().double()
        gap = float((half - full).norm() / full.norm())
        if not gap < HALF_TOLERANCE:
            what = f"gradients in {name} differ from those in fp32 by {gap:.1e} of their norm"
            raise ModelError(what, where=f"mixed_precision: {name}", hint="mixed_precision=no")
        before = toy.crowd.agents.weights.clone()
        toy.optimizer().step()
        after = toy.crowd.agents.weights
        if not (after.isfinite().all() and (after != before).any(1).all()):
            raise ModelError(
                f"after a fused step in {name} not every agent has moved to finite weights",
                where=f"mixed_precision: {name}",
                hint="mixed_precision=no",
            )
        found.append(f"{name} within {gap:.1e} of fp32")
    return f"{', '.join(found)}; a fused optimizer step moves every agent"


def attention(device: torch.device) -> str:
    """Kernels of attention over packed rows agree with plain products, in every precision that a run may have.

    Forward and backward, with windows and with grouped heads.
    """
    found = []
    for name in ("fp32", "bf16", "fp16"):
        dtype = DTYPES[name]
        if name == "bf16" and not has_bf16(device):
            continue
        ways: tuple[Way, ...] = ("varlen", "rows") if device.type == "cuda" and dtype in HALVES else ("rows",)
        found += [f"{name} {way} {_attends(way, device, dtype)}" for way in ways]
    return f"over packed rows, with windows and grouped heads: {', '.join(found)}"


def has_bf16(device: torch.device) -> bool:
    """Whether the device computes in bf16, and does not emulate it."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _attends(way: Way, device: torch.device, dtype: torch.dtype) -> str:
    worst = 0.0
    for window, groups in ((None, 4), (None, 2), (8, 4)):
        trial = Trial.drawn(4, groups, 32, window, device, dtype)
        try:
            worst = max(worst, trial.distance(way))
        except (RuntimeError, TypeError, ValueError) as error:  # the kernel is not for this device: a run avoids it
            if is_out_of_memory(error):
                raise
            return "not here"
    if not worst < bound_of(dtype):
        what = f"attention by {way} in {dtype} differs from plain products by {worst:.1e}"
        raise ModelError(what, where=f"{device}", hint=REPORT_HINT)
    return f"within {worst:.1e}"


def determinism(device: torch.device, dtype: torch.dtype | None = None, *, required: bool) -> str:
    """Twice the same step from the same weights gives the same bits; else a resumed run is not called bitwise.

    Args:
        dtype: the dtype of autocast in the run, which has kernels of its own; None without autocast.
        required: whether other bits are a failure.
    """
    toy = Toy.on(device)
    first, second = toy.gradients(dtype), toy.gradients(dtype)
    if changed := int((first != second).sum()):
        what = f"the same step gives other bits the second time: {changed} of {first.numel()} gradients differ"
        if not required:
            return f"{what}; a resumed run is state-exact here, and not bitwise"
        raise ModelError(what, where=f"deterministic: true, on {device}", hint="deterministic=auto runs without this")
    return f"the same step twice gives the same {first.numel():,} gradients, bit for bit"


def copies(device: torch.device) -> str:
    """A batch goes to the device from pinned memory, and comes back, without a changed bit."""
    ids = torch.randint(0, 2**40, (1 << 20,), generator=generator_for(0, "gpu check copies"))
    here = ids.pin_memory() if device.type == "cuda" else ids
    there = here.to(device, non_blocking=True)
    back = there.to("cpu")
    if not torch.equal(back, ids):
        raise CiLlmError(
            f"{int((back != ids).sum())} of {len(ids)} numbers come back changed from the device",
            where=f"{device}",
            hint="do not train on this machine: its memory or its bus changes bits",
        )
    return f"{size(ids.nbytes)} from pinned memory and back, bit for bit"


def checkpoint(device: torch.device, folder: Path, processes: Processes | None = None) -> str:
    """Weights and moments on the device are copied behind the next step, saved, and restored bit for bit."""
    toy = Toy.on(device)
    optimizer = toy.optimizer()
    state: dict[str, Any] = {"agents": {"weights": toy.crowd.agents.weights}, "optimizer": optimizer}
    with CheckpointManager(folder, optimizers=[optimizer], processes=processes) as manager:
        _step(toy, optimizer)
        wanted = _bits(toy, optimizer)
        manager.save(1, state)
        _step(toy, optimizer)  # waits for the copy, and not for the save
        manager.wait_until_finished()
        if processes is not None:
            processes.wait_for_everyone()  # only the main one has written
        manager.restore(1, into=state)
    found = _bits(toy, optimizer)
    changed = [
        number for number, (one, other) in enumerate(zip(wanted, found, strict=True)) if not torch.equal(one, other)
    ]
    if changed:
        raise CheckpointError(
            f"{len(changed)} of {len(wanted)} tensors come back changed", where=f"{device}, {folder}", hint=REPORT_HINT
        )
    return f"{len(wanted)} tensors copied behind a step, saved and restored, bit for bit"


def _step(toy: Toy, optimizer: torch.optim.Optimizer) -> None:
    toy.gradients()
    optimizer.step()


def _bits(toy: Toy, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [tensor.detach().to("cpu", copy=True) for tensor in (toy.crowd.agents.weights, *moments)]


def memory(device: torch.device) -> str:
    """Free memory and peak are told; running out is recognised, and leaves a device that works."""
    free, total = free_memory(device)
    if not 0 < free <= total:
        raise CiLlmError(f"free memory of {size(free)} of {size(total)} cannot be", where=f"{device}", hint=REPORT_HINT)
    taken = torch.ones(PROBE_BYTES, dtype=torch.uint8, device=device)
    if device.type == "cuda" and torch.cuda.max_memory_allocated(device) < PROBE_BYTES:
        raise CiLlmError("the peak of memory does not count what is taken", where=f"{device}", hint=REPORT_HINT)
    refusal = _running_out(device)
    if refusal is None or not is_out_of_memory(refusal) or int(taken.sum(dtype=torch.int64)) != PROBE_BYTES:
        raise CiLlmError(
            f"running out of memory is not known as such: {refusal!r}", where=f"{device}", hint=REPORT_HINT
        ) from refusal
    return f"{size(free)} of {size(total)} free, running out is noticed; {_watched()}"


def _running_out(device: torch.device) -> BaseException | None:
    try:
        torch.empty(1 << 56, dtype=torch.uint8, device=device)
    except (RuntimeError, MemoryError) as error:
        return error
    return None


def _watched() -> str:
    gpus = Gpus()
    read = gpus.read()
    gpus.close()
    return ", ".join(str(gpu["name"]) for gpu in read) or "the driver tells monitor_gpu nothing"


def determinism_of(context: CheckContext) -> str:
    """The check `determinism`, with the algorithms that the configuration chooses."""
    device = _gpu_of(context)
    if context.config.deterministic is False:
        raise Inapplicable("deterministic is false: not checked")
    set_determinism(context.config)
    dtype = autocast_dtype(context.config.mixed_precision)
    return determinism(device, dtype, required=context.config.deterministic is True)


def checkpoint_of(context: CheckContext) -> str:
    """The check `checkpoint`, in the scratch folder."""
    device = _gpu_of(context)
    return checkpoint(device, context.scratch / "gpu", context.processes)
