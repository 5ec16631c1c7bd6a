"""Open a saved crowd: from a checkpoint's folder to base, agents and prompts, each file verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ci_llm.checkpoints.manifest import digest, read_manifest
from ci_llm.checkpoints.state_files import read_snapshot
from ci_llm.crowd.base import Base, load_base, short_name
from ci_llm.crowd.lora import LoraSettings
from ci_llm.crowd.prompts import Prompter
from ci_llm.crowd.recognise import META, require_checkpoint
from ci_llm.errors import DamagedCheckpoint, ForeignCheckpoint


@dataclass(frozen=True)
class Pretrained:
    """The parts of a saved crowd.

    Attributes:
        base: found and loaded, with the fingerprint that the checkpoint recorded.
        settings: of the agents.
        agents: K dicts of tensors by PEFT's names.
        prompter: with the tokenizer and the form of prompts of the training.
    """

    base: Base
    settings: LoraSettings
    agents: list[Mapping[str, Tensor]]
    prompter: Prompter


def open_pretrained(
    folder: Path, device: torch.device | str | None = None, base_model: str | None = None
) -> Pretrained:
    """Read a crowd from a committed checkpoint. Other parts of the checkpoint, such as the optimizer, are not read.

    Args:
        folder: a checkpoint, or the folder of a run: its `final_checkpoint`, or else its newest step.
        device: where the base goes; by default CUDA if there is one, otherwise the CPU.
        base_model: hub id or folder of the base, if it is no longer found under its recorded name.

    Raises:
        BadInput: there is no checkpoint.
        DamagedCheckpoint: a file is missing or differs from its digest in the manifest.
        ForeignCheckpoint: it holds no crowd, or the base has other weights than the one that was trained on.
        ModelError: the base is not found.
    """
    folder = require_checkpoint(folder, str(folder), final_first=True)
    state = _verified(folder)
    if META not in state:
        raise ForeignCheckpoint(
            "this checkpoint holds no crowd", where=str(folder), hint="give one written by train.py"
        )
    meta = state[META]
    base = _base(meta, folder, device, base_model)
    settings = LoraSettings.from_dict(meta["lora"])
    agents = [state[f"agent{k}/adapter_model"] for k in range(settings.num_agents)]
    return Pretrained(base, settings, agents, Prompter(_tokenizer(folder, base), meta["prompt_form"]))


def _verified(folder: Path) -> dict[str, Any]:
    """The keys of the checkpoint that a crowd is built from; every byte is compared with the manifest."""
    manifest = read_manifest(folder)
    forms = {
        key: form
        for key, form in manifest.forms.items()
        if key == META or key.startswith("tokenizer/") or key.endswith("/adapter_model")
    }
    files = {}
    for name, record in manifest.files.items():
        if any(name.removeprefix(key) in ("", ".json", ".safetensors") for key in forms):
            files[name] = _read(folder / name)
            if digest([files[name]]) != record.digest:
                raise DamagedCheckpoint(f"{name} has another digest than the manifest says", where=str(folder))
    return read_snapshot(forms, files)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read: {error.strerror}", where=str(path.parent)) from error


def _base(meta: Mapping[str, Any], folder: Path, device: torch.device | str | None, base_model: str | None) -> Base:
    recorded = str(meta["base_model_name_or_path"])
    name = base_model or short_name(recorded)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    base = load_base(name, meta["base_dtype"], device, meta.get("quantization"))
    if base.fingerprint != meta["base_fingerprint"]:
        raise ForeignCheckpoint(
            f"the agents were trained on {short_name(recorded)} with fingerprint {meta['base_fingerprint']}; "
            f"{name} has {base.fingerprint}",
            where=str(folder),
            hint="give the base they were trained on: Crowd.from_pretrained(folder, base_model=...)",
        )
    return base


def _tokenizer(folder: Path, base: Base) -> PreTrainedTokenizerBase:
    saved = folder / "tokenizer"
    if not saved.is_dir():
        return base.tokenizer
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(saved, trust_remote_code=False)
    return tokenizer
