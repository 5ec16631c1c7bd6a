"""What the end of an attempt means: by exit code, signal and output alone, or by what our run wrote about itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from ci_llm.core.attempts import PEER_LOST, Failure, earliest_failure
from ci_llm.core.run_status import Status
from ci_llm.supervisor.attempt import AttemptResult
from ci_llm.supervisor.patterns import says_killed
from ci_llm.supervisor.policy import Kind, Outcome

_KILLS: Final = (-9, 137)  # by a signal, and as a shell or a container reports one
_REQUESTS: Final = (-15, -2, -1, 143, 130, 129)  # SIGTERM, SIGINT, SIGHUP
_NO_SPACE: Final = ("No space left on device", "Disk quota exceeded")
BAD_CALL: Final = 2
#: Exceptions that may pass by themselves: a network, another process, a device that somebody else still holds.
_PASSING: Final = re.compile(
    r"connect|time(?:d|s)? ?out|temporar|unavailable|in use\b|\bbusy|locked|reset|refused|name resolution|gaierror"
    r"|network|\bSSL|HTTP|Too Many Requests|try again|retry|stale file|input/output|NCCL|CUDA|HIP error|driver",
    re.IGNORECASE,
)
_NUMBERS: Final = re.compile(r"0x[0-9a-fA-F]+|\d+")

#: Reasons of our trainer, and of its exceptions, that mean a kind of their own; every other is a crash.
_REASONS: Final[dict[str, Kind]] = {
    "nonfinite": "nonfinite",
    "out_of_memory": "out_of_memory",
    "error:OutOfMemoryError": "out_of_memory",
    "error:MemoryError": "out_of_memory",
    "disk_full": "disk_full",
    "hang": "hang",
}


def classify_by_output(
    ending: AttemptResult, *, learning_rate: float | None, batch_size: int | None, lasting_s: float
) -> Outcome:
    """The outcome of a script that tells nothing but its output and its exit code.

    Args:
        learning_rate, batch_size: what it ran with, where known.
        lasting_s: it has made progress if it ran this long.
    """
    kind, detail = _kind_by_output(ending)
    return Outcome(
        kind,
        detail,
        progress=ending.duration_s >= lasting_s,
        learning_rate=learning_rate,
        batch_size=batch_size,
        fault=fault(kind, ending.evidence.exception),
        duration_s=ending.duration_s,
    )


def fault(kind: Kind, exception: str | None) -> str | None:
    """What two crashes have in common if they are the same; None for one that may pass by itself, or is unknown."""
    if kind != "crashed" or exception is None or _PASSING.search(exception):
        return None
    return _NUMBERS.sub("#", exception)


def classify_by_status(
    ending: AttemptResult, status: Status | None, failures: Sequence[Failure], *, has_begun: bool
) -> tuple[Kind, str]:
    """The kind of end of our own run, and the evidence for it.

    Args:
        status: what this attempt wrote into status.json; None if it ended before that.
        failures: what its processes wrote before they failed.
        has_begun: an earlier attempt with the same call began, so that the call cannot be what is wrong.
    """
    if ending.ordered == "hang":
        return "hang", "no heartbeat and no output"
    if status is None:
        return _before_it_began(ending, has_begun)
    if status.status == "completed":
        return "completed", f"step {status.step}"
    if status.status == "interrupted":
        return "interrupted", f"{status.reason}, step {status.step}"
    cause = earliest_failure(failures)
    if status.status == "failed" or cause is not None:
        message = cause.message if cause else str(status.reason)
        if any(text in message for text in _NO_SPACE):
            return "disk_full", message
        reason = cause.reason if cause else str(status.reason)
        if reason == PEER_LOST or says_killed(message):  # the one that was killed could not say so itself
            return _killed(ending, f"{reason}: {message}")
        return _REASONS.get(reason, "crashed"), f"{reason}: {message}"
    return _killed(ending, f"no word after step {status.step}")


def _before_it_began(ending: AttemptResult, has_begun: bool) -> tuple[Kind, str]:
    if ending.returncode == 0:
        return "completed", "nothing was left to do"
    if ending.returncode == BAD_CALL and not has_begun:
        return "refused", _last_words(ending)
    return _kind_by_output(ending)


def _kind_by_output(ending: AttemptResult) -> tuple[Kind, str]:
    code, said = ending.returncode, ending.evidence
    if ending.error is not None:
        return "refused", f"it cannot be started: {ending.error}"
    if ending.ordered and ending.ordered != "nonfinite":
        return "interrupted", ending.ordered
    if said.nonfinite:
        return "nonfinite", said.nonfinite
    if said.out_of_memory and (code != 0 or said.ended_out_of_memory):
        return "out_of_memory", said.out_of_memory
    if code == 0:
        return "completed", ""
    if code in _KILLS or code is None or said.killed:
        return _killed(ending, said.killed or "killed by signal 9")
    if code in _REQUESTS:
        return "interrupted", f"it was told to stop: {_in_words(code)}"
    if any(text in line for line in said.last_lines for text in _NO_SPACE):
        return "disk_full", said.last_words
    return "crashed", f"{_in_words(code)}: {said.last_words}"


def _killed(ending: AttemptResult, detail: str) -> tuple[Kind, str]:
    """A kill under memory pressure was the kernel's."""
    if ending.memory_pressure:
        return "out_of_memory", f"{detail}, while memory was short"
    return "killed", detail


def _last_words(ending: AttemptResult) -> str:
    return ending.evidence.last_lines[-1] if ending.evidence.last_lines else "it said nothing"


def _in_words(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
