"""The errand that deletes runs of Weights & Biases through its public API, in a process of its own.

It may take long, prompt, or fail in ways that only the network knows; the supervisor waits with a limit.
"""

from __future__ import annotations

import importlib
import json
import sys
from datetime import datetime, timezone
from typing import Any

_CLOCKS_MAY_DIFFER_S = 300.0


def main() -> int:
    """`wandb_deletion SINCE PATH...`: one JSON line per run; SINCE is the unix time at which the supervision began."""
    since, paths = float(sys.argv[1]), sys.argv[2:]
    try:
        wandb: Any = importlib.import_module("wandb")
    except ImportError:
        print("wandb is not installed")
        return 1
    api = wandb.Api(timeout=20)
    for path in paths:
        try:
            result = delete(api, path, since)
        except (wandb.errors.Error, ValueError, OSError) as error:
            result = f"{type(error).__name__}: {error}".splitlines()[0]
        print(json.dumps({"run": path, "result": result}), flush=True)
    return 0


def delete(api: Any, path: str, since: float) -> str:
    """Delete one run, unless it is older than the supervision; returns "deleted" or why not."""
    run = api.run(path)
    created = datetime.fromisoformat(run.created_at.replace("Z", "+00:00"))
    if created.tzinfo is None:
        created = created.replace(tzinfo=timezone.utc)
    if created.timestamp() < since - _CLOCKS_MAY_DIFFER_S:
        return "it is older than this supervision"
    run.delete()
    return "deleted"
