"""A saved crowd: written as a committed folder, and opened from a folder or the hub to base, agents and prompts.

Every file of a checkpoint that is read is compared with its digest in the manifest.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from weakref import finalize

import torch
import xxhash
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ci_llm.base.gguf import gguf_file
from ci_llm.base.load import Base, load_base, short_name
from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.checkpoints.layout import is_checkpoint_name
from ci_llm.checkpoints.manifest import MANIFEST, Manifest, name_unlisted, read_file, read_manifest
from ci_llm.checkpoints.state_files import read_state
from ci_llm.config import Config, parse_config
from ci_llm.core.durable import read_json
from ci_llm.core.remote import fetch, is_url, may_be_repository
from ci_llm.crowd.adapter_files import Adapter, write_files
from ci_llm.crowd.given_path import META, SAVED, require_checkpoint
from ci_llm.crowd.uncertainty import Calibration
from ci_llm.data.prompts import Prompter
from ci_llm.data.rows import Rows
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.errors import ForeignCheckpoint, ModelError
from ci_llm.lora.heads import how_tokenized
from ci_llm.lora.settings import LoraSettings
from ci_llm.mirror.filling import local_copy
from ci_llm.objectives import without_function

logger = logging.getLogger(__name__)

#: The key of a calibration in a saved crowd, and the name of its file.
CALIBRATION: Final = "calibration"
#: The files of a saved crowd, for the hub.
FILES: Final = (MANIFEST, f"{META}.json", "config.yaml", "agent*/adapter_*", "tokenizer/*", f"{CALIBRATION}.json")


@dataclass(frozen=True)
class Pretrained:
    """The parts of a saved crowd.

    Attributes:
        source: the source as it was given, for messages.
        base: the loaded base, whose fingerprint is the recorded one.
        settings: the settings of the agents.
        prompter: the prompter with the tokenizer and the form of prompts of the training.
        meta: the content of `ci_llm_meta_config.json`; see `Crowd.meta`.
        weights: the fingerprint of agents and base.
        names: the names of the agents' folders; empty for a base alone, as is `agents`.
        agents: [K] the adapters; their configurations name the base that was opened.
        common_start: True if all agents began with the same weights, as far as it is recorded.
        step: the optimizer steps taken; 0 for agents that no run has trained.
        run_config: `config.yaml` of the run that trained the agents; None if no run did.
        calibration: the calibration of exactly these agents; None if there is none.
    """

    source: str
    base: Base
    settings: LoraSettings
    prompter: Prompter
    meta: Mapping[str, Any]
    weights: str
    names: list[str] = field(default_factory=list)
    agents: list[Adapter] = field(default_factory=list)
    common_start: bool = True
    step: int = 0
    run_config: str | None = None
    calibration: Calibration | None = None

    @cached_property
    def config(self) -> Config | None:
        """The configuration of the run; an objective that only the checkpoint names gives way to a built-in one."""
        if self.run_config is None:
            return None
        found: Config = without_function(parse_config(self.run_config, "config.yaml"), self.settings.outputs)
        return found

    def tokenized(self, rows: Rows, config: Config) -> TokenizedRows:
        """Rows as these agents read them, by the keys of a configuration.

        Raises:
            DataError: no row can be used.
        """
        tokenizer = self.prompter.tokenizer
        how = how_tokenized(config, self.base.model.config, tokenizer)
        return tokenize(rows, tokenizer, max_seq_length=config.max_seq_length, **how)


def open_pretrained(
    source: Path | str, device: torch.device | str | None = None, base_model: str | None = None
) -> Pretrained:
    """Read a crowd from a committed checkpoint. Other parts of the checkpoint, such as the optimizer, are not read.

    Args:
        source: a checkpoint; the folder of a run, for its `final_checkpoint` or its newest step; the URL of a mirror;
            or a model on the hub, as a string `user/name` that is not a folder here.
        device: the device of the base; by default CUDA if there is one, otherwise the CPU.
        base_model: hub id or folder of the base, if it is no longer found under its recorded name.

    Raises:
        BadInput: there is no checkpoint.
        DamagedCheckpoint: a file is missing or differs from its digest in the manifest.
        ForeignCheckpoint: it holds no crowd, or the base has other weights than the one that was trained on.
        ModelError: the base is not found.
    """
    with located(source) as place:
        folder = require_checkpoint(place, str(source), final_first=True)
        manifest, state = _verified(folder, source)
        calibration = read_calibration(folder, state.get(CALIBRATION))
        meta = state[META]
        run_config = state["config.yaml"].decode() if "config.yaml" in state else None
        base = _base(meta, str(source), device, base_model or _gguf_file(meta, run_config))
        tokenizer = _own_tokenizer(folder, state) or base.tokenizer
    lora, names, named = meta["lora"], names_of_agents(meta), {"base_model_name_or_path": base.name}
    return Pretrained(
        source=str(source),
        base=base,
        settings=LoraSettings.from_dict(lora),
        names=names,
        agents=[Adapter(state[f"{name}/adapter_config"] | named, state[f"{name}/adapter_model"]) for name in names],
        prompter=Prompter(tokenizer, meta["prompt_form"]),
        meta=meta,
        common_start=meta.get("common_start", not lora["initialize_adapters_rand"]),
        step=manifest.step,
        run_config=run_config,
        calibration=calibration,
        weights=weights_fingerprint(manifest),
    )


def open_wording(source: Path | str, base_model: str | None) -> tuple[Prompter, list[str]]:
    """The prompter of a saved crowd and the names of its agents, for use where another program runs the agents.

    The base is opened only if the checkpoint does not have a tokenizer.

    Raises:
        BadInput, DamagedCheckpoint, ForeignCheckpoint: see `open_pretrained`.
    """
    with located(source) as place:
        folder = require_checkpoint(place, str(source), final_first=True)
        _, state = _verified(folder, source)
        meta = state[META]
        tokenizer = _own_tokenizer(folder, state) or _base(meta, str(source), "cpu", base_model).tokenizer
    return Prompter(tokenizer, meta["prompt_form"]), names_of_agents(meta)


def open_base(name: str, device: torch.device | str | None = None) -> Pretrained:
    """A base alone in the form of a saved crowd: without agents, and with one adapter that changes nothing.

    Raises:
        ModelError: the base is not found, or cannot be used.
    """
    base = load_base(name, None, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Pretrained(
        source=name,
        base=base,
        settings=LoraSettings(num_agents=1, rank=1),
        prompter=Prompter(base.tokenizer),
        meta={"num_agents": 0},
        weights=base.fingerprint,
    )


def default_names(num_agents: int) -> list[str]:
    """The agents' folders in a crowd that no run has changed: agent0, agent1, ..."""
    return [f"agent{k}" for k in range(num_agents)]


def class_names(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the classes by their numbers, from the facts about heads in `meta`; empty if there are none."""
    named = facts.get("id2label", {})
    return tuple(named[str(number)] for number in range(len(named)))


def names_of_agents(meta: Mapping[str, Any]) -> list[str]:
    """The folders of the agents of a saved crowd, in order.

    Args:
        meta: see `Crowd.meta`.
    """
    return [*meta.get("folders", default_names(meta["num_agents"]))]


def given_names(meta: Mapping[str, Any]) -> list[str]:
    """The names of a saved crowd's agents for people: the names that the run gave them, or those of their folders.

    Args:
        meta: `Crowd.meta` of a checkpoint, with `agents` if they had settings of their own.
    """
    return [agent["name"] for agent in meta["agents"]] if "agents" in meta else names_of_agents(meta)


@contextmanager
def located(source: Path | str) -> Iterator[Path]:
    """Yield the folder that a source means.

    A crowd on the hub is copied, because the hub's cache holds links, which a checkpoint must not hold.
    """
    if isinstance(source, str) and is_url(source):
        yield local_copy(source, source, final_first=True)
        return
    if not (isinstance(source, str) and may_be_repository(source)):
        yield Path(source)
        return
    cached = fetch(source, FILES)
    with TemporaryDirectory() as scratch:
        yield Path(shutil.copytree(cached, Path(scratch, cached.name)))


def _verified(folder: Path, source: Path | str) -> tuple[Manifest, dict[str, Any]]:
    """The manifest, and the verified content of those keys of the checkpoint that a crowd is built from.

    Raises:
        ForeignCheckpoint: the checkpoint does not hold a crowd.
        DamagedCheckpoint: a file differs from its digest in the manifest.
    """
    manifest = read_manifest(folder)
    name_unlisted(folder, manifest)
    forms = {key: form for key, form in manifest.forms.items() if _is_of_crowd(key)}
    files = {
        name: read_file(folder, name, record)
        for name, record in manifest.files.items()
        if any(name.removeprefix(key) in ("", ".json", ".safetensors") for key in forms)
    }
    state = read_state(forms, files)
    if META not in state:
        raise ForeignCheckpoint(
            "this checkpoint holds no crowd", where=str(source), hint="give one written by train.py"
        )
    return manifest, state


def _is_of_crowd(key: str) -> bool:
    endings = ("/adapter_model", "/adapter_config")
    return key in (META, CALIBRATION, "config.yaml") or key.startswith("tokenizer/") or key.endswith(endings)


def _gguf_file(meta: Mapping[str, Any], run_config: str | None) -> str | None:
    """The GGUF file of a run, if the folder that it was dequantised into is not on this machine; else None."""
    if run_config is None or Path(str(meta["base_model_name_or_path"])).is_dir():
        return None
    name = parse_config(run_config, "config.yaml").model_name
    return name if gguf_file(name) else None


def _base(meta: Mapping[str, Any], where: str, device: torch.device | str | None, base_model: str | None) -> Base:
    recorded = str(meta["base_model_name_or_path"])
    name = base_model or short_name(recorded)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    base = load_base(name, meta["base_dtype"], device, meta.get("quantization"))
    if base.fingerprint != meta["base_fingerprint"]:
        raise ForeignCheckpoint(
            f"the agents were trained on {short_name(recorded)} with fingerprint {meta['base_fingerprint']}; "
            f"{name} has {base.fingerprint}",
            where=where,
            hint="give the base they were trained on: Crowd.from_pretrained(folder, base_model=...)",
        )
    return base


def _own_tokenizer(folder: Path, state: Mapping[str, Any]) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the verified content of a checkpoint; None if there is none.

    Transformers opens whatever lies in a folder, so it gets a folder of these bytes alone, kept while the tokenizer is.
    """
    files = {key: data for key, data in state.items() if key.startswith("tokenizer/") and isinstance(data, bytes)}
    if not files:
        return None
    scratch = TemporaryDirectory()
    write_files(Path(scratch.name), files)
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        Path(scratch.name, "tokenizer"), trust_remote_code=False
    )
    found.name_or_path = str(folder / "tokenizer")
    finalize(found, scratch.cleanup)
    return found


def weights_fingerprint(manifest: Manifest) -> str:
    """The fingerprint of agents and base, which is the same for a final checkpoint and the step it was made of."""
    names = sorted(n for n in manifest.files if n.endswith("/adapter_model.safetensors") or n.startswith(META))
    found = [[name, manifest.files[name].digest] for name in names]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(found).encode()))


def calibration_path(folder: Path) -> Path | None:
    """The path of a checkpoint's calibration in the folder of its run; None for a folder outside of a run.

    The files of a checkpoint are fixed. A saved or exported crowd holds its calibration itself.
    """
    return folder.absolute().parent / f"{CALIBRATION}.json" if is_checkpoint_name(folder.name) else None


def read_calibration(folder: Path, own: Mapping[str, Any] | None = None) -> Calibration | None:
    """The calibration of the agents in a checkpoint; None if there is none, or it is of other agents.

    Args:
        own: the calibration in the checkpoint itself, if any.
    """
    path = calibration_path(folder)
    if own is not None or path is None or not path.is_file():
        return None if own is None else Calibration.of(own)
    try:
        found = Calibration.of(read_json(path))
    except (OSError, ValueError) as error:
        logger.warning(f"{path} is left out: it is not a calibration ({error})")
        return None
    if found.weights != weights_fingerprint(read_manifest(folder)):
        logger.warning(f"{path} is left out: it is of other agents; ci-llm evaluate --calibrate makes it again")
        return None
    return found


def write_crowd(
    folder: Path,
    agents: Mapping[str, Any],
    meta: Mapping[str, Any],
    tokenizer: Mapping[str, bytes],
    *,
    step: int = 0,
    card: bytes | None = None,
    calibration: Calibration | None = None,
    info: Mapping[str, Any] | None = None,
) -> None:
    """Commit a folder that `open_pretrained` opens, and whose agents plain PEFT opens.

    Args:
        agents: `agent<k>/adapter_model` -> tensors, `agent<k>/adapter_config` -> values.
        meta: see `Crowd.meta`.
        tokenizer: file name -> content; it is also written beside every agent, so that each can be used alone.
        card: the content of README.md.
        info: `info` of the manifest; None for agents saved for use.

    Raises:
        ModelError: the folder exists. CheckpointError: it cannot be written.
    """
    require_free(folder)
    places = ["tokenizer", *names_of_agents(meta)] if tokenizer else []
    files = {f"{place}/{name}": data for place in places for name, data in tokenizer.items()}
    if card is not None:
        files["README.md"] = card
    kept = {} if calibration is None else {CALIBRATION: calibration.record()}
    write_checkpoint(folder, {**agents, META: meta, **kept, **files}, step=step, info=info or {SAVED: "crowd"})


def require_free(folder: Path) -> None:
    """Refuse a path that exists, even as a broken link.

    Raises:
        ModelError: it exists.
    """
    if os.path.lexists(folder):
        raise ModelError("this path exists already", where=str(folder), hint="give a path that does not exist")
