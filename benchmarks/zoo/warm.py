"""Runs scripts of the zoo as forks of a process that has imported torch: an audit then takes seconds, not a minute."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.audit.runs import INSIDE, Execute
from tools.testbed.forkserver import ForkServer


def executor(server: ForkServer) -> Execute:
    """What `Plan.execute` takes, for commands of the form `python SCRIPT ...` and `python -m MODULE ...`."""

    def execute(
        command: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path, limit_s: float
    ) -> tuple[int | None, bool]:
        own = {name: value for name, value in environment.items() if name.startswith("CI_LLM_AUDIT")}
        [code] = server.run(run_script, output, words=list(command[1:]), environment=own, folder=str(folder))
        return code, False

    return execute


def run_script(words: list[str], environment: dict[str, str], folder: str) -> int:
    """In the fork: start the probe as `sitecustomize` does, then run the script."""
    import torch

    os.environ.update(environment)
    os.chdir(folder)
    is_module = words[0] == "-m"
    sys.path[:0] = [str(INSIDE), folder if is_module else str(Path(words[0]).parent)]
    sys.argv[:] = words[is_module:]
    import ci_llm_probe

    ci_llm_probe.install(torch)
    try:
        if is_module:
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    return 0
