"""Prints every case that `decide` decides, computed by the code itself; docs/interruptions.md has the short form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from ci_llm.supervisor.policy import Decision, Outcome, Policy, decide

_RAN: Final = Outcome("crashed", learning_rate=2e-4, batch_size=32)
_NO_PROGRESS: Final = (_RAN, _RAN)

#: Row by row: how the attempt ended, the situation, the outcomes before it, its own outcome.
CASES: Final[tuple[tuple[str, str, tuple[Outcome, ...], Outcome], ...]] = (
    ("completed", "", (), replace(_RAN, kind="completed")),
    ("interrupted", "it stopped by itself, or was asked to", (), replace(_RAN, kind="interrupted")),
    ("any failure", "the supervisor was told to stop", (), replace(_RAN, stopping=True)),
    ("refused", "the call is wrong, nothing began", (), replace(_RAN, kind="refused")),
    ("any failure", "all retries are used up", (_RAN,) * 10, replace(_RAN, kind="nonfinite")),
    ("nonfinite", "", (), replace(_RAN, kind="nonfinite")),
    ("nonfinite", "own run, good until step 250", (), replace(_RAN, kind="nonfinite", good_step=250)),
    ("nonfinite", "near the smallest learning rate", (), replace(_RAN, kind="nonfinite", learning_rate=1.2e-6)),
    ("nonfinite", "at the smallest learning rate", (), replace(_RAN, kind="nonfinite", learning_rate=1e-6)),
    ("nonfinite", "the learning rate is unknown", (), replace(_RAN, kind="nonfinite", learning_rate=None)),
    ("out_of_memory", "", (), replace(_RAN, kind="out_of_memory")),
    ("out_of_memory", "at the smallest batch", (), replace(_RAN, kind="out_of_memory", batch_size=1)),
    ("out_of_memory", "the batch size is unknown", (), replace(_RAN, kind="out_of_memory", batch_size=None)),
    ("killed", "", (), replace(_RAN, kind="killed")),
    ("killed", "second time without progress", (_RAN,), replace(_RAN, kind="killed")),
    ("hang", "", (), replace(_RAN, kind="hang")),
    ("disk_full", "", (), replace(_RAN, kind="disk_full")),
    ("disk_full", "second time without progress", (_RAN,), replace(_RAN, kind="disk_full")),
    ("crashed", "", (), _RAN),
    ("crashed", "second time without progress", (_RAN,), _RAN),
    ("crashed", "third time, but with progress", _NO_PROGRESS, replace(_RAN, progress=True)),
    ("killed, hang, disk_full, crashed", "third time without progress", _NO_PROGRESS, replace(_RAN, kind="killed")),
)


def render_table(policy: Policy | None = None) -> str:
    """Return the table in Markdown: learning rate 2e-4 and batch 32 unless a row says otherwise."""
    rows = list(_rows(policy or Policy()))
    head = ("the attempt", "situation", "action", "what changes, or why", "exit code")
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [head, tuple("-" * width for width in widths), *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _rows(policy: Policy) -> Iterator[tuple[str, ...]]:
    for ended, situation, history, outcome in CASES:
        decision = decide(history, outcome, policy)
        code = "" if decision.exit_code is None else str(decision.exit_code)
        yield ended, situation, decision.action, _effect(outcome, decision), code


def _effect(outcome: Outcome, decision: Decision) -> str:
    changes = []
    if decision.learning_rate is not None:
        changes.append(f"learning rate {outcome.learning_rate:.3g} -> {decision.learning_rate:.3g}")
    if decision.batch_size is not None:
        changes.append(f"batch {outcome.batch_size} -> {decision.batch_size}")
    if decision.resume_at_most_step is not None:
        changes.append(f"back to a checkpoint of step {decision.resume_at_most_step} or before")
    if decision.wait_s:
        changes.append(f"after {decision.wait_s:g} s")
    return ", ".join(changes) or (decision.why if decision.exit_code else "")


if __name__ == "__main__":
    print(render_table())
