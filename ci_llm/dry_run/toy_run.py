"""Checks that run the real code at toy size, from the first step to the final checkpoint."""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ci_llm.checkpoints.checkpoint import Checkpoint, load_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import FileRecord
from ci_llm.checkpoints.state_files import State, entries_of, files_of
from ci_llm.core.determinism import generator_for
from ci_llm.core.quantities import count, duration, short, size
from ci_llm.core.run_folder import number, read_records
from ci_llm.crowd.aggregators import aggregate, find_vote
from ci_llm.crowd.generation import continuation
from ci_llm.crowd.next_token import Decoding
from ci_llm.crowd.objective import GrpoObjective, NextToken
from ci_llm.data.batches import Batch, Owned, pack
from ci_llm.data.encoder import use_chat_template
from ci_llm.data.prompts import Prompter, form_of, last_answer
from ci_llm.data.units import Unit
from ci_llm.dry_run.context import TOY_STEPS, CheckContext
from ci_llm.errors import CheckpointError, CiLlmError, ModelError
from ci_llm.interrupts import Interrupts, send
from ci_llm.logs.run_log import RunLog
from ci_llm.run.attempt import Attempt
from ci_llm.run.evaluation import conclude
from ci_llm.run.exactness import record_bits
from ci_llm.run.loop import Batches, steps, train
from ci_llm.run.reporting import contents_of
from ci_llm.run.run_checkpoint import Resume
from ci_llm.run.start.beginning import newest_source
from ci_llm.run.start.loading import Loaded, open_base
from ci_llm.run.step.step_metrics import Learning
from ci_llm.run.trainer import Trainer, assemble, build_crowd, set_determinism

TERMINATED = "signal:SIGTERM"
GENERATED_TOKENS = 8
NOISE = 0.05


def model(context: CheckContext) -> str:
    """The base is loaded and has the agents; their route through it gives the base's own logits."""
    set_determinism(context.config)
    base = open_base(context.config, context.processes)
    use_chat_template(base.tokenizer, context.config.chat_template)
    parameters = base.num_parameters  # counted before there are agents
    config = context.toy_config()
    log = RunLog(config.run_folder, is_main_process=context.processes.is_main_process, terminal=io.StringIO())
    context.at_end.callback(log.close)
    manager = CheckpointManager(
        config.run_folder,
        save_interval_steps=None,
        checkpoint_backend=config.checkpoint_backend,
        processes=context.processes,
        interrupts=context.interrupts,
    )
    context.at_end.callback(manager.close)
    crowd = build_crowd(config, base, context.processes)
    crowd.prompter = Prompter(base.tokenizer, form_of(context.rows[0]))
    attempt = context.attempt = Attempt(config, context.launch, manager, context.interrupts, log)
    rows, eval_rows = [*context.examples], [*context.eval_examples]
    loaded = Loaded(base, rows, eval_rows, settled={}, preferences=rows)
    trainer = context.trainer = assemble(config, context.processes, attempt, loaded, crowd)
    trainer.total_steps = TOY_STEPS  # of the two more that the schedule knows, for the interruption
    start = time.perf_counter()
    record_bits(trainer, attempt)
    took = f"the digest of a layer takes {duration(time.perf_counter() - start)}"
    agents = f"{trainer.crowd.num_agents} agents of {short(trainer.crowd.storage.weights.shape[1])}"
    rows_are = trainer.crowd.base_model.route
    return f"{short(parameters)} parameters, {agents}, rows {rows_are}; {took}{_repeated(trainer, attempt)}"


def _repeated(trainer: Trainer, attempt: Attempt) -> str:
    """Compute the layer of the digest once more: other bits fail a run that has to be deterministic."""
    first = attempt.bits["layer"]
    record_bits(trainer, attempt)
    if trainer.config.deterministic is False or attempt.bits["layer"] == first:
        return ""
    if trainer.config.deterministic is True:
        what = "the same layer computed twice gives other bits"
        raise ModelError(what, where="deterministic: true", hint="deterministic=auto runs without this")
    return "\ncomputed twice it gives other bits: a resumed run is state-exact here, and not bitwise"


def two_steps(context: CheckContext) -> str:
    """Two optimizer steps: every loss is finite, and every agent moves."""
    trainer = context.trainer
    before = trainer.crowd.storage.weights.clone()
    context.attempt.log.open(1)
    context.attempt.learning = Learning(trainer.state.names, trainer.total_steps)
    _uninterrupted(train(trainer, context.attempt, steps(trainer)))
    moved = (trainer.crowd.storage.weights != before).any(1).tolist()
    losses, speed = trainer.processes.on_main(lambda: _logged(trainer.config.run_folder))
    if not all(moved) or not all(map(math.isfinite, losses)):
        raise CiLlmError(
            f"after two steps the losses are {losses}, and the agents moved: {moved}",
            where="two optimizer steps",
            hint="lower learning_rate, or take mixed_precision=bf16 or no instead of fp16",
        )
    context.tokens_per_s = speed
    return f"loss {losses[0]:.3f}, then {losses[-1]:.3f}; {speed:,.0f} tokens/s"


def _logged(run_folder: Path) -> tuple[list[float], float]:
    """The losses of the logged steps, and the speed of the last one in tokens per second."""
    lines, _ = read_records(run_folder)
    return [number(line["train/task_loss"]) for line in lines], number(lines[-1]["tokens_per_s"])


def _uninterrupted(stop: str | None) -> None:
    if stop is not None:
        raise CiLlmError(f"the dry run was stopped: {stop}")


def checkpoint(context: CheckContext) -> str:
    """The checkpoint of the last step holds every bit, and restores a run whose weights are lost."""
    trainer = context.trainer
    context.attempt.manager.wait_until_finished()
    result = context.attempt.manager.last_result
    if result is not None and not result.saved:
        raise CheckpointError(
            result.note, where=str(trainer.config.run_folder), hint="give an output_dir on another disk"
        )
    wanted = _records(contents_of(trainer, context.attempt)[0])
    trainer.crowd.storage.weights.fill_(math.nan)
    for moments in trainer.optimizer.state.values():
        for tensor in moments.values():
            tensor.zero_()
    source = _saved(context)
    trainer.state = Resume(trainer, source).restore()
    _compare(wanted, _records(contents_of(trainer, context.attempt)[0]), str(source.folder))
    if result is None:  # on every process but the one that writes
        return ""
    context.checkpoint_bytes = result.nbytes
    return f"{size(result.nbytes)} written in {duration(result.seconds)}, read back bit for bit"


def _saved(context: CheckContext) -> Checkpoint:
    """The checkpoint of the present step, which must be the newest."""
    step = context.trainer.state.step
    with context.processes.main_process_first():
        source = newest_source(context.attempt.manager)
    if source is None or source.manifest.step != step:
        raise CheckpointError(f"the checkpoint of step {step} is not found again", where=str(context.scratch))
    return source


def _records(state: State) -> dict[str, FileRecord]:
    """Size and digest of every file of a state; without the global generators, which every draw changes."""
    files = files_of(entries_of({key: value for key, value in state.items() if key != "rng"}))
    return {name: image.record() for name, image in files.items()}


def _compare(wanted: Mapping[str, FileRecord], found: Mapping[str, FileRecord], where: str) -> None:
    changed = sorted(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
    if changed:
        what = f"{len(changed)} of {len(wanted)} files come back changed, the first is {changed[0]}"
        raise CheckpointError(what, where=where, hint="do not train on this disk: it changes what is written")


def interruption(context: CheckContext) -> str:
    """A SIGTERM in the middle of a step: the step is finished, saved, and read back."""
    trainer, attempt = context.trainer, context.attempt
    trainer.total_steps = TOY_STEPS + 2
    with Interrupts(announce=lambda _: None) as own:
        attempt.interrupts = own
        stop = train(trainer, attempt, _terminated(context, steps(trainer)))
        context.attempt.manager.wait_until_finished()
        took = time.monotonic() - (own.stop_requested_at or time.monotonic())
    attempt.interrupts = context.interrupts
    if stop != TERMINATED or trainer.state.step != TOY_STEPS + 1:
        raise CiLlmError(f"a SIGTERM in step {TOY_STEPS + 1} stopped the run at step {trainer.state.step}: {stop}")
    source = _saved(context)
    _compare(_records(contents_of(trainer, attempt)[0]), _records(source.state), str(source.folder))
    return f"SIGTERM in step {trainer.state.step}: finished, saved and read back {duration(took)} later"


def _terminated(context: CheckContext, batches: Batches) -> Batches:
    """The batches; the main process gets a SIGTERM before each one."""
    for step, micro_batches in batches:
        if context.processes.is_main_process:
            send(os.getpid(), "SIGTERM")
            context.attempt.interrupts.wait(10)
        yield step, micro_batches


def diversity(context: CheckContext) -> str:
    """The diversity term is zero for agents that are alike, positive for others, and has a finite gradient."""
    trainer = context.trainer
    if not isinstance(trainer.objective, NextToken):
        return f"none: objective {trainer.config.objective}"
    examples = trainer.training_rows.each[0].rows
    rows = [examples[number] for number in range(min(2, len(examples)))]
    batch = pack(rows, range(len(rows))).to(trainer.crowd.device)
    kept = trainer.crowd.storage.weights.clone()
    generator = generator_for(trainer.config.seed, "dry run")
    noise = torch.randn(kept.shape, generator=generator).to(kept) * NOISE
    try:  # with weights of zero, agents of any shape are the base itself
        alike, _ = _diversity_of(trainer, torch.zeros_like(noise), batch)
        apart, gradient = _diversity_of(trainer, noise, batch)
    finally:
        trainer.crowd.storage.weights.copy_(kept)
    if not (math.isfinite(gradient) and abs(alike) < 1e-3 < 1e3 and (apart > alike or len(kept) == 1)):
        raise CiLlmError(
            f"diversity {trainer.objective.diversity}: {alike:.3g} of equal agents, {apart:.3g} of others,"
            f" gradient {gradient:.3g}",
            where=f"diversity: {trainer.config.diversity}",
            hint="take diversity=none, or a wider mixed_precision",
        )
    weight = "measured only" if trainer.config.diversity == "none" else f"weight {trainer.config.lambda_sw:g}"
    return f"{trainer.config.diversity} ({weight}): {abs(alike):.1g} of equal agents, {apart:.3g} of different ones"


def _diversity_of(trainer: Trainer, weights: Tensor, batch: Batch) -> tuple[float, float]:
    """(the diversity term per target, the norm of the gradient of the whole loss) with these weights."""
    trainer.crowd.storage.weights.copy_(weights)
    trainer.crowd.storage.begin_step(0)
    with trainer.processes.autocast():
        loss = trainer.objective(trainer.crowd(batch), 0)
    loss.total.backward()
    return float(loss.diversity) / batch.num_targets, float(trainer.crowd.storage.gradients.norm())


def generation(context: CheckContext) -> str:
    """The crowd generates, with its cache, the tokens that full passes of all agents and their aggregate choose."""
    trainer = context.trainer
    if trainer.crowd.settings.outputs:
        return f"none: agents of objective {trainer.config.objective} have heads"
    examples = trainer.training_rows.each[0].rows
    asked = [examples[number] for number in range(min(2, len(examples)))]
    starts = [row.prompts[0] if isinstance(row, Unit) else last_answer(row).start for row in asked]
    prompts = [row.input_ids[:start].tolist() for row, start in zip(asked, starts, strict=True)]
    how = trainer.config.aggregator
    decoding = Decoding(max_new_tokens=GENERATED_TOKENS, aggregator="probability" if find_vote(how) else how)
    with trainer.processes.autocast():
        start = time.monotonic()
        texts = [found.ids for found in trainer.crowd.generate_ids(prompts, decoding)]
        took = time.monotonic() - start
        gap = max(_regret(trainer, prompt, text) for prompt, text in zip(prompts, texts, strict=True))
    # The most that the token chosen may be less likely, in nats: rounding alone may change the choice.
    exact = trainer.config.mixed_precision == "no" and trainer.loaded.base.model.dtype in (torch.float32, torch.float64)
    if not gap <= (1e-3 if exact else 0.2):
        raise ModelError(
            f"generation chooses tokens that full passes find {gap:.2g} nats less likely than the best",
            where=f"model_name: {trainer.config.model_name}",
            hint="report this base; training is not concerned, set generation_eval_samples=0 to do without",
        )
    shown = trainer.crowd.prompter.text(texts[0]).replace("\n", "⏎")
    return f"{GENERATED_TOKENS} tokens x {len(prompts)} in {duration(took)}, as full passes choose them: {shown!r}"


def rewards(context: CheckContext) -> str:
    """An agent draws the completions of one prompt, and the functions reward them."""
    trainer = context.trainer
    if not isinstance(trainer.objective, GrpoObjective):
        return f"none: objective {trainer.config.objective}"
    rows = trainer.training_rows.each[0].rows
    asked = [Owned((0,), pack([rows[0]], [0]))]
    rollout = trainer.rollouts.of_step(trainer.objective, 0, [asked], trainer.training_rows)
    if rollout.failure is not None:
        raise rollout.failure
    return "\n".join(line.strip() for line in rollout.lines(trainer.objective.grpo.num_generations))


@torch.no_grad()
def _regret(trainer: Trainer, prompt: list[int], text: list[int]) -> float:
    """The largest gap in nats, over the tokens of the text, to the likeliest token of one full pass."""
    batch = pack([continuation(prompt, text)], [0]).to(trainer.crowd.device)
    trainer.crowd.eval()
    logits = trainer.crowd.head.logits(trainer.crowd.states(batch)[:, batch.predict_from])
    crowd = aggregate(logits.log_softmax(-1), trainer.config.aggregator)
    chosen = crowd.gather(-1, batch.targets[:, None]).squeeze(-1)
    return float((crowd.amax(-1) - chosen).max())


def conclusion(context: CheckContext) -> str:
    """The end of a run: agents and crowd are evaluated, and the final checkpoint and its evaluation are there."""
    trainer = context.trainer
    start = time.monotonic()
    scores = trainer.evaluator.scores(trainer.state.step, trainer.micro_batch_size)
    middle = time.monotonic()
    _uninterrupted(conclude(trainer, context.attempt)[0])
    end = time.monotonic()
    assert scores is not None
    if trainer.processes.is_main_process:
        load_checkpoint(trainer.config.run_folder / "final_checkpoint")
    rows = len(trainer.evaluator.rows)
    questions = min(rows, trainer.config.generation_eval_samples)
    context.row_evaluated_s = (middle - start) / rows
    context.token_generated_s = max(0.0, end - middle - (middle - start)) / GENERATED_TOKENS
    done = f"{count(rows, 'row')} scored, {count(questions, 'answer')} generated"
    return f"{done}, nll of the crowd {scores.mean_nll[-1]:.3f}"
