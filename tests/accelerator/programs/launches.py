"""What a step of four agents starts on the device: one pass for all, a thin Qwen2 of 24 layers in bf16.

`launches.py VOCABULARY ... [each] [short]` prints it as JSON for each of these vocabularies, with four rows and with
eight. The word `each` takes a pass per agent, as `deterministic: true` does; with `short` rows a simulation is fast.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks import harness
from benchmarks.step import Ours
from tools.testbed.accelerator.face import TRACE


def step(vocabulary: int, rows: int, *, pass_per_agent: bool, layers: int = 24) -> dict[str, Any]:
    """What one step starts on the device."""
    torch.manual_seed(0)
    harness.VOCABULARY = min(vocabulary, harness.VOCABULARY)  # of which the rows are
    shape = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    with torch.device("cuda"):
        base = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    base.config.use_cache = False
    run = Ours(base)
    run.crowd.storage.pass_per_agent = pass_per_agent
    run.crowd.base_model.choose_attention()
    for batch in harness.batches(None, rows, 2):
        TRACE.phase = f"{vocabulary} words, {rows} rows, {batch.sample_ids}"
        run.move(batch.pinned())
    phase, TRACE.phase = TRACE.phase, "between"
    own = Counter({what: count for (name, what), count in TRACE.launches.items() if name == phase})
    waits = [place for (name, _, place), count in TRACE.waits.items() if name == phase for _ in range(count)]
    return {"launches": own.total(), "waits": waits, "most": own.most_common(12)}


numbers, each = [word for word in sys.argv[1:] if word.isdecimal()], "each" in sys.argv
if "short" in sys.argv:
    harness.LENGTHS = "24:8 31:9 17:5 12:3"
found = {f"{words}/{rows}": step(int(words), rows, pass_per_agent=each) for words in numbers for rows in (4, 8)}
print(f"\nlaunches {json.dumps(found)}")
