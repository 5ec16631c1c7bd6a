"""`Trainer`: what trains the agents of a run, and the state that moves with every step; and how its parts are joined.

They are loaded and checked first: everything that can be refused is refused before the first file is written. What is
beside the training is the `Attempt`'s: log, mirror, signals.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from accelerate.utils import model_has_dtensor
from torch import nn
from torch.utils import deterministic

from ci_llm.base.load import Base
from ci_llm.base.targets import absent_targets
from ci_llm.checkpoints.gradients import inner_optimizer
from ci_llm.config import Config, as_typed
from ci_llm.config.own_keys import NAME
from ci_llm.core.run_folder import OF_A_RUN, SWEEP
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.importing import load_initial_adapters, require_distinct_agents
from ci_llm.crowd.objective import TrainedObjective, objective_of
from ci_llm.crowd.rewarding import Drawer
from ci_llm.data.agent_rows import EvaluationRows, TrainingRows
from ci_llm.data.prompts import Prompter
from ci_llm.data.sources import row_kind
from ci_llm.distributed.precision import slow_bf16
from ci_llm.distributed.processes import Processes, peer_errors
from ci_llm.errors import ConfigError
from ci_llm.evaluation.evaluator import Evaluator
from ci_llm.run.attempt import Attempt
from ci_llm.run.optimizer import build_optimizer
from ci_llm.run.start import agent_settings, loading
from ci_llm.run.start.cost_model import resolve_auto
from ci_llm.run.step.nonfinite import LastGood, NonFiniteResponse
from ci_llm.run.step.out_of_memory import MemoryRelief
from ci_llm.run.step.rollout import Rollouts
from ci_llm.run.step.state import TrainState, Validation
from ci_llm.run.step.step_metrics import StepMetrics
from ci_llm.run.watchdog import Heartbeat

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 20
INITIAL_LOSS_SCALE = 2.0**16  # PyTorch's GradScaler starts there as well


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
        loaded: the base, and the rows of every agent with which the run began.
        description: what checkpoints say of the crowd; it follows the crowd.
        prepared: crowd and optimizer as the loop takes them.
        nonfinite: responds to numbers that are not finite.
        memory: responds where memory runs out.
        rollouts: draws what agents learn from, where the objective asks for it.
        metrics: the steps since the last line of metrics.
    """

    config: Config
    processes: Processes
    loaded: loading.Loaded
    crowd: Crowd
    objective: TrainedObjective
    description: agent_settings.Description
    prepared: Prepared
    state: TrainState
    total_steps: int
    nonfinite: NonFiniteResponse
    memory: MemoryRelief
    evaluator: Evaluator
    heartbeat: Heartbeat
    rollouts: Rollouts
    metrics: StepMetrics

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer itself, which moves the agents; `prepared` has it as Accelerate wraps it."""
        return inner_optimizer(self.prepared.optimizer)

    @property
    def training_rows(self) -> TrainingRows:
        """The rows of the agents that stand in the crowd now; `loaded.rows` has the rows of all agents."""
        return TrainingRows(tuple(agent.training.rows for agent in self.crowd.agents))

    @property
    def present_config(self) -> Config:
        """The configuration with the agents that stand in the crowd now."""
        return agent_settings.config_of(self.config, self.state.numbers)

    @property
    def micro_batch_size(self) -> int:
        """Rows per process and micro-step: as configured, or fewer where memory or the supervisor asks for it."""
        return self.state.recovery.limit(self.config.batch_size)

    def prepare(self, loader: Any) -> None:
        """Let Accelerate prepare crowd, optimizer and loader: again after each change of the crowd. A collective.

        On several processes DistributedDataParallel wraps the crowd, without the frozen base, which each has loaded.
        Where each process holds a part of the base the crowd stays as it is: its gradients are reduced in the same way.
        """
        accelerator, crowd, optimizer = self.processes.accelerator, self.crowd, self.optimizer
        accelerator.unwrap_model(self.prepared.model, keep_fp32_wrapper=False)
        accelerator.free_memory()  # of what was prepared before
        tensors = *crowd.named_parameters(), *crowd.named_buffers()
        ignored: Any = [name for name, tensor in tensors if not tensor.requires_grad]
        crowd._ddp_params_and_buffers_to_ignore = ignored
        with peer_errors():
            # DDP refuses a base that is spread over the processes. For one process under a launcher it would reduce in
            # every pass, because Accelerate's `no_sync` does nothing there.
            is_one = self.processes.num_processes == 1 and torch.distributed.is_initialized()
            if model_has_dtensor(crowd) or is_one:
                model = accelerator.prepare_model(crowd, evaluation_mode=True)
                self.prepared = Prepared(model, *accelerator.prepare(optimizer, loader))
            else:
                self.prepared = Prepared(*accelerator.prepare(crowd, optimizer, loader))

    def learning_rate(self, step: int) -> float:
        """The learning rate of a 0-based step before any factor, for people; the mean if agents have different ones."""
        rates = [agent.learning_rate(step) for agent in self.crowd.agents]
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


def require_no_sweep(folder: Path) -> None:
    """Refuse the folder of a sweep, whose runs lie below it.

    Raises:
        ConfigError: the folder holds a sweep.
    """
    if (folder / SWEEP).exists():
        raise ConfigError(
            "this folder holds a sweep and not a run",
            where=f"output_dir: {folder}",
            hint="experiment_name=NAME, or another output_dir, for the run",
        )


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written; found out by a temporary file, which leaves no trace.

    Raises:
        ConfigError: the folder is read-only, full, or not a folder; or a folder in it has the name of a file of a run.
    """
    if in_the_way := [name for name in OF_A_RUN if Path(name).suffix and (folder / name).is_dir()]:
        raise ConfigError(
            f"a folder has the name of a file that a run writes: {', '.join(in_the_way)}",
            where=f"output_dir: {folder}",
            hint="move it away, or give another output_dir",
        )
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
    except OSError as error:
        raise ConfigError(
            f"nothing can be written here: {error.strerror}",
            where=f"output_dir: {folder}",
            hint="give an output_dir on a disk that has space and may be written",
        ) from error


def build(
    config: Config,
    processes: Processes,
    attempt: Attempt,
    loaded: loading.Loaded | None = None,
    before: Config | None = None,
    given: Base | None = None,
) -> Trainer:
    """Load, check and join everything a run needs, at step 0; logs what it found.

    Args:
        loaded: base and rows of an earlier run of this process, whose crowd has left the base; None to load them.
        before: the settings of the checkpoint that the run resumes from.
        given: a base that is loaded already, by a call in Python.

    Raises:
        BadInput: the model, the data or their combination cannot be trained; nothing was created.
    """
    set_determinism(config)
    config, line = processes.choose_precision(config.settled_as(before))
    if line:
        logger.info(f"precision {line}")
    if slow := slow_bf16(config):
        logger.warning(f"precision {slow}")
    loaded = loaded or loading.load(config, processes, before.max_seq_length if before else None, given)
    loaded = loaded.for_agents(config.num_agents)
    config = config.with_settled(loaded.settled)
    for line in config.told_auto():
        logger.info(f"auto      {line}")
    config = resolve_auto(config, loaded.rows, processes, given and given.model.config)
    crowd = build_crowd(config, loaded.base, processes)
    crowd.prompter = Prompter(loaded.base.tokenizer, loading.common_form(config, loaded.rows))
    trainer = assemble(config, processes, attempt, loaded, crowd)
    loading.describe_rows(config, loaded.rows, trainer.evaluator.rows)
    return trainer


def assemble(config: Config, processes: Processes, attempt: Attempt, loaded: loading.Loaded, crowd: Crowd) -> Trainer:
    """The trainer at step 0, of parts that are ready."""
    heartbeat = Heartbeat()
    rows_per_step = config.rows_per_step(processes.num_processes)
    steps = loading.steps_of(config, [*map(len, loaded.rows)], rows_per_step)
    state = TrainState.at_start(
        config.num_agents,
        rows_per_step=rows_per_step,
        loss_scale=INITIAL_LOSS_SCALE if config.mixed_precision == "fp16" else None,
        validation=Validation(config.metric_for_best_model),
    )
    agent_settings.assign_training(crowd.agents, config, loaded.rows, rows_per_step, steps)
    optimizer = build_optimizer(config, crowd.agents)
    attempt.manager.watch(optimizer)
    memory = MemoryRelief(config, loaded.base, crowd, processes.num_processes)

    def asked_to_stop() -> str | None:
        heartbeat.tick()
        return attempt.interrupts.stop_reason

    objective = objective_of(config, crowd)
    return Trainer(
        config=config,
        processes=processes,
        loaded=loaded,
        crowd=crowd,
        objective=objective,
        description=agent_settings.describe(config, state.numbers, loaded, crowd, stopped={}),
        prepared=Prepared(crowd, optimizer),
        state=state,
        total_steps=steps,
        nonfinite=NonFiniteResponse(
            LastGood(crowd.storage.rows, optimizer),
            config.run_folder,
            attempt.manager.store.holds_lease,
            drops_agents=config.trial_steps is not None,
        ),
        memory=memory,
        evaluator=Evaluator(
            config,
            crowd,
            EvaluationRows.of(loaded.eval_rows),  # answers alone are evaluated, whatever is learned
            objective,
            loaded.preferences,
            processes,
            memory.exhausted,
            lambda **fields: attempt.status.note(**fields),  # the status is another object once the attempt has begun
            asked_to_stop,
        ),
        heartbeat=heartbeat,
        rollouts=Rollouts(Drawer(crowd, heartbeat.tick), processes),
        metrics=StepMetrics(state.names, crowd.device),
    )


def build_crowd(config: Config, base: Base, processes: Processes) -> Crowd:
    """The agents on their base, by the route through it that gives the base's own logits."""
    crowd = Crowd(base.model, agent_settings.lora_settings(config), base.name, base.pad_id)
    crowd.classes = config.label_names or ()
    kind = row_kind(config)
    crowd.reads_pairs = kind == "pairs"
    # Sharded weights are gathered in the precision of autocast, and have no other one.
    with processes.autocast() if loading.shares_layers(config, processes) else nullcontext():
        reason = crowd.base_model.choose_route()
        whole = crowd.base_model.share_prompts() if kind in ("pairs", "prompts") else None
    if whole:
        logger.info(f"model     each answer has a prompt of its own: {whole}")
    if reason:
        logger.info(f"model     rows are padded, not packed: {reason}")
    elif crowd.device.type == "cuda":
        with processes.autocast():
            logger.info(f"attention {crowd.base_model.choose_attention()}")
    if config.init_from:
        logger.info(f"agents    {load_initial_adapters(crowd, Path(config.init_from))}")
    if config.reference == "start":
        crowd.start = crowd.storage.weights.clone()
    require_distinct_agents(
        crowd,
        f"init_from: {config.init_from}" if config.init_from else "initialize_adapters_rand: false",
        [
            agent_settings.training_of(own, agent.settings)
            for own, agent in zip(config.each_agent, crowd.agents, strict=True)
        ],
    )
    crowd.storage.pass_per_agent = config.pass_per_agent is True
    if config.use_gradient_checkpointing is True:
        crowd.gradient_checkpointing_enable()
    for line in _described(config, crowd):
        logger.info(f"agents    {line}")
    for line in {absent_targets(base.model, own.target_modules): None for own in crowd.settings.each()}:
        if line:
            logger.warning(f"lora_target_modules: {line}")
    return crowd


def _described(config: Config, crowd: Crowd) -> Iterator[str]:
    """Lines for people: one about all agents, or one for each that has settings of its own."""
    sizes = crowd.storage.sizes
    if not config.agents:
        places = "" if config.agent_layers == "all" else f", agent_layers {as_typed(config.agent_layers)}"
        yield f"{config.num_agents} x LoRA rank {config.lora_rank}{places}, {sizes[0]:,} trainable parameters each"
    for name, own, size in zip(config.agent_names, config.agents, sizes, strict=False):
        told = [f"{key} {as_typed(value)}" for key, value in own.items() if key != NAME]
        yield f"{name}: {', '.join([*told, f'{size:,} trainable parameters'])}"


def set_determinism(config: Config) -> None:
    """Choose deterministic algorithms and TF32, as the configuration says; before anything is computed."""
    torch.backends.cuda.matmul.allow_tf32 = False
    if config.deterministic is False:
        return
    torch.use_deterministic_algorithms(True, warn_only=config.deterministic == "auto")
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, and hides bugs of other libraries
