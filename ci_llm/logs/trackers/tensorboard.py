"""TensorBoard: its curves are cut back to the step from which an attempt resumes; agents and crowd share charts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ci_llm.core.measures import METRICS, Measures, measures_of
from ci_llm.logs.trackers import TrackerKind

logger = logging.getLogger(__name__)

#: The module of the thread that writes events.
_WRITERS: Final = "tensorboard.summary.writer.event_file_writer"


def layout(words: Measures) -> dict[str, Any]:
    """The tab CUSTOM SCALARS: group -> chart -> patterns of the curves in it, for any number of agents."""
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


class TensorBoard(TrackerKind):
    def project(self) -> str:
        return "tensorboard"  # the folder, below that of the run

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


def _leave_errors_of_writers_to_their_callers() -> None:
    """Print no traceback of a thread that writes, such as one whose folder was moved away or whose disk is full.

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


kind = TensorBoard()
