"""The supervisor's policy after an attempt: a pure table over its outcome, the attempts before it, and the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Literal

Kind = Literal[
    "completed",
    "interrupted",
    "refused",
    "nonfinite",
    "out_of_memory",
    "disk_full",
    "hang",
    "killed",
    "crashed",
]
Action = Literal["finish", "requeue", "relaunch", "wait", "give up"]

#: Kinds after which the next attempt is the same as the last. Only these must make progress sooner or later.
UNCHANGED: Final = frozenset({"disk_full", "hang", "killed", "crashed"})
#: Kinds whose first relaunch is immediate: the cause lies outside of the program, or was ended with it.
_NO_FIRST_PAUSE: Final = frozenset({"hang", "killed"})


@dataclass(frozen=True)
class Policy:
    """The limits of the supervisor.

    Attributes:
        max_retries: attempts after the first one.
        min_learning_rate, min_batch_size: lower bounds of the cuts.
        reduction: divides the learning rate after non-finite values, and the batch size after out of memory.
        patience: attempts in a row without a change and without progress, after which the supervisor gives up.
        progress_after_s: a script that reports no steps has made progress if it ran for this long.
        first_wait_s, disk_wait_s: the first pause after a crash and after a full disk. Each further one is doubled.
        longest_wait_s: the upper bound of a pause.
    """

    max_retries: int = 10
    min_learning_rate: float = 1e-6
    min_batch_size: int = 1
    reduction: float = 1.5
    patience: int = 3
    progress_after_s: float = 600.0
    first_wait_s: float = 5.0
    disk_wait_s: float = 60.0
    longest_wait_s: float = 600.0


@dataclass(frozen=True)
class Outcome:
    """The end of an attempt.

    Attributes:
        detail: the evidence, for people: a line of the output, or the reason in status.json.
        stopping: the supervisor was told to stop, and launches nothing more.
        progress: the attempt left something that lasts: a newer checkpoint, or a long time of running.
        learning_rate, batch_size: what the attempt ran with; None where that is unknown, and then it cannot be cut.
        good_step: the newest step that counts as good after non-finite values, in a run that can go back to it.
        duration_s: how long the attempt ran.
    """

    kind: Kind
    detail: str = ""
    stopping: bool = False
    progress: bool = False
    learning_rate: float | None = None
    batch_size: int | None = None
    good_step: int | None = None
    duration_s: float = 0.0


@dataclass(frozen=True)
class Decision:
    """The next action of the supervisor.

    Attributes:
        learning_rate, batch_size: the new value; None where it stays.
        resume_at_most_step: the newest checkpoint that the next attempt may resume from; None for any.
        wait_s: seconds before the relaunch.
        exit_code: the exit code of the supervisor; None if it continues.
    """

    action: Action
    why: str
    learning_rate: float | None = None
    batch_size: int | None = None
    resume_at_most_step: int | None = None
    wait_s: float = 0.0
    exit_code: int | None = None


def decide(history: Sequence[Outcome], outcome: Outcome, policy: Policy) -> Decision:
    """Decide what follows from `outcome`. The first case that applies counts.

    Args:
        history: the outcomes of the attempts before, oldest first.
        outcome: how the last attempt ended.
    """
    repeats = _unchanged_in_vain(history, outcome)
    match outcome.kind:
        case "completed":  # even if the supervisor was told to stop meanwhile: nothing is left to do
            return Decision("finish", "completed", exit_code=0)
        case kind if outcome.stopping or kind == "interrupted":
            return Decision("requeue", "interrupted", exit_code=75)
        case "refused":
            return Decision("give up", "the call or the configuration must change", exit_code=2)
        case _ if len(history) >= policy.max_retries:
            return _give_up(f"all {policy.max_retries} retries are used up")
        # What is changed needs no progress: the cuts end by themselves, at the smallest value.
        case "nonfinite":
            return _cut_learning_rate(outcome, policy)
        case "out_of_memory":
            return _cut_batch(outcome, policy)
        # What is not changed would be launched for ever without progress.
        case _ if repeats >= policy.patience:
            return _give_up(f"{repeats} attempts in a row without progress")
        case _:
            return _relaunch_unchanged(repeats, outcome, policy)


def _give_up(why: str) -> Decision:
    return Decision("give up", why, exit_code=1)


def _cut_learning_rate(outcome: Outcome, policy: Policy) -> Decision:
    rate = outcome.learning_rate
    if rate is None:
        return _give_up("non-finite values, and no learning rate is known that could be cut")
    if rate <= policy.min_learning_rate:
        return _give_up(f"non-finite values at {rate:.3g}, and the learning rate may not go below it")
    return Decision(
        "relaunch",
        "non-finite values",
        learning_rate=max(rate / policy.reduction, policy.min_learning_rate),
        resume_at_most_step=outcome.good_step,
    )


def _cut_batch(outcome: Outcome, policy: Policy) -> Decision:
    size = outcome.batch_size
    if size is None:
        return _give_up("out of memory, and no batch size is known that could be cut")
    if size <= policy.min_batch_size:
        return _give_up(f"out of memory at batch {size}, and it may not go below it: a smaller model, shorter rows")
    smaller = max(int(size / policy.reduction), policy.min_batch_size)
    return Decision("relaunch", "out of memory", batch_size=smaller)


def _relaunch_unchanged(repeats: int, outcome: Outcome, policy: Policy) -> Decision:
    """Repeat the attempt: at once, or after a pause that doubles with every repeat."""
    doublings = repeats - 2 if outcome.kind in _NO_FIRST_PAUSE else repeats - 1
    if doublings < 0:
        return Decision("relaunch", _WHY[outcome.kind])
    first = policy.disk_wait_s if outcome.kind == "disk_full" else policy.first_wait_s
    return Decision("wait", _WHY[outcome.kind], wait_s=min(first * 2.0**doublings, policy.longest_wait_s))


def _unchanged_in_vain(history: Sequence[Outcome], outcome: Outcome) -> int:
    """The number of attempts in a row, with this one, that changed nothing and brought no progress; at least 1."""
    attempts = (outcome, *reversed(history))
    return max(1, len(list(takewhile(lambda one: one.kind in UNCHANGED and not one.progress, attempts))))


_WHY: Final = {
    "disk_full": "the disk was full",
    "hang": "it made no sign of life and was ended",
    "killed": "it was killed from outside",
    "crashed": "it crashed",
}
