"""TensorBoard: its curves are cut back to the step from which an attempt resumes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ci_llm.logs.trackers import TrackerKind


class TensorBoard(TrackerKind):
    def project(self) -> str:
        return "tensorboard"  # the folder, below that of the run

    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        return {"purge_step": resumed_from + 1 if resumed_from else 0}

    def show_hyperparameters(self, tracker: Any, values: Mapping[str, object]) -> None:
        # Accelerate's own method opens a second run beside the first.
        rows = "\n".join(f"    {key}: {value}" for key, value in values.items())
        tracker.writer.add_text("config", rows, global_step=0)


kind = TensorBoard()
