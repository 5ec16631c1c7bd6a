"""A reading of a run in words, for `ci-llm status` and for the panels of `ci-llm watch`.

Where a width is given, the longest form that fits is taken, else the shortest.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Final

from ci_llm.watch.reading import Reading

_FEW_AGENTS: Final = 8  # so many are listed, of more there is the range


def progress(reading: Reading) -> str:
    """`120 of 260 steps, 46 %`; how many steps there are is not known of a run of an older release."""
    step, total = reading.status.step, reading.status.total_steps
    return f"{step} of {total} steps, {100 * step / total:.0f} %" if total else f"{step} steps"


def speed(reading: Reading) -> str:
    """`2.1 steps/s, 5310 tokens/s`, as far as it is known."""
    rates = [_rate(reading.steps_per_s)] if math.isfinite(reading.steps_per_s) else []
    if math.isfinite(reading.tokens_per_s):
        rates.append(f"{reading.tokens_per_s:.0f} tokens/s")
    return ", ".join(rates)


def time_left(reading: Reading) -> str:
    """`0:01:06 left`, or what the run does after its last step; nothing where it is not known."""
    if reading.is_concluding:
        return "evaluating"
    return "" if reading.left_s is None else f"{timedelta(seconds=round(reading.left_s))} left"


def losses(reading: Reading, width: int | None = None) -> str:
    """`loss 1.23 (1.21 1.25)`: the mean and each agent; of many, or where there is no room, the range."""
    if not reading.losses:
        return ""
    each, mean = [f"{loss:.3g}" for loss in reading.losses], f"loss {reading.loss:.4g}"
    if len(each) == 1:
        return mean
    finite = [loss for loss in reading.losses if math.isfinite(loss)]
    span = f"{min(finite):.3g} to {max(finite):.3g}" if finite else "none finite"
    odd = f", {len(each) - len(finite)} not finite" if 0 < len(finite) < len(each) else ""
    listed = [f"{mean} ({' '.join(each)})"] if len(each) <= _FEW_AGENTS else []
    return _fitting(width, *listed, f"{mean} ({len(each)} agents: {span}{odd})", f"{mean} ({span}{odd})")


def scores(reading: Reading, width: int | None = None) -> str:
    """`evaluation after step 100: crowd nll 0.512, exact match 0.310 (agents 0.250)`."""
    if (found := reading.scores) is None:
        return ""
    nll, exact = f"{found.crowd_nll:.3g}", f"{found.crowd_exact_match:.3f}"
    what = f"result, step {found.step}" if found.is_final else f"evaluation after step {found.step}"
    long = f"{what}: crowd nll {nll}, exact match {exact} (agents {found.agents_exact_match:.3f})"
    return _fitting(width, long, f"at {found.step}: nll {nll}, exact {exact}")


def whereabouts(reading: Reading, width: int | None = None) -> str:
    """`attempt 1 on node017, heartbeat 3 s ago`."""
    attempt, beat = f"attempt {reading.status.attempt}", f"heartbeat {_ago(reading.heartbeat_age_s)}"
    place = f"{attempt} on {reading.status.host}"
    if reading.status.status not in ("running", "vanished"):
        return _fitting(width, place, attempt)
    return _fitting(width, f"{place}, {beat}", f"{attempt}, {beat}")


def _fitting(width: int | None, *forms: str) -> str:
    return next((form for form in forms if width is None or len(form) <= width), forms[-1])


def _ago(seconds: float) -> str:
    """`3 s ago`, `2 min ago`, `5 h ago`, `3 d ago`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _rate(steps_per_s: float) -> str:
    """Steps per second, or seconds per step where these are more than one."""
    return f"{steps_per_s:.3g} steps/s" if steps_per_s >= 1 else f"{1 / steps_per_s:.3g} s/step"
