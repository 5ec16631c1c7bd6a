"""What sharding the layers of a base saves and costs: peak memory of each process, and the time of a step.

`python -m benchmarks.sharded [--processes N ...] [--size 124M|tiny]`: a random Llama stored in bf16 and loaded in fp32,
four agents, processes of gloo on this machine, one thread each. A peak is the largest resident size since the base was
about to be loaded, less the size at that time. With and without shards the gradients must be the same bits.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch import distributed as dist
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ci_llm import Crowd, LoraSettings, load_base, pack
from ci_llm.base.sharded import ShardedLayers, is_sharded, stored_here
from ci_llm.embedded import BASE_FOLDER
from tools.testbed.crews import enter
from tools.testbed.forkserver import ForkServer

SIZES: Final = {"124M": (1024, 2816, 9, 4096), "tiny": (32, 48, 2, 500)}  # hidden, feed-forward, layers, vocabulary
STEPS, ROWS, TOKENS = 2, 2, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--size", choices=SIZES, default="124M")
    args = parser.parse_args()
    print("processes  base_sharding  layers stored  peak loading  peak training  s per step")
    with ForkServer("benchmarks.sharded") as server:
        for processes in args.processes:
            print("\n".join(table(measure(server, processes, args.size))), flush=True)


def measure(server: ForkServer, processes: int, size: str) -> dict[str, list[dict[str, Any]]]:
    """What each process of a world found, with and without shards.

    Raises:
        AssertionError: a process failed, or the gradients are not the same bits.
    """
    from benchmarks import sharded  # by the name under which the processes find it, which is not that of a program

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        base, log = Path(folder, "base"), Path(folder, "log")
        assert server.run(sharded.write_base, log, folder=str(base), size=size) == [0], log.read_text()
        for sharding in ("none", "layers"):
            codes = server.run(sharded.train, log, ranks=processes, folder=str(base), sharding=sharding)
            assert codes == [0] * processes, log.read_text()
            found[sharding] = [json.loads((base / f"{sharding}{k}.json").read_text()) for k in range(processes)]
    assert [one["gradients"] for one in found["none"]] == [one["gradients"] for one in found["layers"]]
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """A line per way: the process that needs most."""
    lines = []
    for sharding, processes in found.items():
        most = {name: max(one[name] for one in processes) for name in ("layers", "loading", "training", "seconds")}
        bytes_ = "".join(f"{most[name] / 1e6:{width}.0f} MB" for name, width in (("layers", 10), ("loading", 11)))
        lines.append(
            f"{len(processes):9d}  {sharding:13s}{bytes_}{most['training'] / 1e6:12.0f} MB{most['seconds']:12.2f}"
        )
    return lines


# In the processes


def write_base(folder: str, size: str) -> int:
    """A trial: writes the random base."""
    torch.manual_seed(0)
    hidden, inner, layers, vocabulary = SIZES[size]
    shape = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        dtype=torch.bfloat16,
    )
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)
    return 0


def train(folder: str, sharding: str) -> int:
    """A trial: loads the base and takes some steps; leaves what it measured beside the base."""
    rank, cpu = enter(), torch.device("cpu")
    before = forget_peak()
    layers = ShardedLayers(cpu) if sharding == "layers" else None
    base = load_base(folder, "fp32", cpu, layers=layers)
    loading = peak() - before
    crowd = Crowd(base.model, LoraSettings(num_agents=4, rank=8, seed=1), folder).train()
    weights = [each for name, each in base.model.named_parameters() if name.endswith("base_layer.weight")]
    assert all(is_sharded(each) == (layers is not None) for each in weights)
    forget_peak()
    seconds = [step(crowd, layers) for _ in range(STEPS)]
    found = {
        "layers": sum(map(stored_here, weights)),
        "loading": loading,
        "training": peak() - before,
        "seconds": min(seconds),
        "gradients": xxhash.xxh3_128_hexdigest(crowd.agents.gradients.numpy().data),
    }
    Path(folder, f"{sharding}{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    return 0


def step(crowd: Crowd, layers: ShardedLayers | None) -> float:
    """Forward, backward, ballot and reduction, as in a run; returns its seconds."""
    dist.barrier()
    start = time.perf_counter()
    crowd.agents.begin_step(0)
    crowd(_batch(int(crowd.model.config.vocab_size))).loss.backward()
    if layers is not None:
        layers.follow()
    dist.all_reduce(crowd.agents.gradients)
    return time.perf_counter() - start


def _batch(vocabulary: int) -> Any:
    numbers = np.random.default_rng(dist.get_rank())
    learned = np.arange(TOKENS) >= TOKENS // 2
    ids = [numbers.integers(vocabulary, size=TOKENS) for _ in range(ROWS)]
    return pack([SimpleNamespace(input_ids=each, supervised=learned) for each in ids], range(ROWS))


def forget_peak() -> int:
    """Let the peak be what is resident now; returns it in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


if __name__ == "__main__":
    main()
