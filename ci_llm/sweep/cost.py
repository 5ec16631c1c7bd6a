"""How many trials fit into one pass, and what a sweep costs beside one run: by the estimate of the dry run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ci_llm.config import Config
from ci_llm.config.own_keys import NAME
from ci_llm.config.sweep import Choices, Range, Space, SweepReading
from ci_llm.crowd.base import load_architecture
from ci_llm.data.lengths import Lengths, sampled
from ci_llm.distributed.processes import Processes
from ci_llm.dry_run.report import size
from ci_llm.errors import ConfigError
from ci_llm.run.cost_model import Untraceable, trace_longest
from ci_llm.run.loading import Loaded
from ci_llm.run.recomputation import USABLE
from ci_llm.sweep.trials import HalvingPlan

#: Trials of a pack where nothing can be estimated.
CAUTIOUS: Final = 4


def trials_per_pass(
    config: Config, spaces: Mapping[str, Space], wanted: int | str, trials: int, loaded: Loaded, processes: Processes
) -> int:
    """The trials of one pass: those that are asked for, or as many as fit.

    Args:
        wanted: `agents_per_pass`.
        trials: of the sweep.

    Raises:
        ConfigError: so many trials as are asked for do not fit.
    """
    fit = _that_fit(config, spaces, loaded, processes)
    if wanted == "auto":
        return max(1, min(trials, CAUTIOUS if fit is None else fit))
    if fit is not None and min(int(wanted), trials) > max(fit, 1):
        free = processes.free_memory()
        raise ConfigError(
            f"{min(int(wanted), trials)} trials of one pass do not fit into memory: {size(free)} are free",
            where=f"agents_per_pass: {wanted}",
            hint=f"agents_per_pass={max(fit, 1)}, or auto",
        )
    return int(wanted)


def _that_fit(config: Config, spaces: Mapping[str, Space], loaded: Loaded, processes: Processes) -> int | None:
    """How many of the largest trials fit beside the base, which is in memory; None if that is not known."""
    [rows] = loaded.rows
    lengths = Lengths.of(sampled([rows]))
    shape, largest = load_architecture(config.model_name), dict(_largest(spaces))
    alone = config.model_copy(update={"agents": (largest,), "num_agents": 1})
    try:
        found = trace_longest(alone, shape, processes.device, config.batch_size, lengths)
    except Untraceable:
        return None
    # Every agent has a copy of the activations, and nothing but the base is shared.
    return int(USABLE * processes.free_memory() // (found.agents_bytes + found.activation_bytes))


def _largest(spaces: Mapping[str, Space]) -> Iterator[tuple[str, Any]]:
    """Of the keys that decide an adapter's size, the value that makes the largest one."""
    match spaces.get("lora_rank"):
        case Choices(values):
            yield "lora_rank", max(values)
        case Range(high=high):
            yield "lora_rank", int(high)
    match spaces.get("lora_dropout"):
        case Choices(values) if any(values):
            yield "lora_dropout", max(values)
        case Range(high=high):
            yield "lora_dropout", high


def as_one_run(reading: SweepReading, plan: HalvingPlan) -> Config:
    """A run that costs what the sweep costs: a full pack of the largest trials, for the steps of all segments."""
    steps = sum(steps * trials / plan.per_pass for trials, steps in plan.segment_steps)
    pack = tuple({NAME: f"trial{k}", "seed": k, **dict(_largest(reading.spaces))} for k in range(plan.per_pass))
    changes = {"agents": pack, "num_agents": plan.per_pass, "max_train_steps": max(1, round(steps))}
    return reading.config.model_copy(update=changes)


def described(plan: HalvingPlan, reading: SweepReading) -> Iterator[str]:
    """Lines for people: rungs, segments and steps."""
    sampler, wanted = reading.keys.sampler, reading.trials_wanted
    rungs = ", ".join(f"{plan.places(rung)} to step {end}" for rung, end in enumerate(plan.steps))
    yield f"{plan.trials} trials by sampler {sampler}, compared by {plan.metric}: {rungs}"
    if wanted is not None:
        yield f"trials={wanted} asks for more trials than the spaces have settings: they have only {plan.trials}"
    parts = plan.segment_steps
    runs = plan.agent_steps / plan.steps[-1]
    steps = sum(steps for _, steps in parts)
    yield (
        f"{len(parts)} segments of at most {plan.per_pass} trials, {steps} steps: the work of {runs:.3g} full runs"
        f" instead of {plan.trials}"
    )
