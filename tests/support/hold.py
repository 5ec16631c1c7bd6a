"""Makes a run wait at one place: a Python that runs this at its start waits there until the run is asked to stop.

HOLD_AT=ci_llm.crowd.scoring:_score_batch names the function that waits before it does anything, HOLD_CALL=10 the first
of its calls that does, the first one by default. A file at HOLD_UNTIL lets it continue as well. A process that waits
leaves an empty file with its number in the folder HOLD_TOLD.
"""

import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULE, _, NAME = os.environ["HOLD_AT"].partition(":")


def hold(module: ModuleType) -> None:
    original, left = getattr(module, NAME), int(os.environ.get("HOLD_CALL", "1"))

    def held(*args: Any, **kwargs: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and (told := os.environ.get("HOLD_TOLD")):
            open(os.path.join(told, str(os.getpid())), "x").close()
        while left <= 0 and not _may_continue():
            time.sleep(0.01)
        return original(*args, **kwargs)

    setattr(module, NAME, held)


def _may_continue() -> bool:
    from ci_llm import interrupts

    return os.path.exists(os.environ.get("HOLD_UNTIL", "")) or any(one.stop_reason for one in interrupts._installed)


class Finder:
    """Holds the module as soon as it is imported, by whomever."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_hold(module: ModuleType) -> None:
            execute(module)
            hold(module)

        spec.loader.exec_module = execute_and_hold  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
