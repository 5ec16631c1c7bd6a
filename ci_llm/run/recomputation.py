"""What `use_gradient_checkpointing: auto` becomes: layers are recomputed where their activations would not fit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from ci_llm.config import Config
from ci_llm.crowd.base import load_architecture
from ci_llm.data.lengths import Lengths, sampled
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.precision import AUTO
from ci_llm.distributed.processes import Processes
from ci_llm.run.cost_model import Trace, Untraceable, trace_longest

logger = logging.getLogger(__name__)

#: Share of the free memory that an estimate may fill: the rest is for its error.
USABLE: Final = 0.8


def settle_recomputation(
    config: Config, each: Sequence[TokenizedRows], processes: Processes, before: Config | None
) -> Config:
    """The configuration with true or false in place of auto: the same on all processes. A collective.

    The base is in memory, and the agents are not.

    Args:
        each: the rows of every agent, or of all.
        before: the settings of the checkpoint that this run goes on from. It keeps what it began with.
    """
    if config.use_gradient_checkpointing != AUTO:
        return config
    if before is not None and before.use_gradient_checkpointing != AUTO:
        settled, why = before.use_gradient_checkpointing, "auto keeps what the run began with"
    else:
        settled, why = _decided(config, each, processes)
    logger.info(f"memory    use_gradient_checkpointing={str(settled).lower()}: {why}")
    return config.model_copy(update={"use_gradient_checkpointing": settled})


def recompute_on_all(found: Trace, free: int, processes: Processes) -> bool:
    """Whether agents and activations are too large for the memory of any process. A collective.

    Args:
        free: bytes that this process finds free beside the base.
    """
    needed = found.agents_bytes + found.activation_bytes
    return any(processes.gather_object(needed > USABLE * free))


def _decided(config: Config, each: Sequence[TokenizedRows], processes: Processes) -> tuple[bool, str]:
    lengths, rows = Lengths.of(sampled(each)), config.batch_size
    try:
        shape = load_architecture(config.model_name)
        found = trace_longest(config, shape, processes.device, rows, lengths, processes.num_processes)
    except Untraceable as error:
        return False, f"this architecture cannot be traced without weights ({error})"
    free = processes.free_memory()
    agents, activations = f"agents {found.agents_bytes / 1e9:.2f} GB", f"{found.activation_bytes / 1e9:.2f} GB"
    kept = f"{agents}, activations of {rows} x {lengths.longest_in_batch(rows)} tokens {activations}"
    return recompute_on_all(found, free, processes), f"by estimate {kept}, free {free / 1e9:.2f} GB"
