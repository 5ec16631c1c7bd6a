"""`best/`: the best trial as a plain PEFT folder with its card, copied bit by bit from the segment that trained it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ci_llm.checkpoints.folders import FINAL, open_folder
from ci_llm.config import as_typed
from ci_llm.core.durable import new_folder, remove_tree, write_new
from ci_llm.core.run_folder import BEST
from ci_llm.crowd.card import CardFacts, adapter_card, public_name
from ci_llm.errors import CheckpointError
from ci_llm.sweep.sweep import Sweep
from ci_llm.sweep.trials import Trial

_CONFIG: Final = "adapter_config.json"


def write_best(sweep: Sweep) -> Path | None:
    """Make `best/` of the best trial, unless it is there; None if every trial has failed.

    Raises:
        DamagedCheckpoint: what the trial's last segment has left is not as it was written.
        CheckpointError: the disk refuses it.
    """
    target, trial = sweep.folder / BEST, sweep.best
    if trial is None or not sweep.has_winner:
        return None
    if (target / _CONFIG).is_file():
        return target
    opened = open_folder(sweep.segment_folder(trial.segment or 0) / FINAL)
    prefix = f"agent{trial.place}/"
    files = {name.removeprefix(prefix): data for name, data in opened.files.items() if name.startswith(prefix)}
    files["README.md"] = _card(sweep, trial, json.loads(files[_CONFIG]), opened.manifest.step).encode()
    try:
        for leftover in sweep.folder.glob(f".{BEST}.*"):
            remove_tree(leftover)
        with new_folder(target) as draft:
            for name, data in files.items():
                write_new(draft / name, [data])
    except OSError as error:
        raise CheckpointError(f"{BEST} cannot be written: {error.strerror}", where=str(target)) from error
    return target


def _card(sweep: Sweep, trial: Trial, config: Mapping[str, object], step: int) -> str:
    standings = sweep.standings
    shared = sweep.config
    settings = ", ".join(f"`{key}` {as_typed(value)}" for key, value in trial.settings.items())
    what = (
        f"This LoRA adapter is the best of {len(standings.trials)} trials of a sweep, by {standings.plan.metric}"
        f" {trial.score:.4f} on the rows that the trials were compared on: {settings}."
    )
    facts = CardFacts(
        base=str(config["base_model_name_or_path"]),
        ranks=[int(str(config["r"]))],
        use_rslora=bool(config.get("use_rslora")),
        trained=f" for {step} optimizer steps on `{', '.join(map(public_name, shared.dataset_names))}`",
    )
    return adapter_card(facts, f"The best of {len(standings.trials)} trials", what)
