"""`ci-llm report` and `ci-llm compare`: the results of a run as a page, and runs or trials beside one another.

Both read the files of the runs, so that they work on any machine that sees the folders.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ci_llm.cli.command import Parser, add_json, print_result
from ci_llm.core.imports import importing
from ci_llm.core.run_folder import SWEEP
from ci_llm.errors import BadInput, ConfigError

if TYPE_CHECKING:
    from ci_llm.report.scores import Leaderboard

_REPORT_EXAMPLE = (
    "example: ci-llm report ci_llm_output\n\n"
    "exit codes: 0 done; 1 the disk refuses the page; 2 bad call, no run, or a damaged file"
)
_COMPARE_EXAMPLE = (
    "example: ci-llm compare ci_llm_output/a ci_llm_output/b\n"
    "         ci-llm compare ci_llm_output/rates      the trials of a sweep\n\n"
    "exit codes: 0 done; 2 bad call, no run, or a damaged file"
)


def report_run(words: Sequence[str]) -> int:
    """Write `RUN/report.html` and print its path.

    Raises:
        BadInput: the call is wrong, there is no run, or a file of it is damaged.
        CiLlmError: the disk refuses the page.
        SystemExit: with 0, after `--help`.
    """
    does = "Write RUN/report.html, one file that stands alone: scores, curves, attempts, and what time each fault cost."
    parser = Parser("ci-llm report", description=does, epilog=_REPORT_EXAMPLE)
    parser.add_argument("run", metavar="RUN", help="the output_dir of a run; it may still be running")
    call = parser.parse_args(words)
    with importing():
        from ci_llm.report.page import write_report

    page = write_report(call.run)
    print(f"{page}: {page.stat().st_size:,} bytes")
    return 0


def compare_runs(words: Sequence[str]) -> int:
    """Print what differs between runs: configurations, and scores with intervals. Or the trials of one sweep.

    Raises:
        BadInput: the call is wrong, there is no run, or a file of one is damaged.
        SystemExit: with 0, after `--help`.
    """
    does = "Show what differs between runs: configurations, and scores with intervals against the first run."
    parser = Parser("ci-llm compare", description=does, epilog=_COMPARE_EXAMPLE)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="the output_dir of a run; two or more, or one of a sweep"
    )
    add_json(parser, "; of a sweep its sweep.json")
    call = parser.parse_args(words)
    from ci_llm.core.run_status import read_status
    from ci_llm.report.compare import LETTERS, as_json, as_text, head
    from ci_llm.report.facts import RunFacts, run_folder
    from ci_llm.report.scores import read_trials

    for path in call.runs:
        if (board := read_trials(Path(path))) is not None:
            return _show_trials(Path(path), board, is_alone=len(call.runs) == 1, as_json=call.json)
    if not 2 <= len(call.runs) <= len(LETTERS):
        what = f"a comparison takes 2 to {len(LETTERS)} runs, not {len(call.runs)}"
        raise ConfigError(what, where="command line", hint="ci-llm compare RUN RUN ...")
    folders = [run_folder(path) for path in call.runs]
    if not call.json:
        for letter, folder in zip(LETTERS, folders, strict=False):
            print(head(letter, folder, read_status(folder)), flush=True)
    runs = [RunFacts(folder) for folder in folders]
    print_result(call.json, as_json(runs), *as_text(runs))
    return 0


def _show_trials(folder: Path, board: Leaderboard, *, is_alone: bool, as_json: bool) -> int:
    """Print the trials of a sweep; returns the exit code."""
    from ci_llm.report.compare import trials_as_text

    if not is_alone:
        best = f"give {board.best_run}, the run of the best trial so far; " if board.best_run else ""
        raise BadInput(
            "this is a sweep, whose runs lie in segments/",
            where=str(folder),
            hint=f"{best}ci-llm compare {shlex.quote(str(folder))} compares its trials",
        )
    for line in [(folder / SWEEP).read_text().rstrip()] if as_json else trials_as_text(board):
        print(line)
    return 0
