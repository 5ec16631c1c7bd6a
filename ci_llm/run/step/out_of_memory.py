"""Out of memory: one process tells the others by its ballot, and all repeat the same step in smaller parts.

The first relief is that every agent takes a pass of its own, which needs 1/K of the activations of K agents. The next
is half the micro-batch, again and again: the accumulation doubles, so each optimizer step still uses the same rows. At
one row the layers are recomputed in the backward pass; after that nothing is left to reduce inside the run. What was
reduced is recovery state: checkpoints hold it. An evaluation is repeated in smaller batches, which changes nothing in
the training.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import zip_longest

import psutil
import torch

from ci_llm.base.load import Base
from ci_llm.config import Config
from ci_llm.core.memory import free_memory, release_cache
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.diversity import find_form
from ci_llm.data.agent_rows import TrainingRows
from ci_llm.data.batches import MicroBatch, Owned, num_units, pack
from ci_llm.errors import OutOfMemory
from ci_llm.run.step.state import TrainState

logger = logging.getLogger(__name__)


def in_parts(training_rows: TrainingRows, micro_batches: list[MicroBatch], size: int) -> list[MicroBatch]:
    """The micro-batches divided into ones of at most `size` rows of each agent, in order."""
    if all(num_units(batch) <= size for batch in micro_batches):
        return micro_batches
    known = {agents for agents, _ in training_rows.different}
    assert all(own.agents in known for batch in micro_batches for own in batch), "no row leaves the step"
    each = []
    for agents, ordered in training_rows.different:
        owned = (own.batch for batch in micro_batches for own in batch if own.agents == agents)
        numbers = [number for batch in owned for number in batch.sample_ids]
        parts = [numbers[at : at + size] for at in range(0, len(numbers), size)]
        each.append([Owned(agents, pack([ordered.rows[number] for number in part], part)) for part in parts])
    return [[own for own in together if own is not None] for together in zip_longest(*each)]


@dataclass(frozen=True)
class MemoryRelief:
    """Reduces the memory that the next attempt needs; every process decides the same without communication."""

    config: Config
    base: Base
    crowd: Crowd
    num_processes: int

    def relieve(self, state: TrainState, complaint: str | None) -> TrainState:
        """Reduce the memory that the next attempt at the same step needs.

        Args:
            complaint: the message of this process's allocator; None if only another process ran out.

        Raises:
            OutOfMemory: nothing is left to reduce.
        """
        release_cache()
        recovery, storage = state.recovery, self.crowd.storage
        # Of the largest micro-batch of any process in this step, which every process can compute.
        rows = min(recovery.limit(self.config.batch_size), -(-state.rows_per_step // self.num_processes))
        takes_one_pass = self.crowd.num_agents > 1 and not storage.pass_per_agent
        if takes_one_pass and not find_form(self.config.diversity).rewarded:
            recovery = replace(recovery, pass_per_agent=True)
            storage.pass_per_agent = True
            done = "every agent takes a pass of its own from now on; the steps are sample-exact"
        elif rows > 1:
            recovery = replace(recovery, micro_batch_size=rows // 2)
            done = f"micro-batch {rows} -> {rows // 2} row(s), the effective batch of {state.rows_per_step} holds"
        elif self.config.objective == "grpo" and recovery.parts_of_group < self.config.num_generations:
            recovery = replace(recovery, parts_of_group=min(2 * recovery.parts_of_group, self.config.num_generations))
            done = f"the completions of a prompt are read in {recovery.parts_of_group} parts"
        elif not (self.config.use_gradient_checkpointing is True or recovery.recompute):
            recovery = replace(recovery, recompute=True)
            self.crowd.gradient_checkpointing_enable()
            done = "layers are recomputed in the backward pass from now on"
        else:
            raise self.exhausted(state.step, complaint, "one row at a time with recomputed layers")
        shown = f"step {state.step + 1} does not fit ({complaint or 'on another process'}): {done}"
        logger.warning(f"memory    {shown}")
        return replace(state, recovery=recovery)

    def exhausted(
        self, step: int, complaint: str | None, what: str = "an evaluation of one row at a time"
    ) -> OutOfMemory:
        """The error of what cannot be made smaller."""
        config = self.config
        agents = f", num_agents={config.num_agents // 2}" if config.num_agents > 1 else ""
        tokens = f"rows of up to {config.max_seq_length} tokens x {config.num_agents} agents"
        parameters = f"base of {self.base.num_parameters:,} parameters"
        return OutOfMemory(
            f"{what} does not fit: {complaint or 'another process ran out'}",
            where=f"after step {step}, {tokens}, {parameters}; {memory_held(self.crowd.device)}",
            hint=f"max_seq_length={max(2, config.max_seq_length // 2)}{agents}, a smaller base, mixed_precision=bf16,"
            " or a machine with more memory",
        )


def memory_held(device: torch.device) -> str:
    """The memory that this process holds, and that of its device, for people."""
    is_gpu = device.type == "cuda"
    held = torch.cuda.memory_allocated(device) if is_gpu else psutil.Process().memory_info().rss
    free, total = free_memory(device)
    return f"{held / 1e9:.2f} GB held, {free / 1e9:.2f} of {total / 1e9:.2f} GB free"
