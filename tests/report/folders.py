"""Folders as runs leave them, for tests of what only reads: written by the same functions, without any training."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ci_llm.checkpoints.checkpoint import write_checkpoint
from ci_llm.config import Config
from ci_llm.core.durable import write_json
from ci_llm.core.run_status import Status, pid_space

NOW = 1_700_000_000.0
FRESH = 4_000_000_000.0
#: What identifies the answers that scores and predictions are of.
ASKED: Mapping[str, Any] = {
    "questions": "a1",
    "metric": "exact_match",
    "aggregator": "probability",
    "max_new_tokens": 64,
}


def leave_run(
    folder: Path,
    *,
    steps: int = 20,
    agents: int | Sequence[Mapping[str, Any]] = 2,
    status: str = "completed",
    predictions: Sequence[Mapping[str, Any]] = (),
    predictions_step: int = 20,
    asked: Mapping[str, Any] | None = None,
    rows: int = 40,
    right: float = 0.5,
    processes: int = 1,
    **keys: Any,
) -> Path:
    """A run of one attempt; returns its folder.

    Args:
        agents: how many, or their own settings.
        predictions_step: the one that gave its predictions.
        asked: what its scores and predictions are of.
        rows: of its evaluation.
        right: share that its crowd answers right.
        processes: that took its steps.
        keys: of its configuration.
    """
    keys |= {} if isinstance(agents, int) else {"agents": agents}
    agents = agents if isinstance(agents, int) else len(agents)
    config = Config(num_agents=agents, **keys).dump().encode()
    state = {"config.yaml": config, "train_state": {"rows_per_step": 8}}
    about = {"surroundings": {"processes": processes}}
    write_checkpoint(folder / f"checkpoint_step_{steps}", state, step=steps, info=about)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics(steps, agents)))
    leave_status(folder, status, steps)
    if status == "completed":
        write_json(folder / "evaluation.json", evaluation(agents, rows, right, steps) | {**(asked or ASKED)})
    if predictions:
        (folder / "predictions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in predictions))
        source = {"checkpoint": f"step {predictions_step} of {folder}", "data": "my.jsonl", "step": predictions_step}
        write_json(folder / "predictions.source.json", source | {**(asked or ASKED)})
    return folder


def leave_status(folder: Path, status: str, step: int, attempt: int = 1, **fields: Any) -> None:
    """status.json of the last attempt. A running one has a heartbeat of just now, and its process is elsewhere.

    With `heartbeat=FRESH` it never vanishes, however long a test takes.
    """
    running = status == "running"
    heartbeat = time.time() if running else NOW + 60
    started = heartbeat - 60
    space = "another machine" if running else pid_space()
    known = Status(status, None, step, attempt, 1, "here", space, started, heartbeat)  # type: ignore[arg-type]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "status.json", asdict(known) | fields)


def metrics(steps: int, agents: int, attempt: int = 1) -> list[dict[str, Any]]:
    """A line a second, and an evaluation after every tenth step."""
    lines = []
    for step in range(1, steps + 1):
        losses = {f"train/agent{k}/loss": 2 / step + 0.1 * k for k in range(agents)}
        line = {"step": step, "epoch": step / steps, "train/task_loss": 2 / step, **losses}
        lines.append(line | {"step_time_s": 1.0, "tokens_per_s": 100.0, "attempt": attempt, "time": NOW + step})
        if step % 10 == 0:
            scores = {f"eval/{who}/nll": 1 / step for who in (*(f"agent{k}" for k in range(agents)), "crowd")}
            lines.append({"step": step, **scores, "attempt": attempt, "time": NOW + step + 0.5})
    return lines


def evaluation(agents: int, rows: int, right: float, step: int) -> dict[str, Any]:
    """evaluation.json of generated answers."""
    gain = {"value": 0.1, "interval95": 0.2}
    exact = {"agents": [0.4] * agents, "crowd": right, "vote": 0.45, "crowd_minus_mean": gain, "crowd_minus_best": gain}
    best = {"metric": "nll", "crowd": None, "agents": []}
    return {
        "task": "embedded",
        "data": ["embedded"],
        "rows_trained_on": "none",
        "aggregator": "probability",
        "n": rows,
        "exact_match": exact,
        "nll": {"agents": [0.6] * agents, "crowd": 0.5},
        "measured_by": "generation",
        "judged_by": "exact_match",
        "step": step,
        "last_step": step,
        "agent_steps": agents * step,
        "stopped_early": False,
        "best": best,
        "warning": None,
    }


def prediction(number: int, *, correct: bool, confidence: float = 0.5, prompt: str | None = None) -> dict[str, Any]:
    return {
        "prompt": f"question {number}" if prompt is None else prompt,
        "reference": str(number),
        "answer": str(number if correct else number + 1),
        "agents": [str(number), "?"],
        "correct": correct,
        "confidence": confidence,
    }
