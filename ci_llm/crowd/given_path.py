"""The content of a path that a user names: a committed checkpoint, a base, a sweep, or something else.

Only names are read, and torch is not imported, so that a wrong path is refused before anything is loaded. A path
without a committed checkpoint becomes an error that says what it holds (`require_checkpoint`).
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Final

from ci_llm.base.gguf import gguf_file
from ci_llm.checkpoints.layout import committed, find_checkpoint
from ci_llm.checkpoints.manifest import MANIFEST, Manifest
from ci_llm.core.remote import fetch, may_be_on_hub
from ci_llm.core.run_folder import SEGMENTS, SWEEP
from ci_llm.errors import BadInput

CONFIG: Final = "adapter_config.json"
META_FILE: Final = "ci_llm_meta_config.json"
#: The file that a base of Transformers has, and a crowd does not have.
BASE_FILE: Final = "config.json"

#: The key of a checkpoint under which a crowd describes itself.
META = META_FILE.removesuffix(".json")
#: The key in a manifest's info of agents that were saved for use, without the state of a training.
SAVED = "saved"
#: The sub-folder that the hooks for Accelerate write into.
HOOKS_FOLDER = "ci_llm"
#: The keys of which only a checkpoint of train.py holds all.
RUN_KEYS = frozenset({META, "train_state", "optimizer", "rng", "config.yaml"})


def require_checkpoint(given: Path, where: str, *, final_first: bool = False) -> Path:
    """The committed folder that `given` means: itself, one in the folder of a run, or that of Accelerate's hooks.

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
    if found is not None:
        return found
    what, hint = _what_else(given)
    raise BadInput(what, where=where, hint=hint)


def is_base(given: str) -> bool:
    """True if `given` is a base, which `load_base` opens, and not a crowd; for the hub, its files are looked up.

    Raises:
        BadInput: neither a folder nor a model on the hub has this name.
    """
    folder = fetch(given, (MANIFEST, BASE_FILE)) if may_be_on_hub(given) else Path(given)
    if folder.is_dir() and find_checkpoint(folder) is not None:
        return False
    named = given == "embedded" and not folder.exists()
    return named or (folder / BASE_FILE).is_file() or (folder.exists() and gguf_file(str(folder)) is not None)


def _best_of_sweep(folder: Path) -> Path | None:
    """The run that trained the best trial of a sweep last; None if no trial is scored."""
    try:
        record = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
        best = next(trial for trial in record["trials"] if trial["id"] == record["best"])
    except (OSError, ValueError, TypeError, KeyError, StopIteration):
        return None
    return folder / SEGMENTS / str(best["segment"])


def _what_else(folder: Path) -> tuple[str, str]:
    """A description of a path without a committed checkpoint, and a hint."""
    given = shlex.quote(str(folder))
    if (folder / CONFIG).is_file() or (folder / "agent0" / CONFIG).is_file():
        return (
            "these are PEFT adapters and not a checkpoint",
            f"ci-llm checkpoints import {given} --to imported makes a crowd of them that can be asked;"
            f" init_from={given} trains on from them",
        )
    if (folder / SWEEP).is_file():
        best = _best_of_sweep(folder)
        return "this is a sweep, whose runs lie in segments/", (
            f"give {best}, the run of the best trial so far" if best else "give one of them; no trial is scored yet"
        )
    if (folder / "status.json").is_file():
        return (
            "this run has not saved a checkpoint yet",
            f"ci-llm status {given} says how it stands; save_steps and save_interval_seconds say when it saves",
        )
    there = sorted({step for step, _ in committed(folder.parent)})
    if there:
        steps = ", ".join(map(str, there))
        return f"there is no {folder.name} in this run: it holds {steps}", f"give {folder.parent} for its newest"
    if folder.is_dir() and is_base(str(folder)):
        return "this is a base and not a checkpoint", "evaluate, generate and chat take it; train.py makes a run of it"
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
    start = f"init_from={shlex.quote(str(folder))} starts agents from it"
    if META not in manifest.forms:
        what = "this checkpoint holds no crowd: a CheckpointManager of another loop wrote it"
        hint = f"that loop resumes from it: CheckpointManager({str(folder.parent)!r}).restore({manifest.step})"
    elif "imported_from" in manifest.info:
        what = "this is a crowd of imported adapters, which has no state to resume from"
        hint = start
    elif SAVED in manifest.info:
        what = "this is a saved crowd, which has no state to resume from"
        hint = start
    else:
        what = "this checkpoint belongs to an Accelerate loop with `register_hooks`, and not to a run of train.py"
        hint = f"accelerator.load_state({str(folder.parent)!r}) in that loop; {start}"
    raise BadInput(what, where=where, hint=hint)
