"""`ci-llm status`: the state of a run in plain lines, or as JSON."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ci_llm.core.push_record import PushRecord, last_push

if TYPE_CHECKING:
    from ci_llm.watch.reading import Reading

_LOGGER = logging.getLogger(__name__)

STATUS_USAGE = """ci-llm status [RUN | --config FILE | key=value ...] [--json]
Shows the state of a run and its reason, the last step, and the process; then progress, speed and time left, losses,
the last evaluation, a warning if there is one, and the command that resumes it. RUN is its output_dir; with the
arguments of train.py it is the run that they would train.
--json: the same as one JSON object; what is not known is null.
exit codes: 0 completed, 75 interrupted, 3 running, 1 failed or vanished, 2 bad call
example: ci-llm status ci_llm_output/mine"""

_TAIL_BYTES: Final = 256 << 10  # the last lines of metrics.jsonl are enough here


def status(words: list[str]) -> int:
    """`ci-llm status RUN`, or with the arguments of train.py: the run that they would train."""
    if {"-h", "--help"} & {*words}:
        print(STATUS_USAGE)
        return 0
    from ci_llm.watch.reading import RunReader

    as_json = "--json" in words
    folder = named_run([word for word in words if word not in ("--debug", "--json")])
    _LOGGER.debug("reads %s", Path(folder, "status.json").absolute())
    found = RunReader(folder, _TAIL_BYTES).look()
    if as_json:
        print(json.dumps(found.record(), indent=2))
    else:
        print(*_lines(found), sep="\n")
    return found.status.exit_code


def named_run(words: list[str]) -> Path:
    """The folder of the run that the words name: itself, or that which train.py would train with them."""
    if len(words) == 1 and "=" not in words[0] and not words[0].startswith("-"):
        return Path(words[0])
    from ci_llm.cli.train import read_configuration

    return read_configuration(words).config.run_folder


def _lines(found: Reading) -> list[str]:
    """For people; scripts may read the first."""
    from ci_llm.watch.words import losses, progress, scores, speed, time_left, whereabouts

    run = found.status
    reason = f" ({run.reason})" if run.reason else ""
    moving = [speed(found), time_left(found)] if found.is_running else []
    lines = [
        ", ".join(filter(None, [progress(found), *moving])),
        f"{run.agent_steps:,} agent-steps" if run.agent_steps else "",
        run.choice or "",
        losses(found),
        scores(found),
        whereabouts(found) if run.status in ("running", "vanished") else "",
        f"SLURM job {found.slurm_job}" if found.slurm_job else "",
        f"warning: {run.warning}" if run.warning else "",
        f"best crowd in an evaluation so far: after step {run.best_step}" if run.best_step is not None else "",
        _mirror(run.mirror) if run.mirror else "",
        _hub(pushed) if (pushed := last_push(found.folder)) else "",
        f"go on with: {run.next_command}" if run.next_command else "",
    ]
    head = f"{run.status}{reason}: step {run.step}, attempt {run.attempt}, process {run.pid} on {run.host}"
    return [head, *filter(None, lines)]


def _hub(pushed: PushRecord) -> str:
    """How the last push to the hub ended."""
    if pushed.error is not None:
        return f"hub: not published: {pushed.error}; the same call tries it again"
    return f"hub: step {pushed.step} is published in {pushed.url}"


def _mirror(state: Mapping[str, Any]) -> str:
    """How far the mirror is, as status.json has it."""
    behind = f", {state['behind_s']:.0f} s behind" if state["behind_s"] >= 1 else ""
    error = f" ({state['error']})" if state["error"] else ""
    return f"mirror: step {state['step']} is the newest in {state['url']}{behind}{error}"
