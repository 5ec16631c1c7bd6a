"""Toy bases and rows for tests: every family that matters, a few thousand parameters, random weights, no network."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from ci_llm.data.batches import Batch, pack

VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_SHORT_WINDOW = {**_GROUPED, "sliding_window": 8}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_GROUPED),
    "qwen2": lambda: Qwen2Config(**_GROUPED),
    "qwen3": lambda: Qwen3Config(**_GROUPED, head_dim=8),
    "gpt_neox": lambda: GPTNeoXConfig(**_COMMON),
    "phi": lambda: PhiConfig(**_COMMON),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "mistral": lambda: MistralConfig(**_SHORT_WINDOW),
    "gemma2": lambda: Gemma2Config(**_SHORT_WINDOW, head_dim=8, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(**_SHORT_WINDOW, head_dim=8, query_pre_attn_scalar=8),
    "granite": lambda: GraniteConfig(**_GROUPED, logits_scaling=3.0, embedding_multiplier=2.0),
    "cohere": lambda: CohereConfig(**_GROUPED, logit_scale=0.25),
    "bloom": lambda: BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0, attention_dropout=0
    ),
    "mixtral": lambda: MixtralConfig(**_GROUPED, num_local_experts=4),
    "gpt_oss": lambda: GptOssConfig(**_SHORT_WINDOW, head_dim=8, num_local_experts=4),
    "mamba": lambda: MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4
    ),
    "phimoe": lambda: PhimoeConfig(**_GROUPED, num_local_experts=4, router_jitter_noise=0.0, input_jitter_noise=0.0),
    "bert": lambda: BertConfig(**_COMMON),
}


def base(
    family: str = "llama", dtype: torch.dtype = torch.float64, seed: int = 0, layers: int | None = None
) -> PreTrainedModel:
    """A random base whose every parameter, norms and biases included, is away from its usual start."""
    torch.manual_seed(seed)
    eager = family == "gemma2"  # the fused kernels leave its soft cap out
    config = FAMILIES[family]()
    config.num_hidden_layers = layers or config.num_hidden_layers
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if eager else None)
    model = model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def example(length: int, supervised_from: int = 4, seed: int = 0) -> Any:
    """One tokenised row of random tokens; targets from position `supervised_from` on."""
    ids = np.random.default_rng(seed + 1000 * length).integers(3, VOCABULARY, length).astype(np.int32)
    return SimpleNamespace(input_ids=ids, supervised=np.arange(length) >= max(1, supervised_from))


def batch(lengths: tuple[int, ...] = (9, 17, 23, 1), supervised_from: int = 4) -> Batch:
    rows = [example(n, supervised_from, seed) for seed, n in enumerate(lengths)]
    return pack(rows, list(range(len(rows))))
