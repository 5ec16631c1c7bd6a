"""`ci-llm status` and `ci-llm watch`: the state of runs, once or while they train.

Both read the files of the runs, so that they work on any machine that sees the folders.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci_llm.cli.command import Parser, print_result
from ci_llm.core.help import asked_help
from ci_llm.core.run_folder import NOT_A_RUN
from ci_llm.errors import BadInput

if TYPE_CHECKING:
    from ci_llm.report.watch import Scene


_LOGGER = logging.getLogger(__name__)

STATUS_USAGE = """ci-llm status [RUN | --config FILE | key=value ...] [--json]
Shows the state of a run and its reason, the last step, and the process; then progress, speed and time left, losses,
the last evaluation, a warning if there is one, and the command that resumes it. RUN is its output_dir; with the
arguments of train.py it is the run that they would train.
--json: the same as one JSON object; what is not known is null.
exit codes: 0 completed, 75 interrupted, 3 running, 1 failed or vanished, 2 bad call
example: ci-llm status ci_llm_output/mine"""


def status(words: list[str]) -> int:
    """`ci-llm status RUN`, or with the arguments of train.py: the run that they would train."""
    if asked_help(words):
        print(STATUS_USAGE)
        return 0
    from ci_llm.report.status import lines, look_at

    as_json = "--json" in words
    folder = named_run([word for word in words if word not in ("--debug", "--json")])
    _LOGGER.debug("reads %s", Path(folder, "status.json").absolute())
    found = look_at(folder)
    run, reason = found.status, f" ({found.status.reason})" if found.status.reason else ""
    head = f"{run.status}{reason}: step {run.step}, attempt {run.attempt}, process {run.pid} on {run.host}"
    print_result(as_json, found.record(), head, *lines(found))  # scripts may read the head
    return found.status.exit_code


def named_run(words: list[str]) -> Path:
    """The folder of the run that the words name: a folder, or the run that train.py would train with these words."""
    if len(words) == 1 and "=" not in words[0] and not words[0].startswith("-"):
        return Path(words[0])
    from ci_llm.cli.train import read_configuration

    return read_configuration(words).config.run_folder


_DESCRIPTION = """Shows runs in one table while they train: state, progress, loss, last evaluation, speed and time
left; below it warnings, SLURM jobs, and the commands that resume interrupted runs. Of a single run it shows all that
ci-llm status tells. It only reads files, and leaves when all runs have ended. Ctrl-C leaves earlier and
changes nothing in a run."""

_EXAMPLES = """RUN is the folder of a run, or a folder that holds runs; by default the run that train.py
would train. A run that does not exist yet is waited for. Where the output is no terminal, one picture is printed.

exit codes: those of ci-llm status: 0 completed, 75 interrupted, 3 running, 1 failed or vanished, 2 bad call; of several
runs, the first of 1, 75, 3 and 0 that one of them has

examples:
  ci-llm watch ci_llm_output/mine
  ci-llm watch ci_llm_output --once
  ci-llm watch ci_llm_output/seed* other/run"""

INTERVAL_S: Final = 1.0


def watch(words: list[str]) -> int:
    """`ci-llm watch RUN ...`."""
    parser = Parser("ci-llm watch", description=_DESCRIPTION, epilog=_EXAMPLES)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="an output folder; several share a table")
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    given = parser.parse_args(words)
    from ci_llm.report.watch import Scene

    scene = Scene(given.runs or [str(named_run([]))])
    return _print_once(scene) if given.once or not sys.stdout.isatty() else _redraw(scene)


def _print_once(scene: Scene) -> int:
    """Print one picture of the runs.

    Raises:
        BadInput: there are no runs.
    """
    from rich.console import Console

    from ci_llm.core.run_status import read_status
    from ci_llm.report.status import Reading
    from ci_llm.report.watch import picture

    scene.look()
    if not any(isinstance(look, Reading) for look in scene.looks):
        for look in scene.looks:
            read_status(look.folder)  # raises with what is wrong there
        raise BadInput(NOT_A_RUN, hint="give the output_dir of a run")
    Console(highlight=False).print(picture(scene.looks, scene.jobs))
    return scene.exit_code()


def _redraw(scene: Scene) -> int:
    """Draw until all runs have ended; the last picture stays."""
    from rich.console import Console
    from rich.live import Live

    from ci_llm.report.watch import picture

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            scene.look()
            ended = scene.has_ended()
            footer = "" if ended else "Ctrl-C leaves; the runs continue"
            live.update(picture(scene.looks, scene.jobs, footer), refresh=True)
            if ended:
                return scene.exit_code()
            time.sleep(INTERVAL_S)
