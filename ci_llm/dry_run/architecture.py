"""The architecture of a base, even without its weights and without the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from ci_llm.crowd.base import load_architecture, positions_of
from ci_llm.errors import ModelError

#: Published figures of the bases of the presets: enough to estimate what a run needs.
KNOWN: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.1-70B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "google/gemma-2-2b": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Shape:
    """An architecture, and its source.

    Attributes:
        from_hub: the name is a hub id, so that missing weights can be downloaded.
        offline: why the hub gave nothing for this name; `config` then comes from `KNOWN`.
    """

    config: PreTrainedConfig
    from_hub: bool
    offline: ModelError | None = None

    @property
    def positions(self) -> int | None:
        """Tokens that a row can have; None where the family has no limit."""
        return positions_of(self.config)


def find_shape(model_name: str) -> Shape:
    """The architecture called `model_name`.

    Raises:
        ModelError: nothing is known of it, or it is no causal language model.
    """
    from_hub = model_name != "embedded" and not Path(model_name).exists()
    try:
        return Shape(load_architecture(model_name), from_hub)
    except ModelError as error:
        if model_name not in KNOWN:
            raise
        return Shape(AutoConfig.for_model(**KNOWN[model_name]), from_hub, offline=error)
