"""A step that is longer than the grace is given up: the last boundary is committed while it still computes.

Between two moves of the optimizer the live weights and moments are the last boundary. So when the process is to be
killed before the step under way can be expected to end, a thread holds the optimizer back, commits the boundary from
the live tensors, and ends the process out of whatever long call its main thread is in. The main process decides; the
others leave the states of their generators for its checkpoint, and go when it has gone.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ci_llm.checkpoints.state_files import read_snapshot, take_snapshot
from ci_llm.cluster.deadline import Walltime, upper
from ci_llm.core import determinism
from ci_llm.core.durable import make_folders, write_bytes
from ci_llm.core.run_status import attempt_folder, read_status
from ci_llm.errors import BadInput, CiLlmError
from ci_llm.run.context import Run
from ci_llm.run.evaluation import kept_steps
from ci_llm.run.resume import contents, describe
from ci_llm.run.shutdown import kill_at, leave

MARGIN_S: Final = 2.0
#: How long the main process waits for the generators of the others, which write them as soon as they hear of the stop.
OTHERS_S: Final = 2.0
_LOOK_S: Final = 0.05
_LISTEN_S: Final = 1.0  # a stop is heard at once; this is for a run that ends without one
_GENERATORS: Final = "generators"
_FILES: Final = (f"{_GENERATORS}.json", f"{_GENERATORS}.safetensors")


def time_to_go_s(now: float, began: float, kill_at: float, steps_s: Sequence[float], saves_s: Sequence[float]) -> float:
    """Seconds until the step under way must be given up; 0 or less: now.

    Args:
        now, began, kill_at: of one clock; when the step began, and when the process is killed.
        steps_s, saves_s: measured durations.
    """
    leave_at = kill_at - upper(saves_s) - MARGIN_S
    return leave_at - now if began + upper(steps_s) <= leave_at else 0.0


class EmergencySave:
    """Watches a run from the moment it is told to stop; a context manager around everything that trains.

    Args:
        attempt: its number, the same on every process.
        walltime: knows when the time of the run is over.
    """

    def __init__(self, run: Run, attempt: int, walltime: Walltime) -> None:
        self._run, self._attempt, self._walltime = run, attempt, walltime
        self._steady = threading.Lock()  # held while weights and state move, and for good once the boat is on its way
        self._moving = False
        self._boundary: tuple[int, dict[str, Any]] = (run.state.step, determinism.capture())
        self._over, self._away = threading.Event(), threading.Event()
        watch = self._watch if run.processes.is_main else self._follow
        self._thread = threading.Thread(target=watch, name="ci_llm lifeboat", daemon=True)

    def __enter__(self) -> EmergencySave:
        self._hook = self._run.optimizer.register_step_pre_hook(self._begin_to_move)
        self._run.pace.at_boundary = self._reach_boundary
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._away.is_set():
            threading.Event().wait()  # whatever happened to this thread meanwhile, the other one ends the process
        if kind is not None and not self._run.processes.is_main and self._main_has_left():
            os._exit(self._run.config.interrupted_exit_code)  # it is gone on purpose, and no failure
        self._over.set()
        self._hook.remove()

    # In the training thread

    def _begin_to_move(self, *_: object) -> None:
        self._steady.acquire()
        self._moving = True

    def _reach_boundary(self) -> None:
        self._boundary = (self._run.state.step, determinism.capture())
        if self._moving:
            self._moving = False
            self._steady.release()

    # In a thread of the main process

    def _watch(self) -> None:
        if not self._heard_stop():
            return
        until = kill_at(self._run, self._walltime.deadline)
        while not self._over.wait(_LOOK_S):
            if self._is_time(until) and self._hold_back():
                if self._is_time(until):
                    self._go()
                self._steady.release()

    def _heard_stop(self) -> bool:
        while not self._over.is_set():
            if self._run.interrupts.wait(_LISTEN_S):
                return True
        return False

    def _is_time(self, until: float) -> bool:
        pace = self._run.pace
        began, now = pace.began, time.monotonic()
        return began is not None and time_to_go_s(now, began, until, pace.steps_s, pace.saves_s) <= 0

    def _hold_back(self) -> bool:
        """Keep the optimizer from moving; False if the run has ended by itself."""
        while not self._steady.acquire(timeout=_LOOK_S):
            if self._over.is_set():
                return False
        return True

    def _go(self) -> None:
        self._away.set()
        run, exit_code = self._run, 1
        try:
            self._save_boundary()
            leave(run, run.interrupts.stop_reason or "")
            exit_code = run.config.interrupted_exit_code
        except Exception as error:  # noqa: BLE001 - the process ends here: nobody else would say it
            run.log.say(f"the last boundary could not be saved: {_in_words(error)}")
        finally:
            os._exit(exit_code)

    def _save_boundary(self) -> None:
        run, (step, _) = self._run, self._boundary
        run.log.say(f"step {step + 1} would not end within the grace: it is given up, and the run ends at step {step}")
        try:
            run.manager.wait_until_finished()
        except Exception as error:  # noqa: BLE001 - whatever became of that one, this one may be saved
            run.log.say(f"the save in flight has failed: {_in_words(error)}")
        if step:
            kept = kept_steps(run)
            run.manager.save_last(step, contents(run, self._all_generators()), info=describe(run), keep=kept)

    def _all_generators(self) -> list[dict[str, Any] | None]:
        """Of every process at the boundary, by index; None where a process has not left them in time."""
        step, own = self._boundary
        until = time.monotonic() + OTHERS_S
        found: list[dict[str, Any] | None] = [own]
        for index in range(1, self._run.processes.count):
            folder = self._folder(index)
            while not _is_complete(folder) and time.monotonic() < until:
                self._over.wait(_LOOK_S)
            left = _read(folder) if _is_complete(folder) else {}
            found.append(left["states"] if left.get("step") == step else None)
        return found

    # In a thread of every other process

    def _follow(self) -> None:
        if self._heard_stop():
            step, states = self._boundary
            _write(self._folder(self._run.processes.index), {"step": step, "states": states})
            while not self._over.wait(_LOOK_S):
                if self._main_has_left():
                    os._exit(self._run.config.interrupted_exit_code)

    def _main_has_left(self) -> bool:
        try:
            status = read_status(self._run.config.run_folder)
        except BadInput:
            return False
        return status.attempt == self._attempt and status.status == "interrupted"

    def _folder(self, index: int) -> Path:
        return attempt_folder(self._run.config.run_folder, self._attempt) / f"process_{index}"


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, (CiLlmError, OSError)) else f"{type(error).__name__}: {error}"


def _write(folder: Path, values: Mapping[str, Any]) -> None:
    make_folders(folder)
    for name, image in take_snapshot({_GENERATORS: values}).files.items():
        write_bytes(folder / name, b"".join(image.parts))


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in _FILES)


def _read(folder: Path) -> Any:
    return read_snapshot({_GENERATORS: "tree"}, {name: (folder / name).read_bytes() for name in _FILES})[_GENERATORS]
