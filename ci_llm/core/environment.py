"""Settings of the environment for the libraries. They read them when they are imported."""

from __future__ import annotations

import logging
import os


def set_library_defaults() -> None:
    """Switch off telemetry, the warning about tokenizers in forked workers, and threads that spin while they wait."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # On a shared machine a spinning thread takes the core from the thread it waits for: two toy steps then take
    # minutes (measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Accelerate imports bitsandbytes if it is installed, which warns about a missing CPU kernel that is not used here.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
