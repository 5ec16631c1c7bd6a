"""Weights & Biases: a resumed attempt continues the run by its id."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ci_llm.logs.trackers import TrackerKind, group_of, name_of


class WeightsAndBiases(TrackerKind):
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


kind = WeightsAndBiases()
