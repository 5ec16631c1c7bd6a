"""Each fast kernel alone, all, and none: kernels and saved bytes of a layer, CPU time of a step.

    python -m benchmarks.kernels --size 15M --base embedded FOLDER --rows 2 8

Kernels and bytes are counted between a base of two layers and one of three, so that they are the same on every machine:
operations of ATen without views and empty memory, forward and backward. Time is CPU time of one thread; all variants
take every batch in turn.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from benchmarks.gsm8k import batches
from benchmarks.passes import base_of, fitting
from benchmarks.step import LOSSES_AGREE_TO, SIZES, Ours
from benchmarks.timing import cpu_ratios, median_cost, take_turns
from ci_llm.base.targets import layer_list
from ci_llm.data.batches import Batch
from ci_llm.lora.kernels import PARTS

#: What is measured: the name of a variant, and the parts that it computes fast.
VARIANTS: dict[str, tuple[str, ...]] = {"plain": (), **{part: (part,) for part in PARTS}, "fast": PARTS}


class Kernels(TorchDispatchMode):
    """Counts operations that compute something."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or "empty" in func.name() or "detach" in func.name())
        return func(*args, **(kwargs or {}))


def counted(ours: Ours, batch: Batch) -> tuple[int, int]:
    """(kernels, bytes of all storages kept for the backward pass at once) of one step; of weights and agents none."""
    weights = [*ours.crowd.parameters(), *ours.crowd.buffers(), ours.crowd.agents.weights]
    owned, kept = {each.untyped_storage()._cdata for each in weights}, dict[int, Tensor]()
    most = 0

    def pack(tensor: Tensor) -> Tensor:
        if (own := tensor.untyped_storage()._cdata) not in owned:
            kept[own] = tensor
        return tensor

    ours.crowd.train().agents.begin_step(0)
    with Kernels() as kernels:
        for part in ours.crowd.parts(batch):
            with part.reading():
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), ours.processes.autocast():
                    loss = ours.objective(ours.crowd(part.rows), part.rows, 0, part.agent)
                most = max(most, sum(each.untyped_storage().nbytes() for each in kept.values()))
                kept.clear()
                loss.total.backward()
    return kernels.count, most


def per_layer(base: PreTrainedModel, parts: Sequence[str], batch: Batch, *, per_agent: bool) -> tuple[int, float]:
    """(kernels, saved bytes) of a layer."""
    found = []
    for layers in (2, 3):
        cut = copy.deepcopy(base)
        name, every = layer_list(cut)
        cut.set_submodule(name, nn.ModuleList(every[:layers]))
        cut.config.num_hidden_layers = layers
        ours = Ours(cut, fast=parts)
        ours.crowd.agents.pass_per_agent = per_agent
        found.append(counted(ours, batch))
    return found[1][0] - found[0][0], found[1][1] - found[0][1]


def lines(name: str, precision: str, rows: int, rounds: int, *, per_agent: bool, timed: bool) -> list[str]:
    """The table of a base.

    Raises:
        AssertionError: the losses of a variant are not those of plain kernels.
    """
    base = base_of(name, precision)
    inputs = [fitting(batch, base.config.vocab_size) for batch in batches(None, rows, rounds + 1)]
    trainers = {each: Ours(copy.deepcopy(base), fast=parts) for each, parts in VARIANTS.items()} if timed else {}
    losses: dict[str, list[float]] = {each: [] for each in VARIANTS}
    for ours in trainers.values():
        ours.crowd.agents.pass_per_agent = per_agent

    def step(each: str, batch: Batch) -> None:
        losses[each].append(trainers[each].step(batch))

    costs = take_turns({each: partial(step, each) for each in trainers}, inputs if timed else [])
    out, plain = [], per_layer(base, (), inputs[0], per_agent=per_agent)
    for each, parts in VARIANTS.items():
        kernels, saved = per_layer(base, parts, inputs[0], per_agent=per_agent)
        shown = [each, str(kernels), f"{saved / 2**10:,.0f}", f"{saved / plain[1]:.2f}"]
        if timed:
            gap = max(abs(a - b) / b for a, b in zip(losses[each], losses["plain"], strict=True))
            assert gap < LOSSES_AGREE_TO[precision], f"the losses of {each} differ by {gap:.1e}"
            ratios = cpu_ratios(costs["plain"][1:], costs[each][1:])
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            shown += [f"{median_cost(costs[each][1:]).cpu_s:.3f}", spread, f"{gap:.0e}"]
        out.append(f"| {' | '.join(shown)} |")
    return out


def main() -> None:
    """Prints markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, nargs="*", default=["15M"], help="random bases (default: 15M)")
    parser.add_argument("--base", nargs="*", default=["embedded"], help="embedded, or folders (default: embedded)")
    parser.add_argument("--precision", choices=LOSSES_AGREE_TO, nargs="+", default=["fp32"])
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8], help="rows per step (default: 2 8)")
    parser.add_argument("--rounds", type=int, default=5, help="batches measured; 0: only count (default: 5)")
    parser.add_argument("--pass-per-agent", action="store_true", help="a pass for each agent, and not one for all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in (*options.base, *options.size):
        for precision in options.precision:
            for rows in options.rows:
                passes = ", a pass per agent" if options.pass_per_agent else ""
                how = {"per_agent": options.pass_per_agent, "timed": options.rounds > 0}
                print(f"\n{name}, {precision}, {rows} rows, K = 4, rank 16{passes}\n")
                timed = " CPU s of a step | plain / it | losses differ by |" if options.rounds else ""
                print(f"| fast | kernels a layer | KiB kept a layer | of plain |{timed}")
                print("|---" * (7 if options.rounds else 4) + "|")
                print("\n".join(lines(name, precision, rows, options.rounds, **how)), flush=True)


if __name__ == "__main__":
    main()
