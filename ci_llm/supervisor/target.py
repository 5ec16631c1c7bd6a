"""What the supervisor needs of the training that it runs: this project's own run, or an external script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ci_llm.supervisor.attempt import AttemptResult, StopOrder
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.patterns import UserPatterns
from ci_llm.supervisor.policy import Decision, Outcome


class Target(Protocol):
    """A training that can be launched again and again, each time with other settings.

    Methods that return lines return them for people: the supervisor logs them.

    Attributes:
        grace_s: seconds from the signal to stop until the kill.
        restarts_from_scratch: a later attempt uses nothing that a failed one left, W&B runs included.
        user_patterns: what the output says in words that only the user knows.
    """

    grace_s: float
    restarts_from_scratch: bool
    user_patterns: UserPatterns

    @property
    def rerun_effect(self) -> str:
        """What the same call does after an interruption; the end of a sentence."""
        ...

    def prepare(self) -> list[str]:
        """Clear away what a killed supervisor left; return what is supervised, in lines."""
        ...

    def begin_attempt(self) -> tuple[list[str], Mapping[str, str]]:
        """Return the command and the environment of the next attempt. Called once, right before its launch."""
        ...

    def stop_order(self, evidence: Evidence) -> StopOrder | None:
        """Return how and why the running attempt is to be ended; None if it goes on. Called several times a second.

        Args:
            evidence: the output of the attempt so far.
        """
        ...

    def stop_signal(self, stop_reason: str) -> str:
        """Return the signal that stops the attempt, when the supervisor was told to stop.

        Args:
            stop_reason: how the supervisor was told: "signal:SIGINT", for instance.
        """
        ...

    def request_save(self) -> str:
        """Pass on a request for a checkpoint; return what came of it, in a line."""
        ...

    def classify(self, result: AttemptResult) -> Outcome:
        """Return what the end of an attempt means."""
        ...

    def adjust(self, decision: Decision, retry: int) -> list[str]:
        """Give the next attempt the settings of `decision`; return what changes, in lines.

        Args:
            retry: the number of the next retry, from 1 on.
        """
        ...

    def requeue(self, stop_reason: str | None) -> str | None:
        """Ask the scheduler to run this supervision again, as the last act; return what came of it, in a line.

        Args:
            stop_reason: the signal that the supervisor got; None if the training stopped by itself.
        """
        ...

    def close(self) -> list[str]:
        """Remove everything temporary; return what is to say at the end, in lines."""
        ...
