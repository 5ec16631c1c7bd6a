"""Where two runs of one script part, and by what name: pure functions of what the probe saw.

What differs first in time is named; of what differs in the same step, what comes first in the order of causes: weights
before data, data before random numbers, those before the loss, and the optimizer last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ci_llm.audit.records import Step, Trace

Kind: TypeAlias = Literal[
    "weights",
    "repeated rows",
    "skipped rows",
    "data order",
    "generator",
    "dropout",
    "scaler",
    "scheduler",
    "settings",
    "moments",
    "gradients",
    "number of steps",
    "no resume",
    "unexplained",
]
#: What makes two steps the same. Generators are none of it: one that nobody asks may stand where it likes.
RESULTS = ("rows", "mode", "losses", "scale", "lr", "settings", "moments", "grads", "state")


@dataclass(frozen=True)
class Divergence:
    """One difference.

    Attributes:
        step: optimizer step of the whole run, from 1 on, in which it shows.
        detail: what exactly, for people.
        follows: it may follow from other rows: only buffers differ, which a forward pass changes.
    """

    kind: Kind
    step: int
    detail: str
    follows: bool = False


def resumed_from(killed: Trace, resumed: Trace) -> int:
    """The step at which a resumed process went on: the one whose weights it began with.

    Where no weights tell, it is the newest checkpoint that had appeared before the kill.
    """
    newest = max((step for step in killed.saves), default=0)
    if not resumed.state:
        return newest
    alike = {
        step: sum(resumed.state.get(name) == digest for name, digest in killed.state_after(step).items())
        for step in range(len(killed.steps) + 1)
    }
    most = max(alike.values())
    frozen = sum(all(step.state.get(name) == at for step in killed.steps) for name, at in killed.state.items())
    if most <= frozen:
        return newest
    return newest if alike.get(newest) == most else max(step for step, count in alike.items() if count == most)


def restored(killed: Trace, resumed: Trace, step: int) -> Iterator[Divergence]:
    """What a resumed process did not begin with, though the killed one had it after `step`."""
    before = killed.state_after(step)
    if wrong := [name for name, digest in before.items() if resumed.state.get(name, digest) != digest]:
        follows = {*wrong} <= {*resumed.buffers}
        yield Divergence("weights", step + 1, _weights(wrong, before, resumed), follows)
    had = killed.moments_after(step)
    missing = [name for name, digest in had.items() if resumed.moments.get(name) != digest]
    if missing and step:
        how = "are not those of the checkpoint" if resumed.moments else "are not there: the optimizer starts anew"
        yield Divergence("moments", step + 1, f"{', '.join(missing)} {how}")


def _weights(wrong: Sequence[str], before: Mapping[str, str], resumed: Trace) -> str:
    if len(wrong) == len(before) and len(resumed.rounded) > len(before) / 2:
        return f"all {len(wrong)} tensors are rounded to half precision"
    listed = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
    return f"{len(wrong)} of {len(before)} tensors are not those of the checkpoint: {listed}"


def compare(straight: Trace, other: Trace, offset: int = 0, unstable: frozenset[str] = frozenset()) -> list[Divergence]:
    """What differs in the first step in which anything does, the likeliest cause first; nothing if nothing does.

    Args:
        offset: step of `straight` after which `other` began.
        unstable: fields of a step that differ between two straight runs already, and tell nothing.
    """
    for number, (own, theirs) in enumerate(zip(straight.steps[offset:], other.steps, strict=False)):
        if any(getattr(own, name) != getattr(theirs, name) for name in RESULTS if name not in unstable):
            return list(_named(straight, other, offset, number, unstable))
    return []


def _named(straight: Trace, other: Trace, offset: int, number: int, unstable: frozenset[str]) -> Iterator[Divergence]:
    own, theirs, step = straight.steps[offset + number], other.steps[number], offset + number + 1
    differing = {name for name in RESULTS if getattr(own, name) != getattr(theirs, name)} - unstable
    drawn = [name for name, digest in own.generators.items() if theirs.generators.get(name, digest) != digest]
    found = False
    if "rows" in differing:
        yield _rows(straight, other, offset, number, drawn)
        found = True
    elif "mode" in differing:
        yield Divergence("dropout", step, "other modules are in training mode: dropout is on in one run only")
        found = True
    elif "losses" in differing and drawn and not _only_scaled(own, theirs):
        kind: Kind = "dropout" if own.dropout and "torch" in drawn else "generator"
        what = "the masks of dropout differ: " if kind == "dropout" else "random numbers differ: "
        yield Divergence(kind, step, f"{what}the generator of {' and '.join(drawn)} stands elsewhere")
        found = True
    for name, kind, what in (
        ("scale", "scaler", "loss scale and steps since it grew"),
        ("lr", "scheduler", "learning rate"),
        ("settings", "settings", "settings of the optimizer"),
    ):
        if name in differing:
            yield Divergence(kind, step, f"{what}: {_shown(own, name)} became {_shown(theirs, name)}")
            found = True
    if not found and {"losses", "grads"} & differing:
        yield Divergence("gradients", step, "another loss or gradient from the same data, weights and random numbers")
    elif not found and "moments" in differing:
        names = [name for name in own.moments if theirs.moments.get(name) != own.moments[name]]
        yield Divergence("moments", step, f"{', '.join(names) or 'moments'} of the optimizer")
    elif not found:
        yield Divergence("unexplained", step, "other weights from the same loss, gradient and moments")


def _only_scaled(own: Step, theirs: Step) -> bool:
    """Whether the losses differ by their scale alone."""
    if own.scale == theirs.scale or not own.scale or not theirs.scale or not theirs.scale[0][0]:
        return False
    ratio = own.scale[0][0] / theirs.scale[0][0]
    return len(own.losses) == len(theirs.losses) and all(
        one == other * ratio for one, other in zip(own.losses, theirs.losses, strict=True)
    )


def _shown(step: Step, name: str) -> str:
    return ", ".join(str(value) for value in getattr(step, name)) or "none"


def _rows(straight: Trace, other: Trace, offset: int, number: int, drawn: Sequence[str]) -> Divergence:
    """The name of a difference of rows: repeated, skipped, in another order, or changed by random numbers."""
    step = offset + number + 1
    seen = list(other.steps[number].rows)
    all_rows = [row for each in straight.steps for row in each.rows]
    here = sum(len(each.rows) for each in straight.steps[: step - 1])
    if not seen:
        return Divergence("data order", step, "no rows were seen in this step")
    if sum(row in set(all_rows) for row in seen) < len(seen) / 2:
        if drawn:
            what = f"the rows themselves differ, and the generator of {' and '.join(drawn)} stands elsewhere"
            return Divergence("generator", step, what)
        return Divergence("data order", step, "the rows are none that the straight run saw")
    window = seen + [row for each in other.steps[number + 1 : number + 3] for row in each.rows]
    others = [at for at in range(len(all_rows)) if at != here]
    places = [at for at in others if _runs_along(all_rows, at, window, len(seen))]
    if not places and len(seen) > 1:  # as after a resume near the end of an epoch: the next epoch is right again
        places = [at for at in others if _runs_along(all_rows, at, seen, len(seen))]
    if places:
        at = min(places, key=lambda place: abs(place - here))
        where = f"the rows of step {_step_of(straight, at)} come in step {step}"
        if at < here:
            return Divergence("repeated rows", step, f"{here - at} rows are seen again: {where}")
        return Divergence("skipped rows", step, f"{at - here} rows are left out: {where}")
    return Divergence("data order", step, "the same rows in another order")


def _runs_along(rows: Sequence[str], at: int, window: Sequence[str], least: int) -> bool:
    """Whether `window` stands in `rows` from `at` on, as far as both go, and at least `least` of it."""
    stretch = rows[at : at + len(window)]
    return len(stretch) >= least and list(stretch) == list(window[: len(stretch)])


def _step_of(trace: Trace, row: int) -> int:
    for number, step in enumerate(trace.steps, 1):
        row -= len(step.rows)
        if row < 0:
            return number
    return len(trace.steps)
