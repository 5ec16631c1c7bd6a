"""The number of CPU threads of a run: a few are tried on rows like its own, and the fastest is taken.

More threads than a small base can use make a step slower: each operation waits for the last of them. The number decides
bits. So a second start takes what the first one found, from the user's cache, and a resume what its checkpoint says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ci_llm.checkpoints.manifest import digest
from ci_llm.config.own_keys import AUTO
from ci_llm.core.determinism import names
from ci_llm.core.durable import make_folders, read_object, write_json
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.core.remote import cache_folder
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts
from ci_llm.run.one_layer import TRIAL_TARGETS, fixed_batch, kernels_of, layer_digest, lengths_of, train_of
from ci_llm.run.trainer import Trainer

#: Each number is tried so often, in turns, and its shortest time counts: what else the machine does only adds to it.
ROUNDS: Final = 3
#: The smallest number that takes at most so many times as long as the fastest one is taken.
AS_FAST: Final = 1.05
#: A round goes down the numbers until one takes so many times as long: one thread may take minutes on a large base.
FAR_SLOWER: Final = 3.0


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
