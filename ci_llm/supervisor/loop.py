"""The supervisor's loop: launch an attempt of a target, watch it, classify its end, decide, adjust, and log all of it.

A target is the training that the loop runs: this project's own run or sweep, or an external script.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from ci_llm.core.quantities import duration
from ci_llm.interrupts import Interrupts
from ci_llm.logs.run_log import AppendedFile, PackageHandler
from ci_llm.supervisor.child import AttemptResult, Child, StopOrder
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.policy import Decision, Outcome, Policy, decide
from ci_llm.supervisor.script_settings import shown
from ci_llm.supervisor.wandb_cleanup import WandbCleanup

if TYPE_CHECKING:
    from ci_llm.supervisor.external_script import ExternalScript
    from ci_llm.supervisor.own_run import OwnRun

logger = logging.getLogger(__name__)


#: A training that can be launched again and again, each time with other settings. Methods that return lines return them
#: for people: the supervisor logs them.
Target: TypeAlias = "OwnRun | ExternalScript"

LOG_NAME: Final = "safe_train.log"
#: `extra` of a logging call while a progress bar may stand on the current line of the terminal.
MID_LINE: Final = {"mid_line": True}
#: `extra` of a logging call for what the terminal has shown already.
FILE_ONLY: Final = {"file_only": True}
_TERMINAL_WAIT_S: Final = 1.0


class SupervisorLog(PackageHandler):
    """The log of a supervision, on the terminal and in a file; a context manager.

    Messages of the level INFO appear as they are. Those of any other level are marked: `warning: ...` on the terminal,
    `WARNING ...` in the file. A terminal that is gone, or stopped by Ctrl-S, is skipped: the training is worth more
    than its log.

    Args:
        path: the file, to which the records are appended.
        fd: the terminal; standard error by default.
    """

    def __init__(self, path: Path, *, fd: int = 2) -> None:
        super().__init__()
        self._file, self._fd = AppendedFile(path), fd

    def __enter__(self) -> SupervisorLog:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()
        self.close()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, in as many lines as its message has."""
        lines = self.format(record).splitlines() or [""]
        mark = "" if record.levelno == logging.INFO else record.levelname
        if not getattr(record, "file_only", False):
            before = "\n" if getattr(record, "mid_line", False) else ""  # the bar keeps its line
            prefix = f"safe_train: {mark.lower()}: " if mark else "safe_train: "
            self._show(before + "".join(f"{prefix}{line}\n" for line in lines))
        head = f"{datetime.fromtimestamp(record.created):%Y-%m-%d %H:%M:%S} {mark}".rstrip()
        self._file.append("\n".join(f"{head} {line}".rstrip() for line in lines))

    def _show(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            if select.select([], [self._fd], [], _TERMINAL_WAIT_S)[1]:
                os.write(self._fd, text.encode(errors="replace"))


_FAILURES: Final = frozenset({"refused", "nonfinite", "out_of_memory", "disk_full", "hang", "killed", "crashed"})
#: What a request to stop does between two attempts.
_BETWEEN: Final = "launching nothing more"
_CLEANUP_S: Final = 120.0
_HURRIED_CLEANUP_S: Final = 10.0  # the machine is wanted back
_NEXT: Final = {
    "requeue": "{why}: {rerun_effect}",
    "relaunch": "relaunching: {why}",
    "wait": "waiting {wait_s:g} s, then relaunching: {why}",
    "give up": "giving up: {why}",
}


class Supervisor:
    """Runs attempts of one target until it is completed, interrupted, or given up.

    Args:
        interrupts: installed; a request to stop is passed on to the running attempt.
        wandb_cleanup: deletes the W&B runs of failed attempts; None to keep them.
    """

    def __init__(
        self, target: Target, policy: Policy, interrupts: Interrupts, wandb_cleanup: WandbCleanup | None = None
    ) -> None:
        self._target, self._policy = target, policy
        self._interrupts, self._wandb_cleanup = interrupts, wandb_cleanup
        self._outcomes: list[Outcome] = []
        self._changes: dict[int, list[str]] = {}  # after the attempt of this number, in words
        interrupts.describe_stop = lambda: _BETWEEN

    def run(self) -> int:
        """Supervise to the end.

        Returns:
            the exit code: 0 completed, 1 gave up, 2 the call is wrong, 75 interrupted.
        """
        try:
            _log_all(self._target.prepare())
            decision = self._run_attempt()
            while decision.exit_code is None:
                decision = self._run_attempt()
            self._summarise(decision)
            if self._wandb_cleanup is not None:
                timeout_s = _HURRIED_CLEANUP_S if decision.action == "requeue" else _CLEANUP_S
                _log_all(self._wandb_cleanup.delete_failed(timeout_s=timeout_s))
        finally:
            _log_all(self._target.clean_up())
        # The last act: SLURM ends this process as soon as it requeues its job.
        line = self._target.requeue(self._interrupts.stop_reason) if decision.action == "requeue" else None
        if line:
            logger.info(line)
        return decision.exit_code

    def _run_attempt(self) -> Decision:
        """Run one attempt, and prepare and await the next one. A decision with an exit code is the last."""
        result = self._watch_attempt()
        outcome = self._with_stop_request(self._target.classify(result))
        decision = decide(self._outcomes, outcome, self._policy)
        self._outcomes.append(outcome)
        self._log_end(result, outcome)
        self._log_decision(decision)
        if self._wandb_cleanup is not None:
            self._wandb_cleanup.note(result.evidence, failed=outcome.kind in _FAILURES)
        if decision.exit_code is not None:
            return decision
        number = len(self._outcomes)
        self._changes[number] = self._target.adjust(decision, number)
        _log_all(f"  {line}" for line in self._changes[number])
        if self._interrupts.wait(decision.wait_s):
            decision = decide([], self._with_stop_request(outcome), self._policy)
            self._log_decision(decision)
        return decision

    def _watch_attempt(self) -> AttemptResult:
        number = len(self._outcomes) + 1
        command, environment = self._target.begin_attempt()
        logger.info("attempt %d of %d: %s", number, self._policy.max_retries + 1, shown(command))
        evidence = Evidence()
        with Child(command, environment, evidence=evidence, grace_s=self._target.grace_s) as child:
            self._interrupts.describe_stop = lambda: f"ending attempt {number}"
            result = child.run(lambda: self._stop_order(evidence))
            self._interrupts.describe_stop = lambda: _BETWEEN
        return result

    def _stop_order(self, evidence: Evidence) -> StopOrder | None:
        if self._interrupts.take_save_request():
            logger.info(self._target.request_save(), extra=MID_LINE)
        order = self._target.stop_order(evidence)
        reason = self._interrupts.stop_reason
        if order is None and reason is not None:
            return StopOrder(self._target.stop_signal or reason.removeprefix("signal:"), reason)
        return order

    def _with_stop_request(self, outcome: Outcome) -> Outcome:
        return replace(outcome, stopping=self._interrupts.stop_reason is not None)

    # The log

    def _log_end(self, result: AttemptResult, outcome: Outcome) -> None:
        logger.info(_end_of(len(self._outcomes), outcome), extra=MID_LINE)
        if result.left_behind:
            logger.info("  had to be killed: %s", ", ".join(result.left_behind))
        if outcome.kind in _FAILURES and result.evidence.last_lines:
            last_lines = ["  its last lines:", *(f"    {line}" for line in result.evidence.last_lines)]
            logger.info("\n".join(last_lines), extra=FILE_ONLY)

    def _log_decision(self, decision: Decision) -> None:
        if decision.action != "finish":
            level = logging.WARNING if decision.action == "give up" else logging.INFO
            values = {"why": decision.why, "wait_s": decision.wait_s, "rerun_effect": self._target.rerun_effect}
            logger.log(level, "  %s", _NEXT[decision.action].format(**values))

    def _summarise(self, decision: Decision) -> None:
        """Log a summary of all attempts, if there were several or the only one failed."""
        count = len(self._outcomes)
        if count == 1 and decision.action != "give up":
            return
        logger.info("failure analysis of %d attempt%s: %s", count, "s" if count > 1 else "", decision.why)
        for number, outcome in enumerate(self._outcomes, 1):
            logger.info("  %s", _end_of(number, outcome))
            _log_all(f"    then {line}" for line in self._changes.get(number, ()))


def _log_all(lines: Iterable[str]) -> None:
    for line in lines:
        logger.info(line)


def _end_of(number: int, outcome: Outcome) -> str:
    detail = f": {outcome.detail}" if outcome.detail else ""
    return f"attempt {number} ended after {duration(outcome.duration_s)}: {outcome.kind}{detail}"
