"""The loop: launch, listen, judge, decide, adjust; and at the end the story."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

from ci_llm.interrupts import Interrupts
from ci_llm.supervisor.attempt import Attempt, AttemptResult
from ci_llm.supervisor.log import SupervisorLog
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.policy import Decision, Outcome, Policy, decide
from ci_llm.supervisor.target import Training
from ci_llm.supervisor.wandb_cleanup import TrackerRuns

_FAILURES: Final = frozenset({"refused", "nonfinite", "out_of_memory", "disk_full", "hang", "killed", "crashed"})
_DELETION_S: Final = 120.0
_HURRIED_DELETION_S: Final = 10.0  # somebody waits for us to go


@dataclass
class _Chapter:
    """One attempt for the story: how it ended, and what was changed after it."""

    outcome: Outcome
    duration_s: float
    changes: list[str] = field(default_factory=list)


class Supervision:
    """Attempts of one training until it is completed, interrupted, or given up.

    Args:
        interrupts: installed; a stop is handed on to the running attempt.
        wake_fd: a file that becomes readable when a signal has arrived.
        tracker_runs: collects the runs of failed attempts; None: they stay.
    """

    def __init__(
        self,
        training: Training,
        policy: Policy,
        story: SupervisorLog,
        interrupts: Interrupts,
        *,
        wake_fd: int,
        tracker_runs: TrackerRuns | None,
    ) -> None:
        self._training, self._policy, self._story = training, policy, story
        self._interrupts, self._wake_fd, self._tracker_runs = interrupts, wake_fd, tracker_runs
        self._chapters: list[_Chapter] = []
        self._attempt_runs = False
        interrupts.describe_stop = self._describe_stop

    def run(self) -> int:
        """Supervise to the end; returns the exit code: 0, 2, 75 or 1."""
        try:
            self._say_all(self._training.begin())
            decision = self._next()
            while decision.exit_code is None:
                decision = self._next()
            self._conclude(decision)
        finally:
            self._say_all(self._training.close())
        if decision.action == "requeue" and (line := self._training.requeue(self._interrupts.stop_reason)):
            self._story.say(line)
        return decision.exit_code

    def _next(self) -> Decision:
        """One attempt and what follows from it; a decision with an exit code is the last."""
        ending = self._attempt()
        outcome = self._judged(self._training.verdict(ending))
        decision = decide([chapter.outcome for chapter in self._chapters], outcome, self._policy)
        self._chapters.append(_Chapter(outcome, ending.duration_s))
        self._tell(ending, outcome, decision)
        if self._tracker_runs is not None:
            self._tracker_runs.note(ending.evidence, failed=outcome.kind in _FAILURES)
        if decision.exit_code is not None:
            return decision
        changes = self._training.adjust(decision, len(self._chapters))
        self._chapters[-1].changes = changes
        self._say_all(f"  {line}" for line in changes)
        if self._interrupts.wait(decision.wait_s):
            decision = decide([], self._judged(outcome), self._policy)
            self._tell_next(decision)
        return decision

    def _judged(self, outcome: Outcome) -> Outcome:
        return replace(outcome, stopping=self._interrupts.stop_reason is not None)

    def _attempt(self) -> AttemptResult:
        number, most = len(self._chapters) + 1, self._policy.max_retries + 1
        environment, command = self._training.environment(), self._training.command()
        self._story.say(f"attempt {number} of {most}: {shlex.join(command)}")
        evidence = Evidence(self._training.own_patterns)
        grace_s = self._training.grace_s
        with Attempt(command, environment, evidence=evidence, grace_s=grace_s, wake_fd=self._wake_fd) as attempt:
            self._attempt_runs = True
            ending = attempt.run(lambda: self._orders(evidence))
            self._attempt_runs = False
        return ending

    def _describe_stop(self) -> str:
        return f"ending attempt {len(self._chapters) + 1}" if self._attempt_runs else "launching nothing more"

    def _orders(self, evidence: Evidence) -> tuple[str, str] | None:
        if self._interrupts.take_save_request():
            self._story.say(self._training.save_now(), at_line_start=False)
        order = self._training.orders(evidence)
        if order is None and (reason := self._interrupts.stop_reason) is not None:
            return self._training.stop_signal(reason), reason
        return order

    # What is told

    def _tell(self, ending: AttemptResult, outcome: Outcome, decision: Decision) -> None:
        number = len(self._chapters)
        self._story.say(_ended(number, self._chapters[-1]), at_line_start=ending.at_line_start)
        if ending.left_behind:
            self._story.say(f"  had to be killed: {', '.join(ending.left_behind)}")
        if outcome.kind in _FAILURES and ending.evidence.last_lines:
            self._story.record(["  its last lines:", *(f"    {line}" for line in ending.evidence.last_lines)])
        self._tell_next(decision)

    def _tell_next(self, decision: Decision) -> None:
        if decision.action != "finish":
            again = self._training.called_again
            self._story.say(f"  {_NEXT[decision.action].format(why=decision.why, wait_s=decision.wait_s, again=again)}")

    def _conclude(self, decision: Decision) -> None:
        """The story in one piece, once more than one attempt was needed or the last one failed."""
        if len(self._chapters) > 1 or decision.action == "give up":
            count = len(self._chapters)
            self._story.say(f"failure analysis of {count} attempt{'s' if count > 1 else ''}: {decision.why}")
            for number, chapter in enumerate(self._chapters, 1):
                self._story.say(f"  {_ended(number, chapter)}")
                self._say_all(f"    then {line}" for line in chapter.changes)
        if self._tracker_runs is not None:
            limit_s = _HURRIED_DELETION_S if decision.action == "requeue" else _DELETION_S
            self._say_all(self._tracker_runs.delete_failed(timeout_s=limit_s))

    def _say_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._story.say(line)


_NEXT: Final = {
    "requeue": "{why}: {again}",
    "relaunch": "relaunching: {why}",
    "wait": "waiting {wait_s:g} s, then relaunching: {why}",
    "give up": "giving up: {why}",
}


def _ended(number: int, chapter: _Chapter) -> str:
    detail = f": {chapter.outcome.detail}" if chapter.outcome.detail else ""
    return f"attempt {number} ended after {chapter.duration_s:.1f} s: {chapter.outcome.kind}{detail}"
