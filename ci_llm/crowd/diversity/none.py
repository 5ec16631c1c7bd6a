"""No reward for diversity: cross-entropy alone is learned, and the Jensen gap is measured for the log.

The Jensen gap is the agents' mean cross-entropy minus that of the crowd, in nats.

Legend: K agents, S targets.
"""

from __future__ import annotations

from torch import Tensor

from ci_llm.crowd.aggregators.probability import aggregate_finite
from ci_llm.crowd.diversity import DiversityForm, TermInputs


def jensen_gap(log_probs: Tensor, finite: Tensor) -> Tensor:
    """Sum over targets of (mean cross-entropy of the agents) - (cross-entropy of the crowd).

    It is never negative (Jensen's inequality). It adds up over tokens, so it does not depend on how a step is split
    into micro-batches and processes.

    Args:
        log_probs: [K, S] log-probability of every target under every agent.
        finite: [K] bool, the agents that count.

    Returns:
        [] in nats.
    """
    kept = log_probs.masked_fill(~finite[:, None], 0.0)
    return (aggregate_finite(log_probs, finite) - kept.sum(0) / finite.sum()).sum()


def term(inputs: TermInputs) -> Tensor:
    """The Jensen gap [] of the micro-batch, which is already a sum over its targets."""
    return jensen_gap(inputs.log_probs, inputs.finite)


form = DiversityForm(term, rewarded=False)
