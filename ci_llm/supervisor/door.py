"""The way in: from a command line to a supervision, and from its end to an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ci_llm.errors import ConfigError, LaunchError
from ci_llm.supervisor.call import DEFAULT_SCRIPT, Call, read_call

if TYPE_CHECKING:
    from ci_llm.supervisor.training import Training


def supervise(arguments: Sequence[str]) -> int:
    """`python safe_train.py ...`; returns the exit code: 0 completed, 2 bad call, 75 interrupted, 1 gave up,
    130 aborted by a second Ctrl-C.

    Raises:
        BadInput: the call is wrong, and nothing was launched.
        SystemExit: with 0, after `--help`.
    """
    call = read_call(arguments)
    if sys.platform == "win32":
        raise LaunchError(
            "the supervisor needs process groups and pseudo-terminals, which Windows does not have",
            cure="run it in WSL; train.py itself resumes by being called again",
        )
    return _supervise(call)


def _supervise(call: Call) -> int:
    # Loaded here, so that --help answers at once.
    from ci_llm.interrupts import ABORTED_EXIT_CODE, STOP_SIGNALS, Interrupts
    from ci_llm.supervisor import tree
    from ci_llm.supervisor.story import LOG_NAME, Story
    from ci_llm.supervisor.supervise import Supervision
    from ci_llm.supervisor.tracker_runs import TrackerRuns

    story = Story(Path(LOG_NAME))
    wake_fd, heard_fd = os.pipe()

    def announce(line: str) -> None:
        if interrupts.stop_reason is not None:  # what is passed on is told when that is done
            story.say(line, at_line_start=False)
        os.write(heard_fd, b"\n")

    with Interrupts(stop=(*STOP_SIGNALS, "SIGHUP"), announce=announce) as interrupts:
        tree.adopt_orphans()
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


def _training(call: Call) -> Training:
    from ci_llm.config import default_file
    from ci_llm.supervisor.foreign import ForeignScript
    from ci_llm.supervisor.whose import is_ours, our_words

    extra = [*(["--config", str(call.config)] if call.config else []), *call.words]
    script = call.script
    if not call.options_for_other_scripts() and script == DEFAULT_SCRIPT:
        script = default_file(script.name) or script
    words = our_words(call.command) if call.command else [] if is_ours(script) else None
    if words is None:
        return ForeignScript(call)
    if call.options_for_other_scripts():
        raise _no_options_of_ours(call)
    from ci_llm.supervisor.ours import OurRun

    command = call.command or (sys.executable, str(script))
    return OurRun([*command, *extra], [*words, *extra], grace_s=call.grace_s)


def _no_options_of_ours(call: Call) -> ConfigError:
    """Where Hydra's two options mean a file that is there, it is named."""
    meant = Path(call.config_path or "", f"{call.config_name}.yaml")
    file = f"--config {meant if meant.is_file() else 'FILE'}"
    return ConfigError(
        f"our own trainer takes no {' and no '.join(call.options_for_other_scripts())}",
        where="command line",
        cure=f"write {file} and key=value; what is adjusted after a failure travels in recovery.json",
    )
