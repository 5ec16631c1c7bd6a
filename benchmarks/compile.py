"""Would torch.compile pay? The step as it is, beside the step on a base whose layers are compiled.

The base, the rows and the clock are those of `benchmarks/step.py`. Packed rows have another length in every batch.
Without `--bucket` shapes are dynamic. With it, spare tokens fill every batch up to the next multiple, as one more row
that nothing reads: shapes are then few, and each is compiled for itself. `regions` compiles what knows nothing of where
rows begin and end: the norms and feed-forward blocks with their adapters; `model` the whole base.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.gsm8k import batches
from benchmarks.step import SIZES, Ours, random_base
from benchmarks.timing import cpu_ratios, median_cost, take_turns
from ci_llm.data.batches import Batch
from ci_llm.lora import layer as groups

PARTS = ("mlp", "input_layernorm", "post_attention_layernorm")


def compile_base(base: nn.Module, what: str, *, dynamic: bool) -> None:
    """Compile `regions` of every layer in place, or the whole `model`."""
    layers = [layer for layer in base.modules() if hasattr(layer, "self_attn")]
    parts = [base] if what == "model" else [getattr(layer, name) for layer in layers for name in PARTS]
    torch._dynamo.config.recompile_limit = 256  # for each bucket, and what differs from layer to layer
    # The compiler cannot follow this question about memory, to which the answer is yes in every step that is measured.
    groups._is_part = lambda *_: True
    for part in parts:
        part.compile(dynamic=dynamic)


def filled(batch: Batch, bucket: int) -> Batch:
    """The batch with spare tokens up to a multiple of `bucket`: one more row without targets."""
    spare = -batch.num_tokens % bucket
    if not spare:
        return batch
    return replace(
        batch,
        input_ids=F.pad(batch.input_ids, (0, spare)),
        position_ids=torch.cat([batch.position_ids, torch.arange(spare)]),
        bounds=(*batch.bounds, batch.num_tokens + spare),
    )


def main() -> None:
    """Prints the cost of compiling, the ratios of the steps and the difference of their losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", choices=("regions", "model"), default="regions")
    parser.add_argument("--size", choices=SIZES, default="15M")
    parser.add_argument("--rows", type=int, default=2, help="rows per batch")
    parser.add_argument("--batches", type=int, default=9)
    parser.add_argument("--bucket", type=int, help="tokens; without it shapes are dynamic")
    options = parser.parse_args()
    plain, compiled = Ours(random_base(options.size)), Ours(random_base(options.size))
    compile_base(compiled.crowd.model.base_model, options.what, dynamic=options.bucket is None)
    bucket = options.bucket or 1
    inputs = batches(None, options.rows, options.batches + 1)
    sizes = {filled(batch, bucket).num_tokens: filled(batch, bucket) for batch in inputs}
    first = [*sizes.values()] if options.bucket else inputs[:1]
    losses: dict[str, list[float]] = {"as it is": [plain.step(batch) for batch in first], "compiled": []}
    cpu, wall = time.process_time(), time.perf_counter()
    losses["compiled"] += [compiled.step(batch) for batch in first]
    spent = f"{time.process_time() - cpu:.1f} CPU s, {time.perf_counter() - wall:.1f} s"
    print(f"first steps, compiling {len(first)} shapes: {spent}", flush=True)
    spare = 1 - sum(batch.num_tokens for batch in inputs) / sum(filled(batch, bucket).num_tokens for batch in inputs)

    costs = take_turns(
        {
            "as it is": lambda batch: losses["as it is"].append(plain.step(batch)),
            "compiled": lambda batch: losses["compiled"].append(compiled.step(filled(batch, bucket))),
        },
        inputs[1:],
    )
    ratios = cpu_ratios(costs["as it is"], costs["compiled"])
    gap = max(abs(a - b) / a for a, b in zip(*losses.values(), strict=True))
    for name, found in costs.items():
        print(f"{name}: {median_cost(found).cpu_s:.3f} CPU s a step")
    print(f"as it is / compiled: {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) of CPU time")
    print(f"{len(sizes)} shapes, {spare:.0%} of the tokens are spare; losses differ by at most {gap:.1e}")


if __name__ == "__main__":
    main()
