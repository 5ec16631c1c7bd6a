"""The frozen base model and its tokenizer: found, loaded, fingerprinted. Nothing is executed from a model's folder."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
import xxhash
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from ci_llm.cluster.hub import may_be_on_hub
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import ConfigError, ModelError

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

#: What a folder raises that is not whole. No RuntimeError: memory may have run out, which is no fault of the folder.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, ImportError, EOFError),
    *(SafetensorError, StrictDataclassError, UnpicklingError),
)

_AGENT = re.compile(r"\.lora_[AB]\.agent\d+$")


@dataclass(frozen=True)
class Base:
    """A frozen base.

    Attributes:
        name: what `from_pretrained` opens.
        fingerprint: of its weights, bit by bit.
        rounded_fingerprint: of its weights rounded to bf16, which is the same in whatever precision they were loaded.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    fingerprint: str
    rounded_fingerprint: str

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


def short_name(name: str) -> str:
    """`embedded` for the base shipped with this package: its path is another one wherever the package is installed."""
    return "embedded" if Path(name).parts[-3:] == BASE_FOLDER.parts[-3:] else name


def load_base(model_name: str, model_dtype: str | None = None, device: torch.device | str = "cpu") -> Base:
    """Load a causal language model by hub id or folder; `embedded` is the one shipped with this package.

    Args:
        model_dtype: fp16, bf16, fp32 or fp64; None keeps the checkpoint's own on CUDA and takes fp32 on a CPU.

    Raises:
        ModelError: not found, not readable, not whole, or not a causal language model.
    """
    name = str(BASE_FOLDER) if model_name == "embedded" else model_name
    transformers_logging.disable_progress_bar()
    config = load_architecture(model_name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model, found = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=_dtype(model_dtype, torch.device(device)),
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to be named below, with those that are missing
            # The fused kernels leave out Gemma 2's soft cap without a word.
            attn_implementation="eager" if getattr(config, "attn_logit_softcapping", None) else None,
        )
    except _UNREADABLE as error:
        raise explained(model_name, error) from error
    _require_whole(model_name, [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    model.config.use_cache = False
    fingerprint, rounded = fingerprint_of(model), fingerprint_of(model, rounded=True)
    return Base(model.to(device), tokenizer, name, fingerprint, rounded)


def _require_whole(model_name: str, absent: list[str]) -> None:
    """Transformers fills what it does not find with random numbers; agents would learn on another base every time."""
    if absent:
        raise ModelError(
            f"{len(absent)} weights of the base are missing or of another shape, the first is {min(absent)}",
            where=f"model_name: {model_name}",
            hint="give the whole causal language model: config.json and weights that belong together",
        )


def _dtype(model_dtype: str | None, device: torch.device) -> torch.dtype | str:
    """The checkpoint's own precision is for GPUs: half of it is slow on many CPUs."""
    if model_dtype is not None:
        return DTYPES[model_dtype]
    return "auto" if device.type == "cuda" else torch.float32


def load_architecture(model_name: str) -> PreTrainedConfig:
    """The shape of a base, without its weights.

    Raises:
        ModelError: not found, not readable, or not a causal language model.
    """
    name = str(BASE_FOLDER) if model_name == "embedded" else model_name
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except _UNREADABLE as error:
        raise explained(model_name, error) from error
    if config.is_encoder_decoder:
        raise _not_causal(model_name, config.model_type)
    return config


def positions_of(config: PreTrainedConfig) -> int | None:
    """Tokens that a row can have; None where the family has no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def require_positions(config: PreTrainedConfig, max_seq_length: int) -> None:
    """Refuse rows that the base has no positions for.

    Raises:
        ConfigError: with the length that it can take.
    """
    limit = positions_of(config)
    if limit is not None and max_seq_length > limit:
        raise ConfigError(
            f"rows of up to {max_seq_length} tokens, but the base has {limit} positions",
            where=f"max_seq_length: {max_seq_length}",
            hint=f"max_seq_length={limit}",
        )


def fingerprint_of(model: PreTrainedModel, *, rounded: bool = False) -> str:
    """Digest of every parameter's name, shape, dtype and bytes: the same weights give the same fingerprint.

    Agents on the base do not count, so that it has the same one before and after they are attached.

    Args:
        rounded: of the values in bf16, the coarsest precision a base is loaded in: half and single precision of the
            same weights then agree, as rounding what is rounded already changes nothing.
    """
    digest = hashlib.sha256()
    named = model.state_dict().items()
    base = {name.replace(".base_layer.", "."): tensor for name, tensor in named if not _AGENT.search(name)}
    for name, tensor in sorted(base.items()):
        if rounded and tensor.is_floating_point():
            tensor = tensor.to(torch.bfloat16)
        raw = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(raw)}\n".encode())
    return digest.hexdigest()[:32]


def _not_causal(model_name: str, kind: str) -> ModelError:
    return ModelError(
        f"the base is no causal language model but {kind!r}",
        where=f"model_name: {model_name}",
        hint="choose a decoder such as Llama, Qwen, Mistral, Gemma, Phi or GPT-NeoX",
    )


def explained(model_name: str, error: Exception) -> ModelError:
    """What Transformers could not load, in a sentence with a hint."""
    text = str(error).strip()
    if "Unrecognized configuration class" in text:
        kind = re.search(r"<class '[\w.]*?(\w+)'>", text)
        return _not_causal(model_name, kind.group(1) if kind else "unknown")
    what = f"the base model cannot be loaded: {text.splitlines()[0] if text else type(error).__name__}"
    place = Path(model_name)
    if place.exists():
        hint = "the folder needs config.json, model.safetensors and a tokenizer"
        return ModelError(what, where=f"model_name: {model_name}", hint=hint)
    return ModelError(
        what if may_be_on_hub(model_name) else "there is no such folder",
        where=f"model_name: {model_name} (nothing of this name at {place.absolute()})",
        hint="give a folder that exists or a hub id that can be reached (or is in the local cache), or use "
        "model_name=embedded, which needs no network",
    )
