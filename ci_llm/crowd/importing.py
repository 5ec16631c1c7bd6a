"""Existing PEFT adapters become a crowd, or the start of its agents."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import xxhash

from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.crowd.base import load_base
from ci_llm.crowd.external_adapters import ExternalAdapter, read_adapters
from ci_llm.crowd.lora import LoraSettings
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.pretrained import META
from ci_llm.crowd.prompts import Prompter
from ci_llm.crowd.targets import shortest_names
from ci_llm.errors import ModelError


def import_crowd(sources: Sequence[Path], target: Path, base_model: str | None = None) -> Crowd:
    """Make the adapters of one or more folders the agents of one crowd, and commit it as `target`.

    Args:
        sources: see `foreign.py` for what can be read; their adapters are counted through, in this order.
        base_model: hub id or folder of the base; by default what the adapters say.

    Raises:
        ModelError: no adapter, adapters that differ in rank, scale, modules or base, or no base.
        ForeignCheckpoint: an adapter that does not fit the base.
        CheckpointError: `target` cannot be written.
    """
    if os.path.lexists(target):
        raise ModelError("there is something here already", where=str(target), hint="give a folder that is not there")
    adapters = [adapter for source in sources for adapter in read_adapters(source)]
    _require_alike(adapters)
    base = load_base(base_model or _base_name(adapters))
    settings = LoraSettings(
        num_agents=len(adapters),
        rank=adapters[0].rank,
        alpha=adapters[0].alpha,
        dropout=adapters[0].dropout,
        use_rslora=adapters[0].use_rslora,
        target_modules=shortest_names(base.model, adapters[0].modules),
    )
    crowd = Crowd(base.model, settings, base.name, base.tokenizer.pad_token_id or 0)
    crowd.prompter = Prompter(base.tokenizer, adapters[0].prompts)
    for k, adapter in enumerate(adapters):
        crowd.agents.load_agent(k, adapter.tensors, str(adapter.source))
    state = {**crowd.adapter_files(), META: crowd.meta(base.fingerprint)}
    write_checkpoint(target, state, info={"imported_from": [str(source.absolute()) for source in sources]})
    return crowd


def _require_alike(adapters: Sequence[ExternalAdapter]) -> None:
    first = adapters[0]
    for adapter in adapters[1:]:
        odd = [
            f"{name} {getattr(first, name)} and {getattr(adapter, name)}"
            for name in ("rank", "alpha", "use_rslora")
            if getattr(first, name) != getattr(adapter, name)
        ]
        if adapter.modules != first.modules:
            odd.append(f"adapted modules ({len(first.modules)} and {len(adapter.modules)})")
        if odd:
            raise ModelError(
                f"the agents of a crowd are alike, and these two differ in {', '.join(odd)}",
                where=f"{first.source}, {adapter.source}",
                hint="import those that are alike",
            )


def _base_name(adapters: Sequence[ExternalAdapter]) -> str:
    names = sorted({adapter.base_name for adapter in adapters if adapter.base_name})
    if len(names) == 1:
        return names[0]
    raise ModelError(
        f"the adapters name different bases: {', '.join(names)}" if names else "the adapters do not name their base",
        where=str(adapters[0].source),
        hint="give it: --base-model NAME_OR_FOLDER, the base they were trained on",
    )


# ---------------------------------------------------------------------------------------------------- init from


def load_initial_adapters(crowd: Crowd, folder: Path) -> str:
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
            hint=f"num_agents={len(adapters)}, or the folder of one adapter for all agents",
        )
    for k in range(crowd.num_agents):
        adapter = adapters[k % len(adapters)]
        _check_scale(crowd, adapter)
        crowd.agents.load_agent(k, adapter.tensors, str(adapter.source))
    every = "one adapter for every agent" if len(adapters) == 1 else "one adapter for each agent"
    return f"starting from {folder}: {every}"


def require_distinct_agents(crowd: Crowd, where: str) -> None:
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
            hint="lora_dropout=0.1 or dropconnect_p=0.1, which each agent draws for itself; as many different adapters"
            " as agents, or without init_from initialize_adapters_rand=true; or num_agents=1",
        )


def _check_scale(crowd: Crowd, adapter: ExternalAdapter) -> None:
    there, here = ({"lora_alpha": f"{x.alpha:.12g}", "use_rslora": x.use_rslora} for x in (adapter, crowd.settings))
    odd = [f"{key} is {value} there and {here[key]} here" for key, value in there.items() if value != here[key]]
    if odd:
        raise ModelError(
            f"the adapter would act with another scale: {'; '.join(odd)}",
            where=str(adapter.source),
            hint="set lora_alpha and use_rslora to the adapter's own",
        )
