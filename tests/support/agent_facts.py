"""What can be told about one agent of a run that ended, under names that do not say which one it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.testbed.trials import account


def facts_of(folder: Path, name: str) -> dict[str, Any]:
    """Final weights and moments of an agent, and all metrics under its name."""
    own = {fact: value for fact, value in account(folder).items() if f"{name}/" in fact}
    told = {fact.replace(f"{name}/", ""): value for fact, value in own.items() if not fact.endswith("/adapter_config")}
    for line in map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines()):
        mine = {fact: value for fact, value in line.items() if f"/{name}/" in fact}
        told |= {f"{fact.replace(f'{name}/', '')} at {line['step']}": value for fact, value in mine.items()}
    return told
