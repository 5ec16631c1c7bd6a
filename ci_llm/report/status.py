"""The present state of a run, read from its files again and again: progress, speed, losses, SLURM job.

It is there as values, and in words for `ci-llm status` and `ci-llm watch`.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape, glob, has_magic
from os.path import exists, isfile
from pathlib import Path
from typing import Any, BinaryIO, Final

from ci_llm.core.metrics_file import METRICS_NAME, Record, number, record_of
from ci_llm.core.quantities import count, countdown, describe_losses, duration, short
from ci_llm.core.run_folder import PushRecord, last_push, read_began
from ci_llm.core.run_status import Status, read_status
from ci_llm.core.scores import measures_of
from ci_llm.errors import BadInput
from ci_llm.report.scores import judged_figures, read_evaluation

_AT_MOST_BYTES: Final = 8 << 20  # read at first: thousands of lines, which are parsed in a tenth of a second


@dataclass(frozen=True)
class Point:
    """A line about training: step, unix seconds, number of the attempt, and mean loss of the agents."""

    step: int
    time: float
    attempt: int
    loss: float


@dataclass
class MetricsTail:
    """The lines of a metrics.jsonl, read as they are added.

    A last line that is half written is read once it is whole. Everything is read again if the file becomes shorter or
    another one, because a run has resumed, or its folder has vanished or appeared.

    Attributes:
        path: the file.
        at_most: the most bytes that are read at first, from the end of the file.
        training, evaluation: the latest line of each kind; empty before the first.
        points: one for each line about training, in order.
    """

    path: Path
    at_most: int = _AT_MOST_BYTES
    training: Record = field(default_factory=dict)
    evaluation: Record = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    _file: tuple[int, int] | None = None  # device and inode
    _offset: int = 0

    def look(self) -> None:
        """Read the new lines."""
        try:
            with self.path.open("rb") as file:
                self._find_place(file)
                new = file.read()
        except OSError:  # the file does not exist yet, or no longer
            self._forget()
            return
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _find_place(self, file: BinaryIO) -> None:
        """Seek to the end of the last line that was read."""
        about = os.fstat(file.fileno())
        if (about.st_dev, about.st_ino) != self._file or about.st_size < self._offset:
            self._forget()
            self._file = about.st_dev, about.st_ino
            if about.st_size > self.at_most:
                file.seek(about.st_size - self.at_most)
                self._offset = about.st_size - self.at_most + len(file.readline())
        file.seek(self._offset)

    def _forget(self) -> None:
        self.training, self.evaluation, self.points = {}, {}, []
        self._file, self._offset = None, 0

    def _take(self, line: bytes) -> None:
        if (record := record_of(line)) is None:
            return
        if "eval/crowd/nll" in record:
            self.evaluation = record
        if "epoch" in record:
            self.training = record
            loss = number(record.get("train/task_loss"))
            self.points.append(Point(record["step"], number(record.get("time")), record.get("attempt", 1), loss))


_UNKNOWN: Final = (math.nan, math.nan)
_SPEED_POINTS: Final = 20  # lines of metrics over which the present speed is a mean


@dataclass(frozen=True)
class Evaluated:
    """The scores of an evaluation: of the crowd, and the mean of its agents.

    Attributes:
        step: the optimizer step after which it was made.
        crowd_nll, agents_nll: nats per target token; for heads the loss of a row.
        crowd_exact_match, agents_exact_match: the share of rows; NaN for free text.
        is_final: whether it is the result of the run.
        metric: the name of another metric that judges the objective; else empty.
        crowd_metric, agents_metric: the values of `metric`; NaN without one.
    """

    step: int
    crowd_nll: float
    agents_nll: float
    crowd_exact_match: float
    agents_exact_match: float
    is_final: bool = False
    metric: str = ""
    crowd_metric: float = math.nan
    agents_metric: float = math.nan

    @classmethod
    def of(cls, step: int, values: Callable[[str], Sequence[float]], status: Status, judged_by: str) -> Evaluated:
        """The scores of an evaluation.

        Args:
            values: returns the values of a metric: the crowd's, and then that of every agent.
        """

        def crowd_and_mean(metric: str) -> tuple[float, float]:
            crowd, *agents = values(metric)
            return crowd, statistics.fmean(agents) if agents else math.nan

        first = measures_of(status.objective).first
        own = "" if first == "exact_match" else first
        exact = _UNKNOWN if judged_by == "nll" else crowd_and_mean("exact_match")
        metric = crowd_and_mean(own) if own else _UNKNOWN
        return cls(step, *crowd_and_mean("nll"), *exact, False, own, *metric)


@dataclass(frozen=True)
class Reading:
    """One look at a run. An unknown value is None, empty or NaN.

    Attributes:
        now: unix seconds of the look.
        loss, losses: the last losses of training in nats per target token: the mean over agents, and each agent's.
        losses_step: the step of the line with these losses.
        left_s: seconds until the last step, at the present speed with evaluations and saves. None after that step.
        scores: the last evaluation.
        points: the loss curve, in order.
        slurm_job: the id of the SLURM job in which the present attempt runs.
        is_supervised: whether a supervisor has started the run, and may start it again.
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
    scores: Evaluated | None = None
    points: Sequence[Point] = ()
    slurm_job: str | None = None
    is_supervised: bool = False

    @property
    def is_running(self) -> bool:
        return self.status.status == "running"

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last heartbeat; clocks of two machines may disagree by more than that."""
        return max(0.0, self.now - self.status.heartbeat)

    @property
    def is_concluding(self) -> bool:
        """Whether the run makes its final evaluation: it has taken its last step, and is not complete."""
        return self.is_running and self.status.total_steps is not None and self.status.step >= self.status.total_steps

    def record(self) -> dict[str, Any]:
        """Plain values for `--json`; an unknown value is null."""
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
            "exactness": status.exactness,
            "next_command": status.next_command,
        }


class RunReader:
    """Reads the state of one run again and again; of its metrics only the new lines.

    Args:
        folder: the run's folder; it may not exist yet.
        tail_bytes: the most bytes of metrics.jsonl that are read at first; by default enough for a curve.
    """

    def __init__(self, folder: Path, tail_bytes: int | None = None) -> None:
        self.folder = folder
        path = folder / METRICS_NAME
        self._tail = MetricsTail(path) if tail_bytes is None else MetricsTail(path, tail_bytes)

    def look(self) -> Reading:
        """The run as it is now.

        Raises:
            BadInput: there is no run in the folder, or its status.json was not written by this program.
        """
        now = time.time()
        status = read_status(self.folder, now=now)
        self._tail.look()
        training, place = self._tail.training, read_began(self.folder, status.attempt)
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
            left_s=left if status.status == "running" and left and math.isfinite(left) else None,
            scores=_result(self.folder, status)
            if status.status == "completed"
            else _scores(self._tail.evaluation, status),
            points=self._tail.points,
            slurm_job=str(place["slurm_job"]) if "slurm_job" in place else None,
            is_supervised=bool(place.get("supervised")),
        )


def _steps_per_s(points: Sequence[Point], training: Record) -> float:
    """The speed over the last points of an attempt, by the clock; by the only line, if there is no second one."""
    recent = points[-_SPEED_POINTS:]
    if len(recent) > 1 and (elapsed := recent[-1].time - recent[0].time) > 0:
        return (recent[-1].step - recent[0].step) / elapsed or math.nan
    return 1 / (number(training.get("step_time_s")) or math.nan) if recent else math.nan


def _of_agents(record: Record, group: str, measure: str) -> Iterator[float]:
    """The values of `GROUP/agent<k>/MEASURE`, in the order of k; a crowd that has changed has gaps."""
    pattern = re.compile(rf"{group}/agent(\d+)/{measure}")
    found = {int(match[1]): value for key, value in record.items() if (match := pattern.fullmatch(key))}
    yield from (number(found[k]) for k in sorted(found))


def _scores(line: Record, status: Status) -> Evaluated | None:
    """The scores in a line of metrics about an evaluation."""
    if not line:
        return None

    def values(metric: str) -> list[float]:
        return [number(line.get(f"eval/crowd/{metric}")), *_of_agents(line, "eval", metric)]

    return Evaluated.of(line["step"], values, status, status.judged_by)


def _result(folder: Path, status: Status) -> Evaluated | None:
    """The scores of evaluation.json; None if it is missing or damaged."""
    try:
        record = read_evaluation(folder)
    except BadInput:
        return None
    if record is None or not isinstance(record.get("step"), int):
        return None
    known = {"nll": record["nll"], "exact_match": record["exact_match"], **judged_figures(record)}

    def values(metric: str) -> list[float]:
        return [known[metric]["crowd"], *known[metric]["agents"]] if metric in known else [math.nan]

    return replace(Evaluated.of(record["step"], values, status, record.get("judged_by", "")), is_final=True)


def _known(value: Any) -> Any:
    """JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def find_runs(words: Sequence[str]) -> list[Path]:
    """The folders that the words of a call mean now.

    A word is the folder of a run, a folder that holds runs, or a pattern. A folder without a run stays in the list,
    because the run may begin later.
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


def lines(reading: Reading, job: str | None = None) -> list[str]:
    """Everything that is known of a run, for people: the lines of `ci-llm status` below the first one.

    Args:
        job: a line about its SLURM job.
    """
    run = reading.status
    moving = [speed(reading), time_left(reading)] if reading.is_running else []
    told = [
        ", ".join(filter(None, [progress(reading), *moving])),
        f"{run.agent_steps:,} agent-steps" if run.agent_steps else "",
        f"exactness: {run.exactness}" if run.exactness else "",
        describe_losses(reading.losses, reading.loss),
        scores(reading),
        whereabouts(reading) if run.status in ("running", "vanished") else "",
        job or (f"SLURM job {reading.slurm_job}" if reading.slurm_job else ""),
        f"warning: {run.warning}" if run.warning else "",
        f"best crowd in an evaluation so far: after step {run.best_step}" if run.best_step is not None else "",
        _mirror(run.mirror) if run.mirror else "",
        _hub(pushed) if (pushed := last_push(reading.folder)) else "",
        way_on(run),
    ]
    return [*filter(None, told)]


def way_on(run: Status) -> str:
    """The command that resumes a run that has stopped; else empty."""
    return f"resume with: {run.next_command}" if run.next_command and run.status != "running" else ""


def progress(reading: Reading) -> str:
    """`120 of 260 steps, 46 %`."""
    step, total = reading.status.step, reading.status.total_steps
    return f"{step} of {total} steps, {100 * step / total:.0f} %" if total else count(step, "step")


def speed(reading: Reading) -> str:
    """`2.1 steps/s, 5310 tokens/s`, as far as it is known; seconds per step if a step takes more than one."""
    rate, rates = reading.steps_per_s, []
    if math.isfinite(rate):
        rates.append(f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step")
    if math.isfinite(reading.tokens_per_s):
        rates.append(f"{short(reading.tokens_per_s)} tokens/s")
    return ", ".join(rates)


def time_left(reading: Reading) -> str:
    """`0:01:06 left`, or `evaluating` after the last step; empty if it is not known."""
    if reading.is_concluding:
        return "evaluating"
    return "" if reading.left_s is None else f"{countdown(reading.left_s)} left"


def scores(reading: Reading) -> str:
    """`evaluation after step 100: crowd nll 0.512, exact match 0.310 (agents 0.250)`."""
    if (found := reading.scores) is None:
        return ""
    words = measures_of(reading.status.objective)
    told = f"{words.nll} {found.crowd_nll:.4g}"
    own = found.crowd_metric, found.agents_metric
    crowd, agents = own if found.metric else (found.crowd_exact_match, found.agents_exact_match)
    if math.isnan(crowd):
        told += f" (agents {found.agents_nll:.4g})"
    else:
        told += f", {words.told} {crowd:.3f} (agents {agents:.3f})"
    what = f"result, step {found.step}" if found.is_final else f"evaluation after step {found.step}"
    return f"{what}: crowd {told}"


def whereabouts(reading: Reading) -> str:
    """`attempt 1 on node017, heartbeat 3 s ago`."""
    place = f"attempt {reading.status.attempt} on {reading.status.host}"
    return f"{place}, heartbeat {duration(round(reading.heartbeat_age_s))} ago"


def _hub(pushed: PushRecord) -> str:
    """How the last push to the hub ended."""
    if pushed.error is not None:
        return f"hub: not published: {pushed.error}; the same call tries it again"
    return f"hub: step {pushed.step} is published in {pushed.url}"


def _mirror(state: Mapping[str, Any]) -> str:
    """How far the mirror is, as status.json has it."""
    behind = f", {duration(state['behind_s'])} behind" if state["behind_s"] >= 1 else ""
    error = f" ({state['error']})" if state["error"] else ""
    return f"mirror: step {state['step']} is the newest in {state['url']}{behind}{error}"
