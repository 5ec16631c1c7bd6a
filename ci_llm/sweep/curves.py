"""One TensorBoard run per trial, with its settings as hyperparameters: made of what its segments have logged.

A trial's folder is written anew after each of its segments, so that a sweep that was killed has every line once.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ci_llm.core.durable import remove_tree
from ci_llm.run.new_run import as_typed
from ci_llm.sweep.sweep import Pack, Sweep
from ci_llm.sweep.trials import Segment, Trial

logger = logging.getLogger(__name__)

FOLDER: Final = "tensorboard"


def write_curves(sweep: Sweep, pack: Pack) -> None:
    """Write the runs of a pack's trials, which were scored. What a disk refuses is told, and the sweep goes on."""
    try:
        for trial in pack.trials:
            _write(sweep, sweep.standings.trials[trial.id])
    except OSError as error:
        logger.warning(f"the curves of trials cannot be written, the sweep goes on: {error}")


def _write(sweep: Sweep, trial: Trial) -> None:
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    folder, metric = sweep.folder / FOLDER / f"trial{trial.id}", sweep.standings.plan.metric
    if folder.exists():
        remove_tree(folder)
    score = f"score/{metric}"
    with SummaryWriter(str(folder)) as writer:
        settings = {key: _plain(value) for key, value in trial.settings.items()}
        for summary in hparams(settings, {score: 0.0}):
            writer._get_file_writer().add_summary(summary)
        for segment in sweep.standings.segments:
            if trial.id in segment.trials:
                for step, name, value in _lines(sweep.segment_folder(segment.number), segment, trial):
                    writer.add_scalar(name, value, step)
        for step, value in zip(sweep.standings.plan.steps, trial.scores, strict=False):
            writer.add_scalar(score, value, step)


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else as_typed(value)


def _lines(run: Path, segment: Segment, trial: Trial) -> Iterator[tuple[int, str, float]]:
    """(step, name, value) of everything a segment has logged of one trial."""
    own = re.compile(rf"(train|eval)/agent{segment.trials.index(trial.id)}/(\w+)")
    path = run / "metrics.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        values = json.loads(line)
        for name, value in values.items():
            if (found := own.fullmatch(name)) and isinstance(value, int | float) and math.isfinite(value):
                yield values["step"], f"{found[1]}/{found[2]}", value
