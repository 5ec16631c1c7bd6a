"""The trackers of Accelerate: the step of the run is their axis, and a resumed run continues its curve.

TensorBoard drops what an earlier attempt drew past the resumed step (`purge_step`). W&B, MLflow and trackio find their
run again by an id that is saved in the checkpoint. A tracker that fails during a run is reported and left out: it must
never end the run. A tracker that cannot start is bad input.
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
        names: the key `report_to`.
        folder: the run's folder; a new run is named after it.
        resumed_from: the step this attempt resumes from; 0 for a fresh start.
        saved_state: `state()` of the previous attempt.
        hyperparameters: plain values; they are shown once, at a fresh start.

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
        require_installed(names)
        kinds = {str(kind): kind for kind in accelerator.log_with}
        self._trackers = {}
        for name in names:
            settings = _settings(name, folder, resumed_from, saved_state.get(name))
            self._trackers[name] = _start(accelerator, kinds[name], name, settings)
            if not resumed_from and name not in saved_state:
                _show_hyperparameters(name, self._trackers[name], hyperparameters)
        accelerator.trackers = [*self._trackers.values()]

    def log(self, step: int, values: Mapping[str, object]) -> None:
        """Send the numbers among `values`."""
        numbers = {key: value for key, value in values.items() if isinstance(value, int | float)}
        for name, tracker in [*self._trackers.items()]:
            self._call(name, partial(_log, name, tracker, step, numbers))

    def state(self) -> dict[str, str]:
        """The ids of this run in its trackers, for the checkpoint."""
        ids = {"wandb": "id", "mlflow": "info.run_id", "trackio": "name"}
        return {name: _attribute(tracker.tracker, ids[name]) for name, tracker in self._trackers.items() if name in ids}

    def finish(self) -> None:
        """Flush and close every tracker."""
        for name, tracker in [*self._trackers.items()]:
            self._call(name, tracker.finish)
        self._trackers.clear()

    def _call(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - no error of a tracker may end the run
            del self._trackers[name]
            logger.warning(f"{name} failed and is left out from here on: {type(error).__name__}: {error}")


def _settings(name: str, folder: Path, resumed_from: int, saved_state: str | None) -> dict[str, Any]:
    match name:
        case "tensorboard":
            return {"purge_step": resumed_from + 1 if resumed_from else 0}
        case "wandb":
            known = {"id": saved_state, "resume": "allow"} if saved_state else {"name": folder.name}
            return {"dir": str(folder), **known}
        case "mlflow":
            return {"run_id": saved_state} if saved_state else {"run_name": folder.name}
        case _:
            # Trackio identifies a run by its name only, and a fresh run must not join an old one.
            return {"name": saved_state or f"{folder.name}-{secrets.token_hex(3)}", "resume": "allow"}


def _start(accelerator: Any, kind: Any, name: str, settings: dict[str, Any]) -> Any:
    """Start one tracker. One at a time, because the project of Accelerate is the folder of TensorBoard."""
    project = "tensorboard" if name == "tensorboard" else os.environ.get("WANDB_PROJECT", PROJECT)
    accelerator.log_with, accelerator.trackers = [kind], []
    try:
        accelerator.init_trackers(project, init_kwargs={name: settings})
    except Exception as error:  # any error of the tracker's library means that the tracker cannot be used
        raise ConfigError(
            f"{name} cannot start: {error}",
            where="report_to",
            hint=f"set {name} up, or leave it out of report_to",
        ) from error
    tracker = accelerator.trackers[0]
    if name == "wandb":  # W&B drops values of a step that it has seen, such as a repeated one: so the axis is a metric
        tracker.tracker.define_metric("step")
        tracker.tracker.define_metric("*", step_metric="step")
    return tracker


def _show_hyperparameters(name: str, tracker: Any, values: Mapping[str, object]) -> None:
    if name == "tensorboard":  # Accelerate's own method opens a second run beside the first
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
