"""Output that a supervisor has heard."""

from __future__ import annotations

from ci_llm.supervisor.output_scan import Evidence


def heard(*lines: str) -> Evidence:
    """The evidence in these lines."""
    evidence = Evidence()
    for line in lines:
        evidence.note(line)
    return evidence
