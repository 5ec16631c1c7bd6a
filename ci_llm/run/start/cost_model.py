"""The cost of one micro-step, traced without weights: operations and memory; and the keys that depend on it.

Fake tensors have shape, dtype and device but no storage. So a base of eight billion parameters is traced on a laptop
in seconds, forward and backward, with the family's own layers and the kernels that the device would take.

`auto` of `pass_per_agent` and of `use_gradient_checkpointing` gets its value here. Where memory decides, it is by
whether the activations would fit.
"""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedConfig

from ci_llm.base.load import attention_of, auto_class, load_architecture, load_error
from ci_llm.base.quantized import BITS, stored_bytes
from ci_llm.base.sharded import layers_of, weights_to_shard
from ci_llm.config import Config
from ci_llm.config.own_keys import AUTO
from ci_llm.core.determinism import FAST
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.diversity import find_form
from ci_llm.crowd.objective import NextToken
from ci_llm.data.agent_rows import Lengths, sampled
from ci_llm.data.batches import Batch, MicroBatch
from ci_llm.data.encoder import Example
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.precision import DTYPES, autocast, autocast_dtype
from ci_llm.distributed.processes import Processes
from ci_llm.errors import first_line
from ci_llm.run.optimizer import MOMENTS
from ci_llm.run.start.agent_settings import lora_settings

logger = logging.getLogger(__name__)


#: An allocator holds 7 to 20 % more than the living tensors (measured on a CPU against the resident size).
ALLOCATED_PER_LIVING = 1.1
GATHERED_COPIES = 2  # of a layer: as it is received, and the weights that are copied out of it
ROWS_TRACED = 2  # of a larger batch this many rows are traced, and half of them; the rest follows by proportion


@dataclass(frozen=True)
class Trace:
    """One micro-step on one process.

    Attributes:
        base_parameters: parameters of the frozen base.
        base_bytes: bytes of the base in the run's `model_dtype`, in one process.
        agent_parameters: trainable parameters of one agent.
        agents_bytes: bytes of all agents, see `agent_copies`.
        activation_bytes: the most bytes that are allocated besides, at any moment of forward and backward.
        flops: floating-point operations; a multiplication and an addition are two.
    """

    base_parameters: int
    base_bytes: int
    agent_parameters: int
    agents_bytes: int
    activation_bytes: int
    flops: float

    @property
    def device_bytes(self) -> int:
        """The bytes on the device at the worst moment."""
        return self.base_bytes + self.agents_bytes + self.activation_bytes


class Untraceable(Exception):
    """This architecture cannot be traced without values: it routes tokens to experts, for instance."""


def trace(
    config: Config,
    shape: PreTrainedConfig,
    device: torch.device,
    *,
    rows: int,
    tokens: int,
    targets: int,
    processes: int = 1,
) -> Trace:
    """Trace one micro-step of `rows` rows, each of `tokens` tokens of which `targets` are learned.

    Args:
        processes: the number of processes of the run, which share the layers of the base with `base_sharding`.

    Raises:
        ModelError: the base is not a causal language model, or `lora_target_modules` does not fit it.
        Untraceable: the computation depends on values, which fake tensors do not have.
    """
    try:
        with FakeTensorMode():
            crowd = _crowd(config, shape, device)
            few = min(rows, ROWS_TRACED)
            peak, flops = _micro_step(config, crowd, _batch(few, tokens, targets, device))
            if rows > few:
                smaller, _ = _micro_step(config, crowd, _batch(few // 2, tokens, targets, device))
                peak += (peak - smaller) * (rows - few) // (few - few // 2)
            trained = crowd.storage.weights
            saved, made_dense = _quantized(config, crowd)
            elsewhere, gathered = _sharded(config, crowd, processes)
            own = {p for name, p in crowd.model.named_parameters() if not p.requires_grad}
            return Trace(
                base_parameters=sum(p.numel() for p in own),
                base_bytes=sum(p.nbytes for p in own) - saved - elsewhere,
                agent_parameters=trained.shape[1],
                agents_bytes=agent_copies(config, device) * trained.nbytes,
                activation_bytes=round(ALLOCATED_PER_LIVING * (peak + made_dense + gathered)),
                flops=flops * rows / few,
            )
    except RuntimeError as error:  # torch raises no narrower error, for instance for Mixtral on a CPU
        raise Untraceable(first_line(error)) from error


def agent_copies(config: Config, device: torch.device) -> int:
    """The copies of each trained parameter that the device holds: weights, gradients, moments, snapshots."""
    state = 1 + MOMENTS  # weights and moments
    saved = state if device.type == "cpu" else 0  # the copy that a checkpoint is written from
    started = 1 if config.reference == "start" else 0  # the start, with which agents are compared
    return 1 + state + state + saved + started  # the gradients; the present state, and the last good one


def trace_longest(
    config: Config, shape: PreTrainedConfig, device: torch.device, rows: int, lengths: Lengths, processes: int = 1
) -> Trace:
    """Trace the longest micro-step to expect of rows with these lengths; see `trace`."""
    tokens = lengths.longest_in_batch(rows)
    targets = lengths.learned_of(tokens)
    branches = rows * lengths.branches
    return trace(config, shape, device, rows=branches, tokens=tokens, targets=targets, processes=processes)


def _quantized(config: Config, crowd: Crowd) -> tuple[int, int]:
    """(bytes that quantised storage saves; bytes of the largest layer, which is made dense for its product)."""
    if config.quantization is None:
        return 0, 0
    head = crowd.model.get_output_embeddings()
    layers = [m for m in crowd.model.modules() if isinstance(m, nn.Linear) and m is not head]
    dense = [layer.weight.nbytes for layer in layers]
    stored = [stored_bytes(config.quantization, *layer.weight.shape) for layer in layers]
    return sum(dense) - sum(stored), max(dense)


def _sharded(config: Config, crowd: Crowd, processes: int) -> tuple[int, int]:
    """(bytes of the base that other processes store; bytes of the largest layer while it is gathered)."""
    if config.base_sharding == "none" or processes == 1:
        return 0, 0
    layers = [weights_to_shard(layer, autocast_dtype(config.mixed_precision)) for layer in layers_of(crowd.model)]
    bits = 0 if config.quantization is None else BITS[config.quantization]  # without scales, which are not sharded
    stored = [sum(each.numel() * bits // 8 if bits else each.nbytes for each in weights) for weights in layers]
    return sum(stored) * (processes - 1) // processes, GATHERED_COPIES * max(stored)


def base_dtype(config: Config, shape: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The precision in which the base would be loaded."""
    if config.model_dtype:
        return DTYPES[config.model_dtype]
    return (shape.dtype or torch.float32) if device.type == "cuda" else torch.float32


def _crowd(config: Config, shape: PreTrainedConfig, device: torch.device) -> Crowd:
    dtype = base_dtype(config, shape, device)
    try:
        with device:
            model = auto_class(shape).from_config(shape, dtype=dtype, attn_implementation=attention_of(shape))
    except ValueError as error:
        raise load_error(config.model_name, error) from error
    model.config.use_cache = False
    crowd = Crowd(model, lora_settings(config), "traced")
    crowd.storage.pass_per_agent = passes_without_estimate(config, device)[0] is not False
    if config.use_gradient_checkpointing is True:
        crowd.gradient_checkpointing_enable()
    return crowd.train()


def _micro_step(config: Config, crowd: Crowd, batch: Batch) -> tuple[int, float]:
    """(bytes at the worst moment, beside base and agents; operations) of forward and backward."""
    crowd.storage.begin_step(0)
    owned = [*crowd.parameters(), *crowd.buffers(), crowd.storage.weights, crowd.storage.gradients]
    passes = crowd.passes_of(crowd.for_all(batch))
    first = next(passes)
    count = crowd.num_agents if crowd.storage.pass_per_agent else 1
    with _Ledger(owned) as ledger:
        try:
            _forward_backward(config, crowd, first)
        except (TypeError, AttributeError):  # its attention cannot take packed rows, see `LoraModel.choose_route`
            crowd.base_model.route = "padded"
            _forward_backward(config, crowd, first)
        flops = ledger.flops
        for rows in islice(passes, 1):  # all others cost what the second pass costs
            _forward_backward(config, crowd, rows)
    return ledger.peak, flops + (ledger.flops - flops) * (count - 1)


def _forward_backward(config: Config, crowd: Crowd, rows: MicroBatch) -> None:
    with autocast(config, crowd.device):
        loss = NextToken(config.diversity, config.lambda_sw)(crowd(rows)[0], 0)
    loss.total.backward()


def _batch(rows: int, tokens: int, targets: int, device: torch.device) -> Batch:
    zeros = partial(torch.zeros, dtype=torch.int64, device=device)
    return Batch(
        input_ids=zeros(rows * tokens),
        position_ids=zeros(rows * tokens),
        bounds=tuple(range(0, rows * tokens + 1, tokens)),
        predict_from=zeros(rows * targets),
        targets=zeros(rows * targets),
        target_rows=zeros(rows * targets),
        last_tokens=zeros(rows),
        sample_ids=tuple(range(rows)),
    )


class _Ledger(TorchDispatchMode):
    """Adds up the operations, and follows every storage from its creation to its end.

    Attributes:
        peak: bytes of all storages that lived at once, at the worst moment.
        flops: the operations of matrix products and of attention.
    """

    def __init__(self, not_counted: list[Tensor]) -> None:
        super().__init__()
        self.peak = self._live = 0
        self.flops = 0.0
        self._known = {tensor.untyped_storage()._cdata for tensor in not_counted}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.flops += _flops(func._overloadpacket, args, kwargs or {}, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._live += size
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._live -= size


def _flops(operation: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Operations by torch's counter, and two that it leaves out: products in place, and oneDNN's products."""
    if (count := flop_registry.get(operation)) is not None:
        return float(count(*args, **kwargs, out_val=result))
    if operation.__name__ == "baddbmm_":
        return float(2 * args[1].numel() * args[2].shape[2])
    if operation.__name__ == "_linear_pointwise":
        return float(2 * args[0].numel() * args[1].shape[0])
    return 0.0


#: The share of the free memory that an estimate may fill; the rest is for its error.
USABLE: Final = 0.8
#: Training reaches about this share of the speed of bare matrix products.
EFFICIENCY: Final = 0.5
_SIDE: Final = {"cpu": 768, "cuda": 4096}


def flops_per_s(config: Config, shape: PreTrainedConfig, device: torch.device) -> float:
    """Operations per second that training will reach, by a matrix product in the precision of the forward pass."""
    dtype = autocast_dtype(config.mixed_precision) or base_dtype(config, shape, device)
    side = _SIDE[device.type]
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    times: list[float] = []
    for _ in range(4):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return EFFICIENCY * 2.0 * side**3 / min(times)


def resolve_auto(
    config: Config,
    each: Sequence[TokenizedRows],
    processes: Processes,
    shape: PreTrainedConfig | None = None,
) -> Config:
    """The configuration with values in place of auto, the same on all processes. A collective.

    The base is in memory by now, and the agents are not.

    Args:
        each: the rows of every agent, or of all.
        shape: of a base that a call in Python has loaded; None: it is read from `model_name`.
    """
    if config.kernels == AUTO:
        config = config.model_copy(update={"kernels": FAST})
    without_estimate = {
        "pass_per_agent": passes_without_estimate(config, processes.device),
        "use_gradient_checkpointing": (None, ""),
    }
    for key, (value, why) in without_estimate.items():
        if getattr(config, key) != AUTO:
            continue
        if value is None:
            value, why = _too_large(config.model_copy(update={key: False}), each, processes, shape)
        logger.info(f"memory    {key}={str(value).lower()}: {why}")
        config = config.model_copy(update={key: value})
    return config


def passes_without_estimate(config: Config, device: torch.device) -> tuple[bool | None, str]:
    """The value of `pass_per_agent`, and why; None where memory decides."""
    if config.pass_per_agent != AUTO:
        return config.pass_per_agent is True, "as it was configured"
    if find_form(config.diversity).rewarded:
        return False, f"diversity {config.diversity} has gradients through all agents"
    if config.base_sharding != "none":
        return False, "every pass gathers the layers of the base"
    if config.deterministic is True:
        return True, "deterministic is true, and an agent has the bits that it has alone"
    if device.type == "cpu":
        return True, "on a CPU it costs little, and an agent has the bits that it has alone"
    return None, ""


def recompute_on_all(found: Trace, free: int, processes: Processes) -> bool:
    """True if agents and activations are too large for any process. A collective.

    Args:
        free: bytes that this process finds free beside the base.
    """
    needed = found.agents_bytes + found.activation_bytes
    return any(processes.gather_object(needed > USABLE * free))


def lengths_of(config: Config, rows: Sequence[Example]) -> Lengths:
    """The lengths of what a run reads of these rows; of prompts with completions of the greatest length."""
    found = Lengths.of(rows)
    if config.objective != "grpo":
        return found
    return found.with_completions(config.num_generations, config.max_completion_length)


def _too_large(
    config: Config, each: Sequence[TokenizedRows], processes: Processes, shape: PreTrainedConfig | None
) -> tuple[bool, str]:
    """True if the longest micro-step does not fit into the memory of a process; and why. A collective."""
    lengths, rows = lengths_of(config, sampled(each)), config.batch_size
    try:
        shape = copy.deepcopy(shape) if shape else load_architecture(config.model_name)
        found = trace_longest(config, shape, processes.device, rows, lengths, processes.num_processes)
    except Untraceable as error:
        return False, f"this architecture cannot be traced without weights ({error})"
    free = processes.free_memory()
    agents, activations = f"agents {found.agents_bytes / 1e9:.2f} GB", f"{found.activation_bytes / 1e9:.2f} GB"
    kept = f"{agents}, activations of {rows * lengths.branches} x {lengths.longest_in_batch(rows)} tokens {activations}"
    return recompute_on_all(found, free, processes), f"by estimate {kept}, free {free / 1e9:.2f} GB"
