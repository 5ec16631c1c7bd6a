"""Everything a run is made of, joined once and handed around; where it stands is the only thing that moves."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.deadline import Pace
from ci_llm.config import Config
from ci_llm.core.run_status import RunStatus
from ci_llm.crowd.base import Base
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.objective import Objective
from ci_llm.data.order import Plan
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts
from ci_llm.logs.run_log import RunLog
from ci_llm.run.heartbeat import Heartbeat
from ci_llm.run.nonfinite_policy import Bounds
from ci_llm.run.rollback import LastGood
from ci_llm.run.state import TrainState


@dataclass
class Meter:
    """Speed since the last reading."""

    tokens: int = 0
    steps: int = 0
    since: float = field(default_factory=time.perf_counter)

    def count(self, tokens: int) -> None:
        self.tokens += tokens
        self.steps += 1

    def read(self) -> dict[str, float]:
        now = time.perf_counter()
        elapsed = max(now - self.since, 1e-9)
        rates = {"tokens_per_s": self.tokens / elapsed, "step_time_s": elapsed / max(self.steps, 1)}
        self.tokens, self.steps, self.since = 0, 0, now
        return rates


@dataclass
class Run:
    """Everything a run needs, made once by `build.py`; `state` is the only thing that moves."""

    config: Config
    base: Base
    tokenizer_files: dict[str, bytes]
    crowd: Crowd
    objective: Objective
    optimizer: torch.optim.Optimizer
    rows: TokenizedRows
    eval_rows: TokenizedRows
    processes: Processes
    interrupts: Interrupts
    manager: CheckpointManager
    log: RunLog
    status: RunStatus
    state: TrainState
    plan: Plan
    total_steps: int
    learning_rate: Callable[[int], float]
    last_good: LastGood
    began_at: int = 0  # the step from which this attempt goes on
    remembered_trackers: dict[str, str] = field(default_factory=dict)
    meter: Meter = field(default_factory=Meter)
    pace: Pace = field(default_factory=Pace)
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def micro_batch_size(self) -> int:
        """Rows per process and micro-step: as configured, or fewer where memory or the supervisor wants it."""
        return min(self.config.batch_size, self.state.healing.micro_batch_size or self.config.batch_size)

    def describe_stop(self) -> str:
        """What a request to stop does now. The step under way may have voted already: then one more step follows."""
        if self.pace.step_started is not None:
            return f"finishing step {self.state.step + 1}, then saving and leaving"
        return f"step {self.state.step} is done; saving and leaving"

    @property
    def bounds(self) -> Bounds:
        """How far the ways back from numbers that are not finite go."""
        config = self.config
        return Bounds(config.nonfinite_lr_factor, config.max_consecutive_nonfinite, config.good_after_steps)
