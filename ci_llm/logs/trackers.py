"""Trackers through Accelerate's: our own step is the axis, and a resumed run goes on in the same curve.

TensorBoard drops what a dead attempt drew past the resumed step (`purge_step`); W&B, MLflow and trackio find
their run again by an id that travels in the checkpoint. A tracker that fails on the way is named and left
out: it must never end a run. One that cannot start is bad input.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ci_llm.errors import ConfigError

logger = logging.getLogger(__name__)

PROJECT = "ci-llm"


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
        accelerator: made with `log_with=names` and, for TensorBoard, `project_dir=folder`.
        names: what `report_to` says.
        folder: the run's folder; a new run is named after it.
        resumed_from: the step this attempt resumes from; 0 for a fresh start.
        remembered: `state()` of the attempt before.
        hyperparameters: plain values, shown once, at a fresh start.

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
        remembered: Mapping[str, str],
        hyperparameters: Mapping[str, object],
    ) -> None:
        require_installed(names)
        kinds = {str(kind): kind for kind in accelerator.log_with}
        self._trackers = {}
        for name in names:
            settings = _settings(name, folder, resumed_from, remembered.get(name))
            self._trackers[name] = _start(accelerator, kinds[name], name, settings)
            if not resumed_from and name not in remembered:
                _show_hyperparameters(name, self._trackers[name], hyperparameters)
        accelerator.trackers = [*self._trackers.values()]

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Send the numbers among `values`."""
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        for name, tracker in [*self._trackers.items()]:
            self._guarded(name, partial(_log, name, tracker, step, numbers))

    def state(self) -> dict[str, str]:
        """The ids under which the outside knows this run, for the checkpoint."""
        ids = {"wandb": "id", "mlflow": "info.run_id", "trackio": "name"}
        return {name: _attribute(tracker.tracker, ids[name]) for name, tracker in self._trackers.items() if name in ids}

    def finish(self) -> None:
        """Flush and close every tracker."""
        for name, tracker in [*self._trackers.items()]:
            self._guarded(name, tracker.finish)
        self._trackers.clear()

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run is worth more
            del self._trackers[name]
            logger.warning(f"{name} failed and is left out from here on: {type(error).__name__}: {error}")


def _settings(name: str, folder: Path, resumed_from: int, remembered: str | None) -> dict[str, Any]:
    match name:
        case "tensorboard":
            return {"purge_step": resumed_from + 1 if resumed_from else 0}
        case "wandb":
            known = {"id": remembered, "resume": "allow"} if remembered else {"name": folder.name}
            return {"dir": str(folder), **known}
        case "mlflow":
            return {"run_id": remembered} if remembered else {"run_name": folder.name}
        case _:
            # Trackio knows a run by its name alone, and a fresh run must not join an old one.
            return {"name": remembered or f"{folder.name}-{secrets.token_hex(3)}", "resume": "allow"}


def _start(accelerator: Any, kind: Any, name: str, settings: dict[str, Any]) -> Any:
    """One tracker at a time, because what Accelerate calls the project is TensorBoard's folder."""
    project = "tensorboard" if name == "tensorboard" else os.environ.get("WANDB_PROJECT", PROJECT)
    accelerator.log_with, accelerator.trackers = [kind], []
    try:
        accelerator.init_trackers(project, init_kwargs={name: settings})
    except Exception as error:  # whatever a foreign library raises, here it is an answer for the user
        raise ConfigError(
            f"{name} cannot start: {error}",
            where="report_to",
            hint=f"set {name} up, or leave it out of report_to",
        ) from error
    tracker = accelerator.trackers[0]
    if name == "wandb":  # W&B drops what comes at a step it has seen, as replayed steps do: the axis is a metric
        tracker.tracker.define_metric("step")
        tracker.tracker.define_metric("*", step_metric="step")
    return tracker


def _show_hyperparameters(name: str, tracker: Any, values: Mapping[str, object]) -> None:
    if name == "tensorboard":  # Accelerate's own way opens a second run beside the first
        rows = "\n".join(f"    {key}: {value}" for key, value in values.items())
        tracker.writer.add_text("config", rows, global_step=0)
    else:
        tracker.store_init_configuration(
            {key: value if _is_plain(value) else str(value) for key, value in values.items()}
        )


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


def _log(name: str, tracker: Any, step: int, numbers: dict[str, int | float]) -> None:
    if name == "wandb":
        tracker.log({"step": step, **numbers})
    else:
        tracker.log(numbers, step=step)


def _attribute(value: Any, path: str) -> str:
    for part in path.split("."):
        value = getattr(value, part)
    return str(value)
