"""Adapters as files: PEFT's folder is read, verified where it is committed, and written; llama.cpp's GGUF is written.

    adapter_config.json, adapter_model.safetensors     PEFT; or adapter_model.bin
    agent0/, agent1/, ...                              PEFT, one folder per agent

No code is executed: a pickle is read with `weights_only=True`, which allows tensors and containers only.

Legend: r rank, A [r, in], B [out, r].
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ci_llm.base.targets import peft_targets
from ci_llm.checkpoints.layout import FINAL
from ci_llm.checkpoints.manifest import MANIFEST, name_unlisted, read_file, read_manifest
from ci_llm.core.durable import read_object
from ci_llm.crowd.given_path import CONFIG, META_FILE
from ci_llm.errors import CiLlmError, ModelError, first_line
from ci_llm.lora.heads import SCORE
from ci_llm.lora.settings import LoraSettings


def tensor_name(module: str, side: str) -> str:
    """PEFT's name of the factor A or B of a module."""
    return f"base_model.model.{module}.lora_{side}.weight"


@dataclass(frozen=True)
class Adapter:
    """One adapter in the form of PEFT's files.

    Attributes:
        config: the content of `adapter_config.json`.
        tensors: the content of `adapter_model.safetensors`, with a head if it has one.
        source: the folder that it was read from.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    source: Path = Path()

    @property
    def rank(self) -> int:
        return int(self.config["r"])

    @property
    def alpha(self) -> float:
        return float(self.config["lora_alpha"])

    @property
    def dropout(self) -> float:
        return float(self.config.get("lora_dropout") or 0.0)

    @property
    def use_rslora(self) -> bool:
        return bool(self.config.get("use_rslora"))

    @property
    def scaling(self) -> float:
        """The factor of the product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def modules(self) -> list[str]:
        """Names of the adapted modules of the base."""
        ends = ".lora_A.weight"
        return [name.removeprefix("base_model.model.").removesuffix(ends) for name in self.tensors if ends in name]

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r] of a module."""
        return self.tensors[tensor_name(module, "A")], self.tensors[tensor_name(module, "B")]

    def files(self) -> dict[str, bytes]:
        """The content of its folder by the names of the files."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        return {
            CONFIG: json.dumps(dict(self.config), indent=2).encode(),
            "adapter_model.safetensors": safetensors.torch.save(tensors, {"format": "pt"}),
        }


def settings_of(base: PreTrainedModel, agents: Sequence[Adapter]) -> LoraSettings:
    """The settings of a crowd of these agents, which have one shape."""
    targets = peft_targets(base, agents[0].modules)
    first = agents[0]
    return LoraSettings(
        num_agents=len(agents),
        rank=first.rank,
        alpha=first.alpha,
        dropout=first.dropout,
        use_rslora=first.use_rslora,
        target_modules=tuple(targets["target_modules"]),
        layers=tuple(targets.get("layers_to_transform", ())) or "all",
    )


# Reading

_TENSOR = re.compile(r"base_model\.model\..+\.lora_[AB]\.weight")

_FOLDER = re.compile(r"agent(\d+)")

# Keys of adapter_config.json that change what an adapter computes, with their values in plain LoRA (here: empty).
_PLAIN: dict[str, Any] = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(
    (
        "rank_pattern",
        "alpha_pattern",
        "layer_replication",
        "modules_to_save",
        "lora_bias",
        "use_dora",
        "use_qalora",
        "use_bdlora",
        "alora_invocation_tokens",
        "arrow_config",
        "kasa_config",
        "monteclora_config",
    )
)

# Initialisations that subtract from the base what they put into the adapter: on the original base it is another model.
_CHANGES_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


#: Modules that PEFT saves whole with an adapter for sequence classification; the base has one of them.
_HEADS = {"score", "classifier"}


def read_adapters(source: Path) -> list[Adapter]:
    """Every adapter of a folder, in the order of its agents; of a committed folder the verified files alone.

    Raises:
        ModelError: there is no adapter, one cannot be read, or one is not plain LoRA.
        DamagedCheckpoint: the folder is committed, and a file differs from its digest in the manifest.
    """
    with listed_files(source) as place:
        try:
            found = _read_adapters(place)
        except CiLlmError as error:  # names the folder that the user named, and not the copy
            error.where, error.hint = (
                text and text.replace(str(place), str(source)) for text in (error.where, error.hint)
            )
            raise
        return [replace(adapter, source=source / adapter.source.relative_to(place)) for adapter in found]


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files by their names below `folder`."""
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@contextmanager
def listed_files(folder: Path) -> Iterator[Path]:
    """Yield a copy of the adapters and tokenizers of a committed folder, or of a folder in one: verified, and no more.

    Any other folder, such as PEFT's, has no list of its files and is yielded itself.

    Raises:
        DamagedCheckpoint: a file differs from its digest in the manifest.
    """
    root = next((each for each in (folder, folder.parent) if (each / MANIFEST).is_file()), None)
    if root is None:
        yield folder
        return
    manifest = read_manifest(root)
    name_unlisted(root, manifest)
    listed = {n: record for n, record in manifest.files.items() if n.startswith("agent") or n == META_FILE}
    with TemporaryDirectory() as scratch:
        write_files(Path(scratch), {name: read_file(root, name, record) for name, record in listed.items()})
        yield Path(scratch, folder.relative_to(root))


def _read_adapters(source: Path) -> list[Adapter]:
    folders = [source] if (source / CONFIG).is_file() else _numbered(source)
    if not folders:
        raise ModelError(
            "there is no adapter here" if source.is_dir() else "there is no such folder",
            where=str(source),
            hint=f"this is the folder of a run: give {source / FINAL}"
            if _numbered(source / FINAL)
            else f"give a folder that holds {CONFIG}, or agent0, agent1, ... that do",
        )
    return [_read_peft(folder) for folder in folders]


def _numbered(source: Path) -> list[Path]:
    """The agents' folders. A gap in the numbers gives a missing folder, unless a run has stopped those agents."""
    numbers = [match[1] for file in source.glob(f"*/{CONFIG}") if (match := _FOLDER.fullmatch(file.parent.name))]
    meta = source / META_FILE
    if numbers and meta.is_file() and "folders" in _read_json(meta):
        return [source / f"agent{k}" for k in sorted(map(int, numbers))]
    return [source / f"agent{k}" for k in range(len(numbers))]


def _read_peft(folder: Path) -> Adapter:
    config = _read_json(folder / CONFIG)
    if {*(config.get("modules_to_save") or ())} <= _HEADS:
        config = {**config, "modules_to_save": None}
    odd = [f"{key}: {config[key]}" for key, value in _PLAIN.items() if config.get(key) and config[key] != value]
    if str(config.get("init_lora_weights")).startswith(_CHANGES_THE_BASE):
        odd.append(f"init_lora_weights: {config['init_lora_weights']}, which changes the base")
    if odd:
        raise ModelError(
            f"agents are plain LoRA of one rank, and this adapter has {', '.join(odd)}",
            where=str(folder / CONFIG),
            hint="give a plain LoRA adapter; PEFT's save_pretrained converts PiSSA, OLoRA and CorDA",
        )
    files = (folder / f"adapter_model{ending}" for ending in (".safetensors", ".bin"))
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ModelError("the adapter has no weights", where=str(folder), hint="copy adapter_model.safetensors here")
    tensors = _read_tensors(file)
    adapter = Adapter(config, tensors, folder)
    try:
        _ = adapter.rank, adapter.alpha, adapter.dropout
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the adapter's settings cannot be read: {error!r}", where=str(folder), hint=_WHOLE) from error
    if not adapter.modules:
        raise ModelError("there is no LoRA tensor in it", where=str(folder), hint=_WHOLE)
    other = sorted(name for name in tensors if name != SCORE and not _TENSOR.fullmatch(name))
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise ModelError(
            f"agents are LoRA of linear layers, and this adapter also has {other[0]}{more}",
            where=str(file),
            hint="its vocabulary was changed, or embeddings or output head trained: give one that leaves them alone",
        )
    return adapter


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)  # type: ignore[no-any-return]
        value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can make torch.load raise an exception of any type
        raise _unreadable(file, error) from error
    if not isinstance(value, dict) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        raise ModelError("the file holds no dict of tensors", where=str(file), hint=_WHOLE)
    return value


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error


_WHOLE = "give the complete folder as it was saved"


def _unreadable(file: Path, error: Exception) -> ModelError:
    return ModelError(f"{file.name} cannot be read: {first_line(error)}", where=str(file), hint=_WHOLE)


# The form of llama.cpp and Ollama

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
