"""The floor of a step: what the multiply-adds that no exact method can avoid take at the speed of bare products.

Counted are, with W a frozen weight: x W and the gradient with respect to x for every real token of every agent, but at
the first layer's q, k and v only x W and that once for all agents, since nothing before them is trained; the head at
the targets; the adapters; attention under its causal mask. The gradient of W is not needed, as W is frozen. The last
layer is counted for all tokens; what it could leave out, where nothing is predicted, is 2 % of all. The speed
is that of the products of the step's own shapes, measured in the same run in turn with the trainers: on a CPU both by
`torch.mm`, which takes MKL in fp32, and by oneDNN, and for each shape the faster one counts.

Legend: K agents, N tokens, S targets, T tokens of a row, D width of all heads, V vocabulary, r rank.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import Batch
from ci_llm.lora.products import product

#: Products that read the embedded tokens: their input depends on no adapter.
FIRST = ("q_proj", "k_proj", "v_proj")


def necessary_flops(crowd: Crowd, batch: Batch) -> float:
    """Floating-point operations of one step, a multiplication and an addition being two."""
    agents, tokens, layers = crowd.num_agents, batch.num_tokens, crowd.storage.layers
    body = adapters = 0
    for name, layer in layers.items():
        first, size = ".0." in name and name.endswith(FIRST), layer.in_features * layer.out_features
        body += 2 * tokens * size * (1 if first else 2 * agents)
        rank = next(iter(layer.lora_A.values())).shape[0]
        adapters += 2 * agents * tokens * rank * (3 * layer.out_features + (2 if first else 3) * layer.in_features)
    head = crowd.model.get_output_embeddings().weight.numel()
    width = next(layer.out_features for name, layer in layers.items() if name.endswith("q_proj"))
    depth = crowd.model.config.num_hidden_layers
    # Two products forward and four backward, each over the half of T x T that the mask leaves.
    attention = 6 * agents * depth * width * sum((end - start) ** 2 for start, end in pairwise(batch.bounds))
    return float(body + 2 * 2 * agents * batch.num_targets * head + adapters + attention)


#: Both products of a step with a weight [out, in]: x Wᵀ forward, g W for the gradient of the input.
LIBRARIES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, weight: torch.mm(x, weight.mT),
    partial(product, by_onednn=True),
)


class Products:
    """The bare products of a step: each shape of the base once forward and once for the gradient of its input.

    Attributes:
        flops_per_s: the speed on each batch, every shape weighed by how often the step needs it, and by the library
            that is faster for it.
    """

    def __init__(self, crowd: Crowd, dtype: torch.dtype) -> None:
        linear = [layer.base_layer for layer in crowd.storage.layers.values()]
        self._agents, self._dtype = crowd.num_agents, dtype
        self._shapes = Counter(tuple(layer.weight.shape) for layer in linear if isinstance(layer, nn.Linear))
        self._head = tuple(crowd.model.get_output_embeddings().weight.shape)
        self.flops_per_s: list[float] = []

    def step(self, batch: Batch) -> None:
        """Measure them for the rows of one batch."""
        tokens = self._agents * batch.num_tokens
        work = [(tokens, shape, count) for shape, count in self._shapes.items()]
        work.append((batch.num_targets, self._head, self._agents))
        flops = seconds = 0.0
        for rows, (out_features, in_features), count in work:
            seconds += count * self._seconds(rows, out_features, in_features)
            flops += count * 4.0 * rows * out_features * in_features
        self.flops_per_s.append(flops / seconds)

    def _seconds(self, rows: int, out_features: int, in_features: int) -> float:
        """Seconds of both products, x Wᵀ and the gradient times W, by the library that is faster for them."""
        x, weight = self._random(rows, in_features), self._random(out_features, in_features)
        found = []
        for multiply in LIBRARIES:
            y = multiply(x, weight)  # warms up
            start = time.process_time()
            multiply(x, weight)
            multiply(y, weight.mT)
            found.append(time.process_time() - start)
        return min(found)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape).to(self._dtype)


def shares(crowd: Crowd, batches: Sequence[Batch], flops_per_s: list[float], cpu_s: list[float]) -> list[float]:
    """The share of the step that the floor of a batch takes, for every batch."""
    return [
        necessary_flops(crowd, batch) / speed / seconds
        for batch, speed, seconds in zip(batches, flops_per_s, cpu_s, strict=True)
    ]
