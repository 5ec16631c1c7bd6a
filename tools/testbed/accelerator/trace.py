"""The trace of a process on the simulated device: launches, waits of the host, copies, and what must not happen.

Everything is noted under a phase, which the process names: "start", "step 1", "after step 1", and so on.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, Final

#: Operations of CUDA that wait for the size of their own result.
WAITING: Final = {
    *("aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"),
    *("aten::bincount", "aten::repeat_interleave"),
}
#: Bytes of a pageable copy to the device that do not wait: they go by way of a buffer of the driver.
STAGED_BYTES: Final = 65_536


class Trace:
    """Counters by phase.

    Attributes:
        step: its number, for the names of phases.
        launches: by (phase, operation).
        waits: by (phase, why, where): every moment at which the host waits for the device.
        copies: bytes by (phase, kind, where).
        mixes: operations that were given tensors of two devices, by (operation, where).
        races: reads of memory whose writer was not waited for, by (what, where).
        attention: calls by (phase, kernel, dtype, has a mask).
        threads: names of those that used the device.
    """

    def __init__(self) -> None:
        self._command = self.step = 0
        self._phase = "start"
        self.launches: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[tuple[str, str, str]] = Counter()
        self.copies: Counter[tuple[str, str, str]] = Counter()
        self.mixes: Counter[tuple[str, str]] = Counter()
        self.races: Counter[tuple[str, str]] = Counter()
        self.attention: Counter[tuple[str, str, str, str]] = Counter()
        self.threads: set[str] = set()

    @property
    def phase(self) -> str:
        """Under which everything is noted."""
        return self._phase if self._command < 2 else f"{self._command}: {self._phase}"

    @phase.setter
    def phase(self, name: str) -> None:
        self._phase = name

    def begin_command(self) -> None:
        """Count what follows for the next command of this process."""
        self._command, self.step, self._phase = self._command + 1, 0, "start"

    def note(self, kind: str, what: str, size: int) -> None:
        """One event; see `tell` in `device.cpp`."""
        self.threads.add(threading.current_thread().name)
        if kind == "launch":
            self.launches[self.phase, what] += 1
            if what in WAITING:
                self.waits[self.phase, f"the size of {what}", place()] += 1
        elif kind == "wait":
            self.waits[self.phase, what, place()] += 1
        elif kind == "mix":
            self.mixes[what, place()] += 1
        elif kind == "race":
            self.races[what, place()] += 1
        else:
            self._note_copy(kind, size)

    def _note_copy(self, kind: str, size: int) -> None:
        self.launches[self.phase, f"copy {kind[:3]}"] += 1
        self.copies[self.phase, kind, place()] += size
        staged = kind == "h2d pageable async" and size <= STAGED_BYTES
        if "blocking" in kind or ("pageable" in kind and not staged):
            self.waits[self.phase, f"copy {kind}", place()] += 1

    def attended(self, kernel: str, dtype: str, masked: bool) -> None:
        """One call of attention."""
        self.attention[self.phase, kernel, dtype, "mask" if masked else "no mask"] += 1

    def written(self, file: Path, **more: Any) -> None:
        """Leave it as JSON, with what else there is to say."""
        counters = {name: value for name, value in vars(self).items() if isinstance(value, Counter)}
        lists = {name: [[*key, count] for key, count in sorted(each.items())] for name, each in counters.items()}
        file.write_text(json.dumps(lists | {"threads": sorted(self.threads)} | more))


def place() -> str:
    """The line of ours that led here, and the library in between; else where the thread is."""
    frame: FrameType | None = sys._getframe()  # torch also calls from C++, with no other frame above
    library = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/ci_llm/" in name:
            return f"{name.rpartition('/ci_llm/')[2]}:{frame.f_code.co_name}{library}"
        if not library and "site-packages" in name and "/torch/" not in name:
            library = f" by {name.rpartition('site-packages/')[2]}"
        frame = frame.f_back
    return f"thread {threading.current_thread().name}{library}"
