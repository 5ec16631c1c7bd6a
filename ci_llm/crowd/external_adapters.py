"""Adapters of other programs, and of the first CI-LLM, read from the folder that a user names.

    adapter_config.json, adapter_model.safetensors     PEFT; or adapter_model.bin
    agent0/, agent1/, ...                              PEFT, one folder per agent
    ci_llm_meta_config.json, agent<i>_weights.pth      the first CI-LLM: the files that its code names
    ci_llm_meta_config.json, model.safetensors         the same: the whole model with the adapters, as it really saves

Adapters of every kind become `ExternalAdapter`s (`read_adapters`).

Nothing is executed: a pickle is read with `weights_only=True`, which allows tensors and containers only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from ci_llm.checkpoints.folders import FINAL
from ci_llm.crowd.given_path import CONFIG, META_FILE
from ci_llm.errors import ModelError
from ci_llm.lora.heads import SCORE

WHOLE_MODEL = "model.safetensors"

_TENSOR = re.compile(r".*\bbase_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.(?P<agent>\w+))?\.weight")

_FOLDER = re.compile(r"agent(\d+)")

# If the name of one agent begins with that of another, older PEFT put tensors of agent10 into the files of agent1.
_LEAKED = re.compile(r".*\.lora_[AB]\d+\.weight")

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


@dataclass(frozen=True)
class ExternalAdapter:
    """One adapter, in the form of PEFT's files.

    Attributes:
        source: the folder it was read from.
        tensors: `base_model.model.<module>.lora_<A|B>.weight` -> A [r, in] or B [out, r]; and the head, if it has one.
        rank: r.
        alpha: `lora_alpha`.
        base_name: the base that it names; None if it names none.
        prompts: the form of prompts in its training, as far as it is known.
    """

    source: Path
    tensors: Mapping[str, Tensor]
    rank: int
    alpha: float
    dropout: float
    use_rslora: bool
    base_name: str | None
    prompts: Literal["chat", "text"]

    @property
    def modules(self) -> frozenset[str]:
        """Names of the adapted modules of the base."""
        return frozenset(match["module"] for name in self.tensors if (match := _TENSOR.fullmatch(name)))


def read_adapters(source: Path) -> list[ExternalAdapter]:
    """Every adapter of a folder, in the order of its agents.

    Raises:
        ModelError: there is no adapter, one cannot be read, or one is no plain LoRA.
    """
    folders = [source] if (source / CONFIG).is_file() else _numbered(source)
    if not folders and (source / META_FILE).is_file():
        return _read_original(source)
    if not folders:
        raise ModelError(
            "there is no adapter here" if source.is_dir() else "there is no such folder",
            where=str(source),
            hint=f"this is the folder of a run: give {source / FINAL}"
            if _numbered(source / FINAL)
            else f"give a folder that holds {CONFIG}, or agent0, agent1, ... that do, or {META_FILE}",
        )
    return [_read_peft(folder) for folder in folders]


def _numbered(source: Path) -> list[Path]:
    """The folders of the agents. A gap in the numbers becomes an error, unless a run has stopped the agents in it."""
    numbers = [match[1] for file in source.glob(f"*/{CONFIG}") if (match := _FOLDER.fullmatch(file.parent.name))]
    meta = source / META_FILE
    if numbers and meta.is_file() and "folders" in _read_json(meta):
        return [source / f"agent{k}" for k in sorted(map(int, numbers))]
    return [source / f"agent{k}" for k in range(len(numbers))]


def _read_peft(folder: Path) -> ExternalAdapter:
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
    file = next((folder / f"adapter_model{end}" for end in (".safetensors", ".bin") if _has(folder, end)), None)
    if file is None:
        raise ModelError("the adapter has no weights", where=str(folder), hint="copy adapter_model.safetensors here")
    tensors = _read_tensors(file)
    adapter = _adapter(config, folder, tensors, config.get("base_model_name_or_path"), "chat")
    if other := sorted(name for name in tensors if name != SCORE and not _TENSOR.fullmatch(name)):
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise ModelError(
            f"agents are LoRA of linear layers, and this adapter also has {other[0]}{more}",
            where=str(file),
            hint="its vocabulary was changed, or embeddings or output head trained: give one that leaves them alone",
        )
    return adapter


def _has(folder: Path, ending: str) -> bool:
    return (folder / f"adapter_model{ending}").is_file()


def _read_original(source: Path) -> list[ExternalAdapter]:
    meta = _read_json(source / META_FILE)
    count = meta.get("K_agents")
    if not isinstance(count, int) or count < 1:
        raise ModelError(
            "the number of agents (K_agents) is missing or below 1", where=str(source / META_FILE), hint=_WHOLE
        )
    files = [source / f"agent{k}_weights.pth" for k in range(count)]
    missing = [file.name for file in files if not file.is_file()]
    if not missing:
        agents = [{n: t for n, t in _read_tensors(file).items() if not _LEAKED.fullmatch(n)} for file in files]
    elif len(missing) == count and (source / WHOLE_MODEL).is_file():
        agents = _agents_of(source / WHOLE_MODEL, count)
    else:
        raise ModelError(
            f"weights of {len(missing)} of {count} agents are missing, the first is {missing[0]}",
            where=str(source),
            hint=f"copy them, or the {WHOLE_MODEL} that Accelerate saved, into this folder",
        )
    return [_adapter(meta, source, tensors, None, "text") for tensors in agents]


def _agents_of(file: Path, count: int) -> list[dict[str, Tensor]]:
    """The adapters in a file with the weights of a whole model; only their tensors are read."""
    agents: list[dict[str, Tensor]] = [{} for _ in range(count)]
    places = {f"agent{k}": agent for k, agent in enumerate(agents)}
    try:
        with safetensors.safe_open(file, "pt") as model:
            for name in model.keys():  # noqa: SIM118 - safetensors' handle has keys() and is not iterable
                match = _TENSOR.fullmatch(name)
                if match and match["agent"] in places:
                    places[match["agent"]][_peft_name(match)] = model.get_tensor(name)
    except (OSError, safetensors.SafetensorError) as error:
        raise _unreadable(file, error) from error
    return agents


def _peft_name(match: re.Match[str]) -> str:
    return f"base_model.model.{match['module']}.lora_{match['side']}.weight"


def _adapter(
    config: Mapping[str, Any],
    source: Path,
    tensors: Mapping[str, Tensor],
    base_name: str | None,
    prompts: Literal["chat", "text"],
) -> ExternalAdapter:
    try:
        adapter = ExternalAdapter(
            source,
            tensors,
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout") or 0.0),
            use_rslora=bool(config.get("use_rslora", False)),
            base_name=base_name,
            prompts=prompts,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the adapter's settings cannot be read: {error!r}", where=str(source), hint=_WHOLE) from error
    if not adapter.modules:
        raise ModelError("there is no LoRA tensor in it", where=str(source), hint=_WHOLE)
    return adapter


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)  # type: ignore[no-any-return]
        value = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle can make torch.load raise an exception of any type
        raise _unreadable(file, error) from error
    if not isinstance(value, dict) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        raise ModelError("the file holds no dict of tensors", where=str(file), hint=_WHOLE)
    return value


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(file, error) from error
    if not isinstance(value, dict):
        raise ModelError("the file holds no JSON object", where=str(file), hint=_WHOLE)
    return value


_WHOLE = "give the complete folder as it was saved"


def _unreadable(file: Path, error: Exception) -> ModelError:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return ModelError(f"{file.name} cannot be read: {text[0]}", where=str(file), hint=_WHOLE)
