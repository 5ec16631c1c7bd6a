"""An attempt's end and what follows: its kind, and the supervisor's policy, a pure table over all attempts so far.

The kind comes from exit code, signal and output, or from what an own run wrote about itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Literal

from ci_llm.core.run_folder import PEER_LOST, Failure
from ci_llm.core.run_status import Status
from ci_llm.errors import AllTrialsFailed
from ci_llm.supervisor.child import AttemptResult
from ci_llm.supervisor.output_scan import says_killed

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


# The kind of an end

#: Exit codes by SIGKILL, and by SIGTERM, SIGINT and SIGHUP: as Popen reports a signal, and as a shell does (128 + n).
_KILLS: Final = (-9, 137)
_STOPS: Final = (-15, -2, -1, 143, 130, 129)
_NO_SPACE: Final = ("No space left on device", "Disk quota exceeded")
BAD_CALL: Final = 2
#: Reasons in status.json and in the failure files that mean a kind of their own; every other one is a crash.
_REASONS: Final[dict[str, Kind]] = {
    "nonfinite": "nonfinite",
    "out_of_memory": "out_of_memory",
    "error:OutOfMemoryError": "out_of_memory",
    "error:MemoryError": "out_of_memory",
    "disk_full": "disk_full",
    "hang": "hang",
    AllTrialsFailed.reason: "refused",
}


def classify_by_output(result: AttemptResult) -> tuple[Kind, str]:
    """Return how an external script ended, and the evidence for it: all it leaves is its output and its exit code.

    The first line that applies counts: a NaN explains the exit code that follows from it, not the reverse.
    """
    code, evidence = result.returncode, result.evidence
    if result.error is not None:
        return "refused", f"it cannot be started: {result.error}"
    if result.stop_reason and result.stop_reason != "nonfinite":
        return "interrupted", result.stop_reason
    if evidence.nonfinite:
        return "nonfinite", evidence.nonfinite
    if evidence.out_of_memory and evidence.ended_out_of_memory(failed=code != 0):
        return "out_of_memory", evidence.out_of_memory
    if code == 0:
        return "completed", ""
    if code in _KILLS or code is None or evidence.killed:
        return _killed(result, evidence.killed or "killed by signal 9")
    if code in _STOPS:
        return "interrupted", f"it was told to stop: {_in_words(code)}"
    if any(text in line for line in evidence.last_lines for text in _NO_SPACE):
        return "disk_full", evidence.last_words
    return "crashed", f"{_in_words(code)}: {evidence.last_words}"


def classify_by_status(
    result: AttemptResult, status: Status | None, cause: Failure | None, *, has_begun: bool
) -> tuple[Kind, str]:
    """Return how an attempt of an own run ended, and the evidence for it.

    Args:
        status: what this attempt wrote into status.json; None if it ended before that.
        cause: the earliest failure that its processes have recorded.
        has_begun: an earlier attempt with the same call has begun to train, so the call itself is right.
    """
    if result.stop_reason == "hang":
        return "hang", "no heartbeat and no output"
    if status is None:
        return _before_it_began(result, has_begun)
    if status.status == "completed":
        return "completed", f"step {status.step}"
    if status.status == "interrupted":
        return "interrupted", f"{status.reason}, step {status.step}"
    if status.status == "failed" or cause is not None:
        message = cause.message if cause else str(status.reason)
        if any(text in message for text in _NO_SPACE):
            return "disk_full", message
        reason = cause.reason if cause else str(status.reason)
        # The survivors report a lost peer. The process that was killed could report nothing.
        if reason == PEER_LOST or says_killed(message):
            return _killed(result, f"{reason}: {message}")
        return _REASONS.get(reason, "crashed"), f"{reason}: {message}"
    return _killed(result, f"no word after step {status.step}")


def _before_it_began(result: AttemptResult, has_begun: bool) -> tuple[Kind, str]:
    """The end of an attempt that wrote no status. A refusal after a good beginning is a crash and not a wrong call."""
    if result.returncode == 0:
        return "completed", "nothing was left to do"
    if result.returncode == BAD_CALL and not has_begun:
        return "refused", result.evidence.last_lines[-1] if result.evidence.last_lines else "it said nothing"
    return classify_by_output(result)


def _killed(result: AttemptResult, detail: str) -> tuple[Kind, str]:
    """A kill while memory was short came from the kernel, and means out of memory."""
    if result.memory_pressure:
        return "out_of_memory", f"{detail}, while memory was short"
    return "killed", detail


def _in_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
