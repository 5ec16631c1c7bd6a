"""Measures of how far a number that says how sure a crowd is can be trusted: pure functions of n answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike

from ci_llm.crowd.answers import Calibration
from ci_llm.crowd.judging import auroc, calibration_error
from ci_llm.evaluation.predictions import Row

COVERAGE: Final = 0.8
DRAWS: Final = 200
#: The price in agents that escalation is shown at.
AGENTS_PER_PROMPT: Final = 1.6
#: Right answers, and as many wrong ones, below which people are shown no AUROC.
LEAST_OF_EACH: Final = 10


def honest_error(probabilities: ArrayLike) -> float:
    """The calibration error that the same probabilities would have if they were true, by chance alone."""
    p, generator = np.asarray(probabilities, float), np.random.default_rng(0)
    return float(np.mean([calibration_error(p, generator.random(len(p)) < p) for _ in range(DRAWS)]))


def at_coverage(sure: ArrayLike, right: ArrayLike) -> float:
    """The share of right answers among the `COVERAGE` of them that are surest."""
    numbers, is_right = np.asarray(sure, float), np.asarray(right, float)
    kept = np.argsort(-numbers, kind="stable")[: max(1, round(COVERAGE * len(numbers)))]
    return float(is_right[kept].mean())


def sureness_record(
    rows: Sequence[Row],
    calibration: Calibration | None,
    aggregator: str,
    *,
    abstain_below: float | None = None,
    agents_per_prompt: float = AGENTS_PER_PROMPT,
    names: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What the lines of a predictions file say of how sure the crowd is: `sureness` of an evaluation.

    `by` names the number that is judged: the calibrated probability, or without a calibration the confidence. Its order
    is that of the log-probabilities: the confidence itself is 0 for every long text.

    Args:
        names: of the agents; None: agent0, agent1, ...
    """
    right = np.array([row["correct"] for row in rows])
    fits = calibration is not None and calibration.aggregator == aggregator
    numbers = [calibration.right(row["signals"]) if fits else row["confidence"] for row in rows]  # type: ignore[union-attr]
    order = numbers if fits else [row["signals"][0] for row in rows]
    record: dict[str, Any] = {
        "by": "probability_right" if fits else "confidence",
        "rows": len(rows),
        "right": int(right.sum()),
        "auroc": auroc(order, right),
        "calibration_error": calibration_error(numbers, right),
        "calibration_error_by_chance": honest_error(numbers),
        "coverage": COVERAGE,
        "exact_match_at_coverage": at_coverage(order, right),
    }
    if calibration is not None:
        record["escalation"] = _escalation(rows, calibration, agents_per_prompt, names)
    if abstain_below is not None:
        given = np.asarray(numbers) >= abstain_below
        record["abstention"] = {
            "below": abstain_below,
            "answered": float(given.mean()),
            "exact_match": float(right[given].mean()) if given.any() else None,
        }
    return record


def _escalation(
    rows: Sequence[Row], calibration: Calibration, agents_per_prompt: float, names: Sequence[str] | None
) -> dict[str, Any]:
    """What asking one agent first, and all where it is unsure, costs and keeps; from answers that are there already."""
    agent, below = calibration.agent, calibration.escalates_below(agents_per_prompt)
    unsure = np.array([calibration.agent_right(row["agents_signals"][agent]) < below for row in rows])
    right = np.where(unsure, [row["correct"] for row in rows], [row["agents_correct"][agent] for row in rows])
    return {
        "agent": names[agent] if names else f"agent{agent}",
        "below": below,
        "agents_per_prompt": float(1 + len(calibration.learned.weights) * unsure.mean()),
        "exact_match": float(right.mean()),
    }
