"""What to do after an attempt: a pure table over its outcome, the attempts before it, and the policy."""

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

#: Kinds for which nothing is changed before the next attempt; only these need progress to go on.
UNCHANGED: Final = frozenset({"disk_full", "hang", "killed", "crashed"})
#: Kinds that say nothing against an immediate relaunch.
_NO_FAULT: Final = frozenset({"hang", "killed"})


@dataclass(frozen=True)
class Policy:
    """How far the supervisor goes.

    Attributes:
        max_retries: attempts after the first.
        min_learning_rate, min_batch_size: what a cut never goes below.
        reduction: divides the learning rate after non-finite values, the batch after out of memory.
        hard_reduction: divides the learning rate once `patience` cuts in a row were in vain.
        patience: attempts in a row that change nothing and bring nothing, after which it gives up.
        lasting_s: a script that reports no steps has made progress if it ran this long.
        early_s: the same crash twice in a row, each within this time, will come a third time.
        first_wait_s, disk_wait_s: the first pause after a crash and after a full disk; doubled each time.
        longest_wait_s: where doubling ends.
    """

    max_retries: int = 10
    min_learning_rate: float = 1e-6
    min_batch_size: int = 1
    reduction: float = 1.5
    hard_reduction: float = 10.0
    patience: int = 3
    lasting_s: float = 600.0
    early_s: float = 60.0
    first_wait_s: float = 5.0
    disk_wait_s: float = 60.0
    longest_wait_s: float = 600.0


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        detail: the evidence, for people: a line of its output, the reason in status.json.
        stopping: the supervisor had been told to stop; nothing is launched any more.
        progress: the attempt brought something that stays: a newer checkpoint, or a long time of running.
        learning_rate, batch_size: what it ran with; None where nobody knows, and then neither can be cut.
        good_step: the newest step whose checkpoint counts as good after non-finite values, of a run that can go back.
        fault: the exception of a crash, where a later attempt may well meet it again, without the numbers in it.
        duration_s: how long it ran.
    """

    kind: Kind
    detail: str = ""
    stopping: bool = False
    progress: bool = False
    learning_rate: float | None = None
    batch_size: int | None = None
    good_step: int | None = None
    fault: str | None = None
    duration_s: float = 0.0


@dataclass(frozen=True)
class Decision:
    """What to do next.

    Attributes:
        learning_rate, batch_size: the new value, where it changes.
        resume_at_most_step: the newest checkpoint that may be resumed from; None: any.
        wait_s: seconds before the relaunch.
        exit_code: of the supervisor, where it ends.
    """

    action: Action
    why: str
    learning_rate: float | None = None
    batch_size: int | None = None
    resume_at_most_step: int | None = None
    wait_s: float = 0.0
    exit_code: int | None = None


def decide(history: Sequence[Outcome], outcome: Outcome, policy: Policy) -> Decision:
    """The next action after `outcome`; `history` holds the attempts before it, oldest first."""
    if outcome.kind == "completed":
        return Decision("finish", "completed", exit_code=0)
    if outcome.stopping or outcome.kind == "interrupted":
        return Decision("requeue", "interrupted", exit_code=75)
    if outcome.kind == "refused":
        return Decision("give up", "the call or the configuration must change", exit_code=2)
    if len(history) >= policy.max_retries:
        return _give_up(f"all {policy.max_retries} retries are used up")
    if outcome.kind == "nonfinite":
        return _cut_learning_rate(history, outcome, policy)
    if outcome.kind == "out_of_memory":
        return _cut_batch(outcome, policy)
    return _try_again(history, outcome, policy)


def _give_up(why: str) -> Decision:
    return Decision("give up", why, exit_code=1)


def _cut_learning_rate(history: Sequence[Outcome], outcome: Outcome, policy: Policy) -> Decision:
    rate = outcome.learning_rate
    if rate is None:
        return _give_up("non-finite values, and no learning rate is known that could be cut")
    if rate <= policy.min_learning_rate:
        return _give_up(f"non-finite values at {rate:.3g}, and the learning rate may not go below it")
    cuts_in_vain = len(list(takewhile(lambda one: one.kind == "nonfinite" and not one.progress, reversed(history))))
    reduction = policy.reduction if cuts_in_vain < policy.patience else policy.hard_reduction
    return Decision(
        "relaunch",
        "non-finite values",
        learning_rate=max(rate / reduction, policy.min_learning_rate),
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


def _try_again(history: Sequence[Outcome], outcome: Outcome, policy: Policy) -> Decision:
    if _is_the_same_again(history, outcome, policy):
        return _give_up(f"the same crash twice, each within {policy.early_s:g} s: {outcome.detail}")
    in_vain = _attempts_in_vain(history, outcome)
    if in_vain >= policy.patience:
        return _give_up(f"{in_vain} attempts in a row without progress")
    doublings = in_vain - 1 if outcome.kind not in _NO_FAULT else in_vain - 2
    if doublings < 0:
        return Decision("relaunch", _WORDS[outcome.kind])
    first = policy.disk_wait_s if outcome.kind == "disk_full" else policy.first_wait_s
    return Decision("wait", _WORDS[outcome.kind], wait_s=min(first * 2.0**doublings, policy.longest_wait_s))


def _is_the_same_again(history: Sequence[Outcome], outcome: Outcome, policy: Policy) -> bool:
    """Whether two attempts in a row, between which nothing was changed, ended at once and by the same exception."""
    twice = (*history[-1:], outcome)
    early = all(one.kind == "crashed" and not one.progress and one.duration_s <= policy.early_s for one in twice)
    return len(twice) == 2 and early and outcome.fault is not None and twice[0].fault == outcome.fault


def _attempts_in_vain(history: Sequence[Outcome], outcome: Outcome) -> int:
    """Failures in a row, this one included, before which nothing was changed and which brought nothing."""
    earlier = takewhile(lambda one: one.kind in UNCHANGED and not one.progress, reversed(history))
    return 1 + (0 if outcome.progress else len(list(earlier)))


_WORDS: Final = {
    "disk_full": "the disk was full",
    "hang": "it made no sign of life and was ended",
    "killed": "it was killed from outside",
    "crashed": "it crashed",
}
