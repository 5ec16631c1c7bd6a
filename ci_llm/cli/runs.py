"""Commands about runs: `status`, `watch`, `report` and `compare` show them, `agents stop` takes an agent out of one.

All of them work by the files of the runs, on any machine that sees the folders.
"""

from __future__ import annotations

import logging
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci_llm.cli.command import add_json, agent_number, help_of, parser_of, print_result
from ci_llm.core.help import asked_help
from ci_llm.core.imports import importing
from ci_llm.core.run_folder import SWEEP
from ci_llm.core.run_status import read_status
from ci_llm.errors import BadInput, ConfigError

if TYPE_CHECKING:
    from ci_llm.report.scores import Leaderboard
    from ci_llm.report.status import Reading
    from ci_llm.run.step.state import CrowdChange


_LOGGER = logging.getLogger(__name__)


def status(words: list[str]) -> int:
    """`ci-llm status RUN`, or with the arguments of train.py: the run that they would train."""
    if asked_help(words):
        print(help_of("status"))
        return 0
    return _tell(named_run([word for word in words if word not in ("--debug", "--json")]), as_json="--json" in words)


def _tell(folder: Path, *, as_json: bool) -> int:
    """Print the state of a run; returns the exit code."""
    from ci_llm.report.status import Reading, lines

    _LOGGER.debug("reads %s", Path(folder, "status.json").absolute())
    found = Reading(folder)
    print_result(as_json, found.record(), *lines(found))
    return found.status.exit_code


def named_run(words: list[str]) -> Path:
    """The folder of the run that the words name: a folder, or the run that train.py would train with these words."""
    if len(words) == 1 and "=" not in words[0] and not words[0].startswith("-"):
        return Path(words[0])
    from ci_llm.cli.train import read_configuration

    return read_configuration(words).config.run_folder


INTERVAL_S: Final = 1.0


def watch(words: list[str]) -> int:
    """`ci-llm watch RUN`: what `ci-llm status` tells, again and again until the run has ended."""
    parser = parser_of("watch")
    parser.add_argument("run", nargs="?", metavar="RUN", help="an output folder; by default that of train.py")
    given = parser.parse_args(words)
    folder = Path(given.run) if given.run else named_run([])
    if not sys.stdout.isatty():
        return _tell(folder, as_json=False)
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        while True:
            found, told = look_again(folder)
            if found is not None and found.is_over:
                live.update(Text("\n".join(told)), refresh=True)
                return found.status.exit_code
            live.update(Text("\n".join([*told, "Ctrl-C leaves; the run continues"])), refresh=True)
            time.sleep(INTERVAL_S)


def look_again(folder: Path) -> tuple[Reading | None, list[str]]:
    """The run as it is now, and the lines about it; None while no run can be read, which may begin later."""
    from ci_llm.report.status import Reading, lines

    try:
        found = Reading(folder)
    except (BadInput, OSError) as error:
        return None, [str(error) if (folder / "status.json").exists() else "no run has begun here yet"]
    return found, lines(found)


def report_run(words: Sequence[str]) -> int:
    """Write `RUN/report.html` and print its path.

    Raises:
        BadInput: the call is wrong, there is no run, or a file of it is damaged.
        CiLlmError: the disk refuses the page.
        SystemExit: with 0, after `--help`.
    """
    parser = parser_of("report")
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
    parser = parser_of("compare")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the output_dir of a run; two or more, or one sweep")
    add_json(parser, "; of a sweep its sweep.json")
    call = parser.parse_args(words)
    from ci_llm.report.compare import LETTERS, as_json, as_text
    from ci_llm.report.facts import RunFacts
    from ci_llm.report.scores import read_trials

    for path in call.runs:
        if (board := read_trials(Path(path))) is not None:
            return _show_trials(Path(path), board, is_alone=len(call.runs) == 1, as_json=call.json)
    if not 2 <= len(call.runs) <= len(LETTERS):
        what = f"a comparison takes 2 to {len(LETTERS)} runs, not {len(call.runs)}"
        raise ConfigError(what, where="command line", hint="ci-llm compare RUN RUN ...")
    runs = [RunFacts(path) for path in call.runs]
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
    lines = [(folder / SWEEP).read_text().rstrip()] if as_json else trials_as_text(board)
    print(*lines, sep="\n")
    return 0


_POLL_S: Final = 0.1
_PATIENCE_S: Final = 30.0  # with a running job, which answers after the step under way


def agents(words: Sequence[str]) -> int:
    """Run `ci-llm agents ARGUMENTS` and return the exit code.

    Raises:
        BadInput: the call is wrong, or there is no run that could do it.
        CheckpointError: the request cannot be written.
        SystemExit: with 0, after `--help`.
    """
    parser = parser_of("agents")
    parser.add_argument("verb", choices=["stop"], help="the agent leaves the crowd")
    parser.add_argument("run", type=Path, metavar="RUN", help="the output_dir of the run")
    parser.add_argument("agent", type=agent_number, metavar="K", help="the number of the agent, or agentK")
    add_json(parser)
    call = parser.parse_args(words)
    from ci_llm.run.step.requests import ask

    status = read_status(call.run)
    if status.status == "completed":
        raise BadInput(
            f"this run is completed at step {status.step}: no agent takes another step",
            where=str(call.run),
            hint="a larger max_train_steps trains on; ci-llm export writes single agents",
        )
    request = ask(call.run, call.agent)
    is_running = status.status == "running"
    decided = _decided(call.run, request, _PATIENCE_S if is_running else 0.0)
    told = None if decided is None else {"step": decided.step, "refused": decided.refused}
    if decided is None:
        when = "after the step under way" if is_running else "after its first step, once it resumes"
        line = f"asked to stop agent{call.agent}: the run does so {when}; its log tells"
    elif decided.refused is not None:
        line = f"refused: {decided.refused}"
    else:
        line = f"stop agent{call.agent}: done after step {decided.step}"
    print_result(call.json, {"verb": "stop", "agent": call.agent, "decision": told}, line)
    return 1 if decided is not None and decided.refused else 0


def _decided(run: Path, request: str, patience_s: float) -> CrowdChange | None:
    """The request as the run has decided it; None if it has not within this time."""
    from ci_llm.run.step.requests import read_record

    until = time.monotonic() + patience_s
    while True:
        found = next((each for each in read_record(run) if each.id == request), None)
        if found is not None or time.monotonic() >= until:
            return found
        time.sleep(_POLL_S)
