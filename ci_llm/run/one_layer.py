"""One layer and the head of a run, computed by themselves: the digest that a resume compares, and the trial of kernels.

The digest shows whether a machine gives the bits that another one gave. The names of versions and devices do not show
that: a library picks its kernels by what it finds, and may pick others under the same names. So one decoder layer and
the head are computed, forward and backward, on fixed tokens and by the code that trains. A resumed run is called
bitwise only where names and digest are both those of the checkpoint.

One trial decides which fast kernels a run uses. Rows with lengths of the run are computed plainly, and with each part
of `ci_llm/lora/kernels.py`. A part whose losses or gradients differ from those of the family's own code stays plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ci_llm.base.targets import layer_list, layer_numbers, text_model
from ci_llm.checkpoints.manifest import digest
from ci_llm.config import Config
from ci_llm.core import determinism
from ci_llm.core.determinism import FAST, PLAIN, names, names_of_all
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.agent_rows import sampled
from ci_llm.data.batches import MicroBatch, Owned, pack
from ci_llm.data.encoder import Example
from ci_llm.distributed.processes import Processes
from ci_llm.lora.kernels import PARTS
from ci_llm.lora.passes import describe_error, distance, tolerance
from ci_llm.lora.reading import compute_dtype
from ci_llm.run.trainer import Trainer

T = TypeVar("T")
Train = Callable[[list[MicroBatch]], Any]  # what it returns has `sums`, a tensor

MOST_TOKENS: Final = 512  # of the fixed rows: as many as show which kernels are taken
WEIGHTS_UP_TO: Final = 0.05  # of the fixed agents: with B = 0 half of their products would be zero
NOT_A_STEP: Final = -1  # keys what is drawn
TRIAL_TOKENS: Final = 128  # of the rows of the trial of kernels
TRIAL_TARGETS: Final = 8  # of a row of a trial: with all of them, a large vocabulary would outweigh the layer


def record_bits(trainer: Trainer, lengths: Sequence[int] = ()) -> None:
    """Find the names and the digest that tell whether another machine computes the same bits. A collective.

    Args:
        lengths: the lengths of the fixed rows; by default those of the call before, or of the longest micro-batch.
    """
    crowd, bits, processes = trainer.crowd, trainer.checkpoint.bits, trainer.processes
    lengths = [*lengths] or bits.get("layer", {}).get("lengths") or lengths_of(trainer)
    batch = fixed_batch(crowd, lengths, own_rows=trainer.courses.are_own)
    found, _ = unless_out_of_memory(partial(layer_digest, crowd, batch, train_of(trainer)))
    processes.follow()  # a process that ran out of memory owes its peers the rest of their gathers
    bits["kernels"] = kernels_of(trainer.config, crowd)
    each = processes.gather_object((names(crowd.device, bits["kernels"]), found))
    bits.update(names_of_all([own for own, _ in each]))
    bits["layer"] = {"lengths": lengths, "digests": [digest for _, digest in each]}


def choose_kernels(trainer: Trainer) -> list[str]:
    """Try the fast kernels, unless plain ones are configured; returns lines for people. A collective."""
    if trainer.config.kernels == PLAIN:
        return []
    own_rows = trainer.courses.are_own
    return choose(trainer.crowd, lengths_of(trainer), train_of(trainer), trainer.processes, own_rows=own_rows)


def train_of(trainer: Trainer) -> Train:
    """Forward and backward as the run does it, and nothing that depends on the step."""
    return partial(trainer.passes.of_fixed_rows().compute_gradients, NOT_A_STEP)


def lengths_of(trainer: Trainer) -> list[int]:
    """Tokens of each row of the longest micro-batch, by a sample; at most `MOST_TOKENS` in all."""
    each, lengths = [course.rows for course in trainer.courses.each], list[int]()
    for length in sorted((len(row.input_ids) for row in sampled(each)), reverse=True)[: trainer.micro_batch_size]:
        if sum(lengths) + min(length, MOST_TOKENS) <= MOST_TOKENS:
            lengths.append(min(length, MOST_TOKENS))
    return lengths


def layer_digest(crowd: Crowd, batch: MicroBatch, train: Train) -> str:
    """xxh3-128 of what one decoder layer and the head give: outputs, losses, gradients of the agents.

    Generators, weights, gradients and mode are afterwards as they were before.

    Args:
        batch: see `fixed_batch`.
        train: forward and backward on micro-batches, as the run does it.
    """
    return _on_one_layer(lambda alone: _digest(crowd, batch, train, alone=alone))


def _on_one_layer(work: Callable[[bool], T]) -> T:
    """Do `work` on one layer alone (true), or on the whole base where layers cannot be run by themselves (false)."""
    try:
        return work(True)
    except Exception as error:  # noqa: BLE001 - families raise errors of every kind
        describe_error(error)  # raises what says nothing about the base
    return work(False)


def fixed_batch(
    crowd: Crowd, lengths: Sequence[int], *, own_rows: bool, key: str = "fixed tokens", most_targets: int | None = None
) -> MicroBatch:
    """Rows of these lengths with fixed tokens; agents that have rows of their own all get these.

    The numbers of the rows are below zero: no data set has such rows.

    Args:
        key: the key by which the tokens are drawn.
        most_targets: the last tokens of a row that are targets; None: all but the first token.
    """
    draw, rows = determinism.generator_for(0, key), []
    vocabulary = crowd.model.get_input_embeddings().weight.shape[0]
    for length in lengths:
        first_target = 1 if most_targets is None else max(1, length - most_targets)
        ids = torch.randint(0, vocabulary, (length,), generator=draw).numpy()
        rows.append(Example(ids, np.arange(length) >= first_target))
    batch = pack(rows, range(-len(rows), 0))
    owners = [(k,) for k in range(crowd.num_agents)] if own_rows else [tuple(range(crowd.num_agents))]
    return [Owned(agents, batch) for agents in owners]


def _digest(crowd: Crowd, batch: MicroBatch, train: Train, *, alone: bool) -> str:
    found: list[Any] = []
    with (
        _fixed(crowd, alone=alone) as (layer, trained),
        layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output)),
    ):
        found += [train([batch]).sums, [each.grad for each in trained]]
        return digest(_bytes(each) for each in tree_leaves(found) if isinstance(each, Tensor))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@contextmanager
def _fixed(crowd: Crowd, *, alone: bool) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """One layer, or the whole base, and its trainable parameters, which have fixed numbers within the block.

    Afterwards everything is as it was before.
    """
    storage, training, generators = crowd.storage, crowd.training, determinism.capture()
    key, draw = storage.dropout.micro_step, torch.Generator().manual_seed(0)
    with one_layer(crowd) if alone else nullcontext(text_model(crowd.model)) as layer:
        trained = [each for each in layer.parameters() if each.requires_grad]
        kept = [each.detach().clone() for each in trained]
        try:
            with torch.no_grad():
                for each in trained:
                    each.copy_(torch.empty(each.shape).uniform_(-WEIGHTS_UP_TO, WEIGHTS_UP_TO, generator=draw))
            yield layer, trained
        finally:
            with torch.no_grad():
                for each, numbers in zip(trained, kept, strict=True):
                    each.copy_(numbers)
            storage.take_gradients_away()
            storage.dropout.micro_step = key
            crowd.train(training)
            determinism.restore(generators)


@contextmanager
def one_layer(crowd: Crowd) -> Iterator[nn.Module]:
    """Leave the base only its first layer that has an adapter, within the block."""
    model = crowd.model
    name, layers = layer_list(model)
    layer = layers[min(layer_numbers(model, crowd.storage.layers).values())]
    every = model.get_submodule(name)
    model.set_submodule(name, nn.ModuleList([layer]))
    try:
        yield layer
    finally:
        model.set_submodule(name, every)


Found = list[Tensor] | str  # losses and gradients, or why there are none


def choose(crowd: Crowd, lengths: Sequence[int], train: Train, processes: Processes, *, own_rows: bool) -> list[str]:
    """Let the crowd compute fast what gives the same on every process; returns lines for people. A collective.

    Args:
        lengths: tokens of rows of the run; rows are taken as long as they fit into `TRIAL_TOKENS`.
        train: forward and backward on micro-batches, as the run does it.
        own_rows: every agent has rows of its own.
    """
    lengths, lines = _lengths_of_trial(lengths), []
    batch = fixed_batch(crowd, lengths, own_rows=own_rows, key="rows of a trial", most_targets=TRIAL_TARGETS)

    def attempt(parts: Sequence[str]) -> Found:
        found, ran_out = unless_out_of_memory(partial(_computed, crowd, batch, train, parts))
        processes.follow()  # a process that ran out of memory owes its peers the rest of their gathers
        return ran_out or "out of memory" if found is None else found

    plain = attempt(())
    with processes.autocast():
        limit = tolerance(crowd.model.dtype, compute_dtype(crowd.model.get_input_embeddings().weight))
    taken: list[str] = []
    for part in PARTS:  # also where the plain pass failed: others may have done it, and each pass may gather
        reasons = [*filter(None, processes.gather_object(_difference(attempt([part]), plain, limit)))]
        if reasons:
            lines.append(f"{part} stays plain: {reasons[0]}")
        else:
            taken.append(part)
    reason = _difference(attempt(taken), plain, limit)
    reasons = [*filter(None, processes.gather_object(plain if isinstance(plain, str) else reason))]
    if reasons:
        taken, lines = [], [f"everything stays plain: {reasons[0]}"]
    crowd.compute_fast(taken)
    return lines


def kernels_of(config: Config, crowd: Crowd) -> str:
    """The kernels as a checkpoint records them: plain, fast, or fast without some parts."""
    if config.kernels == PLAIN:
        return PLAIN
    left = [part for part in PARTS if part not in crowd.fast]
    return FAST if not left else f"{FAST} without {', '.join(left)}"


def _difference(found: Found, plain: Found, limit: float) -> str | None:
    """Why `found` differs too much from what the plain pass gives; None if it does not."""
    if isinstance(found, str) or isinstance(plain, str):
        return found if isinstance(found, str) else "nothing to compare with"
    gap = max(distance(own, wanted) for own, wanted in zip(found, plain, strict=True))
    return None if gap <= limit else f"it changes losses or gradients by {gap:.1e}"


def _lengths_of_trial(lengths: Sequence[int]) -> list[int]:
    """The shortest of these lengths, the last one cut, until `TRIAL_TOKENS` are used up."""
    taken: list[int] = []
    left = TRIAL_TOKENS
    for length in sorted(lengths):
        if left < 2:
            break
        taken.append(max(2, min(length, left)))
        left -= taken[-1]
    return taken


def _computed(crowd: Crowd, batch: MicroBatch, train: Train, parts: Sequence[str]) -> Found:
    """Losses and gradients with these parts computed fast."""
    try:
        return _on_one_layer(lambda alone: _losses_and_gradients(crowd, batch, train, parts, alone=alone))
    except Exception as error:  # noqa: BLE001 - families raise errors of every kind
        return describe_error(error)  # raises what says nothing about the base


def _losses_and_gradients(
    crowd: Crowd, batch: MicroBatch, train: Train, parts: Sequence[str], *, alone: bool
) -> list[Tensor]:
    with _fixed(crowd, alone=alone) as (_, trained):
        try:
            crowd.compute_fast(parts)
            sums = train([batch]).sums[: crowd.num_agents]
            return [sums, *(each.grad.clone() for each in trained if each.grad is not None)]
        finally:
            crowd.compute_fast(())
