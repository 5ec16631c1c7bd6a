"""The trial of the fast kernels: each is used where it gives what the family's own code gives, on rows of the run.

One layer of the base and the head are computed, forward and backward, by the code that trains: plainly, and with each
part of `ci_llm/lora/kernels.py`. Losses and gradients have to agree, else the part stays plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final

import numpy as np
import torch
from torch import Tensor

from ci_llm.base.targets import text_model
from ci_llm.config import Config
from ci_llm.core import determinism
from ci_llm.core.memory import unless_out_of_memory
from ci_llm.core.numerics import FAST, PLAIN
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import AgentBatches, MicroBatch, pack
from ci_llm.data.encoder import Example
from ci_llm.distributed.processes import Processes
from ci_llm.lora.kernels import PARTS
from ci_llm.lora.layer import compute_dtype
from ci_llm.lora.passes import describe_error, distance, tolerance
from ci_llm.run.layer_digest import Train, one_layer, without_a_trace

MOST_TOKENS: Final = 128  # of the rows of the trial
TARGETS: Final = 8  # of a row: with a large vocabulary they are what costs

Found = list[Tensor] | str  # losses and gradients, or why there are none


def choose(crowd: Crowd, lengths: Sequence[int], train: Train, processes: Processes, *, own_rows: bool) -> list[str]:
    """Let the crowd compute fast what every process found to be the same; returns what to tell. A collective.

    Args:
        lengths: tokens of rows of the run; as many as fit into `MOST_TOKENS` are taken.
        train: forward and backward on micro-batches, as the run does it.
        own_rows: every agent has rows of its own.
    """
    batch, said = _rows(crowd, lengths, own_rows=own_rows), []

    def attempt(parts: Sequence[str]) -> Found:
        found, ran_out = unless_out_of_memory(partial(_computed, crowd, batch, train, parts))
        processes.follow()  # a process that ran out of memory owes its peers the rest of their gathers
        return ran_out or "out of memory" if found is None else found

    plain = attempt(())
    with processes.autocast():
        limit = tolerance(crowd.model.dtype, compute_dtype(crowd.model.get_input_embeddings().weight))
    taken: list[str] = []
    for part in PARTS if not isinstance(plain, str) else ():
        reason = _difference(attempt([part]), plain, limit)
        if not any(reasons := processes.gather_object(reason)):
            taken.append(part)
        else:
            said.append(f"{part} stays plain: {next(filter(None, reasons))}")
    reasons = processes.gather_object(plain if isinstance(plain, str) else _difference(attempt(taken), plain, limit))
    if any(reasons):
        taken, said = [], [f"everything stays plain: {next(filter(None, reasons))}"]
    crowd.compute_fast(taken)
    return said


def kernels_of(config: Config, crowd: Crowd) -> str:
    """What a checkpoint records: plain, fast, or fast without some parts."""
    if config.kernels == PLAIN:
        return PLAIN
    left = [part for part in PARTS if part not in crowd.fast]
    return FAST if not left else f"{FAST} without {', '.join(left)}"


def _difference(found: Found, plain: Found, limit: float) -> str | None:
    """Why what was found does not count as what the plain pass gives; None: it does."""
    if isinstance(found, str) or isinstance(plain, str):
        return found if isinstance(found, str) else "nothing to compare with"
    gap = max(distance(own, wanted) for own, wanted in zip(found, plain, strict=True))
    return None if gap <= limit else f"it changes losses or gradients by {gap:.1e}"


def _rows(crowd: Crowd, lengths: Sequence[int], *, own_rows: bool) -> MicroBatch:
    """Rows of about these lengths with fixed tokens, of which the last ones are targets."""
    draw, rows, left = determinism.generator_for(0, "rows of a trial"), [], MOST_TOKENS
    vocabulary = crowd.model.get_input_embeddings().weight.shape[0]
    for length in sorted(lengths):
        length = max(2, min(length, left))
        ids = torch.randint(0, vocabulary, (length,), generator=draw).numpy()
        rows.append(Example(ids, np.arange(length) >= max(1, length - TARGETS)))
        if (left := left - length) < 2:
            break
    batch = pack(rows, range(-len(rows), 0))
    return AgentBatches((batch,) * crowd.num_agents) if own_rows else batch


def _computed(crowd: Crowd, batch: MicroBatch, train: Train, parts: Sequence[str]) -> Found:
    """Losses and gradients with these parts computed fast."""
    reason = ""
    for alone in (True, False):
        try:
            return _of_layer(crowd, batch, train, parts, alone=alone)
        except Exception as error:  # noqa: BLE001 - families raise errors of every kind
            reason = describe_error(error)  # raises what says nothing about the base
    return reason


def _of_layer(crowd: Crowd, batch: MicroBatch, train: Train, parts: Sequence[str], *, alone: bool) -> list[Tensor]:
    with ExitStack() as after:
        layer = after.enter_context(one_layer(crowd)) if alone else text_model(crowd.model)
        trained = [each for each in layer.parameters() if each.requires_grad]
        after.enter_context(without_a_trace(crowd, trained))
        after.callback(crowd.compute_fast, ())
        crowd.compute_fast(parts)
        sums = train([batch.to(crowd.device)]).sums[: crowd.num_agents]
        return [sums, *(each.grad.clone() for each in trained if each.grad is not None)]
