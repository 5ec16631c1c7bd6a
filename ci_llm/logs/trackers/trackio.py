"""Trackio: it identifies a run by its name only, so a fresh run gets a name of its own."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from ci_llm.logs.trackers import TrackerKind, name_of


class Trackio(TrackerKind):
    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        return {"name": run_id or f"{name_of(folder)}-{secrets.token_hex(3)}", "resume": "allow"}

    def in_group(self, group: str) -> dict[str, Any]:
        return {"group": group}

    def run_id(self, tracker: Any) -> str | None:
        return str(tracker.tracker.name)


kind = Trackio()
