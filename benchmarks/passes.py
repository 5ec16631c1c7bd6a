"""Two ways through the base side by side, or two checkouts of this program: time and memory of an optimizer step.

One CPU thread, K = 4 agents of rank 16. Both take every batch in turn. The memory is what a process of its own holds at
its peak beyond base and agents; beside a checkout it is all that the process holds.

python -m benchmarks.passes --size 15M 125M --base embedded FOLDER
    A pass for each agent (`pass_per_agent`) beside one for all, on rows as long as those of GSM8K.
python -m benchmarks.passes --size --base FOLDER --prompt 128 --answer 128
    DPO on whole rows beside `shared_prompts`: random pairs of so many tokens, give or take a quarter.
python -m benchmarks.passes --beside CHECKOUT --rows 16 --size --base FOLDER --dataset ROWS --precision bf16
    The step of another checkout beside this one's, each in a process of its own with the same libraries. A base in a
    folder reads the rows of the data set. A checkout from before `pass_per_agent` has one pass.
"""

from __future__ import annotations

import argparse
import inspect
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from multiprocessing.connection import Connection
from pathlib import Path
from subprocess import PIPE

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.gsm8k import batches
from benchmarks.real_step import Case
from benchmarks.step import LOSSES_AGREE_TO, SIZES, Ours, random_base
from benchmarks.timing import cpu_ratios, median_cost, take_turns
from ci_llm.config import Config
from ci_llm.crowd.preferences import Preferences
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Example
from ci_llm.data.units import Unit, unit_of
from ci_llm.embedded import BASE_FOLDER
from ci_llm.objectives import objective_of

ONE_PASS, PASS_EACH = "one pass", "a pass per agent"
SHARED, WHOLE = "shared prompts", "whole rows"
#: As `LOSSES_AGREE_TO`. A DPO loss near 0 changes, relatively, by beta times what the sum of an answer's
#: log-probabilities is rounded by, and such a sum is hundreds of nats for random tokens: fp32 is the test here.
PAIRS_AGREE_TO = {"fp32": 1e-3, "bf16": 1e-1}


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


def pairs_of(prompt: int, answer: int, rows: int, count: int) -> list[Batch]:
    """`count` packed batches of `rows` random pairs, with the mean lengths of a prompt and of an answer."""
    chance = np.random.default_rng(0)

    def tokens(mean: int) -> np.ndarray:
        return chance.integers(3, 32_000, chance.integers(mean - mean // 4, mean + mean // 4 + 1), dtype=np.int32)

    def pair() -> Unit:
        begin, answers = tokens(prompt), (tokens(answer), tokens(answer))
        learned = np.arange(2 * (prompt + answer)) >= len(begin)
        each = [np.concatenate([begin, own]) for own in answers]
        return unit_of([Example(ids, learned[: len(ids)]) for ids in each])

    return [pack([pair() for _ in range(rows)], range(rows)) for _ in range(count)]


def trainer(name: str, precision: str, way: str) -> Ours:
    """A crowd on a base of its own."""
    ours = Ours(base_of(name, precision))
    ours.crowd.agents.pass_per_agent = way != ONE_PASS
    if way in (SHARED, WHOLE):
        agents = [Config(objective="dpo")] * ours.crowd.num_agents
        ours.objective = Preferences(objective_of("dpo", agents), ours.crowd)  # type: ignore[assignment]
        ours.crowd.shares_prompts = way == SHARED
    return ours


def peak_bytes(name: str, precision: str, inputs: Sequence[Batch], way: str, told: Connection) -> None:
    """Send how much more this process held at its peak than before the first step."""
    torch.set_num_threads(1)
    ours = trainer(name, precision, way)
    before = psutil.Process().memory_info().rss
    for batch in inputs:
        ours.step(fitting(batch, ours.crowd.model.config.vocab_size))
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    told.send(int(peak.split()[1]) * 1024 - before)


def memory(name: str, precision: str, inputs: Sequence[Batch], way: str) -> int:
    """`peak_bytes` in a new process."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=peak_bytes, args=(name, precision, inputs, way, there))
    child.start()
    found: int = here.recv()
    child.join()
    return found


def line(name: str, precision: str, rows: int, inputs: Sequence[Batch], fast: str, slow: str) -> str:
    """A line of the table; the first of the batches warms up.

    Raises:
        AssertionError: the losses of the two differ.
    """
    ways = {way: trainer(name, precision, way) for way in (fast, slow)}
    vocabulary = ways[fast].crowd.model.config.vocab_size
    losses: dict[str, list[float]] = {way: [] for way in ways}

    def step(way: str, batch: Batch) -> None:
        losses[way].append(ways[way].step(fitting(batch, vocabulary)))

    costs = take_turns({way: partial(step, way) for way in ways}, inputs)
    gap = max(abs(a - b) / a for a, b in zip(*losses.values(), strict=True))
    agree_to = (PAIRS_AGREE_TO if fast == SHARED else LOSSES_AGREE_TO)[precision]
    assert gap < agree_to, f"the losses differ by {gap:.1e}"
    ratios = cpu_ratios(costs[slow][1:], costs[fast][1:])
    seconds = [f"{median_cost(costs[way][1:]).cpu_s:.3f}" for way in ways]
    held = [memory(name, precision, inputs[:2], way) / 2**20 for way in ways]
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    shown = [Path(name).name, precision, rows, *seconds, spread, *(f"{each:.0f}" for each in held)]
    return f"| {' | '.join(map(str, shown))} |"


def side() -> None:
    """The process of a checkout: steps on the rows that come, answered with CPU seconds, loss and peak in bytes.

    It is run by its source, with the modules of its own checkout, so it uses only what all of them have.
    """
    import json
    import sys
    import time

    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.gsm8k import _example
    from benchmarks.step import SIZES, Ours, random_base
    from ci_llm.data.batches import pack

    torch.set_num_threads(1)
    name, precision, per_agent = json.loads(sys.stdin.readline())
    base = random_base(name) if name in SIZES else AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    ours = Ours(base.to(torch.bfloat16 if precision == "bf16" else torch.float32))
    ours.crowd.model.config.use_cache = False
    ours.crowd.agents.pass_per_agent = per_agent
    for line in sys.stdin:
        rows = [_example(ids, targets) for ids, targets in json.loads(line)]
        batch, began = pack(rows, range(len(rows))), time.process_time()
        loss = ours.step(batch)
        seconds = time.process_time() - began
        with open("/proc/self/status") as status:
            peak = next(int(each.split()[1]) * 1024 for each in status if each.startswith("VmHWM"))
        print(json.dumps([seconds, loss, peak]), flush=True)


def rows_of(batch: Batch) -> list[tuple[list[int], int]]:
    """Token ids of each row, and how many of them, at its end, are targets."""
    ids, counts = batch.input_ids.tolist(), torch.bincount(batch.target_rows, minlength=batch.num_rows).tolist()
    return [(ids[start:end], count) for (start, end), count in zip(pairwise(batch.bounds), counts, strict=True)]


def beside(checkout: Path, name: str, precision: str, inputs: Sequence[Batch], *, per_agent: bool) -> str:
    """A line of the table of both checkouts.

    Raises:
        AssertionError: their losses differ.
    """
    sides, found = [], []
    for folder in (checkout.absolute(), Path(__file__).parent.parent):
        program = f"{inspect.getsource(side)}\nside()"
        own = {**os.environ, "PYTHONPATH": str(folder)}
        command = [sys.executable, "-c", program]
        process = subprocess.Popen(command, cwd=folder, env=own, stdin=PIPE, stdout=PIPE, text=True)
        sides.append(process)
        _ask(process, [str(BASE_FOLDER) if name == "embedded" else name, precision, per_agent])
        found.append([])
    for number, batch in enumerate(inputs):
        for at in (0, 1) if number % 2 else (1, 0):
            _ask(sides[at], rows_of(batch))
            found[at].append(json.loads(sides[at].stdout.readline()))
    for process in sides:
        process.communicate()
    old, new = found
    gap = max(abs(a[1] - b[1]) / a[1] for a, b in zip(old, new, strict=True))
    assert gap < LOSSES_AGREE_TO[precision], f"the losses differ by {gap:.1e}"
    ratios = sorted(a[0] / b[0] for a, b in zip(old[1:], new[1:], strict=True))
    seconds = [f"{statistics.median(each[0] for each in own[1:]):.3f}" for own in found]
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    shown = [Path(name).name, precision, inputs[0].num_rows, *seconds, spread, *(own[-1][2] >> 20 for own in found)]
    return f"| {' | '.join(map(str, shown))} |"


def _ask(process: subprocess.Popen[str], what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def inputs_of(name: str, options: argparse.Namespace) -> list[Batch]:
    """A batch that warms up, and those that are measured."""
    if name in SIZES or name == "embedded" or options.dataset is None:
        vocabulary = base_of(name, "fp32").config.vocab_size
        return [fitting(batch, vocabulary) for batch in batches(None, options.rows, options.rounds + 1)]
    case = Case(name, str(options.dataset), options.rows, options.rounds + 1, "fp32")
    return [batch for steps in case.rounds_of_rows() for batch in steps][: options.rounds + 1]


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a copy of GSM8K; by default rows of the same lengths are made up")
    parser.add_argument("--size", choices=SIZES, nargs="*", default=["15M"], help="random bases (default: 15M)")
    parser.add_argument("--base", nargs="*", default=["embedded"], help="embedded, or folders (default: embedded)")
    parser.add_argument("--precision", choices=LOSSES_AGREE_TO, nargs="+", default=["fp32"])
    parser.add_argument("--rows", type=int, default=4, help="rows per step (default: 4)")
    parser.add_argument("--rounds", type=int, default=5, help="batches measured (default: 5)")
    parser.add_argument("--prompt", type=int, help="tokens of the prompt of a pair; without, rows of GSM8K are taken")
    parser.add_argument("--answer", type=int, default=128, help="tokens of each answer of a pair (default: 128)")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="another checkout of this program")
    parser.add_argument("--one-pass", action="store_true", help="with --beside: no pass per agent in either")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.beside:
        print("| base | precision | rows | CHECKOUT, CPU s | this, CPU s | CHECKOUT / this | MiB | MiB of this |")
        print("|---|---|---|---|---|---|---|---|")
        for name, precision in product((*options.base, *options.size), options.precision):
            inputs = inputs_of(name, options)
            print(beside(options.beside, name, precision, inputs, per_agent=not options.one_pass), flush=True)
        return
    fast, slow = (SHARED, WHOLE) if options.prompt else (ONE_PASS, PASS_EACH)
    inputs = (
        pairs_of(options.prompt, options.answer, options.rows, options.rounds + 1)
        if options.prompt
        else batches(options.dataset, options.rows, options.rounds + 1)
    )
    print(f"| base | precision | rows | {fast}, CPU s | {slow}, CPU s | times {fast} | MiB | MiB, {slow} |")
    print("|---|---|---|---|---|---|---|---|")
    for name in (*options.base, *options.size):
        for precision in options.precision:
            print(line(name, precision, options.rows, inputs, fast, slow), flush=True)


if __name__ == "__main__":
    main()
