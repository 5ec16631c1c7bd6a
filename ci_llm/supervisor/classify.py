"""The kind of an attempt's end: by exit code, signal and output, or by what an own run wrote about itself."""

from __future__ import annotations

from typing import Final

from ci_llm.core.run_folder import PEER_LOST, Failure
from ci_llm.core.run_status import Status
from ci_llm.errors import AllTrialsFailed
from ci_llm.supervisor.child import AttemptResult
from ci_llm.supervisor.output_scan import says_killed
from ci_llm.supervisor.policy import Kind

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
