"""How a run fails: the process that failed says why, first of all, in a file; nobody enters a collective any more."""

from __future__ import annotations

from collections.abc import Iterator

from ci_llm.checkpoints.collective import PeerGone
from ci_llm.checkpoints.store import DISK_FULL
from ci_llm.crowd.memory import is_out_of_memory
from ci_llm.errors import GivenUp
from ci_llm.processes import PeerLost
from ci_llm.run.interruption import command_line
from ci_llm.run.run import Run
from ci_llm.status import PEER_LOST, Failure, write_failure


def record_failure(run: Run, attempt: int, error: BaseException) -> None:
    """Write why this process fails, then, on the main one, how the run ended.

    A disk that refuses either is told and no more: the error itself is what people have to see. They see it once: the
    terminal hears it from the door, which explains it, and training.log has it from here.
    """
    reason = reason_of(error)
    step = error.step if isinstance(error, GivenUp) and error.step is not None else run.state.step
    failure = Failure.of(error, reason, run.processes.index, step)
    for write in (
        lambda: write_failure(run.config.run_folder, attempt, run.processes.index, failure),
        lambda: run.status.finish("failed", reason, command_line(run.processes.launch)),
    ):
        try:
            write()
        except OSError as refusal:
            run.log.say(f"the failure could not be written down: {refusal}")
    run.log.say(f"failed ({reason}) after step {run.state.step}")
    run.log.note(str(error))


def reason_of(error: BaseException) -> str:
    """A word for scripts, and for the supervisor."""
    if isinstance(error, (PeerLost, PeerGone)):
        return PEER_LOST
    for cause in _causes(error):
        if isinstance(cause, GivenUp):
            return cause.reason
        if isinstance(cause, OSError) and cause.errno in DISK_FULL:
            return "disk_full"
        if is_out_of_memory(cause):
            return "out_of_memory"
    return f"error:{type(error).__name__}"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and what it was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
