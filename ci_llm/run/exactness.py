"""How exactly a run resumes: the digest of a layer, the surroundings that are compared, the grade that the log says.

- `bitwise`: processes, micro-batch, threads and the like, the names of `core/determinism.py` and the digest are the
  same as in the checkpoint.
- `sample-exact`: the same samples in the same optimizer steps; sums may round differently.
- `state-exact`: the same state to resume from, on a device that may round differently each time.

The line adds which keys make it another run from here on, because rows, mathematics or the schedule are others.

The digest shows whether a machine gives the bits that another one gave. The names of versions and devices do not show
that: a library picks its kernels by what it finds, and may pick others under the same names. So one decoder layer and
the head are computed, forward and backward, on fixed tokens and by the code that trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ci_llm.core.determinism import FAST, PLAIN, differences, names, names_of_all
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken
from ci_llm.data.agent_rows import sampled
from ci_llm.data.batches import MicroBatch, Owned, pack
from ci_llm.data.encoder import Example
from ci_llm.lora.kernels import PARTS
from ci_llm.lora.passes import describe_error
from ci_llm.run import gradients
from ci_llm.run.attempt import Attempt
from ci_llm.run.run_checkpoint import Resume, bits_changing
from ci_llm.run.trainer import Trainer

T = TypeVar("T")
ForwardBackward = Callable[[list[MicroBatch]], Any]  # what it returns has `sums`, a tensor

MOST_TOKENS: Final = 512  # of the fixed rows: as many as show which kernels are taken
WEIGHTS_UP_TO: Final = 0.05  # of the fixed agents: with B = 0 half of their products would be zero
NOT_A_STEP: Final = -1  # keys what is drawn
#: The surroundings that are compared one by one.
_COMPARED: Final = ("processes", "micro_batch", "threads", "pass_per_agent", "kernels", "shared_prompts", "all_reduce")


def resume_exactly(resume: Resume, attempt: Attempt) -> str:
    """Set the generators as they were; returns the grade, and what lowers it, for people. `record_bits` comes first."""
    trainer, source = resume.trainer, resume.source
    before: Any = source.manifest.info["surroundings"]
    now = surroundings(trainer, attempt)
    if trainer.crowd.device.type != "cpu":
        now["threads"] = before["threads"]  # they compute no step
    odd = [f"{key} {before[key]} -> {now[key]}" for key in _COMPARED if before[key] != now[key]]
    odd += differences(before, now)
    precision, precision_now = resume.precisions()
    if precision != precision_now:
        odd.append(f"precision of the base {precision} -> {precision_now}")
    odd += restore_generators(trainer, source.state["rng"], same_processes=before["processes"] == now["processes"])
    changes = bits_changing(resume.changes(), trainer.config)
    odd += [f"{change.key} {change.old} -> {change.new}" for change in changes if change.kind == "free"]
    odd += _other_digest(before, now, odd)
    others = [change.key for change in changes if change.kind != "free"]
    if resume.fingerprints["data"] != trainer.description.fingerprints["data"]:
        others.append("training rows")
    grade = "bitwise"
    if odd or not now["deterministic"]:
        unsure = [] if now["deterministic"] else ["deterministic=true alone takes the same bits from every kernel"]
        grade = f"{'sample' if odd else 'state'}-exact ({'; '.join(odd + unsure)})"
    return f"{grade}; another run from here on ({', '.join(others)})" if others else grade


def restore_generators(trainer: Trainer, saved: Any, *, same_processes: bool) -> list[str]:
    """Set the global generators; returns the reasons why they are not as they were.

    With as many processes as before, each process gets its own generators back. With another number, rows are dealt
    in another way, and the generators begin from a key, so that a repeated resume draws the same. Every micro-step
    sets them by a key in any case: this is for what draws between the steps, such as a callback.
    """
    index, count = trainer.processes.process_index, trainer.processes.num_processes
    if not same_processes:
        determinism.seed_everything(trainer.config.seed, "processes", trainer.state.step, count, index)
        return []  # the numbers of processes are named already
    odd = [f"no generators of process {i}" for i in range(count) if f"process{i}" not in saved]
    own = saved.get(f"process{index}")
    if own is not None and (hindrance := determinism.restore(own)):
        odd.append(hindrance)
    return odd


def _other_digest(before: Mapping[str, Any], now: Mapping[str, Any], odd: Sequence[str]) -> Iterator[str]:
    """The difference of the digests, for people; nothing if one is missing, or may change by itself."""
    if "layer" not in before or before["processes"] != now["processes"] or not now["deterministic"]:
        return
    old, new = before["layer"]["digests"], now["layer"]["digests"]
    if None in (*old, *new):
        yield "memory did not hold the layer that is compared"
    elif old != new:
        yield f"{'' if odd else 'the same names, and '}other bits in a layer"


def surroundings(trainer: Trainer, attempt: Attempt) -> dict[str, Any]:
    """What surrounds the run and must be the same for a run to have the same bits."""
    crowd, num_processes = trainer.crowd, trainer.processes.num_processes
    parts = len(crowd.storage.gradients_to_add) if num_processes > 2 else 1
    return {
        "processes": num_processes,
        "micro_batch": trainer.micro_batch_size,
        "threads": torch.get_num_threads(),
        "pass_per_agent": crowd.storage.pass_per_agent,
        "shared_prompts": crowd.base_model.shares_prompts,
        "all_reduce": "one for each agent" if parts > 1 else "one",  # on two processes the bits are the same
        # Kernels with a deterministic form take it only where anything else is an error: attention does not after
        # warn_only (`deterministic: auto`).
        "deterministic": crowd.device.type == "cpu"
        or (torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()),
        **attempt.bits,
    }


def record_bits(trainer: Trainer, attempt: Attempt, lengths: Sequence[int] = ()) -> None:
    """Find the names and the digest that tell whether another machine computes the same bits. A collective.

    Args:
        lengths: the lengths of the fixed rows; by default those of the call before, or of the longest micro-batch.
    """
    crowd, processes = trainer.crowd, trainer.processes
    lengths = [*lengths] or attempt.bits.get("layer", {}).get("lengths") or longest_micro_batch(trainer)
    found, _ = unless_out_of_memory(layer_pass(trainer, lengths))
    processes.follow()  # a process that ran out of memory owes its peers the rest of their gathers
    kernels = kernels_of(trainer.config, crowd)
    each = processes.gather_object((names(crowd.device, kernels), found))
    digests = [digest for _, digest in each]
    attempt.bits = {
        "kernels": kernels,
        **names_of_all([own for own, _ in each]),
        "layer": {"lengths": lengths, "digests": digests},
    }


def kernels_of(config: Config, crowd: Crowd) -> str:
    """The kernels as a checkpoint records them: plain, fast, or fast without some parts."""
    if config.kernels == PLAIN:
        return PLAIN
    left = [part for part in PARTS if part not in crowd.base_model.fast]
    return FAST if not left else f"{FAST} without {', '.join(left)}"


def forward_backward_of(trainer: Trainer) -> ForwardBackward:
    """Forward and backward as the run does it, and nothing that depends on the step."""
    objective = trainer.objective if isinstance(trainer.objective, NextToken) else NextToken()  # the rows are single
    return lambda batches: gradients.compute_gradients(trainer, NOT_A_STEP, batches, objective, None)


def longest_micro_batch(trainer: Trainer) -> list[int]:
    """Tokens of each row of the longest micro-batch, by a sample; at most `MOST_TOKENS` in all."""
    rows = sampled([ordered.rows for ordered in trainer.training_rows.each])
    longest = sorted((len(row.input_ids) for row in rows), reverse=True)
    lengths: list[int] = []
    for length in longest[: trainer.micro_batch_size]:
        if sum(lengths) + min(length, MOST_TOKENS) <= MOST_TOKENS:
            lengths.append(min(length, MOST_TOKENS))
    return lengths


def fixed_batch(
    crowd: Crowd, lengths: Sequence[int], *, own_rows: bool, key: str = "fixed tokens", most_targets: int | None = None
) -> MicroBatch:
    """Rows of these lengths with fixed tokens; agents that have rows of their own all get these.

    The numbers of the rows are below zero: no data set has such rows.

    Args:
        key: the key by which the tokens are drawn.
        most_targets: only the last tokens of a row are targets, at most this many; None: all but the first token.
    """
    draw = determinism.generator_for(0, key)
    vocabulary = crowd.model.get_input_embeddings().weight.shape[0]
    rows: list[Example] = []
    for length in lengths:
        first_target = 1 if most_targets is None else max(1, length - most_targets)
        ids = torch.randint(0, vocabulary, (length,), generator=draw).numpy()
        rows.append(Example(ids, np.arange(length) >= first_target))
    batch = pack(rows, range(-len(rows), 0))
    owners = [(k,) for k in range(crowd.num_agents)] if own_rows else [tuple(range(crowd.num_agents))]
    return [Owned(agents, batch) for agents in owners]


def layer_pass(trainer: Trainer, lengths: Sequence[int], most_targets: int | None = None) -> Callable[[], str]:
    """What computes `layer_digest` on rows of these lengths, as the run does it."""
    batch = fixed_batch(trainer.crowd, lengths, own_rows=trainer.training_rows.are_own, most_targets=most_targets)
    return partial(layer_digest, trainer.crowd, batch, forward_backward_of(trainer))


def layer_digest(crowd: Crowd, batch: MicroBatch, forward_backward: ForwardBackward) -> str:
    """xxh3-128 of what one decoder layer and the head give: outputs, losses, gradients of the agents.

    Generators, weights, gradients and mode are afterwards as they were before.

    Args:
        batch: see `fixed_batch`.
        forward_backward: on micro-batches, as the run does it.
    """

    def work(layer: nn.Module, trained: list[nn.Parameter]) -> str:
        found: list[Any] = []
        with layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output)):
            found += [forward_backward([batch]).sums, [each.grad for each in trained]]
        return digest(_bytes(each) for each in tree_leaves(found) if isinstance(each, Tensor))

    return on_one_layer(crowd, work)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def on_one_layer(crowd: Crowd, work: Callable[[nn.Module, list[nn.Parameter]], T]) -> T:
    """Do `work` on one layer alone and its parameters, or on the whole base where no layer can be run by itself."""
    try:
        with _fixed(crowd, alone=True) as place:
            return work(*place)
    except Exception as error:  # noqa: BLE001 - families raise errors of every kind
        describe_error(error)  # raises what says nothing about the base
    with _fixed(crowd, alone=False) as place:
        return work(*place)


@contextmanager
def _fixed(crowd: Crowd, *, alone: bool) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """One layer, or the whole base, and its trainable parameters, in whose place it reads fixed numbers inside.

    Afterwards everything is as it was before.
    """
    storage, training, key = crowd.storage, crowd.training, crowd.storage.dropout.micro_step
    generators = determinism.capture()
    draw = torch.Generator().manual_seed(0)
    with one_layer(crowd) if alone else nullcontext(text_model(crowd.model)) as layer:
        trained = [each for each in layer.parameters() if each.requires_grad]
        numbers = torch.empty_like(storage.weights)  # those of other layers are not read
        for each in trained:
            own = numbers.as_strided(each.size(), each.stride(), each.storage_offset())
            own.copy_(torch.empty(each.shape).uniform_(-WEIGHTS_UP_TO, WEIGHTS_UP_TO, generator=draw))
        try:
            with storage.reading_from(numbers):  # and not in their place: a save may read the weights meanwhile
                yield layer, trained
        finally:
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
