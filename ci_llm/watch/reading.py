"""What the files of a run say about it now: state, progress, speed, losses, evaluations, SLURM job."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from glob import escape, glob, has_magic
from os.path import exists, isfile
from pathlib import Path
from typing import Any, Final

from ci_llm.core.attempts import attempt_folder
from ci_llm.core.durable import read_json
from ci_llm.core.run_status import Status, read_status
from ci_llm.watch.metrics_tail import MetricsTail, Point, Record, number

_SPEED_POINTS: Final = 20  # lines of metrics over which the present speed is a mean


@dataclass(frozen=True)
class Scores:
    """An evaluation: the crowd and the mean of its agents.

    Attributes:
        step: the optimizer step after which it was made.
        crowd_nll: nats per target token.
        crowd_exact_match: share of rows.
        agents_exact_match: the mean over agents.
        is_final: it is the result of the run.
    """

    step: int
    crowd_nll: float
    crowd_exact_match: float
    agents_exact_match: float
    is_final: bool = False


@dataclass(frozen=True)
class Reading:
    """One look at a run. What is not known is None, empty or NaN.

    Attributes:
        now: unix seconds of the look.
        loss, losses: in nats per target token, the mean over agents and each agent: means since the line before.
        losses_step: the step of that line.
        left_s: seconds until the last step, at the present speed; evaluations and saves count.
        scores: of the last evaluation.
        points: of the curve, in order.
        slurm_job: the id of the job of the present attempt.
        is_supervised: a supervisor has started it, and may start it again.
    """

    folder: Path
    status: Status
    now: float
    loss: float = math.nan
    losses: tuple[float, ...] = ()
    losses_step: int | None = None
    learning_rate: float = math.nan
    tokens_per_s: float = math.nan
    steps_per_s: float = math.nan
    left_s: float | None = None
    scores: Scores | None = None
    points: Sequence[Point] = ()
    slurm_job: str | None = None
    is_supervised: bool = False

    @property
    def is_running(self) -> bool:
        return self.status.status == "running"

    @property
    def heartbeat_age_s(self) -> float:
        """Clocks of two machines may disagree by more than it is."""
        return max(0.0, self.now - self.status.heartbeat)

    @property
    def is_concluding(self) -> bool:
        """Whether the run has taken its last step and is not over: it makes the final evaluation."""
        return self.is_running and self.status.total_steps is not None and self.status.step >= self.status.total_steps

    def record(self) -> dict[str, Any]:
        """Plain values for `--json`; what is not known is null."""
        status, scores = self.status, self.scores
        return {
            "folder": str(self.folder),
            "status": status.status,
            "reason": status.reason,
            "exit_code": status.exit_code,
            "step": status.step,
            "total_steps": status.total_steps,
            "agent_steps": status.agent_steps,
            "left_s": None if self.left_s is None else round(self.left_s, 1),
            "steps_per_s": _known(self.steps_per_s),
            "tokens_per_s": _known(self.tokens_per_s),
            "learning_rate": _known(self.learning_rate),
            "losses": {
                "step": self.losses_step,
                "mean": _known(self.loss),
                "agents": [_known(loss) for loss in self.losses],
            },
            "evaluation": scores and {key: _known(value) for key, value in vars(scores).items()},
            "best_step": status.best_step,
            "attempt": status.attempt,
            "pid": status.pid,
            "host": status.host,
            "heartbeat_age_s": round(self.heartbeat_age_s, 1),
            "slurm_job": self.slurm_job,
            "warning": status.warning,
            "choice": status.choice,
            "next_command": status.next_command,
        }


class RunReader:
    """Looks at one run again and again, and reads of its metrics only what is new.

    Args:
        folder: of the run; it may not exist yet.
        tail_bytes: how much of a metrics.jsonl that is there already is read; None: enough for a curve.
    """

    def __init__(self, folder: Path, tail_bytes: int | None = None) -> None:
        self.folder = folder
        path = folder / "metrics.jsonl"
        self._tail = MetricsTail(path) if tail_bytes is None else MetricsTail(path, tail_bytes)

    def look(self) -> Reading:
        """The run as it is now.

        Raises:
            BadInput: there is no run in the folder, or its status.json was not written by this program.
        """
        now = time.time()
        status = read_status(self.folder, now=now)
        self._tail.look()
        training, place = self._tail.training, _place(self.folder, status.attempt)
        own = [point for point in self._tail.points if point.attempt == status.attempt]
        if own and status.status == "running" and own[-1].step > status.step:  # younger than the last heartbeat
            status = replace(status, step=own[-1].step, agent_steps=training.get("agent_steps", status.agent_steps))
        steps_per_s = _steps_per_s(own, training)
        left = None if status.total_steps is None else (status.total_steps - status.step) / steps_per_s
        return Reading(
            folder=self.folder,
            status=status,
            now=now,
            loss=number(training.get("train/task_loss")),
            losses=tuple(_of_agents(training, "train", "loss")),
            losses_step=training.get("step"),
            learning_rate=number(training.get("train/learning_rate")),
            tokens_per_s=number(training.get("tokens_per_s")) if own else math.nan,
            steps_per_s=steps_per_s,
            left_s=left if status.status == "running" and left is not None and math.isfinite(left) else None,
            scores=_result(self.folder) if status.status == "completed" else _scores(self._tail.evaluation),
            points=self._tail.points,
            slurm_job=str(place["slurm_job"]) if "slurm_job" in place else None,
            is_supervised=bool(place.get("supervised")),
        )


def _steps_per_s(points: Sequence[Point], training: Record) -> float:
    """Of the attempt whose points these are, by the clock; by its only line, if there is no second one."""
    recent = points[-_SPEED_POINTS:]
    if len(recent) > 1 and (elapsed := recent[-1].time - recent[0].time) > 0:
        return (recent[-1].step - recent[0].step) / elapsed or math.nan
    return 1 / (number(training.get("step_time_s")) or math.nan) if recent else math.nan


def _of_agents(record: Record, group: str, measure: str) -> Iterator[float]:
    """The values of `GROUP/agent<k>/MEASURE`, in the order of k; a crowd that has changed has gaps."""
    pattern = re.compile(rf"{group}/agent(\d+)/{measure}")
    found = {int(match[1]): value for key, value in record.items() if (match := pattern.fullmatch(key))}
    yield from (number(found[k]) for k in sorted(found))


def _scores(line: Record) -> Scores | None:
    """Of a line of metrics about an evaluation."""
    if not line:
        return None
    agents = [*_of_agents(line, "eval", "exact_match")]
    nll, exact = (number(line.get(f"eval/crowd/{measure}")) for measure in ("nll", "exact_match"))
    return Scores(line["step"], nll, exact, statistics.fmean(agents) if agents else math.nan)


def _result(folder: Path) -> Scores | None:
    """Of evaluation.json; None if it is not there, or not of this program."""
    try:
        record: Any = read_json(folder / "evaluation.json")
        exact, agents = record["exact_match"], [number(value) for value in record["exact_match"]["agents"]]
        nll = number(record["nll"]["crowd"])
        return Scores(int(record["step"]), nll, number(exact["crowd"]), statistics.fmean(agents), is_final=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _place(folder: Path, attempt: int) -> Mapping[str, Any]:
    """Where the attempt runs, as it has recorded; empty if it has not."""
    try:
        began = read_json(attempt_folder(folder, attempt) / "began.json")
    except (OSError, ValueError):
        return {}
    return began if isinstance(began, dict) else {}


def _known(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def find_runs(words: Sequence[str]) -> list[Path]:
    """The folders that the words of a call mean, as they are now.

    A word is the folder of a run, a folder that holds runs, or a pattern. A folder without a run stays in the list:
    the run may begin later.
    """
    found: dict[Path, None] = {}
    for word in words:
        is_pattern = not exists(word) and has_magic(word)
        for path in sorted(map(Path, glob(word))) if is_pattern else [Path(word)]:
            found |= dict.fromkeys(_runs_at(path, is_named=not is_pattern))
    return [*found]


def _runs_at(path: Path, *, is_named: bool) -> list[Path]:
    if isfile(path / "status.json"):
        return [path]
    inside = [Path(found).parent for found in sorted(glob(f"{escape(str(path))}/*/status.json"))]
    return inside or ([path] if is_named and not isfile(path) else [])
