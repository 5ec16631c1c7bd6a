"""The audit of a script: a straight run beside its repetition, and beside runs resumed after a kill and a stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ci_llm.errors import BadInput
from tools.audit import divergence as causes
from tools.audit.divergence import RESULTS, Divergence, Kind, compare, restored, resumed_from
from tools.audit.runs import Ending, Place, Plan, Trace

STRAIGHT, KILLED, STOPPED = "two straight runs", "killed and resumed", "stopped and resumed"


@dataclass(frozen=True)
class Check:
    """One comparison.

    Attributes:
        divergences: what differs first; nothing where all steps are the same.
        resumed_from: step from which the resumed process continued; None where none was resumed.
        lost_steps: how many steps it took again.
        steps: that were compared.
        loss_difference: the largest of any step; None without a loss.
        note: what else there is to say.
    """

    name: str
    divergences: Sequence[Divergence]
    resumed_from: int | None
    lost_steps: int | None
    steps: int
    loss_difference: float | None
    process: int = 0
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """The result of an audit.

    Attributes:
        saves: steps after which the straight run saved.
        places: lines of the script, by what they do.
    """

    checks: Sequence[Check]
    framework: str
    steps: int
    saves: Sequence[int]
    places: dict[str, str]

    @property
    def exact(self) -> bool:
        return not any(check.divergences for check in self.checks)

    @property
    def first(self) -> tuple[Check, Divergence] | None:
        """The first divergence: of two straight runs if these part, otherwise of the run that was killed."""
        return next(((check, check.divergences[0]) for check in self.checks if check.divergences), None)

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        first = self.first
        return {
            "exact": self.exact,
            "first_divergence": None if first is None else {"check": first[0].name, **self._record_of(first[1])},
            "framework": self.framework,
            "steps": self.steps,
            "saves": list(self.saves),
            "checks": [
                {**vars(check), "divergences": [self._record_of(each) for each in check.divergences]}
                for check in self.checks
            ],
        }

    def _record_of(self, divergence: Divergence) -> dict[str, Any]:
        return {
            "kind": divergence.kind,
            "step": divergence.step,
            "detail": divergence.detail,
            "likely_cause": causes.cause(divergence.kind, self.framework),
            "line": causes.place(divergence.kind, self.places),
        }


def audit(plan: Plan, scratch: Path, tell: Callable[[str], None] = lambda _: None) -> Verdict:
    """Run a script again and again, and compare.

    Args:
        scratch: an empty folder.
        tell: is given a line before each run.

    Raises:
        BadInput: the script takes no optimizer step, or fails by itself.
    """
    tell(f"1 of 4: straight, {plan.steps} optimizer steps")
    first = _require(Place(scratch, "straight", plan).run("run"))
    straight = first.traces[0]
    tell("2 of 4: straight again")
    again = _require(Place(scratch, "again", plan).run("run"))
    noise = _straight(first.traces, again.traces)
    unstable = _unstable(first.traces, again.traces)
    at = plan.kill_at or moment(straight)
    checks = [noise]
    for number, name, sent in ((3, KILLED, "SIGKILL"), (4, STOPPED, "SIGTERM")):
        tell(f"{number} of 4: {sent} after step {at}, then resumed")
        checks.append(_interrupted(Place(scratch, sent.lower(), plan), name, sent, at, first.traces, unstable))
    places = {**straight.places}
    return Verdict(checks, straight.framework, len(straight.steps), straight.saves, places)


def moment(straight: Trace) -> int:
    """The step after which a run is struck: between two saves, about the middle of the run, so that steps are lost."""
    steps, saves = len(straight.steps), [step for step in straight.saves if step]
    if not saves:
        return max(1, steps // 2)
    last = min(saves, key=lambda step: (abs(step - steps / 2), step))
    following = next((step for step in saves if step > last), steps)
    return min(last + max(1, (following - last + 1) // 2), max(1, steps - 1))


def _require(ending: Ending) -> Ending:
    """A run that has something to tell."""
    last = "\n".join(f"    {line}" for line in ending.last_lines.splitlines())
    if ending.over_time:
        raise BadInput("the script took longer than its limit", where=last, hint="fewer --steps, or a larger --seconds")
    if not any(trace.enough for trace in ending.traces) and ending.code:
        what = f"the script failed by itself, with exit code {ending.code}"
        raise BadInput(what, where=f"its last lines\n{last}", hint="the command behind -- must run as it stands")
    if not any(trace.steps for trace in ending.traces):
        raise BadInput(
            "no optimizer step of torch was seen",
            where=f"its last lines\n{last}",
            hint="the script must start Python without -I, -E and -S, and call step() of an optimizer of torch",
        )
    return ending


def _straight(first: Sequence[Trace], again: Sequence[Trace]) -> Check:
    """The noise floor."""
    compared = []
    for process, (one, other) in enumerate(zip(first, again, strict=False)):
        found: list[Divergence] = []
        if wrong := [name for name, digest in one.state.items() if other.state.get(name) != digest]:
            detail = f"{len(wrong)} of {len(one.state)} tensors begin with other values: they are drawn without a seed"
            found = [Divergence("generator", 1, detail)]
        found += compare(one, other)
        compared.append(Check(STRAIGHT, found, None, None, len(one.steps), _loss_difference(one, other, 0), process))
    return _worst(compared)


def _unstable(first: Sequence[Trace], again: Sequence[Trace]) -> frozenset[str]:
    """Fields of a step that already differ between two straight runs."""
    return frozenset(
        name
        for one, other in zip(first, again, strict=False)
        for own, theirs in zip(one.steps, other.steps, strict=False)
        for name in RESULTS
        if getattr(own, name) != getattr(theirs, name)
    )


def _interrupted(
    place: Place, name: str, strike: str, at: int, straight: Sequence[Trace], unstable: frozenset[str]
) -> Check:
    """A run that is struck, resumed by its own means, and compared with the straight one."""
    struck = place.run("struck", strike=strike, at=at)
    if not (done := max((len(trace.steps) for trace in struck.traces), default=0)):
        _require(struck)  # which raises: it ended before the signal
    if any(trace.enough for trace in struck.traces):
        return Check(name, (), None, None, done, None, note="the signal was ignored: the script continued")
    newest = max((step for trace in struck.traces for step in trace.saves), default=0)
    resumed = place.run("resumed", resumes=True, steps=max(1, len(straight[0].steps) - newest))
    if not resumed.traces or not any(trace.steps for trace in resumed.traces):
        how = "its time was over" if resumed.over_time else f"exit code {resumed.code}"
        last = resumed.last_lines.splitlines()[-1:] or [""]
        kind: Kind = "number of steps" if resumed.succeeded else "no resume"
        found = Divergence(kind, done + 1, f"it took no step after a resume ({how}): {last[0]}")
        return Check(name, (found,), None, None, 0, None, note=_left(struck))
    compared = [
        replace(_continued(name, *traces, unstable), process=process, note=_left(struck))
        for process, traces in enumerate(zip(straight, struck.traces, resumed.traces, strict=False))
    ]
    return _worst(compared)


def _continued(name: str, straight: Trace, struck: Trace, resumed: Trace, unstable: frozenset[str]) -> Check:
    began = resumed_from(struck, resumed)
    missing = list(restored(struck, resumed, began))
    found = compare(straight, resumed, began, unstable)
    # What was not restored shows in its first step, but nothing of it needs to show there.
    known = {each.kind for each in missing}
    found = [*missing, *(each for each in found if each.kind not in known and _is_own(each, missing))]
    other_rows = any("rows" in each.kind for each in found)
    found.sort(key=lambda each: (each.step, each.follows and other_rows))
    steps = min(len(resumed.steps), len(straight.steps) - began)
    if not found and not resumed.enough and began + len(resumed.steps) != len(straight.steps):
        ended = f"the resumed run ended after step {began + len(resumed.steps)}, the straight one after"
        found = [Divergence("number of steps", began + len(resumed.steps), f"{ended} {len(straight.steps)}")]
    lost = max(0, len(struck.steps) - began)
    return Check(name, found, began, lost, steps, _loss_difference(straight, resumed, began))


def _is_own(divergence: Divergence, missing: Sequence[Divergence]) -> bool:
    """Whether a difference of results is one of its own, and does not follow from weights or moments."""
    return not missing or divergence.kind not in ("gradients", "unexplained", "moments")


def _loss_difference(one: Trace, other: Trace, offset: int) -> float | None:
    pairs = [
        abs(a - b)
        for own, theirs in zip(one.steps[offset:], other.steps, strict=False)
        for a, b in zip(own.losses, theirs.losses, strict=False)
    ]
    return max(pairs, default=None)


def _left(struck: Ending) -> str:
    return f"it ended with {struck.code}"


def _worst(checks: Sequence[Check]) -> Check:
    """That of the process in which it shows first."""
    return min(checks, key=lambda check: (not check.divergences, check.divergences[0].step if check.divergences else 0))
