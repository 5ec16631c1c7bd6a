"""What a step costs, in counts that are the same on every machine: kernels, waits for the device, memory kept.

Counted on the dispatcher while the loop's own functions take a step on a CPU: a GPU launches a kernel for every
operation that is no view, and waits where a program asks for a number of the device.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ci_llm.agents.agent import Training
from ci_llm.cluster.launch import read_launch
from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken
from ci_llm.data.batches import Batch
from ci_llm.distributed.ballot import Verdict, decode, encode
from ci_llm.distributed.processes import Processes
from ci_llm.lora.settings import LoraSettings
from ci_llm.run.gradients import apply_gradients, compute_gradients
from ci_llm.run.step.state import TrainState
from ci_llm.run.trainer import Prepared
from ci_llm.run.watchdog import Heartbeat
from tools.testbed.tiny import base, batch

#: Forward and backward of a layer of a Llama, with adapters on its seven products and four packed rows of attention.
KERNELS_PER_LAYER = {None: 234, torch.bfloat16: 265}
#: Of an agent, outside of the layers: its logits, its moments.
KERNELS_PER_AGENT = {None: 17, torch.bfloat16: 19}
ASKS_THE_DEVICE = ("cpu", "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "nonzero")
NO_KERNEL = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "_unsafe_view", "set_", "lift_fresh")


class Kernels(TorchDispatchMode):
    """Counts what a GPU would launch, and follows the memory that is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: Counter[str] = Counter()
        self._storages: dict[int, Any] = {}

    def living(self) -> list[Any]:
        """The storages that were allocated or touched and are still held by somebody."""
        return [storage for each in self._storages.values() if (storage := each()) is not None]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        if not func.is_view and name not in NO_KERNEL:
            self.launched[name] += 1
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                # The address of one that is gone may be given out again: the last to have it counts.
                self._storages[storage._cdata] = weakref.ref(storage)
        return result


class Waits(TorchFunctionMode):
    """Notes every call that brings a number of a tensor into the program."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ASKS_THE_DEVICE:
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def accelerate_forgets() -> Iterator[None]:
    """Accelerate's state is that of the process, and keeps a precision."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Step:
    """A run's step as the loop takes it."""

    def __init__(self, *, agents: int = 2, layers: int = 2, dtype: torch.dtype | None = None) -> None:
        crowd = Crowd(base(dtype=torch.float32, layers=layers), LoraSettings(num_agents=agents, rank=2), "toy")
        processes = Processes(Config(mixed_precision="bf16" if dtype else "no"), launch=read_launch({}, []))
        optimizer = torch.optim.AdamW([{"params": [row]} for row in crowd.storage.rows], fused=True)
        self.trainer: Any = SimpleNamespace(
            crowd=crowd,
            processes=processes,
            state=TrainState.at_start(agents),
            prepared=Prepared(*processes.accelerator.prepare(crowd, optimizer)),
            config=Config(),
            heartbeat=Heartbeat(),
        )
        for agent in crowd.agents:
            agent.training = Training(lambda _: 1e-3, 0.0, 1.0, rows=None)  # type: ignore[arg-type]

    def take(self, number: int, rows: Batch, *watched: Any) -> Verdict:
        """One step; `watched` see what it does up to and after the ballot."""
        with ExitStack() as watching:
            for each in watched:
                watching.enter_context(each)
            micro_batches = [self.trainer.crowd.for_all(rows)]
            votes = encode(compute_gradients(self.trainer, number, micro_batches, NextToken(), None))
        verdict = decode(votes, self.trainer.crowd.num_agents, ())  # votes lie on the CPU
        with ExitStack() as watching:
            for each in watched:
                watching.enter_context(each)
            apply_gradients(self.trainer, number, verdict, [])
        return verdict


def kernels_of_a_step(**shape: Any) -> Counter[str]:
    """By name, in a step after the first."""
    step, kernels = Step(**shape), Kernels()
    step.take(0, batch())
    step.take(1, batch(), kernels)
    return kernels.launched


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_step_waits_for_the_device_once(dtype: torch.dtype | None) -> None:
    step, waits = Step(dtype=dtype), Waits()
    step.take(0, batch())
    step.take(1, batch(), waits)
    assert waits.calls == ["cpu"], "the ballot, and nothing else"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_layers_launch_as_many_kernels_for_many_agents_as_for_few(dtype: torch.dtype | None) -> None:
    few, deep, many = (
        kernels_of_a_step(agents=agents, layers=layers, dtype=dtype) for agents, layers in ((2, 2), (2, 4), (6, 2))
    )
    assert (deep.total() - few.total()) / 2 == KERNELS_PER_LAYER[dtype]
    assert (many.total() - few.total()) / 4 == KERNELS_PER_AGENT[dtype]


def test_a_step_after_the_first_leaves_no_memory_behind() -> None:
    """The third leaves no storage that neither crowd nor optimizer owns."""
    step, kernels = Step(), Kernels()
    for number in range(2):
        step.take(number, batch())
    step.take(2, batch(), kernels)
    owned = {each.untyped_storage()._cdata for each in _owned(step)}
    assert [storage.nbytes() for storage in kernels.living() if storage._cdata not in owned] == []


def _owned(step: Step) -> list[Tensor]:
    crowd, optimizer = step.trainer.crowd, step.trainer.prepared.optimizer
    states = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [*crowd.parameters(), *crowd.buffers(), crowd.storage.weights, crowd.storage.gradients, *states]
