"""Imports of large libraries, without the garbage collector looking through what they make."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


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
