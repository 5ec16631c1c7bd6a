"""A frozen linear layer that carries the low-rank adapters of K agents: `AdaptedLinear`.

It reads owned rows: tokens end to end, and whose they are (`Reading`). The products are those of products.py.

Legend: R rows of the input, r rank, in and out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ci_llm.base.quantized import QuantizedLinear
from ci_llm.base.targets import WeightMetadata
from ci_llm.errors import ModelError
from ci_llm.lora.products import FusedLinear, LowRank, Owned, Stack, inputs_of, joined, with_adapters
from ci_llm.lora.reading import Casts, InputDropout, Reading, compute_dtype


class AdaptedLinear(nn.Module):
    """A frozen linear layer with a low-rank adapter for each of K agents, or for some of them.

    Input [..., in], one owner's tokens after the other's; output [..., out].

    Args:
        base_layer: the frozen layer.
        dropout: the dropout of the adapters' inputs, shared by all layers.
        casts: the casts of the current pass, shared by all layers.
        reading: whose tokens the inputs hold, shared by all layers.
        name: the name of the layer in the base.

    Attributes:
        lora_A, lora_B: parameters `agent<k>` [r, in] and [out, r], views of the crowd's storage.
        stacks: the same numbers, stacked where neighbours have one shape.
        joined: the `JoinedInput` of the layer and its neighbours; None if it computes alone.
        by_onednn: true if training computes products with the frozen weight by oneDNN; see `product`.
    """

    def __init__(self, base_layer: nn.Module, dropout: InputDropout, casts: Casts, reading: Reading, name: str) -> None:
        super().__init__()
        self.name, self.base_layer = name, base_layer
        self.dropout, self.casts, self.reading = dropout, casts, reading
        self.in_features, self.out_features = _features(base_layer)
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        self.bind(())
        self.joined: Any = None
        self.by_onednn = False

    @property
    def weight(self) -> WeightMetadata:
        return WeightMetadata(self.base_layer.weight, self.name)  # type: ignore[arg-type]

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias  # type: ignore[return-value]  # the same with and without agents

    def bind(self, stacks: tuple[Stack, ...]) -> None:
        """Compute with these stacks from now on."""
        self.stacks = stacks
        self._at: dict[Any, list[tuple[Stack, int]]] = {}

    def forward(self, x: Tensor) -> Tensor:
        base, dtype = self.base_layer, compute_dtype(x)
        if self.joined is not None and torch.is_grad_enabled():
            found = self.joined.output(self, x)
            if found is not None:
                return found  # type: ignore[no-any-return]
        # One tensor for the base and for dropout, so that their gradients are added before those of other layers.
        rows = x.reshape(-1, self.in_features)
        owned = self.owned(len(rows))
        if not (type(base) is nn.Linear or isinstance(base, QuantizedLinear)):
            # Autocast, if it is on, casts the base's weights; `LowRank` casts the adapters to the dtype of its input.
            y = self._beside(base, rows.to(dtype), owned)
        else:
            cast = rows if x.dtype == dtype else self.casts.input(x, dtype).reshape(rows.shape)
            y = self._fused(rows, cast, owned)
        return y.view(*x.shape[:-1], self.out_features)

    def _fused(self, x: Tensor, cast: Tensor, owned: Owned) -> Tensor:
        """y of a linear base layer [R, out]. A decoder calls it for every token: each operator and look-up counts."""
        dropped = self._dropped(x, owned)
        if not torch.is_grad_enabled():
            weight: Any = self.reading.reordered.get(self, self.base_layer)
            return with_adapters(cast, dropped, weight, self.bias, owned, self.reading.by_onednn)[0]
        parameters = [each for stack, _ in owned for each in self._parameters_of(stack)]
        return FusedLinear.apply(x, cast, dropped, self, owned, *parameters)  # type: ignore[no-any-return]

    def owned(self, rows: int) -> list[tuple[Stack, slice]]:
        """The adapters that read an input of `rows` rows; neighbours of one shape with equally many rows are one batch.

        Raises:
            ModelError: the owners have another number of rows.
        """
        reading = self.reading
        each, rest = divmod(rows, max(len(reading.agents), 1))
        if rest if reading.sizes is None else sum(reading.sizes) != rows:
            raise ModelError(
                f"{self.name} reads {rows:,} rows of {sum(reading.sizes or ()) or 'other'} tokens:"
                " it is not known whose they are",
                where="agents with rows of their own",
                hint="name the layers to adapt by lora_target_modules, or let all agents train on the same rows",
            )
        if reading.sizes is not None:
            return [(stack, own) for agent, own in reading.owners() for stack, _ in self._stacks_of((agent,))]
        found = self._stacks_of(reading.agents)
        return [(stack, slice(place * each, (place + stack.size) * each)) for stack, place in found]

    def _stacks_of(self, agents: tuple[int, ...]) -> list[tuple[Stack, int]]:
        """The stacks of these agents, each with its first agent's place among them; made once and not in each pass."""
        numbers = self.reading.numbers
        if numbers is not None:  # nothing is kept of them
            return self._made([stack.from_numbers(numbers) for stack in self.stacks], agents)
        key = agents, self.training, self.reading.in_storage
        if key not in self._at:
            self._at[key] = self._made(self.stacks, agents)
        return self._at[key]

    def _made(self, stacks: Sequence[Stack], agents: tuple[int, ...]) -> list[tuple[Stack, int]]:
        """`_stacks_of` from the stacks of all agents."""
        ready = stacks if self.training else [stack.at_rest() for stack in stacks]
        if not self.reading.in_storage:
            ready = [replace(stack, gradients=None) for stack in ready]
        found = list[tuple[Stack, int]]()
        for stack in ready:
            if agents[stack.first : stack.end] == tuple(range(stack.first, stack.end)):
                found.append((stack, stack.first))
            else:
                found += [(stack.only(k), at) for at, k in enumerate(agents) if stack.first <= k < stack.end]
        return found

    def _beside(self, base: nn.Module, x: Tensor, owned: Owned) -> Tensor:
        """y of a base layer that computes by itself."""
        y: Tensor = base(x)
        parts = list[Tensor]()
        end = 0
        for stack, rows, z in inputs_of(owned, x, self._dropped(x, owned)):
            added = LowRank.apply(z, stack, *self._parameters_of(stack)).flatten(0, 1)
            parts += [y[end : rows.start], y[rows] + added]
            end = rows.stop
        return joined([*parts, y[end:]]) if parts else y

    def _dropped(self, x: Tensor, owned: Owned) -> Tensor | None:
        """The input after dropout of the agents that drop, one after the other; None if no agent drops."""
        dropping = [(stack, rows, rows.stop - rows.start) for stack, rows in owned if stack.drops]
        if not dropping:
            return None
        x = x.to(compute_dtype(x))
        all_drop = sum(count for *_, count in dropping) == len(x)
        inputs = x if all_drop else joined([x[rows] for _, rows, _ in dropping])
        owners = [(k, count // stack.size) for stack, _, count in dropping for k in range(stack.first, stack.end)]
        return self.dropout.apply(inputs, self.name, owners, self.reading)

    def _parameters_of(self, stack: Stack) -> list[Tensor]:
        names = [f"agent{k}" for k in range(stack.first, stack.end)]
        return [owner[name] for owner in (self.lora_A, self.lora_B) for name in names]


def _features(layer: nn.Module) -> tuple[int, int]:
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    assert isinstance(layer, nn.Linear | QuantizedLinear)
    return layer.in_features, layer.out_features
