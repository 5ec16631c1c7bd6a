"""The run as one object: the parts that `setup.py` joins, and the state of the run.

Few files take the whole object. The others take the parts that they use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import torch

from ci_llm.agents.agent import courses_of
from ci_llm.base.load import Base
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.cluster.deadline import STOPPED_BY_CALLBACK, Pace
from ci_llm.config import Config
from ci_llm.config.own_keys import AUTO
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.core.numerics import PLAIN, names, names_of_all
from ci_llm.core.quantities import count
from ci_llm.core.run_status import RunStatus
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import Objective
from ci_llm.crowd.preferences import TrainedObjective
from ci_llm.crowd.scoring import Scores
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.data.batches import MicroBatch
from ci_llm.data.courses import Courses
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts
from ci_llm.logs.progress import Position
from ci_llm.logs.run_log import RunLog
from ci_llm.run.end.mirroring import RunMirror
from ci_llm.run.end.result import MORE_STEPS
from ci_llm.run.end.watchdog import Heartbeat
from ci_llm.run.one_layer import NOT_A_STEP, choose, fixed_batch, kernels_of, layer_digest, longest_lengths
from ci_llm.run.start.resume import RunCheckpoint
from ci_llm.run.step.callbacks import Callbacks, Event, TrainerState
from ci_llm.run.step.evaluation import Evaluator, StopVote, kept_steps
from ci_llm.run.step.members import RecordFailure, config_of
from ci_llm.run.step.nonfinite import NonFiniteResponse
from ci_llm.run.step.out_of_memory import MemoryRelief
from ci_llm.run.step.state import LastGood, TrainState
from ci_llm.run.step.step_metrics import Learning, StepMetrics
from ci_llm.run.step.whole_step import WholeStep
from ci_llm.run.thread_trial import TARGETS, choose_threads


@dataclass
class Resources:
    """The parts that an attempt needs to build its run: configuration, processes, signals, checkpoints, mirror, log."""

    config: Config
    processes: Processes
    interrupts: Interrupts
    manager: CheckpointManager
    mirror: RunMirror
    log: RunLog


@dataclass(frozen=True)
class Prepared:
    """What Accelerate has prepared for the loop; before that, the crowd and the optimizer themselves.

    Attributes:
        model: the crowd; on several processes a DistributedDataParallel around it.
        optimizer: moves the agents.
        loader: the micro-batches of this process.
    """

    model: torch.nn.Module
    optimizer: Any
    loader: Any = None


@dataclass
class Run(Resources):
    """The parts of a run.

    `state` moves with every step. Plan, length and schedule follow from the checkpoint that the run resumes from.
    `status` belongs to the attempt. Rows, objective, rates and bounds follow the crowd when it changes. The other parts
    stay.

    Attributes:
        prepared: crowd, optimizer and loader as the loop takes them. `crowd` and `optimizer` are inside of these.
        batch_places: for each agent its place in the micro-batches that the attempt has prepared.
        checkpoint: collects what a checkpoint holds, and restores it.
        votes_after_steps: whether a callback may ask for a stop after any step, so that all processes vote there too.
        record_failure: why the disk takes no decisions about requests.
        last_scores: the scores after step `state.validation.step`; None: this attempt has not made them.
        exactness: how exactly this attempt resumes, for people; None for a fresh start.
        logs_next_steps: whether people are told at the end what to do next.
    """

    base: Base
    crowd: Crowd
    objective: TrainedObjective
    optimizer: torch.optim.Optimizer
    eval_rows: EvaluationRows
    status: RunStatus
    state: TrainState
    total_steps: int
    last_good: LastGood
    nonfinite: NonFiniteResponse
    memory: MemoryRelief
    stop_vote: StopVote
    evaluator: Evaluator
    checkpoint: RunCheckpoint
    heartbeat: Heartbeat
    step_metrics: StepMetrics
    prepared: Prepared
    batch_places: Sequence[int] = ()
    pace: Pace = field(default_factory=Pace)
    learning: Learning = field(default_factory=lambda: Learning(()))  # before there are steps
    callbacks: Callbacks = field(default_factory=Callbacks)
    votes_after_steps: bool = False
    record_failure: RecordFailure = field(default_factory=RecordFailure)
    last_scores: Scores | None = None
    exactness: str | None = None
    logs_next_steps: bool = True

    @property
    def courses(self) -> Courses:
        """The rows of the agents that stand in the crowd now, in their order; `checkpoint.rows` has the first ones."""
        return courses_of(self.crowd.agents)

    @property
    def present_config(self) -> Config:
        """The configuration with the agents that stand in the crowd now."""
        return config_of(self.config, self.state.members)

    @property
    def micro_batch_size(self) -> int:
        """Rows per process and micro-step: as configured, or fewer where memory or the supervisor asks for it."""
        return self.state.recovery.limit(self.config.batch_size)

    @property
    def info(self) -> dict[str, Any]:
        """The position of the run, for the manifest of a checkpoint."""
        return self.checkpoint.info(self.state, self.courses.epoch(self.state.step)) | self.step_metrics.record()

    def measure(self, train: Callable[[Run, int, list[MicroBatch]], Any], lengths: Sequence[int] = ()) -> None:
        """Find the names and the digest that tell whether another machine computes the same bits. A collective.

        Args:
            train: `compute_gradients` of the loop.
            lengths: the lengths of the fixed rows; by default those of the call before, or of the longest micro-batch.
        """
        bits, crowd = self.checkpoint.bits, self.crowd
        known = bits.get("layer", {}).get("lengths")
        lengths = [*lengths] or known or longest_lengths(self.courses, self.micro_batch_size)
        batch = fixed_batch(crowd, lengths, own_rows=self.courses.are_own)
        alike = self._measured()
        found, _ = unless_out_of_memory(partial(layer_digest, crowd, batch, partial(train, alike, NOT_A_STEP)))
        self.processes.follow()  # a process that ran out of memory owes its peers the rest of their gathers
        bits["kernels"] = kernels_of(self.config, crowd)
        each = self.processes.gather_object((names(crowd.device, bits["kernels"]), found))
        bits.update(names_of_all([own for own, _ in each]))
        bits["layer"] = {"lengths": lengths, "digests": [digest for _, digest in each]}

    def choose_kernels(self, train: Callable[[Run, int, list[MicroBatch]], Any]) -> list[str]:
        """Try the fast kernels, unless plain ones are configured; returns lines for people. A collective.

        Args:
            train: as for `measure`.
        """
        if self.config.kernels == PLAIN:
            return []
        lengths, own_rows = longest_lengths(self.courses, self.micro_batch_size), self.courses.are_own
        train_alike = partial(train, self._measured(), NOT_A_STEP)
        return choose(self.crowd, lengths, train_alike, self.processes, own_rows=own_rows)

    def choose_threads(
        self, train: Callable[[Run, int, list[MicroBatch]], Any], recorded: Mapping[str, Any]
    ) -> str | None:
        """Set the CPU threads: the number given, that of the checkpoint, or by a trial. A collective.

        Args:
            train: as for `measure`.
            recorded: the surroundings in the checkpoint that the run resumes from; {} for a fresh start.

        Returns:
            a line for people about a trial.
        """
        config, crowd, threads = self.config, self.crowd, self.config.cpu_threads
        if crowd.device.type == "cpu" and threads == AUTO and recorded.get("processes") == self.processes.num_processes:
            threads = recorded["threads"]
        if threads != AUTO:
            torch.set_num_threads(threads)
            return None
        lengths, own_rows = longest_lengths(self.courses, self.micro_batch_size), self.courses.are_own
        how = [kernels_of(config, crowd), crowd.storage.pass_per_agent, lengths, crowd.storage.sizes]
        like = {**names(crowd.device)["machine"], "base": [self.base.fingerprint, config.mixed_precision], "how": how}
        batch = fixed_batch(crowd, lengths, own_rows=own_rows, most_targets=TARGETS)
        once = partial(layer_digest, crowd, batch, partial(train, self._measured(), NOT_A_STEP))
        return choose_threads(once, like, self.processes, self.interrupts)

    def _measured(self) -> Run:
        """The run with parts that do not depend on the step, to compute fixed rows."""
        # The loss scale changes from step to step.
        state = replace(self.state, loss_scale=None)
        # The fixed rows are single ones. For other kinds of rows they measure the passes, which all kinds share.
        objective = self.objective if isinstance(self.objective, Objective) else Objective()
        optimizer = torch.optim.SGD(self.crowd.storage.rows)
        return replace(self, optimizer=optimizer, state=state, objective=objective)

    def whole_step(self, step: int, micro_batches: Sequence[MicroBatch]) -> WholeStep:
        """The step as a whole, for objectives that need it; `micro_batches` are those of this process."""
        limit, seed = self.config.max_seq_length, self.config.seed
        return WholeStep(
            step, micro_batches, self.crowd, self.processes, self.courses, limit, seed, self.heartbeat.tick
        )

    def contents(self, generators: Sequence[dict[str, Any] | None] = ()) -> dict[str, Any]:
        """The contents of a checkpoint of the present step; for `generators` see `RunCheckpoint.contents`."""
        rate = self.last_learning_rate if self.state.step else self.learning_rate(0)
        return self.checkpoint.contents(self.state, rate, self.log.tracker_state(), generators)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a 0-based step before any factor; the mean if agents have different ones."""
        rates = [agent.training.learning_rate(step) for agent in self.crowd.agents]
        return rates[0] if len({*rates}) == 1 else fmean(rates)

    def call_event(self, event: Event, **values: Mapping[str, Any]) -> None:
        """Call the callbacks of an event. If one of them asks for a stop, the next vote tells all processes."""
        if self.callbacks:
            step = self.state.step
            state = TrainerState(step, self.total_steps, self.courses.epoch(step), self.processes.is_main_process)
            with self.heartbeat.resting():
                if self.callbacks.call_event(event, self.config, state, values) and not self.is_finished:
                    self.interrupts.request_stop(STOPPED_BY_CALLBACK)

    @property
    def last_learning_rate(self) -> float:
        """The learning rate of the step just taken, times the factor that the supervisor asks for."""
        return self.learning_rate(self.state.step - 1) * self.state.recovery.requested_lr_factor

    def position(self, losses: Sequence[float] = ()) -> Position:
        """The position of the run, for people; `losses` are those of the step just taken."""
        step = self.state.step
        rate = self.last_learning_rate if step else None
        done = self.state.tokens_seen, self.courses.epoch(step)
        return Position(step, self.total_steps, losses, *done, rate, self.state.names)

    def outlook(self) -> Iterator[str]:
        """Lines for people: what a step consists of, how long the run is, and how its crowd will change."""
        steps, rows = self.total_steps, self.state.rows_per_step
        passes = math.ceil(rows / self.processes.num_processes / self.micro_batch_size)
        epochs = ", ".join(f"{plan.epoch(steps):.3g}" for plan in self.courses.plans)
        of_each = " of each agent" if "," in epochs else ""
        yield (
            f"batch     {count(rows, 'row')} per step{of_each}: {self.processes.num_processes} process(es)"
            f" x {passes} micro-step(s) of at most {self.micro_batch_size}; {count(steps, 'step')}, {epochs} epochs"
        )
        config = self.present_config
        kinds = ", ".join(dict.fromkeys(own.lr_scheduler_type for own in config.each_agent))
        yield f"optimizer {type(self.optimizer).__name__}, learning_rate {config.learning_rates}, {kinds}"
        for change in self.state.members.planned if self.state.members else ():
            yield f"          crowd: after step {change.step} of {steps}, {change}"

    def describe_stop(self) -> str:
        """What a request to stop does now. If the step under way has voted already, one more step follows."""
        if self.pace.step_started is not None:
            return f"finishing step {self.state.step + 1}, then saving and leaving"
        if self.state.step == 0:
            return "leaving before the first step"
        return f"step {self.state.step} is done; saving and leaving"

    @property
    def is_finished(self) -> bool:
        """Whether no step is left: the last one is taken, or patience with the evaluations has run out."""
        return self.is_out_of_patience or self.state.step >= self.total_steps

    @property
    def is_out_of_patience(self) -> bool:
        """Whether early stopping ends the run here."""
        patience = self.config.early_stopping_patience
        return patience is not None and self.state.validation.without_better >= patience

    @property
    def keys_to_go_on(self) -> dict[str, str | None]:
        """The keys to change, so that a run which is over trains on; None: the key is left out."""
        changes: dict[str, str | None] = {}
        if self.is_out_of_patience:
            more = self.state.validation.without_better + (self.config.early_stopping_patience or 0)
            changes["early_stopping_patience"] = str(more)
        return changes if self.state.step < self.total_steps else {**changes, **MORE_STEPS}

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation follows the step just taken; the last step is evaluated by `job.conclude`."""
        every, step = self.config.eval_steps, self.state.step
        if step >= self.total_steps:
            return False
        return every is not None and step % every == 0

    @property
    def evaluation_missed(self) -> bool:
        """Whether the attempt before ended between the present step and the evaluation that was due after it."""
        return self.state.step > 0 and self.evaluation_due and self.state.validation.step != self.state.step

    @property
    def is_at_best(self) -> bool:
        """Whether the present step is the best one so far, and the run keeps its checkpoint."""
        return self.state.step in kept_steps(self.config, self.state.validation)
