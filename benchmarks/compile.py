"""Would torch.compile pay? The step as it is, beside the step on a base whose layers are compiled.

The base, the rows and the clock are those of `benchmarks/step.py`. Packed rows have another length in every batch, so
shapes are dynamic. `regions` compiles what knows nothing of where rows begin and end: the norms and feed-forward blocks
with their adapters; `model` the whole base.
"""

from __future__ import annotations

import argparse
import statistics
import time

from torch import nn

from benchmarks.gsm8k import batches
from benchmarks.step import SIZES, Ours, random_base
from benchmarks.timing import cpu_ratios, take_turns

PARTS = ("mlp", "input_layernorm", "post_attention_layernorm")


def compile_base(base: nn.Module, what: str) -> None:
    """Compile `regions` of every layer in place, or the whole `model`."""
    layers = [layer for layer in base.modules() if hasattr(layer, "self_attn")]
    parts = [base] if what == "model" else [getattr(layer, name) for layer in layers for name in PARTS]
    for part in parts:
        part.compile(dynamic=True)


def main() -> None:
    """Prints the cost of compiling, the ratio of the steps and the difference of their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("regions", "model"), default="regions")
    parser.add_argument("--size", choices=SIZES, default="15M")
    parser.add_argument("--rows", type=int, default=2, help="rows per batch")
    parser.add_argument("--batches", type=int, default=9)
    options = parser.parse_args()
    plain, compiled = Ours(random_base(options.size)), Ours(random_base(options.size))
    compile_base(compiled.crowd.model.base_model, options.what)
    inputs = batches(None, options.rows, options.batches + 1)
    losses: dict[str, list[float]] = {"plain": [plain.step(inputs[0])], "compiled": []}
    start = time.perf_counter()
    losses["compiled"].append(compiled.step(inputs[0]))
    print(f"first step, compiling: {time.perf_counter() - start:.1f} s", flush=True)
    trainers = {"plain": plain, "compiled": compiled}
    costs = take_turns(
        {name: lambda batch, name=name: losses[name].append(trainers[name].step(batch)) for name in trainers},
        inputs[1:],
    )
    ratios = cpu_ratios(costs["compiled"], costs["plain"])
    gap = max(abs(a - b) / a for a, b in zip(losses["plain"], losses["compiled"], strict=True))
    print(f"compiled / plain: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of CPU time")
    print(f"losses differ by at most {gap:.1e}")


if __name__ == "__main__":
    main()
