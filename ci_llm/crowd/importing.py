"""Existing PEFT adapters as agents: of a run that starts (`init_from`), or of a crowd committed as a checkpoint.

Agents that start alike need something that makes them different; without it a run is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch
import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ci_llm.base.load import load_base
from ci_llm.base.targets import peft_targets
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.external_adapters import ExternalAdapter, read_adapters
from ci_llm.crowd.pretrained import require_free, write_crowd
from ci_llm.data.encoder import chat_template
from ci_llm.data.prompts import Prompter, tokenizer_files
from ci_llm.errors import ModelError, first_line
from ci_llm.lora.heads import SCORE
from ci_llm.lora.layer import AgentLora, LoraSettings


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
        drawn = {name: tensor for name, tensor in crowd.agents.agent_tensors(k).items() if name == SCORE}
        crowd.agents.load_agent(k, drawn | dict(adapter.tensors), str(adapter.source))
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


def import_crowd(sources: Sequence[Path], target: Path, base_model: str | None = None) -> Crowd:
    """Make the adapters of one or more folders the agents of one crowd, and commit it as `target`.

    Args:
        sources: folders that `read_adapters` can read; the agents are numbered in this order.
        target: folder of the new checkpoint, which must not exist.
        base_model: hub id or folder of the base; by default the one that the adapters name.

    Raises:
        ModelError: `target` exists; there is no adapter; adapters differ in rank, scale, modules, base or chat
            template; or the base or a tokenizer is not found or not readable.
        ForeignCheckpoint: an adapter does not fit the base.
        CheckpointError: `target` cannot be written.
    """
    require_free(target)
    adapters = [adapter for source in sources for adapter in read_adapters(source)]
    _require_alike(adapters)
    base = load_base(base_model or _base_name(adapters))
    targets = peft_targets(base.model, adapters[0].modules)
    settings = LoraSettings(
        num_agents=len(adapters),
        rank=adapters[0].rank,
        alpha=adapters[0].alpha,
        dropout=adapters[0].dropout,
        use_rslora=adapters[0].use_rslora,
        target_modules=tuple(targets["target_modules"]),
        layers=tuple(targets.get("layers_to_transform", ())) or "all",
    )
    crowd = Crowd(base.model, settings, base.name, base.pad_id)
    own = _tokenizer(adapters, base.tokenizer)
    crowd.prompter = Prompter(own or base.tokenizer, adapters[0].prompts)
    for k, adapter in enumerate(adapters):
        crowd.agents.load_agent(k, adapter.tensors, str(adapter.source))
    write_crowd(
        target,
        crowd.adapter_files(),
        crowd.meta(base.fingerprint),
        tokenizer_files(own) if own else {},
        info={"imported_from": [str(source.absolute()) for source in sources]},
    )
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
                f"adapters that are imported together have the same shape, and these two differ in {', '.join(odd)}",
                where=f"{first.source}, {adapter.source}",
                hint="import adapters of one shape; init_from with `agents:` starts from adapters of different shapes",
            )


def _tokenizer(adapters: Sequence[ExternalAdapter], of_base: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """The tokenizer that the adapters bring along, with the chat template of their training; None: they bring none."""
    found = {folder: _read_tokenizer(folder) for folder in dict.fromkeys(adapter.source for adapter in adapters)}
    (first, own), *others = found.items()
    for folder, other in others:
        if chat_template(other or of_base) != chat_template(own or of_base):
            raise ModelError(
                "adapters that are imported together have one chat template, and these two have different ones",
                where=f"{first}, {folder}",
                hint="import each alone; one without tokenizer_config.json counts as trained with the base's template",
            )
    return next((each for each in found.values() if each is not None), None)


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    if not (folder / "tokenizer_config.json").is_file():
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json makes tokenizers raise a bare Exception
        raise ModelError(
            f"the adapter's tokenizer cannot be read: {first_line(error)}",
            where=str(folder),
            hint="copy all its files here, or move tokenizer_config.json away to take the base's tokenizer",
        ) from error
    return tokenizer


def _base_name(adapters: Sequence[ExternalAdapter]) -> str:
    names = sorted({adapter.base_name for adapter in adapters if adapter.base_name})
    if len(names) == 1:
        return names[0]
    raise ModelError(
        f"the adapters name different bases: {', '.join(names)}" if names else "the adapters do not name their base",
        where=str(adapters[0].source),
        hint="give it: --base-model NAME_OR_FOLDER, the base they were trained on",
    )
