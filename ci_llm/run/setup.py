"""A run is built from its configuration: its parts are loaded, checked and joined.

Everything that can be refused is refused before the first file is written.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.utils import deterministic

from ci_llm.base.load import Base
from ci_llm.base.targets import absent_targets
from ci_llm.config import Config, as_typed
from ci_llm.config.own_keys import NAME
from ci_llm.core.run_folder import OF_A_RUN, SWEEP
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.importing import load_initial_adapters, require_distinct_agents
from ci_llm.crowd.rewarding import Drawer
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.data.prompts import Prompter, tokenizer_files
from ci_llm.data.sources import row_kind
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.precision import slow_bf16
from ci_llm.distributed.processes import Processes
from ci_llm.errors import ConfigError
from ci_llm.run.attempt import Attempt
from ci_llm.run.run_checkpoint import RunCheckpoint
from ci_llm.run.start import agent_settings, loading
from ci_llm.run.start.cost_model import settle
from ci_llm.run.step.evaluator import Evaluator
from ci_llm.run.step.last_good import LastGood
from ci_llm.run.step.nonfinite import NonFiniteResponse
from ci_llm.run.step.out_of_memory import MemoryRelief
from ci_llm.run.step.rollout import Rollouts
from ci_llm.run.step.rounds import Heartbeat, StopVote
from ci_llm.run.step.state import Bounds, TrainState, Validation
from ci_llm.run.step.step_metrics import Learning, StepMetrics
from ci_llm.run.trainer import Prepared, Trainer

logger = logging.getLogger(__name__)

PROBE_BYTES = 1 << 20
INITIAL_LOSS_SCALE = 2.0**16  # PyTorch's GradScaler starts there as well


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
    config = _with_precision(config.settled_as(before), processes)
    loaded = loaded or loading.load(config, processes, before.max_seq_length if before else None, given)
    loaded = loaded.for_agents(config.num_agents)
    base, rows = loaded.base, loaded.rows
    config = config.model_copy(update=loaded.settled)
    for line in config.told_auto():
        logger.info(f"auto      {line}")
    config = settle(config, rows, processes, given and given.model.config)
    eval_rows = EvaluationRows.of(loaded.eval_rows)  # answers alone are evaluated, whatever is learned
    crowd = build_crowd(config, base, processes)
    crowd.prompter = Prompter(base.tokenizer, loading.common_form(config, rows))
    loading.describe_rows(config, rows, eval_rows)
    return assemble(
        config, processes, attempt, base, crowd, loading.training_rows(config, rows), eval_rows, loaded.judged
    )


def _with_precision(config: Config, processes: Processes) -> Config:
    """The configuration with a precision in place of auto; logs it. A collective."""
    config, line = processes.settle_precision(config)
    if line:
        logger.info(f"precision {line}")
    if slow := slow_bf16(config):
        logger.warning(f"precision {slow}")
    return config


def assemble(
    config: Config,
    processes: Processes,
    attempt: Attempt,
    base: Base,
    crowd: Crowd,
    rows: Sequence[TokenizedRows],
    eval_rows: EvaluationRows,
    judged: Sequence[TokenizedRows] = (),
) -> Trainer:
    """The trainer at step 0, of parts that are ready; for `judged` see `Loaded`."""
    heartbeat, holds_lease = Heartbeat(), attempt.manager.store.holds_lease
    rows_per_step = config.rows_per_step(processes.num_processes)
    steps = loading.steps_of(config, [*map(len, rows)], rows_per_step)
    state = TrainState.of_agents(
        config.num_agents,
        rows_per_step=rows_per_step,
        loss_scale=INITIAL_LOSS_SCALE if config.mixed_precision == "fp16" else None,
        validation=Validation(config.metric_for_best_model),
    )
    agent_settings.prepare_agents(crowd.agents, config, rows, rows_per_step, steps)
    optimizer = optimizer_of(config, crowd)
    attempt.manager.watch(optimizer)
    last_good = LastGood(crowd.storage.rows, optimizer)
    memory = MemoryRelief(config, base, crowd, processes.num_processes)
    objective = agent_settings.objective_of(config, crowd)
    vote = StopVote(processes, attempt.interrupts, heartbeat)
    files = tokenizer_files(base.tokenizer)
    checkpoint = RunCheckpoint(config, base, crowd, optimizer, rows, files, last_good, processes, config)
    return Trainer(
        config=config,
        processes=processes,
        crowd=crowd,
        objective=objective,
        prepared=Prepared(crowd, optimizer),
        checkpoint=checkpoint,
        state=state,
        total_steps=steps,
        nonfinite=NonFiniteResponse(
            Bounds(), last_good, config.run_folder, holds_lease, drops_agents=config.trial_steps is not None
        ),
        memory=memory,
        evaluator=Evaluator(config, crowd, eval_rows, objective, judged, vote, memory),
        heartbeat=heartbeat,
        rollouts=Rollouts(Drawer(crowd, heartbeat.tick), processes),
        metrics=StepMetrics(state.names, crowd.device),
        learning=Learning(state.names, steps),
    )


def optimizer_of(config: Config, crowd: Crowd) -> torch.optim.Optimizer:
    """The optimizer of the agents of `config`."""
    betas, groups = (config.adam_beta1, config.adam_beta2), [agent.optimizer_group for agent in crowd.agents]
    return torch.optim.AdamW(groups, betas=betas, eps=config.adam_epsilon, fused=True)


def build_crowd(config: Config, base: Base, processes: Processes) -> Crowd:
    """The agents on their base, by the route through it that gives the base's own logits."""
    crowd = Crowd(base.model, agent_settings.lora_settings(config), base.name, base.pad_id)
    crowd.classes = config.label_names or ()
    kind = row_kind(config)
    crowd.reads_pairs = kind == "pairs"
    # Sharded weights are gathered in the precision of autocast, and have no other one.
    with processes.autocast() if loading.shares_layers(config, processes) else nullcontext():
        reason = crowd.choose_route()
        whole = crowd.share_prompts() if kind in ("pairs", "prompts") else None
    if whole:
        logger.info(f"model     each answer has a prompt of its own: {whole}")
    if reason:
        logger.info(f"model     rows are padded, not packed: {reason}")
    elif crowd.device.type == "cuda":
        with processes.autocast():
            logger.info(f"attention {crowd.choose_attention()}")
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
