"""`ci-llm watch`: runs side by side, redrawn until all have ended; from any machine that sees their folders."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Final

from ci_llm.errors import BadInput

if TYPE_CHECKING:
    from ci_llm.watch.scene import Scene

_DESCRIPTION = """Shows runs side by side while they train: state, progress, speed and time left, losses with their
curve, the last evaluation, the attempt and its heartbeat, the SLURM job, and the command that resumes an interrupted
run. It only reads files, and leaves when all runs have ended. Ctrl-C leaves earlier and changes nothing in a run."""

_EXAMPLES = """RUN is the folder of a run, a folder that holds runs, or a pattern; by default the run that train.py
would train. A run that does not exist yet is waited for. Where the output is no terminal, one picture is printed.

exit codes: those of ci-llm status: 0 completed, 75 interrupted, 3 running, 1 failed or vanished, 2 bad call; of several
runs, the first of 1, 75, 3 and 0 that one of them has

examples:
  ci-llm watch ci_llm_output/mine
  ci-llm watch ci_llm_output --once
  ci-llm watch 'ci_llm_output/seed*' other/run"""

INTERVAL_S: Final = 0.5


def watch(words: list[str]) -> int:
    """`ci-llm watch RUN ...`."""
    from ci_llm.cli.arguments import make_parser

    parser = make_parser("ci-llm watch", _DESCRIPTION, _EXAMPLES)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="an output folder; several are shown side by side")
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    given = parser.parse_args(words)
    from ci_llm.cli.status import named_run
    from ci_llm.watch.scene import Scene

    scene = Scene(given.runs or [str(named_run([]))])
    return _print_once(scene) if given.once or not sys.stdout.isatty() else _redraw(scene)


def _print_once(scene: Scene) -> int:
    """One picture of the runs that are there.

    Raises:
        BadInput: there are none.
    """
    from rich.console import Console

    from ci_llm.core.run_status import read_status
    from ci_llm.watch.board import Board
    from ci_llm.watch.reading import Reading

    scene.look(wait_for_squeue=True)
    if not any(isinstance(look, Reading) for look in scene.looks):
        for look in scene.looks:
            read_status(look.folder)  # raises with what is wrong there
        raise BadInput("this is no folder of a run: it has no status.json", hint="give the output_dir of a run")
    Console(highlight=False).print(Board(scene.looks, scene.jobs))
    return scene.exit_code()


def _redraw(scene: Scene) -> int:
    """Draw until all runs have ended; the last picture stays."""
    from rich.console import Console
    from rich.live import Live

    from ci_llm.watch.board import Board

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            scene.look()
            ended = scene.has_ended()
            footer = "" if ended else "Ctrl-C leaves; the runs go on"
            live.update(Board(scene.looks, scene.jobs, footer), refresh=True)
            if ended:
                return scene.exit_code()
            time.sleep(INTERVAL_S)
