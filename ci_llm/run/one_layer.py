"""One layer and the head of a run, computed by themselves: the digest that a resume compares, and the trials of a run.

The digest shows whether a machine gives the bits that another one gave. The names of versions and devices do not show
that: a library picks its kernels by what it finds, and may pick others under the same names. So one decoder layer and
the head are computed, forward and backward, on fixed tokens and by the code that trains. A resumed run is called
bitwise only where names and digest are both those of the checkpoint.

One trial decides which fast kernels a run uses. Rows with lengths of the run are computed plainly, and with each part
of `ci_llm/lora/kernels.py`. A part whose losses or gradients differ from those of the family's own code stays plain.

Another trial decides the number of CPU threads: a few are tried on rows like those of the run, and the fastest is
taken. More threads than a small base can use make a step slower: each operation waits for the last of them. The number
decides bits. So a second start takes what the first one found, from the user's cache, and a resume what its checkpoint
says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ci_llm.base.targets import layer_list, layer_numbers, text_model
from ci_llm.checkpoints.manifest import digest
from ci_llm.config import Config
from ci_llm.config.own_keys import AUTO
from ci_llm.core import determinism
from ci_llm.core.determinism import FAST, PLAIN, names, names_of_all
from ci_llm.core.durable import make_folders, read_object, write_json
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.core.remote import cache_folder
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken
from ci_llm.data.agent_rows import sampled
from ci_llm.data.batches import MicroBatch, Owned, pack
from ci_llm.data.encoder import Example
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts
from ci_llm.lora.kernels import PARTS
from ci_llm.lora.passes import describe_error, distance, tolerance
from ci_llm.lora.reading import compute_dtype
from ci_llm.run import gradients
from ci_llm.run.trainer import Trainer

T = TypeVar("T")
Train = Callable[[list[MicroBatch]], Any]  # what it returns has `sums`, a tensor

MOST_TOKENS: Final = 512  # of the fixed rows: as many as show which kernels are taken
WEIGHTS_UP_TO: Final = 0.05  # of the fixed agents: with B = 0 half of their products would be zero
NOT_A_STEP: Final = -1  # keys what is drawn
TRIAL_TOKENS: Final = 128  # of the rows of the trial of kernels
TRIAL_TARGETS: Final = 8  # of a row of a trial: with all of them, a large vocabulary would outweigh the layer
#: Each number is tried so often, in turns, and its shortest time counts: what else the machine does only adds to it.
ROUNDS: Final = 3
#: The smallest number that takes at most so many times as long as the fastest one is taken.
AS_FAST: Final = 1.05
#: A round goes down the numbers until one takes so many times as long: one thread may take minutes on a large base.
FAR_SLOWER: Final = 3.0


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
    objective = trainer.objective if isinstance(trainer.objective, NextToken) else NextToken()  # the rows are single
    return lambda batches: gradients.compute_gradients(trainer, NOT_A_STEP, batches, objective, None)


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

    def work(layer: nn.Module, trained: list[nn.Parameter]) -> str:
        found: list[Any] = []
        with layer.register_forward_hook(lambda _layer, _inputs, output: found.append(output)):
            found += [train([batch]).sums, [each.grad for each in trained]]
        return digest(_bytes(each) for each in tree_leaves(found) if isinstance(each, Tensor))

    return _on_one_layer(crowd, work)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _on_one_layer(crowd: Crowd, work: Callable[[nn.Module, list[nn.Parameter]], T]) -> T:
    """Do `work` on one layer alone and its parameters, or on the whole base where no layer can be run by itself."""
    try:
        with _fixed(crowd, alone=True) as place:
            return work(*place)
    except Exception as error:  # noqa: BLE001 - families raise errors of every kind
        describe_error(error)  # raises what says nothing about the base
    with _fixed(crowd, alone=False) as place:
        return work(*place)


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


@contextmanager
def _fixed(crowd: Crowd, *, alone: bool) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """One layer, or the whole base, and its trainable parameters, in whose place it reads fixed numbers inside.

    Afterwards everything is as it was before.
    """
    storage, training, generators = crowd.storage, crowd.training, determinism.capture()
    key, draw = storage.dropout.micro_step, torch.Generator().manual_seed(0)
    with one_layer(crowd) if alone else nullcontext(text_model(crowd.model)) as layer:
        trained = [each for each in layer.parameters() if each.requires_grad]
        numbers = torch.zeros_like(storage.weights)
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

    def reason_of_any(own: str | None) -> str | None:
        return next(filter(None, processes.gather_object(own)), None)

    plain = attempt(())
    reason = reason_of_any(plain if isinstance(plain, str) else None)
    if reason is not None or isinstance(plain, str):
        return [f"everything stays plain: {reason}"]
    with processes.autocast():
        limit = tolerance(crowd.model.dtype, compute_dtype(crowd.model.get_input_embeddings().weight))
    taken: list[str] = []
    for part in PARTS:
        if reason := reason_of_any(_difference(attempt([*taken, part]), plain, limit)):
            lines.append(f"{part} stays plain: {reason}")
        else:
            taken.append(part)
    crowd.compute_fast(taken)
    return lines


def kernels_of(config: Config, crowd: Crowd) -> str:
    """The kernels as a checkpoint records them: plain, fast, or fast without some parts."""
    if config.kernels == PLAIN:
        return PLAIN
    left = [part for part in PARTS if part not in crowd.fast]
    return FAST if not left else f"{FAST} without {', '.join(left)}"


def _difference(found: Found, plain: list[Tensor], limit: float) -> str | None:
    """Why `found` differs too much from what the plain pass gives; None if it does not."""
    if isinstance(found, str):
        return found
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

    def losses_and_gradients(_: nn.Module, trained: list[nn.Parameter]) -> list[Tensor]:
        try:
            crowd.compute_fast(parts)
            sums = train([batch]).sums[: crowd.num_agents]
            return [sums, *(each.grad.clone() for each in trained if each.grad is not None)]
        finally:
            crowd.compute_fast(())

    try:
        return _on_one_layer(crowd, losses_and_gradients)
    except Exception as error:  # noqa: BLE001 - families raise errors of every kind
        return describe_error(error)  # raises what says nothing about the base


def choose_threads(trainer: Trainer, interrupts: Interrupts, recorded: Mapping[str, Any]) -> str | None:
    """Set the CPU threads: the number given, that of the checkpoint, or by a trial. A collective.

    Args:
        recorded: the surroundings in the checkpoint that the run resumes from; {} for a fresh start.

    Returns:
        a line for people about a trial.
    """
    config, crowd, processes, threads = trainer.config, trainer.crowd, trainer.processes, trainer.config.cpu_threads
    if crowd.device.type == "cpu" and threads == AUTO and recorded.get("processes") == processes.num_processes:
        threads = recorded["threads"]
    if threads != AUTO:
        torch.set_num_threads(threads)
        return None
    lengths, base = lengths_of(trainer), trainer.checkpoint.base.fingerprint
    how = [kernels_of(config, crowd), crowd.storage.pass_per_agent, lengths, crowd.storage.sizes]
    like = {**names(crowd.device)["machine"], "base": [base, config.mixed_precision], "how": how}
    batch = fixed_batch(crowd, lengths, own_rows=trainer.courses.are_own, most_targets=TRIAL_TARGETS)
    return try_threads(partial(layer_digest, crowd, batch, train_of(trainer)), like, processes, interrupts)


def try_threads(
    once: Callable[[], object], like: Mapping[str, Any], processes: Processes, interrupts: Interrupts
) -> str | None:
    """Set the fastest number of threads, the same on all processes; returns a line for people. A collective.

    Args:
        once: forward and backward on rows like those of the run, without an effect on it.
        like: what the choice depends on, beside the number of cores.

    Returns:
        None if all stays as it was: the number is given, there is one core, memory ran out, or a stop is requested.
    """
    most = min(processes.gather_object(processes.launch.threads_per_process if processes.chooses_threads else 1))
    if most == 1:
        return None
    counts, before = [*(1 << power for power in range((most - 1).bit_length())), most], torch.get_num_threads()
    record = cache_folder("threads") / f"{digest([repr((like, most)).encode()])}.json"
    if (known := processes.broadcast_object(_known(record))) in counts:
        torch.set_num_threads(known)
        return f"{known} of {most} cores, as an earlier start found: {record}"
    seconds = _tried(counts, once, processes, interrupts)
    taken = min((n for n in seconds if seconds[n] <= AS_FAST * min(seconds.values())), default=before)
    torch.set_num_threads(taken)
    if not seconds:
        return None
    took = ", ".join(f"{count}: {each * 1000:.3g} ms" for count, each in seconds.items() if each < math.inf)
    line = f"{taken} of {most} cores, by a trial of one layer ({took}); cpu_threads=N is another number"
    if processes.is_main_process:
        try:
            make_folders(record.parent)
            write_json(record, {**like, "cores": most, "threads": taken})
        except OSError as error:
            line += f"; the next start tries again, as {record.parent} cannot be written: {error.strerror}"
    return line


def _tried(counts: list[int], once: Callable[[], object], processes: Processes, asked: Interrupts) -> dict[int, float]:
    """The shortest time of each number, on the slowest process; {} if memory ran out or a stop was requested."""
    shortest = dict.fromkeys(counts, math.inf)
    for _ in range(ROUNDS):
        for count in reversed(counts):
            torch.set_num_threads(count)
            begun = time.perf_counter()
            _, complaint = unless_out_of_memory(once)
            processes.follow()  # a process that ran out of memory owes its peers the rest of their gathers
            own = time.perf_counter() - begun, complaint or asked.stop_reason
            seconds, reasons = zip(*processes.gather_object(own), strict=True)
            if any(reasons):
                return {}
            shortest[count] = min(shortest[count], max(seconds))
            if max(seconds) > FAR_SLOWER * min(shortest.values()):
                break
    return shortest


def _known(record: Path) -> Any:
    """What an earlier start kept; None if it is missing or cannot be read."""
    try:
        return read_object(record).get("threads")
    except (OSError, ValueError):
        return None
