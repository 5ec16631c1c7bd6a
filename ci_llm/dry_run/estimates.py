"""What the real run will take of disk and time: from measurements of the toy run if there are any, else estimated."""

from __future__ import annotations

import shutil
import time

import torch

from ci_llm.distributed.precision import autocast_dtype
from ci_llm.dry_run.context import CheckContext
from ci_llm.dry_run.environment import scratch_parent
from ci_llm.dry_run.report import duration, size
from ci_llm.errors import ConfigError
from ci_llm.run.cost_model import agent_copies, base_dtype
from ci_llm.run.setup import steps_of

#: Training reaches about this share of the speed of bare matrix products.
EFFICIENCY = 0.5
SIDE = {"cpu": 768, "cuda": 4096}


def space(context: CheckContext) -> str:
    """The checkpoints that are kept, one more that is being written, and the final one, fit on the disk."""
    one = context.measured.checkpoint_bytes or (
        context.trace.agents_bytes * 3 // agent_copies(context.config) if context.trace else None
    )
    if one is None:
        return "not estimated: this architecture cannot be traced"
    kept = context.config.save_total_limit or _number_of_saves(context)
    best = context.config.keeps_best
    needed = one * (kept + 2 + best)
    free = shutil.disk_usage(scratch_parent(context.config.run_folder)).free
    which = f"{kept} checkpoints, {'the best one, ' if best else ''}one being written and the final one"
    what = f"{which}, {size(one)} each: {size(needed)}"
    if needed > free:
        raise ConfigError(
            f"{what}; {size(free)} are free",
            where=f"output_dir: {context.config.run_folder}, save_total_limit: {context.config.save_total_limit}",
            hint="save_total_limit=1, or an output_dir on a larger disk",
        )
    return f"{what} of {size(free)} free"


def _number_of_saves(context: CheckContext) -> int:
    every, steps = context.config.save_steps, _total_steps(context)
    return -(-steps // every) if every and steps else 1


def _total_steps(context: CheckContext) -> int | None:
    """Optimizer steps of the real run; None if epochs decide and the rows are not known."""
    if not context.rows:
        return context.config.max_train_steps
    return steps_of(context.config, context.num_rows, context.rows_per_step)


def time_needed(context: CheckContext) -> str:
    """How long a step, and all of them with their evaluations, will take."""
    step_s, how = _seconds_per_step(context)
    if step_s is None:
        return f"not estimated: {how}"
    steps = _total_steps(context)
    if steps is None:
        return f"{duration(step_s)} per step ({how}); how many steps there are depends on the data"
    evaluation_s = _evaluation_seconds(context, steps)
    more = f"; evaluations add at most {duration(evaluation_s)}" if evaluation_s else ""
    late = f"\none step outlasts grace_s {context.config.grace_s:g}" if step_s > context.config.grace_s else ""
    about = "about" if context.lengths.sampled else "at most"
    return f"{about} {duration(steps * step_s)}: {steps} steps of {duration(step_s)} ({how}){more}{late}"


def _seconds_per_step(context: CheckContext) -> tuple[float | None, str]:
    """(seconds of one optimizer step, how that is known)."""
    found = context.trace
    per_step = context.rows_per_step
    of_each = [min(per_step, number) for number in context.num_rows] if context.rows else [per_step]
    if context.measured.tokens_per_s:  # those of each agent count, if each has its own
        return sum(of_each) * context.lengths.mean / context.measured.tokens_per_s, "measured"
    tokens = max(of_each) * context.lengths.mean
    if found is None:
        return None, "this architecture cannot be traced"
    flops = found.flops * tokens / (context.micro_batch * context.longest_tokens)
    speed = EFFICIENCY * _flops_per_s(context)
    return flops / (speed * context.processes.num_processes), f"{flops / 1e12:.2g} TFLOP at {speed / 1e12:.2g} TFLOP/s"


def _flops_per_s(context: CheckContext) -> float:
    """The speed of a matrix product in the precision of the forward pass, on the device of this process."""
    device = context.processes.device
    config = context.config
    dtype = autocast_dtype(config.mixed_precision) or base_dtype(config, context.shape.config, device)
    side = SIDE[device.type]
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for the device
        times.append(time.perf_counter() - start)
    return 2.0 * side**3 / min(times)


def _evaluation_seconds(context: CheckContext, steps: int) -> float:
    """Seconds of all evaluations at most: answers may end early."""
    config, measured = context.config, context.measured
    if not context.rows:
        return 0.0
    times = 1 + ((steps - 1) // config.eval_steps if config.eval_steps else 0)
    rows = context.num_eval_rows
    rounds = -(-min(config.generation_eval_samples, rows) // (config.batch_size * context.processes.num_processes))
    answering = rounds * config.max_new_tokens_eval * measured.token_generated_s
    return times * rows * measured.row_evaluated_s + answering
