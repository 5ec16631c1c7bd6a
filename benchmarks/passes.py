"""One pass for all agents beside a pass for each (`pass_per_agent`): time and memory of an optimizer step.

One CPU thread, K = 4 agents of rank 16, rows as long as those of GSM8K. Both take every batch in turn. The memory is
what a process of its own holds at its peak beyond base and agents.

python -m benchmarks.passes --size 15M 125M --base embedded FOLDER
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gsm8k import batches
from benchmarks.step import LOSSES_AGREE_TO, SIZES, Ours, random_base
from benchmarks.timing import cpu_ratios, median_cost, take_turns
from ci_llm.data.batches import Batch
from ci_llm.embedded import BASE_FOLDER

ONE_PASS, PASS_EACH = "one pass", "a pass per agent"


def base_of(name: str, precision: str) -> PreTrainedModel:
    """A random Llama of `benchmarks.step.SIZES`, the embedded base, or that of a folder."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    if name in SIZES:
        return random_base(name).to(dtype)
    folder = BASE_FOLDER if name == "embedded" else name
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.config.use_cache = False
    return model


def fitting(batch: Batch, vocabulary: int) -> Batch:
    """The same lengths with tokens that the base knows."""
    return replace(batch, input_ids=batch.input_ids % vocabulary, targets=batch.targets % vocabulary)


def trainer(name: str, precision: str, *, per_agent: bool) -> Ours:
    """A crowd on a base of its own."""
    ours = Ours(base_of(name, precision))
    ours.crowd.agents.pass_per_agent = per_agent
    return ours


def peak_bytes(name: str, precision: str, inputs: Sequence[Batch], per_agent: bool, told: Connection) -> None:
    """Send how much more this process held at its peak than before the first step."""
    torch.set_num_threads(1)
    ours = trainer(name, precision, per_agent=per_agent)
    before = psutil.Process().memory_info().rss
    for batch in inputs:
        ours.step(fitting(batch, ours.crowd.model.config.vocab_size))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    told.send(int(peak.split()[1]) * 1024 - before)


def memory(name: str, precision: str, inputs: Sequence[Batch], *, per_agent: bool) -> int:
    """`peak_bytes` in a new process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=peak_bytes, args=(name, precision, inputs, per_agent, there))
    child.start()
    found: int = here.recv()
    child.join()
    return found


def line(name: str, precision: str, rows: int, rounds: int, dataset: Path | None) -> str:
    """A line of the table.

    Raises:
        AssertionError: the losses of the two differ.
    """
    inputs = batches(dataset, rows, rounds + 1)
    ways = {way: trainer(name, precision, per_agent=way == PASS_EACH) for way in (ONE_PASS, PASS_EACH)}
    vocabulary = ways[ONE_PASS].crowd.model.config.vocab_size
    losses: dict[str, list[float]] = {way: [] for way in ways}

    def step(way: str, batch: Batch) -> None:
        losses[way].append(ways[way].step(fitting(batch, vocabulary)))

    costs = take_turns({way: partial(step, way) for way in ways}, inputs)
    gap = max(abs(a - b) / a for a, b in zip(*losses.values(), strict=True))
    assert gap < LOSSES_AGREE_TO[precision], f"the losses differ by {gap:.1e}"
    ratios = cpu_ratios(costs[PASS_EACH][1:], costs[ONE_PASS][1:])
    seconds = [f"{median_cost(costs[way][1:]).cpu_s:.3f}" for way in ways]
    held = [memory(name, precision, inputs[:2], per_agent=way == PASS_EACH) / 2**20 for way in ways]
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    shown = [Path(name).name, precision, rows, *seconds, spread, *(f"{each:.0f}" for each in held)]
    return f"| {' | '.join(map(str, shown))} |"


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a copy of GSM8K; by default rows of the same lengths are made up")
    parser.add_argument("--size", choices=SIZES, nargs="*", default=["15M"], help="random bases (default: 15M)")
    parser.add_argument("--base", nargs="*", default=["embedded"], help="embedded, or folders (default: embedded)")
    parser.add_argument("--precision", choices=LOSSES_AGREE_TO, nargs="+", default=["fp32"])
    parser.add_argument("--rows", type=int, default=4, help="rows per step (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="batches measured (default: 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| base | precision | rows | one pass, CPU s | a pass per agent, CPU s | times one pass | MiB | MiB per agent |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name in (*options.base, *options.size):
        for precision in options.precision:
            print(line(name, precision, options.rows, options.rounds, options.dataset), flush=True)


if __name__ == "__main__":
    main()
