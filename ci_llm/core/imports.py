"""What precedes the import of large libraries: settings that they read then, and no garbage collection meanwhile."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


def set_library_defaults() -> None:
    """Switch off telemetry, the warning about tokenizers in forked workers, and threads that spin while they wait."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # On a shared machine a spinning thread takes the core from the thread it waits for: two toy steps then take
    # minutes (measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Accelerate imports bitsandbytes if it is installed, which warns about a missing CPU kernel that is not used here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@contextmanager
def importing() -> Iterator[None]:
    """A command imports torch and what is on top of it, once: `with importing(): from ci_llm.run.job import run_job`.

    Modules make a million objects that live as long as the process. The collector visits them again and again while
    they become more, which is a quarter of what their import takes, and once more in every full collection later.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
