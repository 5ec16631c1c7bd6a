"""The curves of the trials in trackers: one run per trial, in one group, with its settings as hyperparameters.

A run has what the trial's segments have logged. After each segment, TensorBoard's folder is written again as a whole;
other trackers find the run of a trial by its id and append to it. A record says what was sent, so that the next call of
a sweep that was killed sends the rest.
"""

from __future__ import annotations

import logging
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ci_llm.config import as_typed
from ci_llm.core.durable import make_folders, read_json, remove_tree, write_json
from ci_llm.core.metrics_file import finite_numbers, read_records
from ci_llm.errors import ConfigError
from ci_llm.logs.trackers import Trackers
from ci_llm.sweep.sweep import Sweep
from ci_llm.sweep.trials import Segment, Trial

logger = logging.getLogger(__name__)

TENSORBOARD: Final = "tensorboard"
FOLDER: Final = "trackers"
_SENT: Final = "sent.json"


@dataclass
class _Sent:
    """What a tracker has of a trial: the id of its run, and the numbers of the segments."""

    id: str | None = None
    segments: list[int] = field(default_factory=list)


class Curves:
    """The tracker runs of the trials, on the main process.

    Args:
        sweep: its folder names the group.
        accelerator: made with `log_with` for the trackers of `report_to`.
    """

    def __init__(self, sweep: Sweep, accelerator: Any) -> None:
        self._sweep, self._accelerator, self._log_with = sweep, accelerator, [*accelerator.log_with]
        self._names, self._folder = sweep.config.report_to, sweep.folder
        self._sent = _read(self._folder / FOLDER / _SENT)

    def begin(self, trial: Trial) -> None:
        """Start the runs of the first trial, as long as no other is known: a tracker that cannot start is told early.

        Raises:
            ConfigError: it cannot.
        """
        for name in self._names:
            if name != TENSORBOARD and not any(tracker == name for tracker, _ in self._sent):
                self._start(name, trial).finish()

    def send(self) -> None:
        """Send what the segments that are over have logged. The error of a tracker is logged, and ends nothing."""
        over = [segment for segment in self._sweep.standings.segments if segment.is_over]
        for name in self._names:
            try:
                for trial in self._sweep.standings.trials:
                    self._send(name, trial, [segment for segment in over if trial.id in segment.trials])
            except (ConfigError, OSError) as error:  # what is missing is sent after the next segment
                logger.warning(f"{name}: the curves of trials cannot be written, the sweep continues: {error}")

    def _send(self, name: str, trial: Trial, segments: Sequence[Segment]) -> None:
        sent = self._sent[name, trial.id]
        if not (new := [segment for segment in segments if segment.number not in sent.segments]):
            return
        if name == TENSORBOARD:
            self._rewrite(trial, segments)
        elif not self._append(name, trial, new):
            return  # it has said why
        sent.segments += [segment.number for segment in new]
        self._note()

    def _rewrite(self, trial: Trial, segments: Sequence[Segment]) -> None:
        """TensorBoard's run of a trial: all of it."""
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        folder = self._folder / TENSORBOARD / _name(trial)
        if folder.exists():
            remove_tree(folder)
        with SummaryWriter(str(folder)) as writer:
            for summary in hparams(_settings(trial), {f"score/{self._sweep.standings.plan.metric}": 0.0}):
                writer._get_file_writer().add_summary(summary)
            for segment in segments:
                for step, values in _lines(self._sweep, segment, trial).items():
                    for name, value in values.items():
                        writer.add_scalar(name, value, step)

    def _append(self, name: str, trial: Trial, segments: Sequence[Segment]) -> bool:
        """Send more of a trial to a tracker; returns whether it has taken it."""
        trackers = self._start(name, trial)
        for segment in segments:
            for step, values in _lines(self._sweep, segment, trial).items():
                trackers.log(step, values)
        taken = name in trackers.names
        trackers.finish()
        return taken

    def _start(self, name: str, trial: Trial) -> Trackers:
        """The run of a trial, begun or found again; its id is on record."""
        sent, folder = self._sent[name, trial.id], self._folder / FOLDER / _name(trial)
        make_folders(folder)
        self._accelerator.log_with = [*self._log_with]  # what is started leaves itself there alone
        trackers = Trackers(
            self._accelerator,
            (name,),
            folder=folder,
            resumed_from=0,
            saved_state={} if sent.id is None else {name: sent.id},
            hyperparameters=_settings(trial),
            group=self._folder.name,
        )
        sent.id = trackers.state().get(name)
        self._note()
        return trackers

    def _note(self) -> None:
        make_folders(self._folder / FOLDER)
        values: dict[str, dict[int, Any]] = defaultdict(dict)
        for (name, id), sent in self._sent.items():
            values[name][id] = {"id": sent.id, "segments": sent.segments}
        write_json(self._folder / FOLDER / _SENT, dict(values), staging=self._sweep.staging())


def _read(path: Path) -> defaultdict[tuple[str, int], _Sent]:
    """(tracker, trial) -> what was sent; nothing where the file is missing or no record."""
    found: defaultdict[tuple[str, int], _Sent] = defaultdict(_Sent)
    try:
        value: Any = read_json(path)
        found |= {(name, int(id)): _Sent(**sent) for name, trials in value.items() for id, sent in trials.items()}
    except FileNotFoundError:
        pass
    except (AttributeError, TypeError, ValueError) as error:
        logger.warning(f"{path} is not a record of what trackers have: all is sent again ({error})")
    return found


def _name(trial: Trial) -> str:
    return f"trial{trial.id}"


def _settings(trial: Trial) -> dict[str, Any]:
    return {key: v if isinstance(v, bool | int | float | str) else as_typed(v) for key, v in trial.settings.items()}


def _lines(sweep: Sweep, segment: Segment, trial: Trial) -> Mapping[int, Mapping[str, float]]:
    """Step -> name -> value of everything a segment has logged of one trial, with the score at its end."""
    lines: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for step, name, value in _logged(sweep.segment_folder(segment.number), segment, trial):
        lines[step][name] = value
    plan = sweep.standings.plan
    if math.isfinite(score := trial.scores[segment.rung]):
        lines[plan.steps[segment.rung]][f"score/{plan.metric}"] = score
    return lines


def _logged(run: Path, segment: Segment, trial: Trial) -> Iterator[tuple[int, str, float]]:
    own = re.compile(rf"(train|eval)/agent{segment.trials.index(trial.id)}/(\w+)")
    for record in read_records(run)[0]:
        for name, value in finite_numbers(record):
            if found := own.fullmatch(name):
                yield record["step"], f"{found[1]}/{found[2]}", value
