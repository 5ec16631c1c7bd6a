"""The frozen base with its tokenizer and fingerprint: from the hub, a folder, a GGUF file or a loaded model.

No code in a model's folder is executed. A loaded model is refused if it cannot be trained on. If its name does not give
the same weights, it is kept in the folder of the run.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final

import torch
import xxhash
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from ci_llm.base.gguf import gguf_file, plain_folder
from ci_llm.base.quantized import Quantization, QuantizedLinear, quantized_loading, stored_quantization
from ci_llm.base.sharded import ShardedLayers, gathered, is_sharded
from ci_llm.core.durable import new_folder, remove_tree
from ci_llm.core.quantities import size
from ci_llm.core.remote import may_be_on_hub
from ci_llm.core.run_folder import BASE_MODEL
from ci_llm.core.work import weights_counted
from ci_llm.distributed.precision import DTYPES
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import ConfigError, ModelError, first_line

logger = logging.getLogger(__name__)

#: The exceptions of loading an incomplete or damaged folder. RuntimeError is left out, as it may mean exhausted memory.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, ImportError, EOFError),
    *(SafetensorError, StrictDataclassError, UnpicklingError),
)

_AGENT = re.compile(r"\.lora_[AB]\.agent\d+$")


@dataclass(frozen=True)
class Base:
    """A frozen base.

    Attributes:
        name: the name that `from_pretrained` opens.
        fingerprint: the fingerprint of the weights, bit by bit.
        rounded_fingerprint: the fingerprint of the weights rounded to bf16, the same for every precision of loading.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    fingerprint: str
    rounded_fingerprint: str

    @property
    def pad_id(self) -> int:
        """The token id that fills padded rows; nothing reads it, so 0 serves a tokenizer without one."""
        return self.tokenizer.pad_token_id or 0

    @property
    def num_parameters(self) -> int:
        # Transformers counts the numbers of quantised layers rightly, except where their bytes are sharded.
        count = int(self.model.num_parameters())
        for layer in self.model.modules():
            if isinstance(layer, QuantizedLinear) and is_sharded(layer.stored):
                count += layer.in_features * layer.out_features - int(layer.stored.numel())
        return count


def short_name(name: str) -> str:
    """The name of a base, which is `embedded` for the shipped one, as its path differs between installations."""
    return "embedded" if Path(name).parts[-3:] == BASE_FOLDER.parts[-3:] else name


def opened_by(model_name: str) -> str:
    """The name that `from_pretrained` opens from any working directory; relative paths become absolute.

    Raises:
        ModelError: the name means a GGUF file that cannot be read.
    """
    if model_name == "embedded":
        return str(BASE_FOLDER)
    if file := gguf_file(model_name):
        return str(plain_folder(file))
    return str(Path(model_name).absolute()) if Path(model_name).is_dir() else model_name


def load_base(
    model_name: str,
    model_dtype: str | None = None,
    device: torch.device | str = "cpu",
    quantization: Quantization | None = None,
    layers: ShardedLayers | None = None,
) -> Base:
    """Load a causal language model.

    Args:
        model_name: hub id, folder, GGUF file, or `embedded` for the base shipped with this package.
        model_dtype: fp16, bf16, fp32 or fp64; None keeps the checkpoint's own on CUDA, and takes fp32 on a CPU, where
            16 bits are slow.
        device: the device of the model.
        quantization: store the linear layers in 4 bits (nf4, with double quantisation) or 8 (int8); None keeps them.
        layers: reads and keeps only this process's part of the layers; the call is then a collective.

    Raises:
        ModelError: the model is not found, not readable, not complete, or not a causal language model.

    Examples:
        >>> base = ci_llm.load_base("embedded")
        >>> base.num_parameters, type(base.model).__name__
        (877696, 'LlamaForCausalLM')
    """
    name = opened_by(model_name)
    config = load_architecture(model_name)
    dtype = _dtype(model_dtype, torch.device(device))
    stored = stored_quantization(config)
    how = quantized_loading(quantization, stored, model_name, device)
    if layers is not None:
        how["distributed_config"] = {}
    elif torch.device(device).type == "cuda":  # weights go there one by one, so the host never holds all
        how.setdefault("device_map", {"": device})
    try:
        with weights_counted():
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model, found = _loading_class(config, layers).from_pretrained(
                name,
                config=config,
                dtype=dtype,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `_require_whole` names them, with those that are missing
                attn_implementation=attention_of(config),
                **how,
            )
    except _UNREADABLE as error:
        raise load_error(model_name, error) from error
    require_tokenizer(model_name, tokenizer)
    _require_whole(model_name, [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])])
    model.config.use_cache = False
    if layers is not None:
        layers.after_loading(model)
        del model.config.distributed_config
    fingerprint, rounded = fingerprint_of(model), fingerprint_of(model, rounded=True)
    if not (quantization or stored):  # a quantised base was loaded onto its device
        model.to(device)
    return Base(model, tokenizer, name, fingerprint, rounded)


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of Transformers that opens a base; a multimodal base opens whole, and its text part is used."""
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


def attention_of(config: PreTrainedConfig) -> str | None:
    """The attention for a base: eager for a soft cap, which fused kernels silently leave out, or else None."""
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None


def _loading_class(config: PreTrainedConfig, layers: ShardedLayers | None) -> Any:
    """The class of Transformers that loads the base; with `layers`, it shards them before it reads weights.

    Transformers then reads only this process's part of every sharded weight.
    """
    auto = auto_class(config)
    if layers is None:
        return auto
    architecture = auto._model_mapping[type(config)]

    def prepare(_: type, distributed_config: Any, device_map: Any = None) -> tuple[Any, Any, None]:
        return distributed_config, device_map, None

    def distribute(_: type, model: PreTrainedModel, *__: Any) -> PreTrainedModel:
        layers.before_loading(model.requires_grad_(False))
        return model

    steps = {"prepare_distribute_model": classmethod(prepare), "maybe_distribute_model": classmethod(distribute)}
    # Transformers knows how a checkpoint names its weights by the names of class and module.
    return type(architecture.__name__, (architecture,), {**steps, "__module__": architecture.__module__})


def require_tokenizer(model_name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a base without tokenizer files, for which Transformers may make a tokenizer without any words."""
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        raise ModelError(
            "the base has no tokenizer: the one that Transformers makes for it knows special tokens only",
            where=model_name if model_name.endswith("=") else f"model_name: {model_name}",
            hint="save the tokenizer into the same folder (tokenizer.save_pretrained), or copy its tokenizer.json and "
            "tokenizer_config.json there",
        )


def _require_whole(model_name: str, absent: list[str]) -> None:
    """Refuse a base with missing weights, which Transformers fills with new random numbers at every start."""
    if absent:
        raise ModelError(
            f"{len(absent)} weights of the base are missing or of another shape, the first is {min(absent)}",
            where=f"model_name: {model_name}",
            hint="give the whole causal language model: config.json and weights that belong together",
        )


def _dtype(model_dtype: str | None, device: torch.device) -> torch.dtype | str:
    """The dtype to load in; by default the checkpoint's own on a GPU, and fp32 on a CPU, where 16 bits are slow."""
    if model_dtype is not None:
        return DTYPES[model_dtype]
    return "auto" if device.type == "cuda" else torch.float32


OTHER_BASES: Final = "choose a decoder such as Llama, Qwen, Mistral, Gemma, Phi or GPT-NeoX"
#: Families with a defect in Transformers 5.23 that no trial at the start detects (`benchmarks.families`).
UNSOUND: Final = {
    "moshi": "Moshi's cache forgets what lies before its window, and its attention mask does not: it would answer"
    " otherwise than it is trained"
}


def load_architecture(model_name: str) -> PreTrainedConfig:
    """The configuration of a base, without its weights.

    Raises:
        ModelError: the base is not found, not readable, or not a causal language model.
    """
    name = opened_by(model_name)
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(name, trust_remote_code=False)
    except _UNREADABLE as error:
        raise load_error(model_name, error) from error
    if config.is_encoder_decoder:
        raise _not_causal(model_name, config.model_type)
    if reason := UNSOUND.get(config.model_type):
        raise ModelError(reason, where=f"model_name: {model_name}", hint=OTHER_BASES)
    return config


def stored_dtype(name: str) -> torch.dtype:
    """The dtype of the weights in the files of a checkpoint, which is a folder or hub id."""
    try:
        return next(tensor.dtype for _, tensor in stored_tensors(name) if tensor.is_floating_point())
    except ModelError:  # the files are of another format
        return load_architecture(name).dtype or torch.float32


def positions_of(config: PreTrainedConfig) -> int | None:
    """The largest number of tokens in a row; None if the family has no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return None if limit is None else int(limit)


def require_positions(config: PreTrainedConfig, max_seq_length: int) -> None:
    """Refuse rows longer than the base's positions.

    Raises:
        ConfigError: the hint names the largest possible length.
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

    Agents on the base do not count, so attaching them does not change the fingerprint. For a quantised base, the files
    of its checkpoint and the kind of quantisation are hashed instead, because versions of bitsandbytes may round
    differently. With sharded layers the call is a collective, which gathers one tensor at a time.

    Args:
        rounded: round the values to bf16 first, the coarsest precision of loading. The same weights in half and in
            single precision then have the same fingerprint, because rounding twice changes nothing.
    """
    if kind := stored_quantization(model.config):
        start = f"{kind}\n" if rounded else f"{kind} of {model.dtype}\n"
        return _fingerprint(stored_tensors(model.name_or_path), rounded, start)
    return _fingerprint(sorted(weights_of(model).items()), rounded)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a base by the names that they have without agents."""
    named = model.state_dict().items()
    return {name.replace(".base_layer.", "."): tensor for name, tensor in named if not _AGENT.search(name)}


def _fingerprint(tensors: Iterable[tuple[str, Tensor]], rounded: bool, start: str = "") -> str:
    digest = hashlib.sha256(start.encode())
    for name, tensor in tensors:
        if rounded and tensor.is_floating_point():
            tensor = tensor.to(torch.bfloat16)
        raw = gathered(tensor.detach()).cpu().reshape(-1).view(torch.uint8).numpy().data
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {xxhash.xxh3_128_hexdigest(raw)}\n".encode())
    return digest.hexdigest()[:32]


def stored_tensors(name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in the safetensors files of a checkpoint, a folder or hub id, with its name, sorted by name.

    Raises:
        ModelError: the checkpoint has no safetensors files.
    """
    whole = cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    index = None if whole else cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if whole is None and index is None:
        raise ModelError(
            "the base has no safetensors files, which quantization reads",
            where=f"model_name: {name}",
            hint="load it with Transformers and write it once again with save_pretrained, which makes such files",
        )
    files = [whole] if whole else get_checkpoint_shard_files(name, index)[0]

    with ExitStack() as opened:
        places: dict[str, Any] = {}
        for file in files:
            tensors = opened.enter_context(safe_open(file, "pt"))
            places |= dict.fromkeys(tensors.keys(), tensors)
        # Sorted over all files, because the same weights may be split into files in another way.
        yield from ((name, places[name].get_tensor(name)) for name in sorted(places))


def _not_causal(model_name: str, kind: str) -> ModelError:
    return ModelError(
        f"the base is not a causal language model but {kind!r}",
        where=f"model_name: {model_name}",
        hint=OTHER_BASES,
    )


def load_error(model_name: str, error: Exception) -> ModelError:
    """The error for a base that Transformers could not load.

    Args:
        model_name: the name as it was given.
        error: the exception of Transformers.
    """
    text = str(error)
    if "Unrecognized configuration class" in text:
        kind = re.search(r"<class '[\w.]*?(\w+)'>", text)
        return _not_causal(model_name, kind.group(1) if kind else "unknown")
    what = f"the base model cannot be loaded: {first_line(error)}"
    place = Path(model_name)
    if place.exists():
        hint = "the folder needs config.json, model.safetensors and a tokenizer"
        if any((place / each / "adapter_config.json").is_file() for each in ("", "agent0")):
            what = "these are adapters and not a base"
            start = f"init_from={shlex.quote(model_name)}"
            hint = f"{start} starts agents from them, with model_name=the base that they were trained on"
        return ModelError(what, where=f"model_name: {model_name}", hint=hint)
    return ModelError(
        what if may_be_on_hub(model_name) else "there is no such folder",
        where=f"model_name: {model_name} (nothing of this name at {place.absolute()})",
        hint="give a folder that exists or a hub id that can be reached (or is in the local cache), or use "
        "model_name=embedded, which needs no network",
    )


#: The entries that may differ in two configurations of the same model.
_INCIDENTAL: Final = ("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache")


def require_usable(model: Any, tokenizer: Any) -> None:
    """Refuse a loaded model and tokenizer that cannot be trained on.

    Raises:
        ModelError: the hint says what to give instead.
    """
    if model is None or not isinstance(tokenizer, PreTrainedTokenizerBase):
        given = f"model= is a {type(model).__name__}, tokenizer= a {type(tokenizer).__name__}"
        both = "give both: what AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained return"
        raise _refused(f"a loaded model and its tokenizer go together: {given}", both)
    modules = [*model.modules()] if isinstance(model, nn.Module) else []
    if any(hasattr(module, "lora_A") or hasattr(module, "peft_config") for module in modules):
        alone = "give the base alone: model.merge_and_unload() of PEFT, or crowd.detach() of a Crowd; init_from=FOLDER"
        raise _refused("there are adapters on this model already", f"{alone} starts agents from saved adapters")
    if type(model) is not MODEL_FOR_CAUSAL_LM_MAPPING.get(type(getattr(model, "config", None)), None):
        causal = "give what AutoModelForCausalLM.from_pretrained returns"
        raise _refused(f"a {type(model).__name__} is not a causal language model of Transformers", causal)
    if reason := UNSOUND.get(model.config.model_type):
        raise _refused(reason, OTHER_BASES)
    places = {tensor.device for tensor in chain(model.parameters(), model.buffers())}
    if stored_quantization(model.config) or len(places) > 1 or torch.device("meta") in places:
        how = "quantised" if stored_quantization(model.config) else f"on {', '.join(sorted(map(str, places)))}"
        keys = "quantization='nf4' or base_sharding='layers'"
        raise _refused(f"this model is {how}", f"load it whole on one device, or give its name, model=NAME, and {keys}")
    require_tokenizer("model=", tokenizer)


def _refused(what: str, hint: str) -> ModelError:
    return ModelError(what, where="train(model=..., tokenizer=...)", hint=hint)


def name_of(model: PreTrainedModel, run_folder: Path) -> str:
    """The name that `from_pretrained` opens for this model.

    It is the model's own name, if that gives the same weights and configuration; or else the folder in which the run
    will keep the model.
    """
    name = str(model.name_or_path)
    return short_name(name) if name and holds(name, model) else str((run_folder / BASE_MODEL).absolute())


def holds(name: str, model: PreTrainedModel) -> bool:
    """True if `from_pretrained(name)` gives exactly these weights, in the precision that they have here."""
    own, found = weights_of(model), set[str]()
    try:
        if _described(load_architecture(name)) != _described(model.config):
            return False
        for key, tensor in stored_tensors(name):
            if key not in own or not torch.equal(tensor.to(own[key]), own[key]):
                return False
            found.add(key)
    except (ModelError, OSError, ValueError):
        return False
    tied = {own[key].data_ptr() for key in found}
    return all(key in found or tensor.data_ptr() in tied for key, tensor in own.items())


def _described(config: PreTrainedConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _INCIDENTAL}


def on_same_weights(model: PreTrainedModel, instead: Mapping[int, Any] = {}) -> PreTrainedModel:
    """A frozen copy with its own modules and configuration, on the memory of the model's weights.

    Args:
        instead: replacements in the copy for objects of the model, by their `id`.
    """
    known = {id(weight): nn.Parameter(weight.data, requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, {**known, **{id(buffer): buffer for buffer in model.buffers()}, **instead})


def base_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> Base:
    """The base of a run, on the weights of a loaded model, which does not change."""
    model = on_same_weights(model).eval()
    if attention := attention_of(model.config):
        model.set_attn_implementation(attention)
    model.config.use_cache = False
    prints = fingerprint_of(model), fingerprint_of(model, rounded=True)
    return Base(model, copy.deepcopy(tokenizer), opened_by(name), *prints)


def keep(base: Base, run_folder: Path) -> None:
    """Write the base into the folder of its run, if its name means that folder and it is not there yet."""
    folder = (run_folder / BASE_MODEL).absolute()
    if base.name != str(folder) or holds(str(folder), base.model):
        return
    if folder.exists():  # of a run that never came to a checkpoint
        remove_tree(folder)
    with new_folder(folder) as draft, weights_counted():
        base.model.save_pretrained(draft, state_dict=weights_of(base.model))
        base.tokenizer.save_pretrained(draft)
    stored = sum(path.stat().st_size for path in folder.iterdir())
    logger.info(f"model     no folder has its weights, so that they are kept in {folder}, {size(stored)}")
