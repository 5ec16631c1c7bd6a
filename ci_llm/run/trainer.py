"""`Trainer`: what trains the agents of a run, and the state that moves with every step.

`setup.py` joins its parts. What is beside the training is the `Attempt`'s: log, mirror, signals.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from accelerate.utils import model_has_dtensor
from torch import nn

from ci_llm.agents.agent import Agent, courses_of
from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import TrainedObjective
from ci_llm.data.agent_rows import Courses
from ci_llm.distributed.processes import Processes, peer_errors
from ci_llm.run.run_checkpoint import RunCheckpoint
from ci_llm.run.start.agent_settings import config_of
from ci_llm.run.step.evaluator import Evaluator
from ci_llm.run.step.nonfinite import NonFiniteResponse
from ci_llm.run.step.out_of_memory import MemoryRelief
from ci_llm.run.step.rollout import Rollouts
from ci_llm.run.step.state import TrainState
from ci_llm.run.step.step_metrics import Learning, StepMetrics
from ci_llm.run.watchdog import Heartbeat


@dataclass(frozen=True)
class Prepared:
    """What Accelerate has prepared for the loop; before that, the crowd and the optimizer themselves.

    Attributes:
        model: the crowd; on several processes a DistributedDataParallel around it.
        optimizer: moves the agents.
        loader: the micro-batches of this process.
    """

    model: nn.Module
    optimizer: Any
    loader: Any = None


@dataclass
class Trainer:
    """What trains the agents of a run.

    `state` moves with every step. Length, order and schedule follow from the checkpoint that the run resumes from.
    Objective and evaluation follow the crowd when it changes. The other parts stay.

    Attributes:
        prepared: crowd and optimizer as the loop takes them.
        checkpoint: collects what a checkpoint holds; it has base, optimizer and rows.
        nonfinite: responds to numbers that are not finite.
        memory: responds where memory runs out.
        rollouts: draws what agents learn from, where the objective asks for it.
        metrics: the steps since the last line of metrics.
        learning: tells whether the agents learn.
    """

    config: Config
    processes: Processes
    crowd: Crowd
    objective: TrainedObjective
    prepared: Prepared
    checkpoint: RunCheckpoint
    state: TrainState
    total_steps: int
    nonfinite: NonFiniteResponse
    memory: MemoryRelief
    evaluator: Evaluator
    heartbeat: Heartbeat
    rollouts: Rollouts
    metrics: StepMetrics
    learning: Learning

    @property
    def courses(self) -> Courses:
        """The rows of the agents that stand in the crowd now, in their order; `checkpoint.rows` has the first ones."""
        return courses_of(self.crowd.agents)

    @property
    def present_config(self) -> Config:
        """The configuration with the agents that stand in the crowd now."""
        return config_of(self.config, self.state.numbers)

    @property
    def micro_batch_size(self) -> int:
        """Rows per process and micro-step: as configured, or fewer where memory or the supervisor asks for it."""
        return self.state.recovery.limit(self.config.batch_size)

    def prepare(self, loader: Any) -> None:
        """Let Accelerate prepare crowd, optimizer and loader: again after each change of the crowd. A collective.

        On several processes DistributedDataParallel wraps the crowd, without the frozen base, which each has loaded.
        Where each process holds a part of the base the crowd stays as it is: its gradients are reduced in the same way.
        """
        accelerator, crowd, optimizer = self.processes.accelerator, self.crowd, self.checkpoint.optimizer
        accelerator.unwrap_model(self.prepared.model, keep_fp32_wrapper=False)
        accelerator.free_memory()  # of what was prepared before
        tensors = *crowd.named_parameters(), *crowd.named_buffers()
        ignored: Any = [name for name, tensor in tensors if not tensor.requires_grad]
        crowd._ddp_params_and_buffers_to_ignore = ignored
        with peer_errors():
            if model_has_dtensor(crowd):  # DDP refuses a base that is spread over the processes
                model = accelerator.prepare_model(crowd, evaluation_mode=True)
                self.prepared = Prepared(model, *accelerator.prepare(optimizer, loader))
            else:
                self.prepared = Prepared(*accelerator.prepare(crowd, optimizer, loader))

    def rate_of(self, agent: Agent, step: int) -> float:
        """The learning rate of an agent at a 0-based step: that of its schedule, less what faults have cut."""
        return agent.training.learning_rate(step) * self.state.lr_factor(agent.place)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a 0-based step before any factor, for people; the mean if agents have different ones."""
        rates = [agent.training.learning_rate(step) for agent in self.crowd.agents]
        return rates[0] if len({*rates}) == 1 else fmean(rates)

    @property
    def last_learning_rate(self) -> float:
        """The learning rate of the step just taken, times the factor that the supervisor asks for."""
        return self.learning_rate(self.state.step - 1) * self.state.recovery.requested_lr_factor

    @property
    def is_finished(self) -> bool:
        """True if no step is left: the last one is taken, or patience with the evaluations has run out."""
        return self.is_out_of_patience or self.state.step >= self.total_steps

    @property
    def is_out_of_patience(self) -> bool:
        """True if early stopping ends the run here."""
        patience = self.config.early_stopping_patience
        return patience is not None and self.state.validation.without_better >= patience

    @property
    def evaluation_due(self) -> bool:
        """True if an evaluation follows the step just taken; the last step is evaluated by `conclude`."""
        every, step = self.config.eval_steps, self.state.step
        return every is not None and step < self.total_steps and step % every == 0

    @property
    def evaluation_missed(self) -> bool:
        """True if the attempt before ended between the present step and the evaluation that was due after it."""
        return self.state.step > 0 and self.evaluation_due and self.state.validation.step != self.state.step

    @property
    def kept_steps(self) -> set[int]:
        """The steps whose checkpoints stay, because they are the best ones."""
        best = self.state.validation.best_step
        return {best} if self.config.keeps_best and best is not None else set()
