"""From a configuration to a run: loads, checks and joins its parts.

Everything that can be refused is refused before the first file is written.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import Final

import torch
from torch.utils import deterministic
from transformers import get_scheduler

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.config import Config
from ci_llm.config.own_keys import NAME, OWN_KEYS
from ci_llm.core.run_status import RunStatus
from ci_llm.crowd.base import Base
from ci_llm.crowd.initial_adapters import load_initial_adapters, require_distinct_agents
from ci_llm.crowd.lora import AgentLora, LoraSettings
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.objective import Objective
from ci_llm.crowd.prompts import Prompter, tokenizer_files
from ci_llm.data.agent_rows import AgentRows, EvaluationRows, TrainingRows
from ci_llm.data.order import AgentPlans, Plan
from ci_llm.distributed.processes import Processes
from ci_llm.errors import ConfigError
from ci_llm.interrupts import Interrupts
from ci_llm.logs.run_log import RunLog
from ci_llm.run.context import Run
from ci_llm.run.evaluation import Evaluator
from ci_llm.run.heartbeat import Heartbeat
from ci_llm.run.interval import Interval
from ci_llm.run.loading import Loaded, common_form, describe_rows, load, training_rows
from ci_llm.run.nonfinite import NonFiniteResponse
from ci_llm.run.nonfinite_policy import AgentRecovery, Bounds, RecoveryState
from ci_llm.run.out_of_memory import MemoryRelief
from ci_llm.run.resume import RunCheckpoint
from ci_llm.run.rollback import LastGood
from ci_llm.run.rounds import StopVote
from ci_llm.run.state import TrainState, Validation

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 20
INITIAL_LOSS_SCALE = 2.0**16  # PyTorch's GradScaler starts there as well


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written. The file that tries it has no name and leaves no trace.

    Raises:
        ConfigError: read-only, full, or not a folder.
    """
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
    interrupts: Interrupts,
    manager: CheckpointManager,
    log: RunLog,
    loaded: Loaded | None = None,
) -> Run:
    """Load, check and join everything a run needs, at step 0; logs what it found.

    Args:
        loaded: base and rows of an earlier run of this process, whose crowd has left the base; None: they are loaded.

    Raises:
        BadInput: the model, the data or their combination cannot be trained; nothing was created.
    """
    set_determinism(config)
    loaded = (loaded or load(config, processes)).for_agents(config.num_agents)
    base, rows = loaded.base, loaded.rows
    eval_rows = EvaluationRows.of(loaded.eval_rows)  # answers alone are evaluated, whatever is learned
    crowd = build_crowd(config, base)
    crowd.prompter = Prompter(base.tokenizer, common_form(config, [own.rows for own in rows]))
    describe_rows(config, rows, eval_rows)
    return join(config, processes, interrupts, manager, log, base, crowd, training_rows(config, rows), eval_rows)


def join(
    config: Config,
    processes: Processes,
    interrupts: Interrupts,
    manager: CheckpointManager,
    log: RunLog,
    base: Base,
    crowd: Crowd,
    rows: TrainingRows,
    eval_rows: EvaluationRows,
) -> Run:
    """The run at step 0, of parts that are ready."""
    rows_per_step = config.global_batch_size or (
        config.batch_size * processes.count * config.gradient_accumulation_steps
    )
    plan, total_steps = plan_ahead(config, lengths_of(rows), rows_per_step)
    optimizer = _optimizer(config, crowd)
    manager.watch(optimizer)
    last_good, heartbeat = LastGood(crowd.agents.rows, optimizer), Heartbeat()
    memory = MemoryRelief(config, base, crowd, processes.count)
    vote = StopVote(processes, interrupts, heartbeat)
    return Run(
        config=config,
        base=base,
        crowd=crowd,
        objective=_objective(config, crowd),
        optimizer=optimizer,
        rows=rows,
        eval_rows=eval_rows,
        processes=processes,
        interrupts=interrupts,
        manager=manager,
        log=log,
        status=RunStatus(config.run_folder, 0, is_main=False),
        state=_first_state(config, rows_per_step),
        plan=plan,
        total_steps=total_steps,
        learning_rates=schedules(config, total_steps),
        max_grad_norms=[own.max_grad_norm for own in config.each_agent],
        last_good=last_good,
        nonfinite=_nonfinite_response(config, last_good, processes, manager),
        memory=memory,
        stop_vote=vote,
        evaluator=Evaluator(config, crowd, eval_rows, vote, memory),
        checkpoint=RunCheckpoint(
            config, base, crowd, optimizer, rows, tokenizer_files(base.tokenizer), last_good, processes
        ),
        heartbeat=heartbeat,
        interval=Interval(crowd.num_agents, crowd.device),
    )


def _optimizer(config: Config, crowd: Crowd) -> torch.optim.Optimizer:
    """AdamW with one group per agent."""
    groups = [
        {"params": [row], "lr": own.learning_rate, "weight_decay": own.weight_decay}
        for row, own in zip(crowd.agents.rows, config.each_agent, strict=True)
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, betas=betas, eps=config.adam_epsilon, fused=config.fused_optimizer)


def _objective(config: Config, crowd: Crowd) -> Objective:
    drawn = [own.row_weights == "bootstrap" for own in config.each_agent]
    keys = [(agent.seed, agent.index) if draws else None for draws, agent in zip(drawn, crowd.agents.each, strict=True)]
    return Objective(
        config.diversity,
        config.lambda_sw,
        config.swd_num_projections,
        config.swd_representation,
        config.seed,
        bootstrap=tuple(keys) if any(drawn) else (),
    )


def _nonfinite_response(
    config: Config, last_good: LastGood, processes: Processes, manager: CheckpointManager
) -> NonFiniteResponse:
    def may_write() -> bool:
        return processes.is_main and manager.holds_lease()

    bounds = Bounds(config.nonfinite_lr_factor, config.max_consecutive_nonfinite, config.good_after_steps)
    return NonFiniteResponse(bounds, last_good, config.run_folder, may_write, drops_agents=config.drop_nonfinite_agents)


def _first_state(config: Config, rows_per_step: int) -> TrainState:
    return TrainState(
        rows_per_step=rows_per_step,
        skipped=(0,) * config.num_agents,
        recovery=RecoveryState(agents=(AgentRecovery(),) * config.num_agents),
        loss_scale=INITIAL_LOSS_SCALE if config.mixed_precision == "fp16" else None,
        validation=Validation(config.metric_for_best_model),
    )


def lengths_of(rows: TrainingRows) -> list[int]:
    """The number of rows of every agent that has its own, or of all."""
    return [len(own) for own in rows.each] if isinstance(rows, AgentRows) else [len(rows)]


def plan_ahead(config: Config, num_rows: Sequence[int], rows_per_step: int) -> tuple[Plan | AgentPlans, int]:
    """Order and length of a run. Epochs are those of the agent with the most rows: all take their steps together.

    Args:
        num_rows: see `lengths_of`.
        rows_per_step: of all agents, or of each; those of step 1 for good.
    """
    plans = [Plan(number, rows_per_step, seed) for number, seed in zip(num_rows, config.data_seeds, strict=False)]
    plan = AgentPlans(tuple(plans)) if len(plans) > 1 else plans[0]
    # Rounded before it is rounded up: 0.1 x 30 is a little more than 3, and must not make a fourth step.
    by_epochs = math.ceil(round(config.epochs * plan.steps_per_epoch, 6))
    return plan, config.max_train_steps or max(1, by_epochs)


def build_crowd(config: Config, base: Base) -> Crowd:
    """The agents on their base, on the route through it that gives the base's own logits."""
    crowd = Crowd(base.model, lora_settings(config), base.name, pad_id=base.tokenizer.pad_token_id or 0)
    if reason := crowd.choose_route():
        logger.info(f"model     rows are padded, not packed: {reason}")
    if config.init_from:
        logger.info(f"agents    {load_initial_adapters(crowd, Path(config.init_from))}")
    require_distinct_agents(
        crowd,
        f"init_from: {config.init_from}" if config.init_from else "initialize_adapters_rand: false",
        [_training_of(own, agent) for own, agent in zip(config.each_agent, crowd.agents.each, strict=True)],
    )
    if config.use_gradient_checkpointing:
        crowd.gradient_checkpointing_enable()
    for line in _described(config, crowd):
        logger.info(f"agents    {line}")
    return crowd


def _training_of(own: Config, agent: AgentLora) -> tuple[Hashable, ...]:
    """What tells this agent's training from that of another with the same start."""
    drawn = (agent.seed, agent.index) if own.row_weights == "bootstrap" else None
    return (drawn, *(getattr(own, key) for key in OWN_KEYS if key != "seed"))


def _described(config: Config, crowd: Crowd) -> Iterator[str]:
    """The agents in a line, and those with settings of their own in a line each."""
    sizes = crowd.agents.sizes
    if not config.agents:
        yield f"{config.num_agents} x LoRA rank {config.lora_rank}, {sizes[0]:,} trainable parameters each"
    for name, own, size in zip(config.agent_names, config.agents, sizes, strict=False):
        told = [f"{key} {_told(value)}" for key, value in own.items() if key != NAME]
        yield f"{name}: {', '.join([*told, f'{size:,} trainable parameters'])}"


def _told(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def lora_settings(config: Config) -> LoraSettings:
    """What the configuration says about an agent."""
    return LoraSettings(
        num_agents=config.num_agents,
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        dropconnect=config.dropconnect_p,
        target_modules=config.lora_target_modules,
        use_rslora=config.use_rslora,
        initialize_adapters_rand=config.initialize_adapters_rand,
        seed=config.seed,
        agents=tuple({_LORA[key]: value for key, value in own.items() if key in _LORA} for own in config.agents),
    )


#: A key that an agent may have of its own -> its name in `LoraSettings`.
_LORA: Final = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "dropconnect_p": "dropconnect",
    "lora_target_modules": "target_modules",
    "use_rslora": "use_rslora",
    "seed": "seed",
}


def schedules(config: Config, total_steps: int) -> list[Callable[[int], float]]:
    """`schedule` of every agent."""
    if not config.agents:
        return [schedule(config, total_steps)] * config.num_agents
    return [schedule(own, total_steps) for own in config.each_agent]


def schedule(config: Config, total_steps: int) -> Callable[[int], float]:
    """Learning rate of 0-based step s, as a pure function: Transformers' schedules, fed by our own counter.

    With `schedule_steps` it is that of a run of so many steps, wherever this one ends; later steps have its last rate.

    A scheduler object would have a position to save, and Accelerate steps a prepared one once per process.
    """
    total_steps = config.schedule_steps or total_steps
    warmup = config.num_warmup_steps
    if warmup is None:
        warmup = round(config.num_warmup_steps_ratio * total_steps)
    dummy = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    extra: dict[str, float] = (
        {"num_decay_steps": max(1, total_steps // 10)} if "stable_decay" in config.lr_scheduler_type else {}
    )
    if config.lr_scheduler_type.endswith("with_min_lr"):
        extra = {"min_lr_rate": 0.1}
    scheduler = get_scheduler(
        config.lr_scheduler_type,
        dummy,
        num_warmup_steps=warmup,
        num_training_steps=total_steps,
        scheduler_specific_kwargs=extra,
    )
    (factor,) = scheduler.lr_lambdas
    return lambda step: config.learning_rate * float(factor(min(step, total_steps)))


def set_determinism(config: Config) -> None:
    """Choose deterministic algorithms, as the configuration says; before anything is computed."""
    if config.deterministic is False:
        return
    # Must be in the environment before the first cuBLAS handle is made.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=config.deterministic == "auto")
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # costs time, and hides bugs of other libraries
