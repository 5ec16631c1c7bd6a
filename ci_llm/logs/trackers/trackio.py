"""Trackio: it identifies a run by its name only, so a fresh run gets a name of its own."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from ci_llm.logs.trackers import TrackerKind, group_of, name_of


class Trackio(TrackerKind):
    def settings(self, folder: Path, resumed_from: int, run_id: str | None) -> dict[str, Any]:
        name = run_id or f"{name_of(folder)}-{secrets.token_hex(3)}"
        group = group_of(folder)
        return {"name": name, "resume": "allow"} | ({"group": group} if group else {})

    def run_id(self, tracker: Any) -> str | None:
        return str(tracker.tracker.name)


kind = Trackio()
