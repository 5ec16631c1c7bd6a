"""What a preset takes on a GPU, by the estimate of the dry run at its longest rows."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AutoConfig

from ci_llm.config import load_config
from ci_llm.distributed.precision import Speed, chosen
from ci_llm.dry_run.inputs import CUDA_CONTEXT_BYTES
from ci_llm.run.start.cost_model import agent_copies, trace
from tests.support.children import ROOT

PRESETS: Final = ROOT / "configs"
SHARED_BY: Final = 4  # processes of a preset whose base is in shards


_FIGURES: Final = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings"),
)
#: Published figures of the bases of the presets: enough to estimate what a run needs.
KNOWN: Final[dict[str, dict[str, Any]]] = {
    name: dict(zip(_FIGURES, figures, strict=True))
    for name, *figures in (
        ("Qwen/Qwen2.5-0.5B", "qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, True),
        ("Qwen/Qwen2.5-3B", "qwen2", 151936, 2048, 11008, 36, 16, 2, 128, 32768, True),
        ("meta-llama/Llama-3.1-8B", "llama", 128256, 4096, 14336, 32, 32, 8, 128, 131072, False),
        ("meta-llama/Llama-3.1-70B", "llama", 128256, 8192, 28672, 80, 64, 8, 128, 131072, False),
        ("google/gemma-2-2b", "gemma2", 256000, 2304, 9216, 26, 8, 4, 256, 8192, True),
    )
}


def gigabytes(preset: str, traced_on: torch.device) -> float:
    """Of one process, with one pass for all agents, and with recomputed layers where the preset says auto."""
    config = load_config(PRESETS / preset)
    auto = chosen(config, Speed(True, "the hardware that it names has bf16")) | {"pass_per_agent": False}
    if config.use_gradient_checkpointing == "auto":
        auto["use_gradient_checkpointing"] = True
    config = config.model_copy(update=auto)
    shape, tokens = AutoConfig.for_model(**KNOWN[config.model_name]), config.max_seq_length
    sizes = {"rows": config.batch_size, "tokens": tokens, "targets": tokens // 2}
    processes = SHARED_BY if config.base_sharding == "layers" else 1
    found = trace(config, shape, traced_on, **sizes, processes=processes)
    # On a GPU the copy that a checkpoint is written from lies in the memory of the host.
    on_gpu = agent_copies(config, torch.device("cuda")) / agent_copies(config, traced_on)
    return (found.device_bytes + CUDA_CONTEXT_BYTES - found.agents_bytes * (1 - on_gpu)) / 1e9
