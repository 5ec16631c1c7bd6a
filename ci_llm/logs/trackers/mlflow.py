"""MLflow: a resumed attempt continues the run by its id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ci_llm.logs.trackers import TrackerKind, group_of, name_of


class MLflow(TrackerKind):
    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        known = {"run_id": run_id} if run_id else {"run_name": name_of(folder)}
        group = group_of(folder)
        return known | ({"tags": {"group": group}} if group else {})

    def run_id(self, tracker: Any) -> str | None:
        return str(tracker.tracker.info.run_id)


kind = MLflow()
