"""How agents start: from existing PEFT adapters (`init_from`), and never all alike with nothing to make them differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch
import xxhash

from ci_llm.crowd.external_adapters import ExternalAdapter, read_adapters
from ci_llm.crowd.lora import AgentLora
from ci_llm.crowd.model import Crowd
from ci_llm.errors import ModelError


def load_initial_adapters(crowd: Crowd, folder: Path) -> str:
    """Fill the agents from the adapters `folder/agent<k>`, or all of them from the one adapter in `folder`.

    Returns:
        a line for the log.

    Raises:
        ModelError: there is no adapter, or another number than agents; one cannot be read or has another scale.
        ForeignCheckpoint: an adapter has another rank or other target modules, or belongs to another base.
    """
    adapters = read_adapters(folder)
    if len(adapters) not in (1, crowd.num_agents):
        raise ModelError(
            f"{len(adapters)} adapters are here, and num_agents is {crowd.num_agents}",
            where=f"init_from: {folder}",
            hint=f"num_agents={len(adapters)}, or the folder of one adapter for all agents",
        )
    for k in range(crowd.num_agents):
        adapter = adapters[k % len(adapters)]
        _check_scale(crowd.agents.each[k], adapter)
        crowd.agents.load_agent(k, adapter.tensors, str(adapter.source))
    crowd.common_start = len(adapters) == 1
    every = "one adapter for every agent" if len(adapters) == 1 else "one adapter for each agent"
    return f"starting from {folder}: {every}"


def require_distinct_agents(crowd: Crowd, where: str, training: Sequence[Hashable] = ()) -> None:
    """Refuse agents that start with the same weights and would keep them, because they are trained in the same way.

    With dropout or DropConnect they become different, because each agent draws its own masks, unless they have the
    same seed. A diversity term does not help: it has the same gradient for equal agents.

    Args:
        where: the keys that made them equal, for the error.
        training: [K] the settings of every agent; none: all are trained alike.

    Raises:
        ModelError: some agents would stay equal to the last bit.
    """
    raw = (row.detach().cpu().contiguous().view(torch.uint8).numpy() for row in crowd.agents.weights)
    digests = map(xxhash.xxh3_128_digest, raw)
    drawn = [(agent.seed, agent.index) if agent.dropout or agent.dropconnect else None for agent in crowd.agents.each]
    alike = max(Counter(zip(digests, drawn, training or drawn, strict=True)).values())
    if alike > 1:
        raise ModelError(
            f"{alike} of {crowd.num_agents} agents begin with the same weights, and nothing makes them differ:"
            " they would stay equal to the last bit",
            where=where,
            hint="set lora_dropout=0.1 or dropconnect_p=0.1, whose masks each agent draws for itself; or give as many"
            " different adapters as agents; or initialize_adapters_rand=true without init_from; or num_agents=1",
        )


def _check_scale(agent: AgentLora, adapter: ExternalAdapter) -> None:
    there, here = ({"lora_alpha": f"{x.alpha:.12g}", "use_rslora": x.use_rslora} for x in (adapter, agent))
    odd = [f"{key} is {value} there and {here[key]} here" for key, value in there.items() if value != here[key]]
    if odd:
        raise ModelError(
            f"the adapter would get another scale: {'; '.join(odd)}",
            where=str(adapter.source),
            hint="set lora_alpha and use_rslora to the adapter's own",
        )
