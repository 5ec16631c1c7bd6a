"""How the CPU time of one optimizer step grows with the number of agents, and with the length of the rows.

    python -m benchmarks.growth                                  prints the tables, about six minutes
    python -m benchmarks.growth --svg docs/step_growth.svg       and draws them (pip install matplotlib)

Trainers, base and adapters are those of `benchmarks/step.py`: 15M random Llama, rank 16, fp32, one thread. Two rows a
step: as long as those of GSM8K for 1 to 16 agents, all of one length for 4 agents. The original's way pads rows to 512.
Medians of the batches after the first.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.gsm8k import VOCABULARY, batches
from benchmarks.step import ORIGINAL, OURS, SEPARATE, K, OriginalsWay, Ours, SeparateRuns, random_base
from benchmarks.timing import median_cost, take_turns
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Example

AGENTS = (1, 2, 4, 8, 16)
LENGTHS = (64, 128, 256, 512, 1024)
ROWS = 2
#: Median CPU seconds of each trainer, by the number that grows.
Growth = Mapping[int, Mapping[str, float]]


def costs(agents: int, inputs: Sequence[Batch]) -> dict[str, float]:
    """Median CPU seconds of a step of each trainer, in turns; the first batch warms up."""
    base = random_base("15M")
    ours = Ours(copy.deepcopy(base), agents=agents)
    original, separate = OriginalsWay(copy.deepcopy(base), ours.crowd), SeparateRuns(base, ours.crowd)
    found = take_turns({OURS: ours.step, ORIGINAL: original.step, SEPARATE: separate.step}, inputs)
    ours.processes.shutdown()
    return {name: median_cost(listed[1:]).cpu_s for name, listed in found.items()}


def rows_of(length: int, count: int) -> Iterator[Batch]:
    """Batches of random rows of one length, of which the last 64 % are targets, as in GSM8K."""
    chance = np.random.default_rng(length)
    for _ in range(count):
        ids = chance.integers(3, VOCABULARY, (ROWS, length), dtype=np.int32)
        supervised = np.arange(length) >= round(0.36 * length)
        yield pack([Example(row, supervised) for row in ids], range(ROWS))


def measured(what: str, cases: Iterable[tuple[int, int, Sequence[Batch]]]) -> dict[int, dict[str, float]]:
    """Print a row of a table for each case: what grows, agents, inputs."""
    found = {}
    print(f"| {what} | {' | '.join((OURS, ORIGINAL, SEPARATE))} | times ours |\n|---|---|---|---|---|")
    for number, agents, inputs in cases:
        own = found[number] = costs(agents, inputs)
        times = ", ".join(f"{own[name] / own[OURS]:.2f}" for name in (ORIGINAL, SEPARATE))
        print(
            f"| {number:,} | {' | '.join(f'{own[n]:.3f}' for n in (OURS, ORIGINAL, SEPARATE))} | {times} |", flush=True
        )
    return found


def draw(by_agents: Growth, by_length: Growth, target: Path) -> None:
    """Two panels, both axes logarithmic."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "ci_llm"}
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axes, found, title in zip(panels, (by_agents, by_length), ("agents", "tokens of a row"), strict=True):
        for name, style in ((ORIGINAL, "s-"), (SEPARATE, "^-"), (OURS, "o-")):
            colour = "#c04000" if name == OURS else "#888888"
            axes.loglog([*found], [own[name] for own in found.values()], style, color=colour, label=name, base=2)
        axes.set(xlabel=title, xticks=[*found], xticklabels=[f"{number:,}" for number in found])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    panels[0].set(ylabel="CPU seconds of a step")
    panels[0].legend(frameon=False)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Prints both tables; draws them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a copy of GSM8K; by default rows of the same lengths are made up")
    parser.add_argument("--rounds", type=int, default=3, help="batches measured of each case (default: 3)")
    parser.add_argument("--svg", type=Path, help="the file to draw to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    count = options.rounds + 1
    inputs = batches(options.dataset, ROWS, count)
    by_agents = measured("agents", ((agents, agents, inputs) for agents in AGENTS))
    print()
    by_length = measured("tokens of a row", ((length, K, [*rows_of(length, count)]) for length in LENGTHS))
    if options.svg is not None:
        draw(by_agents, by_length, options.svg)


if __name__ == "__main__":
    main()
