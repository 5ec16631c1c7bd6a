"""The present state of a run, read from its files: progress, speed, losses, last evaluation, SLURM job.

It is there as values, and in words for `ci-llm status` and `ci-llm watch`.
"""

from __future__ import annotations

import contextlib
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ci_llm.core.evaluation_file import read_evaluation
from ci_llm.core.measures import measures_of
from ci_llm.core.quantities import count, countdown, describe_losses, duration, short
from ci_llm.core.run_folder import PushRecord, Record, last_push, last_records, number, read_began
from ci_llm.core.run_status import read_status
from ci_llm.errors import BadInput
from ci_llm.report.scores import as_line

_TAIL_BYTES: Final = 256 << 10  # of metrics.jsonl, whose last lines are enough here
_PATIENCE_S: Final = 120.0  # with a supervisor or a scheduler that may launch a run again
_SPEED_LINES: Final = 20  # lines of metrics over which the present speed is a mean


@dataclass(frozen=True)
class Evaluated:
    """The scores of an evaluation: of the crowd, and the mean of its agents.

    Attributes:
        step: the optimizer step after which it was made.
        measure: the name of the measure that judges the objective: nll, exact_match, ...
        crowd, agents: its values.
        crowd_nll, agents_nll: nats per target token; for heads the loss of a row.
        is_final: True for the result of the run.
    """

    step: int
    measure: str
    crowd: float
    agents: float
    crowd_nll: float
    agents_nll: float
    is_final: bool

    @classmethod
    def of(cls, line: Record, objective: str, judged_by: str, *, is_final: bool) -> Evaluated:
        """The scores in a line of metrics about an evaluation."""

        def values(measure: str) -> tuple[float, float]:
            of_agents = _of_agents(line, "eval", measure)
            return number(line.get(f"eval/crowd/{measure}")), statistics.fmean(of_agents) if of_agents else math.nan

        first = measures_of(objective).first
        measure = "nll" if first == "exact_match" and judged_by == "nll" else first
        return cls(line["step"], measure, *values(measure), *values("nll"), is_final)


class Reading:
    """The run as it is now. An unknown value is None, empty or NaN.

    Attributes:
        now: unix seconds of the look.
        training: the last line of metrics about training.
        left_s: seconds until the last step, at the present speed with evaluations and saves. None after that step.
        scores: the last evaluation.
        slurm_job: the id of the SLURM job in which the present attempt runs.
        is_supervised: True if a supervisor has started the run, and may start it again.

    Raises:
        BadInput: there is no run in the folder, or its status.json was not written by this program.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, time.time()
        self.status = status = read_status(folder, now=self.now)
        records, place = last_records(folder, _TAIL_BYTES), read_began(folder, status.attempt)
        trained = [record for record in records if "epoch" in record]
        own = [record for record in trained if record.get("attempt", 1) == status.attempt]
        self.training: Record = trained[-1] if trained else {}
        if own and self.is_running and own[-1]["step"] > status.step:  # younger than the last heartbeat
            agent_steps = self.training.get("agent_steps", status.agent_steps)
            self.status = status = replace(status, step=own[-1]["step"], agent_steps=agent_steps)
        self.tokens_per_s = number(self.training.get("tokens_per_s")) if own else math.nan
        self.steps_per_s = _steps_per_s(own[-_SPEED_LINES:])
        left_s = math.nan if status.total_steps is None else (status.total_steps - status.step) / self.steps_per_s
        self.left_s = left_s if self.is_running and left_s > 0 else None
        self.scores = self._last_scores(records)
        self.slurm_job = str(place["slurm_job"]) if "slurm_job" in place else None
        self.is_supervised = bool(place.get("supervised"))

    def _last_scores(self, records: Sequence[Record]) -> Evaluated | None:
        """The scores of the last evaluation; of a completed run those of the final one, if its file can be read."""
        run = self.status
        if run.status != "completed":
            evaluated = [record for record in records if "eval/crowd/nll" in record]
            return Evaluated.of(evaluated[-1], run.objective, run.judged_by, is_final=False) if evaluated else None
        with contextlib.suppress(BadInput):
            if (found := read_evaluation(self.folder)) is not None:
                return Evaluated.of(as_line(found), run.objective, found.judged_by, is_final=True)
        return None

    @property
    def loss(self) -> float:
        """The last loss of training in nats per target token, the mean over agents."""
        return number(self.training.get("train/task_loss"))

    @property
    def losses(self) -> list[float]:
        """The last loss of each agent."""
        return _of_agents(self.training, "train", "loss")

    @property
    def is_running(self) -> bool:
        return self.status.status == "running"

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds since the last heartbeat; clocks of two machines may disagree by more than that."""
        return max(0.0, self.now - self.status.heartbeat)

    @property
    def is_over(self) -> bool:
        """True if the run has ended, and neither a supervisor nor a scheduler will start it again."""
        if self.is_running:
            return False
        is_launched_again = self.status.status != "completed" and (self.is_supervised or self.slurm_job is not None)
        return not is_launched_again or self.heartbeat_age_s > _PATIENCE_S

    def record(self) -> dict[str, object]:
        """Plain values for `--json`; an unknown value is None, or NaN."""
        return asdict(self.status) | {
            "folder": str(self.folder),
            "exit_code": self.status.exit_code,
            "left_s": None if self.left_s is None else round(self.left_s, 1),
            "steps_per_s": self.steps_per_s,
            "tokens_per_s": self.tokens_per_s,
            "learning_rate": number(self.training.get("train/learning_rate")),
            "losses": {
                "step": self.training.get("step"),
                "mean": self.loss,
                "agents": self.losses,
            },
            "evaluation": self.scores and asdict(self.scores),
            "heartbeat_age_s": round(self.heartbeat_age_s, 1),
            "slurm_job": self.slurm_job,
        }


def _steps_per_s(lines: Sequence[Record]) -> float:
    """The speed over some lines of an attempt, by the clock; by the only line, if there is no second one."""
    if not lines:
        return math.nan
    elapsed = number(lines[-1].get("time")) - number(lines[0].get("time"))
    if elapsed > 0:
        return (lines[-1]["step"] - lines[0]["step"]) / elapsed or math.nan
    return 1 / (number(lines[-1].get("step_time_s")) or math.nan)


def _of_agents(record: Record, group: str, measure: str) -> list[float]:
    """The values of `GROUP/agent<k>/MEASURE`, in the order of k; a crowd that has changed has gaps."""
    pattern = re.compile(rf"{group}/agent(\d+)/{measure}")
    found = {int(match[1]): number(value) for key, value in record.items() if (match := pattern.fullmatch(key))}
    return [found[k] for k in sorted(found)]


def lines(reading: Reading) -> list[str]:
    """The lines of `ci-llm status`: everything that is known of a run. Scripts may read the first."""
    return [line for line in _told(reading) if line]


def _told(reading: Reading) -> Iterator[str]:
    run, reason = reading.status, f" ({reading.status.reason})" if reading.status.reason else ""
    yield f"{run.status}{reason}: step {run.step}, attempt {run.attempt}, process {run.pid} on {run.host}"
    moving = [speed(reading), time_left(reading)] if reading.is_running else []
    yield ", ".join(filter(None, [progress(reading), *moving]))
    yield f"{run.agent_steps:,} agent-steps" if run.agent_steps else ""
    yield f"exactness: {run.exactness}" if run.exactness else ""
    yield describe_losses(reading.losses, reading.loss)
    yield scores(reading)
    if run.status in ("running", "vanished"):
        yield f"attempt {run.attempt} on {run.host}, heartbeat {duration(round(reading.heartbeat_age_s))} ago"
    yield f"SLURM job {reading.slurm_job}" if reading.slurm_job else ""
    yield f"warning: {run.warning}" if run.warning else ""
    yield f"best crowd in an evaluation so far: after step {run.best_step}" if run.best_step is not None else ""
    yield _mirror(run.mirror) if run.mirror else ""
    yield _hub(pushed) if (pushed := last_push(reading.folder)) else ""
    yield f"resume with: {run.next_command}" if run.next_command and run.status != "running" else ""


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
    total = reading.status.total_steps
    if reading.is_running and total is not None and reading.status.step >= total:
        return "evaluating"
    return "" if reading.left_s is None else f"{countdown(reading.left_s)} left"


def scores(reading: Reading) -> str:
    """`evaluation after step 100: crowd nll 0.512, exact match 0.310 (agents 0.250)`."""
    if (found := reading.scores) is None:
        return ""
    words = measures_of(reading.status.objective)
    told = f"{words.nll} {found.crowd_nll:.4g}"
    if found.measure == "nll" or math.isnan(found.crowd):
        told += f" (agents {found.agents_nll:.4g})"
    else:
        told += f", {words.told} {found.crowd:.3f} (agents {found.agents:.3f})"
    what = f"result, step {found.step}" if found.is_final else f"evaluation after step {found.step}"
    return f"{what}: crowd {told}"


def _hub(pushed: PushRecord) -> str:
    """A line about the last push to the hub."""
    if pushed.error is not None:
        return f"hub: not published: {pushed.error}; the same call tries it again"
    return f"hub: step {pushed.step} is published in {pushed.url}"


def _mirror(state: Mapping[str, Any]) -> str:
    """A line about the mirror, from its part of status.json."""
    behind = f", {duration(state['behind_s'])} behind" if state["behind_s"] >= 1 else ""
    error = f" ({state['error']})" if state["error"] else ""
    return f"mirror: step {state['step']} is the newest in {state['url']}{behind}{error}"
