"""Tiny GGUF files: random Llama and Qwen2 models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.convert_slow_tokenizer import bytes_to_unicode

TOKENS = [*bytes_to_unicode().values(), "Ġa", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 257,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config}
Kind = gguf.GGMLQuantizationType


def tiny_model(architecture: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose numbers fit into bf16, as those of published models do."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[architecture](**_SHAPE))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight)).copy_(weight.bfloat16())
    return model.eval()


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key projection as llama.cpp's converter of Llama orders them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = Kind.Q8_0,
    template: str | None = TEMPLATE,
    leave_out: str = "",
    general: str | None = None,
) -> PreTrainedModel:
    """Write a random model, and return it.

    Args:
        kind: of the weight matrices; others are fp32.
        leave_out: tensors and metadata whose names begin so.
        general: `general.architecture`, if it is not true.
    """
    model = tiny_model(architecture)
    config = model.config
    writer = gguf.GGUFWriter(path, general or architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if leave_out != "tokenizer":
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm" if architecture == "llama" else "qwen2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * 257 + [3] * 3)
        writer.add_token_merges(["Ġ a"])
        writer.add_bos_token_id(257)
        writer.add_eos_token_id(258)
        writer.add_pad_token_id(259)
        writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(
        {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[architecture], config.num_hidden_layers
    )
    for name, tensor in model.state_dict().items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        data = tensor.numpy()
        if architecture == "llama" and ("attn_q." in stored or "attn_k." in stored):
            heads = config.num_attention_heads if "attn_q." in stored else config.num_key_value_heads
            data = permuted(data, heads)
        if not (leave_out and stored.startswith(leave_out)):
            how = kind if data.ndim == 2 else Kind.F32
            writer.add_tensor(stored, gguf.quantize(data, how), raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
