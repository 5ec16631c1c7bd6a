"""What a base in 4 or 8 bits costs: bytes of the base and CPU seconds of a step beside the dense base, paired.

`python -m benchmarks.quantized [--rounds N]`: a random Llama of 15 million parameters, four agents, one thread.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ci_llm import Crowd, LoraSettings, load_base, pack
from ci_llm.embedded import BASE_FOLDER

KINDS: Final = (None, "int8", "nf4")
ROWS, TOKENS = 2, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="paired rounds")
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        _write_base(Path(folder))
        crowds = {kind: _crowd(folder, kind) for kind in KINDS}
    batch = _batch()
    seconds: dict[Any, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(rounds + 1):
        for kind, (crowd, _) in crowds.items():
            seconds[kind].append(_step(crowd, batch))
    dense_bytes = crowds[None][1]
    print("base    bytes of the base   of dense   CPU s per step   of dense")
    for kind, (_, size) in crowds.items():
        median = statistics.median(seconds[kind][1:])  # the first round warms up
        share = statistics.median(a / b for a, b in zip(seconds[kind][1:], seconds[None][1:], strict=True))
        print(f"{kind or 'dense':6s}  {size:17,d}   {size / dense_bytes:8.3f}   {median:14.2f}   {share:8.2f}")


def _write_base(folder: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1024, num_hidden_layers=7, num_attention_heads=6
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(BASE_FOLDER).save_pretrained(folder)


def _crowd(folder: str, kind: Any) -> tuple[Crowd, int]:
    """The crowd in training mode, and the bytes that its base takes."""
    model = load_base(folder, "fp32", "cpu", kind).model
    crowd = Crowd(model, LoraSettings(num_agents=4, rank=16), folder)
    own = {id(p): p.nbytes for name, p in crowd.named_parameters() if ".lora_" not in name}
    scales = sum(_scales(layer) for layer in crowd.modules() if hasattr(layer, "stored"))
    return crowd.train(), sum(own.values()) + scales


def _scales(layer: Any) -> int:
    state = getattr(layer.stored, "quant_state", None)
    return int(layer.scale.nbytes if state is None else state.absmax.nbytes + state.state2.absmax.nbytes)


def _batch() -> Any:
    numbers = np.random.default_rng(0)
    learned = np.arange(TOKENS) >= TOKENS // 2
    rows = [SimpleNamespace(input_ids=numbers.integers(4096, size=TOKENS), supervised=learned) for _ in range(ROWS)]
    return pack(rows, range(ROWS))


def _step(crowd: Crowd, batch: Any) -> float:
    crowd.agents.begin_step(0)
    start = time.process_time()
    crowd(batch).loss.backward()
    return time.process_time() - start


if __name__ == "__main__":
    main()
