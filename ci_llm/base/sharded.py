"""The layers of a frozen base, of which each process stores a part: gathered one by one for a pass, and then freed.

FSDP2 shards, gathers and frees them. Nothing is reduced, because nothing of the base is trained. Agents, embedding,
norms and output layer are whole on every process.

A gather is a collective in the middle of a pass. A process that has no rows, or that ran out of memory, would not take
part, and the others would wait. So the processes agree before each gather: each says which layer it needs next, or
none. A process that computes nothing takes part in the gathers of the others until no process computes any more. So all
processes make the same gathers in the same order, whatever each of them computes.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ci_llm.base.quantized import QuantizedLinear, keep_part, replace_quantized_layers, stored_quantization
from ci_llm.base.targets import layer_list, text_model
from ci_llm.distributed.processes import peer_errors
from ci_llm.errors import ModelError

_M_MMAP_THRESHOLD: Final = -3  # of malloc.h
_NO_LAYER: Final = -(1 << 30)  # below every number of a layer and its negative


class ShardedLayers:
    """The sharded layers of one base, as one of the processes sees them.

    Args:
        device: the device of the base.
        dtype: autocast's dtype, in which the weights are gathered; None to gather them as they are stored.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self._device, self._dtype = device, dtype
        self._root: Any = None
        self._layers: list[Any] = []
        self._has_computed = self._follows = False

    def before_loading(self, model: PreTrainedModel) -> None:
        """Let loading give this process only its part of the layers; `model` has no numbers yet (meta)."""
        if stored_quantization(model.config) is None:
            self.shard(model)
            return
        for layer in layers_of(model):
            for each in layer.modules():
                keep_part(each, dist.get_rank(), dist.get_world_size())

    def after_loading(self, model: PreTrainedModel) -> None:
        """Shard quantised layers, which have their parts after loading."""
        if stored_quantization(model.config):
            replace_quantized_layers(model)
            self.shard(model)

    def shard(self, model: PreTrainedModel) -> None:
        """Give each process its part of the layers of `model`, which has no numbers yet (meta) or the same on all.

        Raises:
            ModelError: the base has no list of layers, or torch is too old.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        if not hasattr(FSDPModule, "reset_iter_state"):
            raise ModelError(
                f"torch {torch.__version__} cannot continue after a failed pass",
                where="base_sharding: layers",
                hint="pip install 'torch>=2.13'",
            )
        if self._device.type == "cpu":
            _return_memory_when_freed()
        self._root = text_model(model)
        mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
        # Autocast would keep a copy of every gathered weight in its own dtype until the backward pass. Inputs are not
        # cast: the residual stream stays in the precision it has without shards.
        policy = MixedPrecisionPolicy(param_dtype=self._dtype, cast_forward_inputs=False)
        for number, layer in enumerate(layers_of(model)):
            parts = {each: each.release_codes() for each in layer.modules() if isinstance(each, QuantizedLinear)}
            kept = {*layer.parameters()} - weights_to_shard(layer, self._dtype)
            fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy, ignored_params=kept)
            for each, part in parts.items():
                each.stored = nn.Parameter(_like(each.stored, part), requires_grad=False)
            sharded: Any = layer
            # In the backward pass FSDP2 would gather the previous layer ahead, which other processes may not do. As the
            # next layer it gets this one, which is gathered already.
            sharded.set_modules_to_backward_prefetch([sharded])
            sharded.set_custom_all_gather(_AgreedGather(self, number))
            self._layers.append(sharded)
        rest = {parameter for parameter in self._root.parameters() if not is_sharded(parameter)}
        fully_shard(self._root, mesh=mesh, ignored_params=rest)

    def follow(self) -> None:
        """Take part in the gathers of processes that still compute, until none does. A collective.

        Layers that a failed pass has left gathered, and gathers that it has left open, are freed.

        Raises:
            PeerLost: a process is gone.
        """
        if self._has_computed:
            self._root.reset_iter_state()
        while (layer := self._agree(None)) is not None:
            self._follows = True
            try:
                self._layers[layer].unshard()
            finally:
                self._follows = False
            self._layers[layer].reshard()

    def begin_gather(self, layer: int) -> None:
        """Agree with all processes on the gather of this layer, unless they have agreed already. A collective.

        Raises:
            PeerLost: a process is gone. ModelError: the processes need different layers.
        """
        if not self._follows:
            self._has_computed = True
            self._agree(layer)

    def _agree(self, layer: int | None) -> int | None:
        """The layer that all processes gather next, None if no process needs one.

        Args:
            layer: the layer that this process needs; None if it needs none.
        """
        # The maxima of the numbers and of their negatives agree if all need the same layer. For a CPU tensor torch
        # takes gloo, which notices a lost process at once, even where the gathers use NCCL.
        votes = torch.tensor([_NO_LAYER, _NO_LAYER] if layer is None else [layer, -layer])
        with peer_errors():
            dist.all_reduce(votes, dist.ReduceOp.MAX)
        last, first = votes.tolist()
        if last == _NO_LAYER:
            return None
        if last != -first:
            raise ModelError(
                f"the processes pass through the base in different ways: one needs layer {-first}, another {last}",
                where="base_sharding: layers",
                hint="base_sharding=none, or a base of another family",
            )
        return int(last)


def _return_memory_when_freed() -> None:
    """Let the C library map every large allocation separately, so that freed memory goes back at once.

    Gathered weights are freed between activations that stay. In the heap of glibc, which over time takes allocations of
    up to 32 MB, they would leave holes that cost more memory than the shards save.
    """
    with suppress(OSError, AttributeError):  # another C library has another allocator
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 1 << 18)


class _AgreedGather:
    """Gathers one layer, once all processes have agreed on it; FSDP2 calls it."""

    def __init__(self, layers: ShardedLayers, number: int) -> None:
        self._layers, self._number = layers, number

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the gathered weights; memory may run out here, before this process has agreed."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self._layers.begin_gather(self._number)
        with peer_errors():
            return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


def weights_to_shard(layer: nn.Module, autocast: torch.dtype | None) -> set[nn.Parameter]:
    """The frozen matrices of a layer; under autocast only those that autocast would cast before their product."""
    if autocast is None:
        return {each for each in layer.parameters() if each.dim() > 1 and not each.requires_grad}
    multiplied: set[Any] = {each.weight for each in layer.modules() if isinstance(each, nn.Linear | Conv1D)}
    return multiplied | {each.stored for each in layer.modules() if isinstance(each, QuantizedLinear)}


def _like(sharded: Any, part: Tensor) -> Tensor:
    """A sharded tensor like `sharded`, whose part in this process is `part`."""
    from torch.distributed.tensor import DTensor

    place = {"device_mesh": sharded.device_mesh, "placements": sharded.placements, "run_check": False}
    return DTensor.from_local(part, **place, shape=sharded.shape, stride=sharded.stride())


def is_sharded(tensor: Tensor) -> bool:
    """True if this process holds only a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor. For a sharded tensor the call is a collective.

    Raises:
        PeerLost: a process is gone.
    """
    if not is_sharded(tensor):
        return tensor
    with peer_errors():
        return tensor.full_tensor()  # type: ignore[no-any-return, attr-defined]


def layers_of(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a base. Raises ModelError if the base has no list of layers."""
    _, layers = layer_list(model)
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no list of layers",
            where="base_sharding: layers",
            hint="base_sharding=none, or a base of another family",
        )
    return [*layers]
