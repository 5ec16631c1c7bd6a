"""A reading of a run in words, for `ci-llm status` and for the panels of `ci-llm watch`."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Final

from ci_llm.watch.reading import Reading

_FEW_AGENTS: Final = 8  # so many are listed, of more there is the range


def progress(reading: Reading) -> str:
    """`120 of 260 steps, 46 %`; how many steps there are is not known of a run of an older release."""
    step, total = reading.status.step, reading.status.total_steps
    if not total:
        return f"{step} steps"
    return f"{step} of {total} steps, {step / total:.0%}".replace("%", " %")


def speed(reading: Reading) -> str:
    """`2.1 steps/s, 5310 tokens/s, 0:01:06 left`, as far as it is known."""
    known = []
    if math.isfinite(reading.steps_per_s):
        known.append(_rate(reading.steps_per_s))
    if math.isfinite(reading.tokens_per_s):
        known.append(f"{reading.tokens_per_s:.0f} tokens/s")
    if left := time_left(reading):
        known.append(left if reading.is_evaluated_last else f"{left} left")
    return ", ".join(known)


def time_left(reading: Reading) -> str:
    """`0:01:06`; what the run does after its last step; nothing where it is not known."""
    if reading.is_evaluated_last:
        return "final evaluation"
    return "" if reading.left_s is None else str(timedelta(seconds=round(reading.left_s)))


def losses(reading: Reading, width: int | None = None) -> str:
    """`loss 1.23 (1.21 1.25)`: the mean and each agent; of many, or where there is no room, the range."""
    if not reading.losses:
        return ""
    each, mean = [f"{loss:.3g}" for loss in reading.losses], f"loss {reading.loss:.4g}"
    listed = f"{mean} ({' '.join(each)})"
    if len(each) == 1:
        return mean
    if len(each) <= _FEW_AGENTS and (width is None or len(listed) <= width):
        return listed
    finite = [loss for loss in reading.losses if math.isfinite(loss)]
    odd = f", {len(each) - len(finite)} not finite" if len(finite) < len(each) else ""
    span = f"{min(finite):.3g} to {max(finite):.3g}" if finite else "none finite"
    return f"{mean} ({len(each)} agents: {span}{odd if finite else ''})"


def scores(reading: Reading) -> str:
    """`evaluation after step 100: crowd nll 0.512, exact match 0.310 (agents 0.250)`."""
    if reading.scores is None:
        return ""
    found = reading.scores
    what = f"result, step {found.step}" if found.is_final else f"evaluation after step {found.step}"
    exact = f"exact match {found.crowd_exact_match:.3f} (agents {found.agents_exact_match:.3f})"
    return f"{what}: crowd nll {found.crowd_nll:.4g}, {exact}"


def ago(seconds: float) -> str:
    """`3 s ago`, `2 min ago`, `5 h ago`, `3 d ago`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _rate(steps_per_s: float) -> str:
    """Steps per second, or seconds per step where these are more than one."""
    return f"{steps_per_s:.3g} steps/s" if steps_per_s >= 1 else f"{1 / steps_per_s:.3g} s/step"
