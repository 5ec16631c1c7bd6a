"""Agents that start from existing adapters, one for each or one for all; and whether they will differ."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
import xxhash

from ci_llm.crowd.foreign import ForeignAdapter, read_adapters
from ci_llm.crowd.model import Crowd
from ci_llm.errors import ModelError


def start_from(crowd: Crowd, folder: Path) -> str:
    """Fill the agents from `folder/agent<k>`, or all of them from the one adapter that lies in `folder`.

    Returns:
        what was found, in words.

    Raises:
        ModelError: there is no adapter, one that cannot be read, another number of them, or one of another scale.
        ForeignCheckpoint: one of another rank, of other target modules, or for another base.
    """
    adapters = read_adapters(folder)
    if len(adapters) not in (1, crowd.num_agents):
        raise ModelError(
            f"{len(adapters)} adapters are here, and num_agents is {crowd.num_agents}",
            where=f"init_from: {folder}",
            cure=f"num_agents={len(adapters)}, or the folder of one adapter for all agents",
        )
    for k in range(crowd.num_agents):
        adapter = adapters[k % len(adapters)]
        _check_scale(crowd, adapter)
        crowd.agents.load_agent(k, adapter.tensors, str(adapter.source))
    every = "one adapter for every agent" if len(adapters) == 1 else "one adapter for each agent"
    return f"starting from {folder}: {every}"


def require_different(crowd: Crowd, where: str) -> None:
    """Refuse to train agents that begin alike and that nothing drives apart: they see the same rows.

    Dropout and DropConnect do, because each agent draws its own. A diversity term does not: it has the same gradient
    for all of them.

    Raises:
        ModelError: some agents would have the same bits for ever.
    """
    if crowd.settings.dropout or crowd.settings.dropconnect:
        return
    raw = (row.detach().cpu().contiguous().view(torch.uint8).numpy() for row in crowd.agents.weights)
    alike = max(Counter(map(xxhash.xxh3_128_digest, raw)).values())
    if alike > 1:
        raise ModelError(
            f"{alike} of {crowd.num_agents} agents begin with the same weights, and nothing makes them differ:"
            " they would stay the same to the last bit, at the cost of as many",
            where=where,
            cure="lora_dropout=0.1 or dropconnect_p=0.1, which each agent draws for itself; as many different adapters"
            " as agents, or without init_from initialize_adapters_rand=true; or num_agents=1",
        )


def _check_scale(crowd: Crowd, adapter: ForeignAdapter) -> None:
    there, here = ({"lora_alpha": f"{x.alpha:.12g}", "use_rslora": x.use_rslora} for x in (adapter, crowd.settings))
    odd = [f"{key} is {value} there and {here[key]} here" for key, value in there.items() if value != here[key]]
    if odd:
        raise ModelError(
            f"the adapter would act with another scale: {'; '.join(odd)}",
            where=str(adapter.source),
            cure="set lora_alpha and use_rslora to the adapter's own",
        )
