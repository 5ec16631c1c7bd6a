"""`ci-llm supervise` and safe_train.py: find the target of a command line, and supervise it."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci_llm.errors import ConfigError, LaunchError
from ci_llm.supervisor.options import DEFAULT_SCRIPT, Options, parse_options

if TYPE_CHECKING:
    from ci_llm.supervisor.loop import Target

logger = logging.getLogger(__name__)

#: A script that imports the command line of this project, as train.py does: it starts this project's trainer.
_OWN_ENTRY: Final = re.compile(r"^\s*(?:from|import) ci_llm\.cli\b", re.MULTILINE)


def supervise(arguments: Sequence[str]) -> int:
    """`python safe_train.py ...`.

    Returns:
        the exit code: 0 completed, 1 gave up, 2 bad call, 75 interrupted, 130 aborted by a second Ctrl-C.

    Raises:
        BadInput: the call is wrong, and nothing was launched.
        SystemExit: with 0, after `--help`.
    """
    options = parse_options(arguments)
    if sys.platform != "linux":
        raise LaunchError("the supervisor follows processes in a way that only Linux has", hint="use Linux, or WSL")
    # Imported here, so that --help answers at once.
    from ci_llm.cli.command import print_line
    from ci_llm.cluster.launch import read_launch
    from ci_llm.cluster.starter import start_again, tell
    from ci_llm.interrupts import ABORTED_EXIT_CODE, STOP_SIGNALS, Interrupts
    from ci_llm.supervisor import process_tree
    from ci_llm.supervisor.loop import LOG_NAME, MID_LINE, Supervisor, SupervisorLog
    from ci_llm.supervisor.wandb_cleanup import WandbCleanup

    def announce(line: str) -> None:
        if interrupts.stop_reason is not None:  # a request to save is reported once it has been passed on
            logger.info(line, extra=MID_LINE)

    interrupts = Interrupts(stop=(*STOP_SIGNALS, "SIGHUP"), announce=announce)
    with interrupts:
        # A command that starts SLURM steps itself needs the variables of the batch script.
        makes_steps = {"srun", "mpirun", "mpiexec"} & {Path(word).name for word in options.command}
        code = None if makes_steps else start_again(1, read_launch(), interrupts, print_line)
        if code is not None:
            return code
        tell()
        with SupervisorLog(Path(LOG_NAME)):
            process_tree.adopt_orphans()
            target = _target(options)
            deletes_runs = options.delete_wandb_runs and target.restarts_from_scratch
            cleanup = WandbCleanup(os.environ) if deletes_runs else None
            try:
                return Supervisor(target, options.policy, interrupts, cleanup).run()
            except KeyboardInterrupt:  # the second Ctrl-C
                logger.warning("aborted")
                return ABORTED_EXIT_CODE


def _target(options: Options) -> Target:
    script, command = options.train_script, options.command
    if not (command or options.external_script_options() or script != DEFAULT_SCRIPT or script.exists()):
        command = (sys.executable, "-m", "ci_llm", "train")  # in another folder than the project's
    own = own_call(command) if command else ("train", list[str]()) if is_own_script(script) else None
    if own is None:
        from ci_llm.supervisor.external_script import ExternalScript

        return ExternalScript(options)
    if useless := options.external_script_options():
        what = f"the trainer of this project takes no {' and no '.join(useless)}"
        hint = "write --config FILE and key=value; adjustments after a failure travel in recovery.json"
        raise ConfigError(what, where="command line", hint=hint)
    from ci_llm.cluster.launch import read_launch
    from ci_llm.cluster.starter import processes_to_start, without_options
    from ci_llm.supervisor.own_run import OwnRun, SweepRun

    launch = read_launch()
    if launch.num_local_processes > 1:
        raise LaunchError(
            f"{launch.num_local_processes} supervisors were started, each of which would supervise the same run",
            where=f"launcher: {launch.launcher}",
            hint="start one, which starts the launcher: python safe_train.py -- torchrun --nproc-per-node 4 train.py",
        )
    command = command or (sys.executable, str(script))
    extra = [*(["--config", str(options.config)] if options.config else []), *options.words]
    if not options.command and (number := processes_to_start(launch)) > 1:
        extra.append(f"--distributed={number}")  # what Accelerate was asked for, the trainer starts
    verb, words = own
    target = SweepRun if verb == "sweep" else OwnRun
    return target([*command, *extra], without_options([*words, *extra]), grace_s=options.grace_s)


def is_own_script(script: Path) -> bool:
    """True if a file starts this project's trainer: it imports the command line of this project."""
    try:
        return _OWN_ENTRY.search(script.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def own_call(command: Sequence[str]) -> tuple[str, list[str]] | None:
    """(train or sweep, the words that it gets) if a command starts it, whatever its launcher; None for others."""
    for place, word in enumerate(command):
        rest = list(command[place + 1 :])
        if word.endswith(".py") and is_own_script(Path(word)):
            return "train", rest
        is_ci_llm = Path(word).name == "ci-llm" or list(command[place - 1 : place + 1]) == ["-m", "ci_llm"]
        if is_ci_llm and rest[:1] in (["train"], ["sweep"]):
            return rest[0], rest[1:]
    return None
