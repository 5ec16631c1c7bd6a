"""Processes with simulated GPUs as trials of a fork server, which has loaded the device before torch: `LOADED`.

This file imports neither: a test names its trials, in a process that has another torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

#: What such a server imports.
LOADED: Final = ("tools.testbed.accelerator.__main__", "tools.testbed.warm")


def on_gpus(folder: str, words: list[str], environment: Mapping[str, str]) -> int:
    """`python -m tools.testbed.accelerator` with these words and, beside the server's, these variables."""
    from tools.testbed.accelerator.__main__ import main

    os.chdir(folder)
    for name in ("ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    os.environ.update(environment)
    return main(words)


def on_cpu(folder: str, words: list[str]) -> int:
    """A command of ours without a GPU."""
    from ci_llm.cli.main import main

    os.chdir(folder)
    return main(words)
