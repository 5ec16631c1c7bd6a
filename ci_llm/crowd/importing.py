"""Adapters of other programs become agents: a run starts from them (`init_from`), or a checkpoint is made of them.

A run is refused if its agents start alike and nothing makes them different.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch
import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ci_llm.base.load import load_base
from ci_llm.crowd.adapter_files import Adapter, listed_files, read_adapters, settings_of
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.pretrained import require_free, write_crowd
from ci_llm.data.encoder import chat_template
from ci_llm.data.prompts import Prompter, tokenizer_files
from ci_llm.errors import ForeignCheckpoint, ModelError, first_line
from ci_llm.lora.heads import SCORE
from ci_llm.lora.settings import AgentLora


def load_initial_adapters(crowd: Crowd, folder: Path) -> str:
    """Load the agents from the adapters `folder/agent<k>`, or all of them from the one adapter in `folder`.

    Returns:
        a line for the log.

    Raises:
        ModelError: there is no adapter, or not one per agent; or one cannot be read or has another scale.
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
        _check_scale(crowd.agents[k].settings, adapter)
        drawn = {name: tensor for name, tensor in crowd.agents[k].state_dict().items() if name == SCORE}
        crowd.agents[k].load_state_dict(drawn | dict(adapter.tensors), str(adapter.source))
    crowd.common_start = len(adapters) == 1
    every = "one adapter for every agent" if len(adapters) == 1 else "one adapter for each agent"
    return f"starting from {folder}: {every}"


def fingerprint_of_start(crowd: Crowd) -> dict[str, str]:
    """The entry `start`: a digest of the weights with which agents are compared; empty if that is the base."""
    if crowd.start is None:
        return {}
    return {"start": xxhash.xxh3_128_hexdigest(crowd.start.float().cpu().numpy().tobytes())}


def find_reference(crowd: Crowd, folder: Path, known: str) -> None:
    """Set the reference of a saved crowd to the adapters in `folder`, with which its training began.

    Args:
        known: the fingerprint of these adapters.

    Raises:
        CiLlmError: the adapters are missing, or are other ones.
    """
    own, common = crowd.storage.weights.clone(), crowd.common_start
    try:
        load_initial_adapters(crowd, folder)
        crowd.start = crowd.storage.weights.clone()
    finally:
        crowd.storage.weights.copy_(own)
        crowd.common_start = common
    if known != fingerprint_of_start(crowd)["start"]:
        raise ForeignCheckpoint(
            "these are not the adapters that the run began with", where=f"init_from: {folder}", hint="put those back"
        )


def require_distinct_agents(crowd: Crowd, where: str, training: Sequence[Hashable] = ()) -> None:
    """Refuse agents that start with the same weights and would stay equal, because they are trained in the same way.

    Dropout and DropConnect make agents different, because each draws its own masks, unless they have the same seed. A
    diversity term does not: it has the same gradient for equal agents.

    Args:
        where: the keys that made the agents equal, for the error.
        training: [K] the training settings of every agent; empty if all are trained alike.

    Raises:
        ModelError: some agents would stay equal to the last bit.
    """
    raw = (row.detach().cpu().contiguous().view(torch.uint8).numpy() for row in crowd.storage.weights)
    digests = map(xxhash.xxh3_128_digest, raw)
    each = [agent.settings for agent in crowd.agents]
    drawn = [(agent.seed, agent.index) if agent.dropout or agent.dropconnect else None for agent in each]
    alike = max(Counter(zip(digests, drawn, training or drawn, strict=True)).values())
    if alike > 1:
        raise ModelError(
            f"{alike} of {crowd.num_agents} agents begin with the same weights, and nothing makes them differ:"
            " they would stay equal to the last bit",
            where=where,
            hint="set lora_dropout=0.1 or dropconnect_p=0.1, whose masks each agent draws for itself; or give as many"
            " different adapters as agents; or initialize_adapters_rand=true without init_from; or num_agents=1",
        )


def _check_scale(agent: AgentLora, adapter: Adapter) -> None:
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
        ModelError: `target` exists; there is no adapter; one has a head; adapters differ in rank, scale, modules, base
            or chat template; or the base or a tokenizer is not found or not readable.
        ForeignCheckpoint: an adapter does not fit the base.
        CheckpointError: `target` cannot be written.
    """
    require_free(target)
    adapters = [adapter for source in sources for adapter in read_adapters(source)]
    _require_alike(adapters)
    base = load_base(base_model or _base_name(adapters))
    crowd = Crowd(base.model, settings_of(base.model, adapters), base.name, base.pad_id)
    own = _tokenizer(adapters, base.tokenizer)
    crowd.prompter = Prompter(own or base.tokenizer)
    for k, adapter in enumerate(adapters):
        crowd.agents[k].load_state_dict(adapter.tensors, str(adapter.source))
    write_crowd(
        target,
        crowd.adapter_files(),
        crowd.meta(base.fingerprint),
        tokenizer_files(own) if own else {},
        info={"imported_from": [str(source.absolute()) for source in sources]},
    )
    return crowd


def _require_alike(adapters: Sequence[Adapter]) -> None:
    """Refuse adapters with a head, or of different shapes."""
    first = adapters[0]
    for adapter in adapters:
        if adapter.config.get("task_type") == "SEQ_CLS" or SCORE in adapter.tensors:
            start = f"init_from={shlex.quote(str(adapter.source))}"
            raise ModelError(
                "this adapter scores texts by a head, and only adapters that write answers are imported",
                where=str(adapter.source),
                hint=f"{start} trains on from it, with the objective of its training",
            )
        pairs = {name: (getattr(first, name), getattr(adapter, name)) for name in ("rank", "alpha", "use_rslora")}
        odd = [f"{name} {one} and {other}" for name, (one, other) in pairs.items() if one != other]
        odd += ["adapted modules"] if {*adapter.modules} != {*first.modules} else []
        if odd:
            raise ModelError(
                f"adapters that are imported together have the same shape, and these two differ in {', '.join(odd)}",
                where=f"{first.source}, {adapter.source}",
                hint="import adapters of one shape; init_from with `agents:` starts from adapters of different shapes",
            )


def _tokenizer(adapters: Sequence[Adapter], of_base: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside the adapters, with the chat template of their training; None if there is none."""
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
    try:
        with listed_files(folder) as place:
            if not (place / "tokenizer_config.json").is_file():
                return None
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json makes tokenizers raise a bare Exception
        raise ModelError(
            f"the adapter's tokenizer cannot be read: {first_line(error)}",
            where=str(folder),
            hint="copy all its files here, or move tokenizer_config.json away to take the base's tokenizer",
        ) from error
    return tokenizer


def _base_name(adapters: Sequence[Adapter]) -> str:
    names = sorted({str(name) for adapter in adapters if (name := adapter.config.get("base_model_name_or_path"))})
    if len(names) == 1:
        return names[0]
    raise ModelError(
        f"the adapters name different bases: {', '.join(names)}" if names else "the adapters do not name their base",
        where=str(adapters[0].source),
        hint="give it: --base-model NAME_OR_FOLDER, the base they were trained on",
    )
