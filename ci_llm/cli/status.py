"""`ci-llm status`: the state of a run in one line, its warning, and the command that resumes it."""

from __future__ import annotations

import logging
from pathlib import Path

_LOGGER = logging.getLogger(__name__)

STATUS_USAGE = """ci-llm status [RUN | --config FILE | key=value ...]
Shows the state of a run and its reason, the last step, the process, a warning if there is one, and the command that
resumes it. RUN is its output_dir; with the arguments of train.py it is the run that they would train.
exit codes: 0 completed, 75 interrupted, 3 running, 1 failed or vanished, 2 bad call
example: ci-llm status ci_llm_output/mine"""


def status(words: list[str]) -> int:
    """`ci-llm status RUN`, or with the arguments of train.py: the run that they would train."""
    from ci_llm.cli.train import read_configuration
    from ci_llm.core.run_status import read_status

    if {"-h", "--help"} & {*words}:
        print(STATUS_USAGE)
        return 0
    words = [word for word in words if word != "--debug"]
    named = len(words) == 1 and "=" not in words[0] and not words[0].startswith("-")
    folder = words[0] if named else read_configuration(words).config.run_folder
    _LOGGER.debug("reads %s", Path(folder, "status.json").absolute())
    found = read_status(folder)
    reason = f" ({found.reason})" if found.reason else ""
    print(f"{found.status}{reason}: step {found.step}, attempt {found.attempt}, process {found.pid} on {found.host}")
    if found.warning:
        print(f"warning: {found.warning}")
    if found.best_step is not None:
        print(f"best crowd in an evaluation so far: after step {found.best_step}")
    if found.next_command:
        print(f"go on with: {found.next_command}")
    return found.exit_code
