"""`ci-llm supervise` and safe_train.py: from a command line to a supervision, and to its exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ci_llm.errors import ConfigError, LaunchError
from ci_llm.supervisor.options import DEFAULT_SCRIPT, Options, parse_options

if TYPE_CHECKING:
    from ci_llm.supervisor.target import Training
import re
from typing import Final


def supervise(arguments: Sequence[str]) -> int:
    """`python safe_train.py ...`; returns the exit code: 0 completed, 2 bad call, 75 interrupted, 1 gave up,
    130 aborted by a second Ctrl-C.

    Raises:
        BadInput: the call is wrong, and nothing was launched.
        SystemExit: with 0, after `--help`.
    """
    call = parse_options(arguments)
    if sys.platform == "win32":
        raise LaunchError(
            "the supervisor needs process groups and pseudo-terminals, which Windows does not have",
            hint="run it in WSL; train.py itself resumes by being called again",
        )
    return _supervise(call)


def _supervise(call: Options) -> int:
    # Loaded here, so that --help answers at once.
    from ci_llm.interrupts import ABORTED_EXIT_CODE, STOP_SIGNALS, Interrupts
    from ci_llm.supervisor import process_tree
    from ci_llm.supervisor.log import LOG_NAME, SupervisorLog
    from ci_llm.supervisor.loop import Supervision
    from ci_llm.supervisor.wandb_cleanup import TrackerRuns

    story = SupervisorLog(Path(LOG_NAME))
    wake_fd, heard_fd = os.pipe()

    def announce(line: str) -> None:
        if interrupts.stop_reason is not None:  # what is passed on is told when that is done
            story.say(line, at_line_start=False)
        os.write(heard_fd, b"\n")

    with Interrupts(stop=(*STOP_SIGNALS, "SIGHUP"), announce=announce) as interrupts:
        process_tree.adopt_orphans()
        training = _training(call)
        deletes_runs = call.delete_wandb_runs and training.starts_anew
        supervision = Supervision(
            training,
            call.policy,
            story,
            interrupts,
            wake_fd=wake_fd,
            tracker_runs=TrackerRuns(os.environ) if deletes_runs else None,
        )
        try:
            return supervision.run()
        except KeyboardInterrupt:  # the second Ctrl-C
            story.say("aborted")
            return ABORTED_EXIT_CODE


def _training(call: Options) -> Training:
    from ci_llm.cli.supervise import is_own_script, our_words
    from ci_llm.config import default_file
    from ci_llm.supervisor.external_script import ExternalScript

    extra = [*(["--config", str(call.config)] if call.config else []), *call.words]
    script = call.script
    if not call.options_for_other_scripts() and script == DEFAULT_SCRIPT:
        script = default_file(script.name) or script
    words = our_words(call.command) if call.command else [] if is_own_script(script) else None
    if words is None:
        return ExternalScript(call)
    if call.options_for_other_scripts():
        raise _no_options_of_ours(call)
    from ci_llm.supervisor.own_run import OwnRun

    command = call.command or (sys.executable, str(script))
    return OwnRun([*command, *extra], [*words, *extra], grace_s=call.grace_s)


def _no_options_of_ours(call: Options) -> ConfigError:
    """Where Hydra's two options mean a file that is there, it is named."""
    meant = Path(call.config_path or "", f"{call.config_name}.yaml")
    file = f"--config {meant if meant.is_file() else 'FILE'}"
    return ConfigError(
        f"our own trainer takes no {' and no '.join(call.options_for_other_scripts())}",
        where="command line",
        hint=f"write {file} and key=value; what is adjusted after a failure travels in recovery.json",
    )


# ---------------------------------------------------------------------------------------------------- whose


_OUR_DOOR: Final = re.compile(r"^\s*(?:from|import) ci_llm\.(?:cli|entrance)\b", re.MULTILINE)


def is_own_script(script: Path) -> bool:
    """Whether a file starts our trainer: it imports `ci_llm.cli.entry`, as train.py does, or `ci_llm.cli.main`."""
    try:
        return _OUR_DOOR.search(script.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def our_words(command: Sequence[str]) -> list[str] | None:
    """The keys that a command hands to our trainer, under whatever launcher; None if it starts something else."""
    for place, word in enumerate(command):
        rest = list(command[place + 1 :])
        if word.endswith(".py") and is_own_script(Path(word)):
            return rest
        if (Path(word).name == "ci-llm" or list(command[place - 1 : place + 1]) == ["-m", "ci_llm"]) and rest[:1] == [
            "train"
        ]:
            return rest[1:]
    return None
