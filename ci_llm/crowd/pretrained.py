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
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import xxhash
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ci_llm.base.gguf import gguf_file
from ci_llm.base.load import Base, fingerprint_of, load_base, short_name
from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.checkpoints.layout import is_named_checkpoint
from ci_llm.checkpoints.manifest import MANIFEST, Manifest, read_file, read_manifest
from ci_llm.checkpoints.state_files import read_snapshot
from ci_llm.config import parse_config
from ci_llm.core.durable import read_json
from ci_llm.core.remote import fetch, is_url, may_be_repository
from ci_llm.crowd.aggregators import Learned
from ci_llm.crowd.answers import Calibration
from ci_llm.crowd.given_path import META, SAVED, require_checkpoint
from ci_llm.crowd.model import CrowdModel, default_names
from ci_llm.data.prompts import Prompter, tokenizer_files
from ci_llm.errors import ForeignCheckpoint, ModelError
from ci_llm.lora.layer import LoraSettings
from ci_llm.mirror.filling import local_copy

logger = logging.getLogger(__name__)

#: The key of a calibration in a saved crowd, and the name of its file.
CALIBRATION: Final = "calibration"
#: The files of a saved crowd, for the hub.
FILES: Final = (MANIFEST, f"{META}.json", "config.yaml", "agent*/adapter_*", "tokenizer/*", f"{CALIBRATION}.json")


@dataclass(frozen=True)
class Pretrained:
    """The parts of a saved crowd.

    Attributes:
        source: as it was given, for messages.
        base: found and loaded, with the fingerprint that the checkpoint recorded.
        settings: the settings of the agents.
        names: the names of their folders.
        agents: K dicts of tensors by PEFT's names.
        configs: K contents of `adapter_config.json`, which name the base that was opened.
        prompter: with the tokenizer and the form of prompts of the training.
        common_start: whether all agents began with the same weights, as far as it is on record.
        step: the optimizer steps taken; 0 for agents that no run has trained.
        run_config: `config.yaml` of the run that trained them; None if no run did.
        calibration: the calibration of exactly these agents; None if there is none.
        weights: fingerprint of agents and base.
    """

    source: str
    base: Base
    settings: LoraSettings
    names: list[str]
    agents: list[Mapping[str, Tensor]]
    configs: list[Mapping[str, Any]]
    prompter: Prompter
    meta: Mapping[str, Any]
    common_start: bool
    step: int
    run_config: str | None
    calibration: Calibration | None
    weights: str

    @property
    def learned(self) -> Learned | None:
        """What aggregators with learned weights take."""
        return None if self.calibration is None else self.calibration.learned


def open_pretrained(
    source: Path | str, device: torch.device | str | None = None, base_model: str | None = None
) -> Pretrained:
    """Read a crowd from a committed checkpoint. Other parts of the checkpoint, such as the optimizer, are not read.

    Args:
        source: a checkpoint, or the folder of a run: its `final_checkpoint`, or else its newest step; or the URL of
            a mirror; or a model on the hub, as a string `user/name` that is not a folder here.
        device: where the base goes; by default CUDA if there is one, otherwise the CPU.
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
        calibration, meta = read_calibration(folder, state.get(CALIBRATION)), state[META]
        run_config = state["config.yaml"].decode() if "config.yaml" in state else None
        base = _base(meta, str(source), device, base_model or _gguf_file(meta, run_config))
        tokenizer = _tokenizer(folder, base)
    lora = meta["lora"]
    settings = LoraSettings.from_dict(lora)
    names = names_of_agents(meta)
    return Pretrained(
        source=str(source),
        base=base,
        settings=settings,
        names=names,
        agents=[state[f"{name}/adapter_model"] for name in names],
        configs=[{**state[f"{name}/adapter_config"], "base_model_name_or_path": base.name} for name in names],
        prompter=Prompter(tokenizer, meta["prompt_form"]),
        meta=meta,
        common_start=meta.get("common_start", not lora["initialize_adapters_rand"]),
        step=manifest.step,
        run_config=run_config,
        calibration=calibration,
        weights=weights_fingerprint(manifest),
    )


def open_wording(source: Path | str, base_model: str | None) -> tuple[Prompter, list[str]]:
    """The prompter of a saved crowd, and the names of its agents: what is needed where another program runs them.

    The base is opened only if the checkpoint has no tokenizer of its own.

    Raises:
        BadInput, DamagedCheckpoint, ForeignCheckpoint: see `open_pretrained`.
    """
    with located(source) as place:
        folder = require_checkpoint(place, str(source), final_first=True)
        _, state = _verified(folder, source)
        meta = state[META]
        if (folder / "tokenizer").is_dir():
            tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", trust_remote_code=False)
        else:
            tokenizer = _base(meta, str(source), "cpu", base_model).tokenizer
    return Prompter(tokenizer, meta["prompt_form"]), names_of_agents(meta)


def open_base(name: str, device: torch.device | str | None = None) -> Pretrained:
    """A base alone, asked and scored as a crowd is: it has no agents, and one adapter that changes nothing.

    Raises:
        ModelError: the base is not found, or cannot be used.
    """
    base = load_base(name, None, device or ("cuda" if torch.cuda.is_available() else "cpu"))
    nobody: Any = {"names": [], "agents": [], "configs": [], "meta": {"num_agents": 0}, "common_start": True}
    about: Any = {"step": 0, "run_config": None, "calibration": None, "weights": base.fingerprint}
    settings, prompter = LoraSettings(num_agents=1, rank=1), Prompter(base.tokenizer)
    return Pretrained(name, base, settings, prompter=prompter, **nobody, **about)


def names_of_agents(meta: Mapping[str, Any]) -> list[str]:
    """The folders of the agents of a saved crowd, in order.

    Args:
        meta: see `Crowd.meta`.
    """
    return [*meta.get("folders", default_names(meta["num_agents"]))]


def given_names(meta: Mapping[str, Any]) -> list[str]:
    """The names of the agents of a saved crowd for people: those that the run gave them, or those of their folders.

    Args:
        meta: `Crowd.meta` of a checkpoint, with `agents` if they had settings of their own.
    """
    return [agent["name"] for agent in meta["agents"]] if "agents" in meta else names_of_agents(meta)


@contextmanager
def located(source: Path | str) -> Iterator[Path]:
    """The folder that a source means.

    The hub's cache is a folder of links. A checkpoint holds none, so a crowd from there is read as a copy.
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
    """The manifest, and the keys of the checkpoint that a crowd is built from; every byte is compared with it.

    Raises:
        ForeignCheckpoint: it holds no crowd. DamagedCheckpoint.
    """
    manifest = read_manifest(folder)
    forms = {key: form for key, form in manifest.forms.items() if _is_of_crowd(key)}
    files = {
        name: read_file(folder, name, record)
        for name, record in manifest.files.items()
        if any(name.removeprefix(key) in ("", ".json", ".safetensors") for key in forms)
    }
    state = read_snapshot(forms, files)
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


def _tokenizer(folder: Path, base: Base) -> PreTrainedTokenizerBase:
    saved = folder / "tokenizer"
    if not saved.is_dir():
        return base.tokenizer
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(saved, trust_remote_code=False)
    return tokenizer


def weights_fingerprint(manifest: Manifest) -> str:
    """A fingerprint of agents and base: the same for a final checkpoint and the step that it was made of."""
    names = sorted(n for n in manifest.files if n.endswith("/adapter_model.safetensors") or n.startswith(META))
    found = [[name, manifest.files[name].digest] for name in names]
    return str(xxhash.xxh3_128_hexdigest(json.dumps(found).encode()))


def calibration_path(folder: Path) -> Path | None:
    """Where the calibration of a checkpoint is kept: in the folder of the run; None for a folder of another program.

    The files of a checkpoint are fixed; those of a crowd that was saved or exported hold its calibration themselves.
    """
    return folder.absolute().parent / f"{CALIBRATION}.json" if is_named_checkpoint(folder) else None


def read_calibration(folder: Path, own: Mapping[str, Any] | None = None) -> Calibration | None:
    """The calibration of the agents in a checkpoint; None if there is none, or one of other agents.

    Args:
        own: what the checkpoint itself holds.
    """
    path = calibration_path(folder)
    if own is not None or path is None or not path.is_file():
        return None if own is None else Calibration.of(own)
    try:
        found = Calibration.of(read_json(path))  # type: ignore[arg-type]  # else a TypeError, which is caught
    except (OSError, ValueError, TypeError, KeyError) as error:
        logger.warning(f"{path} is left out: it is not a calibration ({error})")
        return None
    if found.weights != weights_fingerprint(read_manifest(folder)):
        logger.warning(f"{path} is left out: it is of other agents; ci-llm evaluate --calibrate makes it again")
        return None
    return found


def save_crowd(crowd: CrowdModel, folder: Path) -> None:
    """`Crowd.save_pretrained`."""
    tokenizer = tokenizer_files(crowd.prompter.tokenizer) if crowd.prompter else {}
    meta = crowd.meta(fingerprint_of(crowd.model))
    write_crowd(folder, crowd.adapter_files(), meta, tokenizer, calibration=crowd.calibration)


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
    """Commit a folder that `open_pretrained` opens, and plain PEFT its agents.

    Args:
        agents: `agent<k>/adapter_model` -> tensors, `agent<k>/adapter_config` -> values.
        meta: see `Crowd.meta`.
        tokenizer: file name -> content; it goes beside every agent too, so that each can be used alone.
        card: README.md.
        info: `info` of the manifest; None: these agents were saved for use.

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
    """Refuse a path that something has already, a link to nothing included.

    Raises:
        ModelError: it exists.
    """
    if os.path.lexists(folder):
        raise ModelError("this path exists already", where=str(folder), hint="give a path that does not exist")
