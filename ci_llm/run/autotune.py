"""Autotuning at the start of a run: which fast kernels it uses, and how many CPU threads.

Kernels: rows with lengths of the run are computed plainly, and with each part of `ci_llm/lora/kernels.py`. A part whose
losses or gradients differ from what the family's own code gives stays plain.

Threads: a few numbers are tried on rows as long as the run's, and the fastest one is taken. More threads than a small
base can use make a step slower: each operation waits for the last of them. The number decides bits. So a second start
takes what the first one found, from the user's cache, and a resume takes what its checkpoint says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.checkpoints.manifest import digest
from ci_llm.config.own_keys import AUTO
from ci_llm.core.determinism import PLAIN, names
from ci_llm.core.durable import make_folders, read_object, write_json
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.core.remote import cache_folder
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import MicroBatch
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts
from ci_llm.lora.kernels import PARTS
from ci_llm.lora.passes import describe_error, distance, tolerance
from ci_llm.lora.reading import compute_dtype
from ci_llm.run import exactness
from ci_llm.run.trainer import Trainer

KERNEL_TOKENS: Final = 128  # of the rows on which kernels are tried
TARGETS: Final = 8  # of a row that is tried: with all of them, a large vocabulary would outweigh the layer
#: How often each number of threads is tried, in turns. The shortest time counts: what else the machine does adds to it.
ROUNDS: Final = 3
#: The smallest number of threads is taken whose time is at most this many times the shortest one.
AS_FAST: Final = 1.05
#: A round goes down the numbers until one takes this many times the shortest time: one thread may take minutes on a
#: large base.
FAR_SLOWER: Final = 3.0


def select_kernels(trainer: Trainer) -> list[str]:
    """Try the fast kernels, unless plain ones are configured; returns lines for people. A collective."""
    if trainer.config.kernels == PLAIN:
        return []
    rows = _shortest(exactness.longest_micro_batch(trainer))
    own_rows = trainer.training_rows.are_own
    batch = exactness.fixed_batch(trainer.crowd, rows, own_rows=own_rows, key="rows of a trial", most_targets=TARGETS)
    return approve_kernels(trainer.crowd, batch, exactness.forward_backward_of(trainer), trainer.processes)


Found = list[Tensor] | str  # losses and gradients, or why there are none


def approve_kernels(
    crowd: Crowd, batch: MicroBatch, forward_backward: exactness.ForwardBackward, processes: Processes
) -> list[str]:
    """Let the crowd compute fast what gives the same on every process; returns lines for people. A collective.

    Args:
        batch: see `fixed_batch`.
        forward_backward: on micro-batches, as the run does it.
    """

    def computed(parts: Sequence[str]) -> Found:
        found, ran_out = unless_out_of_memory(partial(_computed, crowd, batch, forward_backward, parts))
        processes.follow()  # a process that ran out of memory owes its peers the rest of their gathers
        return ran_out or "out of memory" if found is None else found

    def reason_of_any(own: str | None) -> str | None:
        return next(filter(None, processes.gather_object(own)), None)

    plain = computed(())
    reason = reason_of_any(plain if isinstance(plain, str) else None)
    if reason is not None or isinstance(plain, str):
        return [f"everything stays plain: {reason}"]
    with processes.autocast():
        limit = tolerance(crowd.model.dtype, compute_dtype(crowd.model.get_input_embeddings().weight))

    def reason_against(parts: Sequence[str]) -> str | None:
        return reason_of_any(_difference(computed(parts), plain, limit))

    lines: list[str] = []
    taken = [*PARTS]
    if reason_against(taken):  # which seldom happens: then one part after the other
        taken = []
        for part in PARTS:
            if reason := reason_against([*taken, part]):
                lines.append(f"{part} stays plain: {reason}")
            else:
                taken.append(part)
    crowd.base_model.compute_fast(taken)
    return lines


def _difference(found: Found, plain: list[Tensor], limit: float) -> str | None:
    """Why `found` differs too much from what the plain pass gives; None if it does not."""
    if isinstance(found, str):
        return found
    gap = max(distance(own, wanted) for own, wanted in zip(found, plain, strict=True))
    return None if gap <= limit else f"it changes losses or gradients by {gap:.1e}"


def _shortest(lengths: Sequence[int]) -> list[int]:
    """The shortest of these lengths, the last one cut, until `KERNEL_TOKENS` are used up."""
    taken: list[int] = []
    left = KERNEL_TOKENS
    for length in sorted(lengths):
        if left < 2:
            break
        taken.append(max(2, min(length, left)))
        left -= taken[-1]
    return taken


def _computed(
    crowd: Crowd, batch: MicroBatch, forward_backward: exactness.ForwardBackward, parts: Sequence[str]
) -> Found:
    """Losses and gradients with these parts computed fast."""

    def losses_and_gradients(_: nn.Module, trained: list[nn.Parameter]) -> list[Tensor]:
        try:
            crowd.base_model.compute_fast(parts)
            sums = forward_backward([batch]).sums[: crowd.num_agents]
            return [sums, *(each.grad.clone() for each in trained if each.grad is not None)]
        finally:
            crowd.base_model.compute_fast(())

    try:
        return exactness.on_one_layer(crowd, losses_and_gradients)
    except Exception as error:  # noqa: BLE001 - families raise errors of every kind
        return describe_error(error)  # raises what says nothing about the base


def select_threads(trainer: Trainer, interrupts: Interrupts, recorded: Mapping[str, Any]) -> str | None:
    """Set the CPU threads: the number given, the checkpoint's, or the fastest one. A collective.

    Args:
        recorded: the surroundings in the checkpoint that the run resumes from; {} for a fresh start.

    Returns:
        a line for people about a trial.
    """
    config, crowd, processes = trainer.config, trainer.crowd, trainer.processes
    threads = config.cpu_threads
    if crowd.device.type == "cpu" and threads == AUTO and recorded.get("processes") == processes.num_processes:
        threads = recorded["threads"]
    if threads != AUTO:
        torch.set_num_threads(threads)
        return None
    lengths = exactness.longest_micro_batch(trainer)
    cache_key = {
        **names(crowd.device)["machine"],
        "base": [trainer.loaded.base.fingerprint, config.mixed_precision],
        "how": [exactness.kernels_of(config, crowd), crowd.storage.pass_per_agent, lengths, crowd.storage.sizes],
    }
    workload = exactness.layer_pass(trainer, lengths, most_targets=TARGETS)
    return set_fastest_threads(workload, cache_key, processes, interrupts)


def set_fastest_threads(
    workload: Callable[[], object], cache_key: Mapping[str, Any], processes: Processes, interrupts: Interrupts
) -> str | None:
    """Set the fastest number of threads, the same on all processes; returns a line for people. A collective.

    Args:
        workload: forward and backward on rows as long as the run's, without an effect on it.
        cache_key: what the number depends on, beside the number of cores.

    Returns:
        None if all stays as it was: the number is given, there is one core, memory ran out, or a stop is requested.
    """
    most = min(processes.gather_object(processes.launch.threads_per_process if processes.chooses_threads else 1))
    if most == 1:
        return None
    counts = [*(1 << power for power in range((most - 1).bit_length())), most]
    record = cache_folder("threads") / f"{digest([repr((cache_key, most)).encode()])}.json"
    if (known := processes.broadcast_object(_known(record))) in counts:
        torch.set_num_threads(known)
        return f"{known} of {most} cores, as an earlier start found: {record}"
    before = torch.get_num_threads()
    seconds = _timed(counts, workload, processes, interrupts)
    if not seconds:
        torch.set_num_threads(before)
        return None
    taken = min(count for count in seconds if seconds[count] <= AS_FAST * min(seconds.values()))
    torch.set_num_threads(taken)
    took = ", ".join(f"{count}: {each * 1000:.3g} ms" for count, each in seconds.items() if each < math.inf)
    line = f"{taken} of {most} cores, by a trial of one layer ({took}); cpu_threads=N is another number"
    if processes.is_main_process:
        try:
            make_folders(record.parent)
            write_json(record, {**cache_key, "cores": most, "threads": taken})
        except OSError as error:
            line += f"; the next start tries again, as {record.parent} cannot be written: {error.strerror}"
    return line


def _timed(
    counts: list[int], workload: Callable[[], object], processes: Processes, asked: Interrupts
) -> dict[int, float]:
    """The shortest time of each number, on the slowest process; {} if memory ran out or a stop was requested."""
    shortest = dict.fromkeys(counts, math.inf)
    for _ in range(ROUNDS):
        for count in reversed(counts):
            torch.set_num_threads(count)
            begun = time.perf_counter()
            _, complaint = unless_out_of_memory(workload)
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
