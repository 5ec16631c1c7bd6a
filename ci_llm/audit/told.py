"""A verdict in lines for a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ci_llm.audit import causes
from ci_llm.audit.audit import Check, Verdict


def show(verdict: Verdict, console: Console) -> None:
    """Print a verdict: a table, the first divergence, and what is likely behind it."""
    saves = f"saved after {', '.join(map(str, verdict.saves))}" if verdict.saves else "no checkpoint was seen"
    console.print(f"{verdict.framework}, {verdict.steps} optimizer steps, {saves}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("", "went on from", "repeated", "compared", "loss differs by", "result"):
        table.add_column(name, justify="left" if name in ("", "result") else "right")
    for check in verdict.checks:
        table.add_row(*_row(check))
    console.print(table)
    for check in verdict.checks:
        for divergence in check.divergences:
            line = causes.place(divergence.kind, verdict.places)
            console.print(f"{check.name}, step {divergence.step}: {divergence.kind}", style="bold", highlight=False)
            console.print(f"  {divergence.detail}", highlight=False)
            console.print(f"  likely: {causes.cause(divergence.kind, verdict.framework)}", highlight=False)
            if line:
                console.print(f"  see:    {line}", highlight=False)
    console.print("exact" if verdict.exact else "not exact", style="bold")


def _row(check: Check) -> tuple[str, ...]:
    went = "" if check.resumed_from is None else f"step {check.resumed_from}"
    lost = "" if check.lost_steps is None else f"{check.lost_steps} steps"
    differs = "" if check.loss_difference is None else f"{check.loss_difference:.2g}"
    result: str = check.divergences[0].kind if check.divergences else "the same bits"
    if check.note.startswith("the signal"):
        result = check.note
    return check.name, went, lost, f"{check.steps} steps", differs, result
