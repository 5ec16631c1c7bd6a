"""Agents that start from existing PEFT adapters: one for each, or one for all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import safetensors
from safetensors.torch import load_file

from ci_llm.crowd.model import Crowd
from ci_llm.errors import ModelError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def start_from(crowd: Crowd, folder: Path) -> str:
    """Fill the agents from `folder/agent<k>`, or all of them from the one adapter that lies in `folder`.

    Returns:
        what was found, in words.

    Raises:
        ModelError: there is no adapter, another number of them, or one of another scale.
        ForeignCheckpoint: one of another rank, of other target modules, or for another base.
    """
    folders = [folder] if (folder / WEIGHTS).is_file() else _numbered(folder)
    if not folders:
        raise ModelError(
            "there is no PEFT adapter here",
            where=f"init_from: {folder}",
            cure=f"give a folder that holds {WEIGHTS} and {CONFIG}, or agent0, agent1, ... that do",
        )
    if len(folders) not in (1, crowd.num_agents):
        raise ModelError(
            f"{len(folders)} adapters are here, and num_agents is {crowd.num_agents}",
            where=f"init_from: {folder}",
            cure=f"num_agents={len(folders)}, or the folder of one adapter for all agents",
        )
    for k in range(crowd.num_agents):
        source = folders[k % len(folders)]
        _check_scale(crowd, source)
        crowd.agents.load_agent(k, _tensors(source), str(source))
    every = "one adapter for every agent" if len(folders) == 1 else "one adapter for each agent"
    return f"starting from {folder}: {every}"


def _numbered(folder: Path) -> list[Path]:
    found: list[Path] = []
    while (folder / f"agent{len(found)}" / WEIGHTS).is_file():
        found.append(folder / f"agent{len(found)}")
    return found


def _check_scale(crowd: Crowd, source: Path) -> None:
    saved: dict[str, Any] = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    own = crowd.settings
    keys = {"lora_alpha": own.alpha, "use_rslora": own.use_rslora}
    odd = [
        f"{key} is {saved.get(key)} there and {value} here" for key, value in keys.items() if saved.get(key) != value
    ]
    if odd:
        raise ModelError(
            f"the adapter would act with another scale: {'; '.join(odd)}",
            where=str(source / CONFIG),
            cure="set lora_alpha and use_rslora to the adapter's own",
        )


def _tensors(source: Path) -> dict[str, Any]:
    try:
        tensors: dict[str, Any] = load_file(source / WEIGHTS)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelError(f"the adapter cannot be read: {error}", where=str(source), cure="give a whole one") from error
    return tensors
