"""An adapter as a GGUF file, which llama.cpp and Ollama add to a base of the same weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from ci_llm.crowd.merging import Adapter
from ci_llm.errors import ModelError

#: Architectures whose linear layers llama.cpp's converter keeps as they are.
_AS_THEY_ARE: Final = frozenset(
    {"cohere", "gemma", "gemma2", "gemma3_text", "olmo2", "phi3", "qwen2", "qwen3", "starcoder2"}
)
#: Architectures whose rows of queries and keys the converter reorders, from halves of a head to pairs.
_IN_PAIRS: Final = frozenset({"granite", "llama", "mistral", "smollm3"})
#: llama.cpp's names of architectures where they differ from those of Transformers.
_NAMES: Final = {"cohere": "command-r", "gemma3_text": "gemma3", "mistral": "llama"}


def require_convertible(config: PreTrainedConfig) -> str:
    """llama.cpp's name of the base's architecture. Raises ModelError if its layout of the weights is not known here."""
    kind: str = config.model_type
    known = _AS_THEY_ARE | _IN_PAIRS
    if kind not in known:
        raise ModelError(
            f"how llama.cpp orders the weights of {kind!r} is not known",
            where="--format gguf",
            hint=f"it is known of {', '.join(sorted(known))}; for others, --into-base writes"
            " a folder that llama.cpp's convert_hf_to_gguf.py reads",
        )
    return _NAMES.get(kind, kind)


def write_gguf_adapter(path: Path, adapter: Adapter, config: PreTrainedConfig) -> None:
    """Write one adapter; its numbers are fp32.

    Args:
        config: the configuration of the base.

    Raises:
        ModelError: llama.cpp's layout of the base, or its name of a module, is not known. OSError: the disk refuses.
    """
    from gguf import GGUFType, GGUFWriter, Keys

    architecture = require_convertible(config)
    tensors = _tensors(adapter, config, architecture)
    writer = GGUFWriter(path, architecture)
    writer.add_type(GGUFType.ADAPTER)
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, float(adapter.config["lora_alpha"]))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _tensors(adapter: Adapter, config: PreTrainedConfig, architecture: str) -> dict[str, np.ndarray]:
    """The tensors by llama.cpp's names; as it scales by alpha / rank, B takes up PEFT's factor of rsLoRA."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    known = {name: key for key, name in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(known[architecture], config.num_hidden_layers)
    heads = config.num_attention_heads
    in_pairs = {} if config.model_type not in _IN_PAIRS else {"q": heads, "k": config.num_key_value_heads or heads}
    found: dict[str, np.ndarray] = {}
    for module in adapter.modules:
        name = names.get_name(module)
        if name is None:
            raise ModelError(
                f"llama.cpp has no tensor for {module}",
                where=f"--format gguf, {architecture}",
                hint="train agents on the projections of attention and feed-forward: lora_target_modules=all-linear",
            )
        lower, upper = (factor.float() for factor in adapter.factors(module))
        if adapter.config.get("use_rslora"):
            upper = upper * lower.shape[0] ** 0.5
        if kind := re.search(r"\.attn_([qk])$", name):
            upper = _paired(upper, in_pairs.get(kind[1]))
        for half, tensor in (("a", lower), ("b", upper)):
            found[f"{name}.weight.lora_{half}"] = tensor.contiguous().cpu().numpy()
    return found


def _paired(rows: Tensor, heads: int | None) -> Tensor:
    """Rows with each head reordered from [first half, second half] to [pair, pair, ...]; unchanged without `heads`."""
    if heads is None:
        return rows
    pairs: Tensor = rows.unflatten(0, (heads, 2, -1)).transpose(1, 2)
    return pairs.flatten(0, 2)
