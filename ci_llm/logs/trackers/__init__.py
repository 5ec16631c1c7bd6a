"""The trackers that `report_to` may name, as in Accelerate: the kinds in this file, and the modules of this package.

The step of the run is their axis, and a resumed run continues its curve. A tracker that fails during a run is reported
and left out: it must never end the run. A tracker that cannot start is bad input.

To add one that Accelerate supports, add a file `trackers/<name>.py` that defines

    kind = TrackerKind()

and `report_to: <name>` selects it. Override a method where the tracker needs more: an id by which a resumed attempt
finds its run again, other settings at the start, another axis.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ci_llm.core.imports import load_plugin
from ci_llm.core.measures import METRICS, Measures, measures_of
from ci_llm.core.run_folder import SEGMENTS
from ci_llm.errors import ConfigError

logger = logging.getLogger(__name__)


class TrackerKind:
    """One kind of tracker, as a run uses it. The methods here suit any tracker of Accelerate."""

    def project(self) -> str:
        """The project that Accelerate starts the tracker with."""
        return os.environ.get("WANDB_PROJECT", "ci-llm")

    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        """Arguments of the tracker's start.

        Args:
            folder: the run's folder; a new run has `name_of(folder)`, and belongs to the group `group_of(folder)`.
            resumed_from: the step this attempt resumes from; 0 for a fresh start.
            run_id: what `run_id` returned in the previous attempt; None without one.
        """
        return {}

    def on_start(self, tracker: Any, objective: str) -> None:
        """Called once with Accelerate's tracker and what the run learns, before anything is logged."""

    def run_id(self, tracker: Any) -> str | None:
        """The id of this run, for the checkpoint; None if the tracker cannot find a run again."""
        return None

    def log(self, tracker: Any, step: int, numbers: dict[str, int | float]) -> None:
        """Send the numbers of one optimizer step."""
        tracker.log(numbers, step=step)

    def show_hyperparameters(self, tracker: Any, values: Mapping[str, object]) -> None:
        """Show the configuration of a run that is new to the tracker."""
        plain = bool | int | float | str | None
        tracker.store_init_configuration(
            {key: value if isinstance(value, plain) else str(value) for key, value in values.items()}
        )


def name_of(folder: Path) -> str:
    """The name of a new run: its folder's name, and before it, for a segment of a sweep, the name of the sweep."""
    sweep = group_of(folder)
    return folder.name if sweep is None else f"{sweep}-{folder.name}"


def group_of(folder: Path) -> str | None:
    """The name of the sweep that this run is a segment of; None for any other run."""
    above = folder.resolve().parent
    return above.parent.name if above.name == SEGMENTS else None


class MLflow(TrackerKind):
    """A resumed attempt continues the run by its id."""

    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        known = {"run_id": run_id} if run_id else {"run_name": name_of(folder)}
        group = group_of(folder)
        return known | ({"tags": {"group": group}} if group else {})

    def run_id(self, tracker: Any) -> str | None:
        return str(tracker.tracker.info.run_id)


class Trackio(TrackerKind):
    """It identifies a run by its name only, so a fresh run gets a name of its own."""

    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        name = run_id or f"{name_of(folder)}-{secrets.token_hex(3)}"
        group = group_of(folder)
        return {"name": name, "resume": "allow"} | ({"group": group} if group else {})

    def run_id(self, tracker: Any) -> str | None:
        return str(tracker.tracker.name)


class WeightsAndBiases(TrackerKind):
    """A resumed attempt continues the run by its id."""

    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        known = {"id": run_id, "resume": "allow"} if run_id else {"name": name_of(folder)}
        group = group_of(folder)
        return {"dir": str(folder), **known} | ({"group": os.environ.get("WANDB_RUN_GROUP", group)} if group else {})

    def on_start(self, tracker: Any, objective: str) -> None:
        # W&B drops the values of a step that it has seen, such as a repeated one. So the axis is a metric.
        tracker.tracker.define_metric("step")
        tracker.tracker.define_metric("*", step_metric="step")

    def run_id(self, tracker: Any) -> str | None:
        return str(tracker.tracker.id)

    def log(self, tracker: Any, step: int, numbers: dict[str, int | float]) -> None:
        tracker.log({"step": step, **numbers})


class TensorBoard(TrackerKind):
    """Its curves are cut back to the step from which an attempt resumes; agents and crowd share charts."""

    def project(self) -> str:
        return "tensorboard"  # a folder in the folder of the run

    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        return {"purge_step": resumed_from + 1 if resumed_from else 0}

    def on_start(self, tracker: Any, objective: str) -> None:
        _leave_errors_of_writers_to_their_callers()
        # In every attempt: a resumed run may begin in a new folder.
        tracker.writer.add_custom_scalars(layout(measures_of(objective)))

    def show_hyperparameters(self, tracker: Any, values: Mapping[str, object]) -> None:
        # Accelerate's own method opens a second run beside the first.
        rows = "\n".join(f"    {key}: {value}" for key, value in values.items())
        tracker.writer.add_text("config", rows, global_step=0)


def layout(words: Measures) -> dict[str, Any]:
    """TensorBoard's tab CUSTOM SCALARS: group -> chart -> patterns of the curves in it, for any number of agents."""
    own = {METRICS[name].told: name for name in words.metrics}
    named = {words.nll: "nll", words.right: "exact_match", **own}
    return {
        "the crowd and its agents, while they train": {
            "loss": ["Multiline", [r"train/agent\d+/loss$", r"train/task_loss$"]],
            "gradient norm": ["Multiline", [r"train/agent\d+/grad_norm$"]],
        },
        "the crowd and its agents, on rows held out": {
            told: ["Multiline", [rf"eval/agent\d+/{name}$", rf"eval/crowd/{name}$"]] for told, name in named.items()
        },
    }


#: The module of the thread that writes TensorBoard's events.
_WRITERS: Final = "tensorboard.summary.writer.event_file_writer"


def _leave_errors_of_writers_to_their_callers() -> None:
    """Print no traceback of a thread that writes for TensorBoard: its folder was moved away, or its disk is full.

    The thread keeps its error, the next call to the writer raises it, and for a run that is one line of the log.
    """
    before = threading.excepthook
    if getattr(before, "__module__", None) == __name__:
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        if type(args.thread).__module__ != _WRITERS:
            before(args)
        else:
            logger.debug("the thread of TensorBoard has ended", exc_info=args.exc_value)

    threading.excepthook = hook


_OWN: Final = {"tensorboard": TensorBoard(), "mlflow": MLflow(), "trackio": Trackio(), "wandb": WeightsAndBiases()}


def find_kind(name: str) -> TrackerKind:
    """The kind of that name.

    Raises:
        BadInput: neither this file nor a module of this package has it.
    """
    kind: TrackerKind = _OWN.get(name) or load_plugin(__name__, name, "kind")
    return kind


def require_installed(names: tuple[str, ...]) -> None:
    """Refuse trackers whose package is missing, before a run leaves anything behind.

    Raises:
        ConfigError: names the first that is not installed.
    """
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"report_to names {name}, which is not installed",
                where="report_to",
                hint=f"pip install {name}, or report_to=none",
            )


class Trackers:
    """The trackers of one attempt, on the main process.

    Args:
        accelerator: its trackers are replaced.
        names: the key `report_to`.
        folder: the run's folder.
        resumed_from: the step this attempt resumes from; 0 for a fresh start.
        saved_state: the `ids` of the previous attempt.
        hyperparameters: plain values; they are shown once.

    Attributes:
        ids: of this run in its trackers, for the checkpoint: the next attempt may find one that has failed here.

    Raises:
        ConfigError: a tracker is not installed or cannot start.
    """

    def __init__(
        self,
        accelerator: Any,
        names: tuple[str, ...],
        *,
        folder: Path,
        resumed_from: int,
        saved_state: Mapping[str, str],
        hyperparameters: Mapping[str, object],
    ) -> None:
        accelerator.project_configuration.logging_dir = str(folder)  # TensorBoard writes below it
        self.ids: dict[str, str] = {}
        self._trackers: list[_Guarded] = []
        for name in names:
            kind = find_kind(name)
            tracker = _start(accelerator, name, kind, kind.settings(folder, resumed_from, saved_state.get(name)))
            kind.on_start(tracker, str(hyperparameters.get("objective", "sft")))
            self._trackers.append(_Guarded(name, kind, tracker))
            if run_id := kind.run_id(tracker):
                self.ids[name] = run_id
            is_known = name in saved_state if run_id else resumed_from > 0
            if not is_known:
                kind.show_hyperparameters(tracker, hyperparameters)
        accelerator.trackers = self._trackers
        self._accelerator = accelerator

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Send the numbers among `values`, under the names of metrics.jsonl and under those that Trainer has."""
        own = {key: value for key, value in values.items() if isinstance(value, int | float)}
        self._accelerator.log(own | _trainers_names(own), step=step)

    def finish(self) -> None:
        """Flush and close every tracker."""
        for one in self._trackers:
            one.call(one.tracker.finish)
        self._trackers.clear()


@dataclass
class _Guarded:
    """A tracker in Accelerate's list: where it fails it is left out, and the others go on."""

    name: str
    kind: TrackerKind
    tracker: Any
    has_failed: bool = False

    def log(self, values: dict[str, int | float], step: int) -> None:
        self.call(partial(self.kind.log, self.tracker, step, values))

    def call(self, call: Callable[[], None]) -> None:
        if not self.has_failed:
            try:
                call()
            except Exception as error:  # noqa: BLE001 - no error of a tracker may end the run
                self.has_failed = True
                logger.warning(f"{self.name} failed and is left out from here on: {type(error).__name__}: {error}")


#: Transformers' Trainer logs under these names what is ours under the others: dashboards and sweeps look for them.
_TRAINERS_NAMES: Final = {"train/loss": "train/task_loss", "train/epoch": "epoch", "eval/loss": "eval/crowd/nll"}
_AGENTS_NORM: Final = re.compile(r"train/agent\d+/grad_norm")


def _trainers_names(numbers: Mapping[str, int | float]) -> dict[str, int | float]:
    renamed = {theirs: numbers[ours] for theirs, ours in _TRAINERS_NAMES.items() if ours in numbers}
    if norms := [number for key, number in numbers.items() if _AGENTS_NORM.fullmatch(key)]:
        renamed["train/grad_norm"] = sum(norms) / len(norms)
    return renamed


def _start(accelerator: Any, name: str, kind: TrackerKind, settings: dict[str, Any]) -> Any:
    """Start one tracker. One at a time, because the project of Accelerate is the folder of TensorBoard."""
    accelerator.log_with, accelerator.trackers = [name], []
    try:
        accelerator.init_trackers(kind.project(), init_kwargs={name: settings})
    except Exception as error:  # any error of the tracker's library means that the tracker cannot be used
        raise ConfigError(
            f"{name} cannot start: {error}",
            where="report_to",
            hint=f"set {name} up, or leave it out of report_to",
        ) from error
    return accelerator.trackers[0]
