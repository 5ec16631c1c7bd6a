"""The digest of one layer and the head of a run: shows whether a machine gives the bits that another one gave.

Names alone promise nothing: a library picks its kernels by what it finds, and may pick others under the same names. So
one decoder layer and the head are computed, forward and backward, on fixed tokens and by the code that trains. A
resumed run is called bitwise only where names and digest are both those of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ci_llm.base.targets import layer_list, layer_numbers, text_model
from ci_llm.checkpoints.manifest import digest
from ci_llm.core import determinism
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.agent_rows import AgentRows, TrainingRows, sampled
from ci_llm.data.batches import AgentBatches, MicroBatch, pack
from ci_llm.data.encoder import Example
from ci_llm.lora.passes import describe_error

MOST_TOKENS: Final = 512  # of the fixed rows: as many as show which kernels are taken
WEIGHTS_UP_TO: Final = 0.05  # of the fixed agents: with B = 0 half of their products would be zero
NOT_A_STEP: Final = -1  # keys what is drawn


def longest_lengths(rows: TrainingRows, count: int) -> list[int]:
    """Tokens of each row of the longest micro-batch of `count` rows, by a sample; at most `MOST_TOKENS` in all."""
    each = rows.each if isinstance(rows, AgentRows) else [rows]
    lengths: list[int] = []
    for length in sorted((len(row.input_ids) for row in sampled(each)), reverse=True)[:count]:
        if sum(lengths) + min(length, MOST_TOKENS) <= MOST_TOKENS:
            lengths.append(min(length, MOST_TOKENS))
    return lengths


Train = Callable[[list[MicroBatch]], Any]  # what it returns has `sums`, a tensor


def layer_digest(crowd: Crowd, batch: MicroBatch, train: Train) -> str:
    """xxh3-128 of what one decoder layer and the head give: outputs, losses, gradients of the agents.

    Generators, weights, gradients and mode are afterwards as they were before. A base whose layers cannot be run by
    themselves is run whole.

    Args:
        batch: see `fixed_batch`.
        train: forward and backward on micro-batches, as the run does it.
    """
    try:
        return _digest(crowd, batch, train, alone=True)
    except Exception as error:  # noqa: BLE001 - families raise errors of every kind
        describe_error(error)  # raises what says nothing about the base
    return _digest(crowd, batch, train, alone=False)


def fixed_batch(crowd: Crowd, lengths: Sequence[int], *, own_rows: bool) -> MicroBatch:
    """Rows of these lengths with fixed tokens, all of them targets; the same for each agent that has its own.

    Their numbers are below zero: no data set has them.
    """
    draw = determinism.generator_for(0, "fixed tokens")
    vocabulary = crowd.model.get_input_embeddings().weight.shape[0]
    ids = [torch.randint(0, vocabulary, (length,), generator=draw).numpy() for length in lengths]
    rows = [Example(each, np.arange(len(each)) > 0) for each in ids]
    batch = pack(rows, range(-len(rows), 0))
    return AgentBatches((batch,) * crowd.num_agents) if own_rows else batch


def _digest(crowd: Crowd, batch: MicroBatch, train: Train, *, alone: bool) -> str:
    found: list[Any] = []
    with ExitStack() as after:
        layer = after.enter_context(one_layer(crowd)) if alone else text_model(crowd.model)
        trained = [each for each in layer.parameters() if each.requires_grad]
        after.enter_context(without_a_trace(crowd, trained))
        hook = layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output))
        after.callback(hook.remove)
        found += [train([batch.to(crowd.device)]).sums, [each.grad for each in trained]]
        return digest(_bytes(each) for each in tree_leaves(found) if isinstance(each, Tensor))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextmanager
def one_layer(crowd: Crowd) -> Iterator[nn.Module]:
    """Leave the base its first layer with an adapter, and no other one."""
    agents, model = crowd.agents, crowd.model
    name, layers = layer_list(model)
    layer = layers[min(layer_numbers(model, agents.layers).values())]
    every, trunk = model.get_submodule(name), agents.trunk
    model.set_submodule(name, nn.ModuleList([layer]))
    agents.trunk = ()
    try:
        yield layer
    finally:
        model.set_submodule(name, every)
        agents.trunk = trunk


@contextmanager
def without_a_trace(crowd: Crowd, trained: Sequence[nn.Parameter]) -> Iterator[None]:
    """Give these parameters fixed numbers inside, and everything what it had afterwards."""
    agents, training, generators = crowd.agents, crowd.training, determinism.capture()
    kept, key, draw = [each.detach().clone() for each in trained], agents.dropout.micro_step, torch.Generator()
    draw.manual_seed(0)
    try:
        with torch.no_grad():
            for each in trained:
                each.copy_(torch.empty(each.shape).uniform_(-WEIGHTS_UP_TO, WEIGHTS_UP_TO, generator=draw))
        yield
    finally:
        with torch.no_grad():
            for each, numbers in zip(trained, kept, strict=True):
                each.copy_(numbers)
        agents.take_gradients_away()
        agents.dropout.micro_step = key
        crowd.train(training)
        determinism.restore(generators)
