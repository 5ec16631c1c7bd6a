"""`python -m tools.audit -- python THEIRS.py ...`: audits a script, and shows the verdict as a table or as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ci_llm.cli.command import make_parser, run_guarded
from ci_llm.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tools.audit.audit import Check, Verdict


_EXAMPLE = """\
The script runs twice straight, once killed by SIGKILL, once stopped by SIGTERM; the latter two are resumed. It is
not changed, and nothing of it leaves this machine. {out} stands for the folder of a run; without it every run works
in a copy of the present folder. {newest} stands for the newest match of --newest.

example: python -m tools.audit -- python train.py --output_dir {out}
         python -m tools.audit --resume-arg=--resume -- python train.py
         python -m tools.audit --newest 'step_*' --resume-arg=--resume_from={newest} -- \\
           python train.py --output_dir {out}

exit codes: 0 exact; 1 diverges; 2 bad call, or the script fails by itself"""


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m tools.audit ...`; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_guarded(lambda: audit(words), debug="--debug" in words)


def audit(words: Sequence[str]) -> int:
    """Audit a command.

    Raises:
        BadInput: the call is wrong, or the script fails without any interruption.
        SystemExit: with 0, after `--help`.
    """
    own, command = _split(words)
    does = "Run a training script again and again: does it resume exactly, and what diverges first?"
    parser = make_parser("python -m tools.audit", does, _EXAMPLE)
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="optimizer steps of a run (default 30)")
    parser.add_argument(
        "--kill-at", type=int, metavar="STEP", help="strike after this step; by default between two saves"
    )
    parser.add_argument(
        "--resume-arg", action="append", default=[], metavar="WORD", help="add this to resume; repeatable"
    )
    parser.add_argument("--newest", default="", metavar="PATTERN", help="what {newest} is to match in a run's folder")
    parser.add_argument("--seconds", type=float, default=900.0, metavar="S", help="limit of each process (default 900)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep records and outputs here")
    parser.add_argument("--json", action="store_true", help="one JSON object, for scripts")
    try:
        call = parser.parse_args(own)
    except ConfigError as error:
        if command or not error.what.startswith("unrecognized arguments"):
            raise
        hint = "write the command behind --: python -m tools.audit -- python train.py"
        raise ConfigError(error.what, where=error.where, hint=hint) from error
    _check(call.steps, call.kill_at, call.seconds, call.keep, command)
    if any("{newest}" in word for word in call.resume_arg) and not call.newest:
        raise ConfigError("{newest} needs --newest PATTERN", where="command line", hint="--newest 'checkpoint_*'")

    from rich.console import Console

    from tools.audit.audit import audit as run_audit
    from tools.audit.runs import Plan

    plan = Plan(command, call.resume_arg, call.newest, call.steps, call.kill_at, call.seconds)
    with tempfile.TemporaryDirectory(prefix="ci_llm_audit_") as scratch:
        folder = (call.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        verdict = run_audit(plan, folder, lambda line: print(line, file=sys.stderr, flush=True))
    if call.json:
        print(json.dumps(verdict.as_json(), indent=2))
    else:
        show(verdict, Console(soft_wrap=True, width=None if sys.stdout.isatty() else 120))
    return 0 if verdict.exact else 1


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of this command, and those behind `--`."""
    if "--" not in words:
        return list(words), []
    at = list(words).index("--")
    return list(words[:at]), list(words[at + 1 :])


def _check(steps: int, kill_at: int | None, seconds: float, keep: Path | None, command: Sequence[str]) -> None:
    wrong = []
    if not command:
        wrong.append("there is no command: write it behind --")
    if steps < 3:
        wrong.append("--steps takes at least 3")
    if kill_at is not None and not 1 <= kill_at < steps:
        wrong.append(f"--kill-at takes a step from 1 to {steps - 1}")
    if seconds <= 0:
        wrong.append("--seconds takes more than 0")
    if keep is not None and keep.exists() and any(keep.iterdir()):
        wrong.append(f"{keep} is not empty")
    if wrong:
        raise ConfigError("; ".join(wrong), where="command line", hint="python -m tools.audit --help")


def show(verdict: Verdict, console: Console) -> None:
    """Print a verdict: a table, the first divergence, and what is likely behind it."""
    from rich.table import Table

    from tools.audit import divergence as causes

    saves = f"saved after {', '.join(map(str, verdict.saves))}" if verdict.saves else "no checkpoint was seen"
    console.print(f"{verdict.framework}, {verdict.steps} optimizer steps, {saves}", highlight=False)
    table = Table(box=None, pad_edge=False)
    for name in ("", "resumed from", "repeated", "compared", "loss differs by", "result"):
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
