"""`RunAttempt`: an attempt at a run, with what it does beside training: signals, mirror, callbacks, metrics."""

from __future__ import annotations

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.deadline import Pace
from ci_llm.config import Config
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts
from ci_llm.logs.run_log import RunLog
from ci_llm.run.end.attempt import Attempt
from ci_llm.run.end.mirroring import RunMirror
from ci_llm.run.step.callbacks import Callbacks
from ci_llm.run.step.step_metrics import Learning, StepMetrics


class RunAttempt(Attempt):
    """One attempt at a run: what it has beside its `Trainer`.

    Attributes:
        interrupts: the signals and requests that this process receives.
        mirror: sends what the run writes to another place.
        callbacks: a program's own code, called at the events of the run.
        pace: how long steps and saves take.
        metrics: the steps since the last line of metrics.
        learning: tells whether the agents learn.
        exactness: how exactly it resumes, for people; None for a fresh start.
        requests_wait: why the disk takes no decisions about requests at present; None if it takes them.
    """

    log: RunLog

    def __init__(
        self,
        config: Config,
        processes: Processes,
        interrupts: Interrupts,
        manager: CheckpointManager,
        log: RunLog,
        callbacks: Callbacks | None = None,
    ) -> None:
        super().__init__(config, processes.launch, manager, log)
        self.processes, self.interrupts = processes, interrupts
        self.mirror = RunMirror(config, manager, processes, interrupts)
        self.callbacks, self.pace = callbacks or Callbacks(), Pace()
        self.metrics = StepMetrics((), processes.accelerator.device)  # of no agents yet
        self.learning = Learning(())
        self.exactness: str | None = None
        self.requests_wait: str | None = None
