"""The folder that a user names, read as what it holds: a committed checkpoint, or adapters of other programs.

    adapter_config.json, adapter_model.safetensors     PEFT; or adapter_model.bin
    agent0/, agent1/, ...                              PEFT, one folder per agent
    ci_llm_meta_config.json, agent<i>_weights.pth      the first CI-LLM: the files that its code names
    ci_llm_meta_config.json, model.safetensors         the same: the whole model with the adapters, as it really saves

Adapters of every kind become `ExternalAdapter`s (`read_adapters`). A path without a committed checkpoint becomes an
error that says what it holds (`require_checkpoint`).

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

from ci_llm.base.gguf import gguf_file
from ci_llm.checkpoints.checkpoint import find_checkpoint
from ci_llm.checkpoints.folders import FINAL, committed
from ci_llm.checkpoints.manifest import MANIFEST, Manifest
from ci_llm.core.remote import fetch, may_be_on_hub
from ci_llm.core.run_folder import SEGMENTS, SWEEP
from ci_llm.errors import BadInput, ModelError

CONFIG, META_FILE = "adapter_config.json", "ci_llm_meta_config.json"
WHOLE_MODEL = "model.safetensors"
#: The file that a base of Transformers has, and a crowd has not.
BASE_FILE = "config.json"

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


@dataclass(frozen=True)
class ExternalAdapter:
    """One adapter, in the form of PEFT's files.

    Attributes:
        source: the folder it was read from.
        tensors: `base_model.model.<module>.lora_<A|B>.weight` -> A [r, in] or B [out, r].
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
    if other := sorted(name for name in tensors if not _TENSOR.fullmatch(name)):
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


#: The key of a checkpoint under which a crowd describes itself.
META = META_FILE.removesuffix(".json")
#: In the info of a manifest: these are agents for use, and no state of a training.
SAVED = "saved"
#: The sub-folder that the hooks for Accelerate write into.
HOOKS_FOLDER = "ci_llm"
#: The keys that together only a checkpoint of train.py holds.
RUN_KEYS = frozenset({META, "train_state", "optimizer", "rng", "config.yaml"})


def require_checkpoint(given: Path, where: str, *, final_first: bool = False) -> Path:
    """The committed folder that `given` means: itself, one in the folder of a run, or that of Accelerate's hooks.

    Nothing but the folder's names is read.

    Args:
        given: the path.
        where: how the path was given, for the error.
        final_first: see `find_checkpoint`.

    Raises:
        BadInput: there is no checkpoint; the hint names the command for what the path holds.
    """
    found = find_checkpoint(given, final_first=final_first)
    if found is None and (given / HOOKS_FOLDER / MANIFEST).is_file():
        found = given / HOOKS_FOLDER
    if found is not None and ((found / MANIFEST).is_file() or not _is_original(found)):
        return found
    what, hint = _what_else(found or given)
    raise BadInput(what, where=where, hint=hint)


def is_base(given: str) -> bool:
    """Whether `given` is a base, which `load_base` opens, and no crowd; on the hub its files tell.

    Raises:
        BadInput: neither a folder nor a model on the hub has this name.
    """
    folder = fetch(given, (MANIFEST, BASE_FILE)) if may_be_on_hub(given) else Path(given)
    if folder.is_dir() and find_checkpoint(folder) is not None:
        return False
    named = given == "embedded" and not folder.exists()
    return named or (folder / BASE_FILE).is_file() or (folder.exists() and gguf_file(str(folder)) is not None)


def _is_original(folder: Path) -> bool:
    """Whether it is a checkpoint of the first CI-LLM, which wrote no manifest."""
    try:
        return "K_agents" in json.loads((folder / META_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _best_of_sweep(folder: Path) -> Path | None:
    """The run in which the best trial of a sweep was trained last; None: no trial is scored."""
    try:
        record = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
        best = next(trial for trial in record["trials"] if trial["id"] == record["best"])
    except (OSError, ValueError, TypeError, KeyError, StopIteration):
        return None
    return folder / SEGMENTS / str(best["segment"])


def _what_else(folder: Path) -> tuple[str, str]:
    if _is_original(folder):
        return (
            "this is a checkpoint of the first CI-LLM, which holds agents and no state to resume from",
            f"ci-llm checkpoints import {folder} --to imported --base-model NAME; then train with init_from=imported",
        )
    if (folder / CONFIG).is_file() or (folder / "agent0" / CONFIG).is_file():
        return (
            "these are PEFT adapters and no checkpoint",
            f"ci-llm checkpoints import {folder} --to imported makes a crowd of them that can be asked;"
            f" init_from={folder} trains on from them",
        )
    if (folder / SWEEP).is_file():
        best = _best_of_sweep(folder)
        return "this is a sweep, whose runs lie in segments/", (
            f"give {best}, the run of the best trial so far" if best else "give one of them; no trial is scored yet"
        )
    if (folder / "status.json").is_file():
        return (
            "this run has not saved a checkpoint yet",
            f"ci-llm status {folder} says how it stands; save_steps and save_interval_seconds say when it saves",
        )
    if there := sorted({step for step, _ in committed(folder.parent)}):
        steps = ", ".join(map(str, there))
        return f"there is no {folder.name} in this run: it holds {steps}", f"give {folder.parent} for its newest"
    if folder.is_dir() and is_base(str(folder)):
        return "this is a base and no checkpoint", "evaluate, generate and chat take it; train.py makes a run of it"
    return (
        "there is no checkpoint at this path" + ("" if folder.exists() else ": it does not exist"),
        "give the folder of a run, or a checkpoint such as RUN/checkpoint_step_100 or RUN/final_checkpoint; evaluate,"
        f" generate and chat also take a base: a folder with {BASE_FILE} and its weights, a hub id, or a GGUF file",
    )


def require_run(manifest: Manifest, folder: Path, where: str) -> None:
    """Refuse a checkpoint that no run of train.py can resume from.

    Raises:
        BadInput: another program wrote it; the hint names what that program can do with it.
    """
    if manifest.forms.keys() >= RUN_KEYS:
        return
    if META not in manifest.forms:
        what = "this checkpoint holds no crowd: a CheckpointManager of another loop wrote it"
        hint = f"that loop resumes from it: CheckpointManager({str(folder.parent)!r}).restore({manifest.step})"
    elif "imported_from" in manifest.info:
        what = "this is a crowd of imported adapters, which has no state to resume from"
        hint = f"init_from={folder} starts agents from it"
    elif SAVED in manifest.info:
        what = "this is a saved crowd, which has no state to resume from"
        hint = f"init_from={folder} starts agents from it"
    else:
        what = "this checkpoint belongs to an Accelerate loop with `register_hooks`, and not to a run of train.py"
        hint = f"accelerator.load_state({str(folder.parent)!r}) in that loop; init_from={folder} starts agents from it"
    raise BadInput(what, where=where, hint=hint)
