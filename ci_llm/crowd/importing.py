"""Adapters of other programs and of the first CI-LLM as agents: read from a folder, for a run or for a saved crowd.

    adapter_config.json, adapter_model.safetensors     PEFT; or adapter_model.bin
    agent0/, agent1/, ...                              PEFT, one folder per agent
    ci_llm_meta_config.json, agent<i>_weights.pth      the first CI-LLM: the files that its code names
    ci_llm_meta_config.json, model.safetensors         the same: the whole model with the adapters, as it really saves

A run starts from them (`init_from`), or they are committed as a checkpoint. A run is refused if its agents start alike
and nothing makes them different. No code is executed: a pickle is read with `weights_only=True`, which allows tensors
and containers only.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ci_llm.base.load import load_base
from ci_llm.checkpoints.layout import FINAL
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.given_path import CONFIG, META_FILE
from ci_llm.crowd.merging import Adapter, settings_of
from ci_llm.crowd.pretrained import listed_files, require_free, write_crowd
from ci_llm.data.encoder import chat_template
from ci_llm.data.prompts import Prompter, tokenizer_files
from ci_llm.errors import CiLlmError, ForeignCheckpoint, ModelError, first_line
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


def _check_scale(agent: AgentLora, adapter: External) -> None:
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
    crowd = Crowd(base.model, settings_of(base.model, adapters), base.name, base.pad_id)
    own = _tokenizer(adapters, base.tokenizer)
    crowd.prompter = Prompter(own or base.tokenizer, adapters[0].prompts)
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


def _require_alike(adapters: Sequence[External]) -> None:
    first = adapters[0]
    for adapter in adapters[1:]:
        pairs = {name: (getattr(first, name), getattr(adapter, name)) for name in ("rank", "alpha", "use_rslora")}
        odd = [f"{name} {one} and {other}" for name, (one, other) in pairs.items() if one != other]
        odd += ["adapted modules"] if {*adapter.modules} != {*first.modules} else []
        if odd:
            raise ModelError(
                f"adapters that are imported together have the same shape, and these two differ in {', '.join(odd)}",
                where=f"{first.source}, {adapter.source}",
                hint="import adapters of one shape; init_from with `agents:` starts from adapters of different shapes",
            )


def _tokenizer(adapters: Sequence[External], of_base: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
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


def _base_name(adapters: Sequence[External]) -> str:
    names = sorted({str(name) for adapter in adapters if (name := adapter.config.get("base_model_name_or_path"))})
    if len(names) == 1:
        return names[0]
    raise ModelError(
        f"the adapters name different bases: {', '.join(names)}" if names else "the adapters do not name their base",
        where=str(adapters[0].source),
        hint="give it: --base-model NAME_OR_FOLDER, the base they were trained on",
    )


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
class External(Adapter):
    """An adapter that was read from a folder, with its head if it has one.

    Attributes:
        source: the folder.
        prompts: the form of prompts in its training, as far as it is known.
    """

    source: Path
    prompts: Literal["chat", "text"] = "chat"


def read_adapters(source: Path) -> list[External]:
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


def _read_adapters(source: Path) -> list[External]:
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
    """The agents' folders. A gap in the numbers gives a missing folder, unless a run has stopped those agents."""
    numbers = [match[1] for file in source.glob(f"*/{CONFIG}") if (match := _FOLDER.fullmatch(file.parent.name))]
    meta = source / META_FILE
    if numbers and meta.is_file() and "folders" in _read_json(meta):
        return [source / f"agent{k}" for k in sorted(map(int, numbers))]
    return [source / f"agent{k}" for k in range(len(numbers))]


def _read_peft(folder: Path) -> External:
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
    adapter = _external(config, tensors, folder, "chat")
    other = sorted(name for name in tensors if name != SCORE and not _TENSOR.fullmatch(name))
    if other:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        raise ModelError(
            f"agents are LoRA of linear layers, and this adapter also has {other[0]}{more}",
            where=str(file),
            hint="its vocabulary was changed, or embeddings or output head trained: give one that leaves them alone",
        )
    return adapter


def _read_original(source: Path) -> list[External]:
    meta = _read_json(source / META_FILE)
    count = meta.get("K_agents")
    if not isinstance(count, int) or count < 1:
        raise ModelError(
            "the number of agents (K_agents) is missing or below 1", where=str(source / META_FILE), hint=_WHOLE
        )
    files = [source / f"agent{k}_weights.pth" for k in range(count)]
    missing = [file.name for file in files if not file.is_file()]
    plain = {key: value for key, value in meta.items() if key != "base_model_name_or_path"}  # a name of that machine
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
    return [_external(plain, tensors, source, "text") for tensors in agents]


def _agents_of(file: Path, count: int) -> list[dict[str, Tensor]]:
    """The adapters in a file with the weights of a whole model, of which only their tensors are read."""
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


def _external(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], source: Path, prompts: Literal["chat", "text"]
) -> External:
    found = External(config, tensors, source, prompts)
    try:
        _ = found.rank, found.alpha, found.dropout
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"the adapter's settings cannot be read: {error!r}", where=str(source), hint=_WHOLE) from error
    if not found.modules:
        raise ModelError("there is no LoRA tensor in it", where=str(source), hint=_WHOLE)
    return found


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
