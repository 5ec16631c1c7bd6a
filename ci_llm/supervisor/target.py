"""What the supervisor needs to know of a training, whosever it is: ours (`ours.py`) or another's (`foreign.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ci_llm.supervisor.attempt import AttemptResult
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.patterns import OwnPatterns
from ci_llm.supervisor.policy import Decision, Outcome


class Training(Protocol):
    """A training that can be launched again and again, each time a little differently.

    Attributes:
        grace_s: seconds from the order to end until the kill.
        called_again: what the same call does after an interruption, as the end of a sentence.
        starts_anew: an attempt that failed leaves nothing that a later one goes on with, tracker runs included.
        own_patterns: what its output says in words of its own.
    """

    grace_s: float
    starts_anew: bool
    own_patterns: OwnPatterns

    @property
    def called_again(self) -> str: ...

    def begin(self) -> list[str]:
        """Clear away what a supervisor left that was killed; returns what is supervised, in lines for people."""
        ...

    def command(self) -> list[str]:
        """The command of the next attempt."""
        ...

    def environment(self) -> Mapping[str, str]:
        """The environment of the next attempt. Called once per attempt, just before it is launched."""
        ...

    def orders(self, evidence: Evidence) -> tuple[str, str] | None:
        """Whether the running attempt shall end: by which signal ("SIGTERM"; "SIGKILL": at once), and why."""
        ...

    def stop_signal(self, stop_reason: str) -> str:
        """The signal by which the attempt learns that the supervisor was told to stop, by "signal:SIGINT" say."""
        ...

    def save_now(self) -> str:
        """Somebody asked the supervisor for a checkpoint: pass it on. Returns a line for people."""
        ...

    def verdict(self, ending: AttemptResult) -> Outcome:
        """What the end of the attempt means."""
        ...

    def adjust(self, decision: Decision, retry: int) -> list[str]:
        """Make the next attempt what `decision` says; returns what changes, in lines for people."""
        ...

    def requeue(self, stop_reason: str | None) -> str | None:
        """Ask the scheduler to run this supervision again, as the last act; returns a line for people.

        Args:
            stop_reason: the signal that the supervisor got; None if the training stopped by itself.
        """
        ...

    def close(self) -> list[str]:
        """Leave nothing temporary behind; returns what is to say at the end."""
        ...
