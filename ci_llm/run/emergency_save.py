"""The emergency save: it commits the last step boundary while a step that is longer than the grace is still computed.

Between two updates by the optimizer, the live weights and moments are those of the last boundary. If the process will
probably be killed before the step under way ends, a thread blocks the optimizer, commits the boundary from the live
tensors, and ends the process, whatever its main thread is doing. The main process decides. The other processes leave
the states of their generators for its checkpoint, and exit after it.

In an elastic job, a process that has lost a peer in the middle of a step commits the boundary as well. Every process
holds all agents, so any one that is left can do it: the one that has the lease of the folder, or takes it over from a
dead process. Other jobs do not do this: without the generators of the dead process the checkpoint would not be exact,
and the same number of processes resumes from the last checkpoint bit for bit.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from ci_llm.checkpoints.state_files import from_bytes, to_bytes
from ci_llm.cluster.deadline import Walltime, expected_kill, upper_quantile
from ci_llm.cluster.launch import exit_code_after_stop, has_rounds
from ci_llm.cluster.starter import exit_code_told
from ci_llm.core import determinism
from ci_llm.core.durable import make_folders, write_bytes
from ci_llm.core.run_status import read_status
from ci_llm.errors import BadInput, PeerLost, WriterBusy
from ci_llm.run.attempt import Attempt, described

logger = logging.getLogger(__name__)

MARGIN_S: Final = 2.0
#: How long the main process waits for the generators of the others, which write them as soon as they learn of the stop.
OTHERS_S: Final = 2.0
#: How long a process that has lost a peer waits for the one that has the lease. Its agent kills it after 30 s.
SURVIVORS_S: Final = 20.0
_POLL_S: Final = 0.05
_STOP_POLL_S: Final = 1.0  # a request to stop wakes the thread at once; this is for a run that ends without one


def seconds_left(
    now: float, began: float, killed_at: float, steps_s: Sequence[float], saves_s: Sequence[float]
) -> float:
    """Seconds until the step under way must be given up; 0 or less means now.

    Args:
        now, began, killed_at: times of one clock; when the step began, and when the process is expected to be killed.
        steps_s, saves_s: measured durations.
    """
    latest = killed_at - upper_quantile(saves_s) - MARGIN_S
    return latest - now if began + upper_quantile(steps_s) <= latest else 0.0


@contextmanager
def beside_the_step(device: torch.device, moved: torch.cuda.Event | None) -> Iterator[None]:
    """Let this thread use a GPU without waiting for the queued work of the step that is given up.

    Args:
        moved: the end of the last update by the optimizer, which is waited for; None on a CPU.
    """
    if moved is None:
        yield
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream(device)
        stream.wait_event(moved)
        with torch.cuda.stream(stream):
            yield


class EmergencySave:
    """Watches a run from the moment it is asked to stop; a context manager around everything that trains.

    Args:
        walltime: knows when the time of the run is over.
        step: returns the optimizer steps taken.
        save: commits the state of a run after its last boundary, without a collective. It takes the states of the
            generators of every process by index, None where they are not known.
    """

    def __init__(
        self,
        attempt: Attempt,
        optimizer: torch.optim.Optimizer,
        walltime: Walltime,
        step: Callable[[], int],
        save: Callable[[list[dict[str, Any] | None]], None],
    ) -> None:
        self._attempt, self._interrupts, self._pace = attempt, attempt.interrupts, attempt.pace
        self._config, self._processes = attempt.config, attempt.processes
        self._optimizer, self._walltime, self._step, self._save = optimizer, walltime, step, save
        # The training thread holds it while weights and state move, and from its end on; the saving thread takes it and
        # keeps it.
        self._boundary_lock = threading.RLock()
        self._moving = False
        # One tuple that is replaced: another thread reads the old boundary or the new one, never a mixture.
        self._boundary: tuple[int, dict[str, Any]] = (step(), determinism.capture())
        self._moved = self._mark_device()
        self._over = threading.Event()
        watch = self._watch if self._processes.is_main_process else self._follow
        self._thread = threading.Thread(target=watch, name="ci_llm emergency save", daemon=True)

    def __enter__(self) -> EmergencySave:
        self._hook = self._optimizer.register_step_pre_hook(self._begin_to_move)
        self._pace.at_boundary = self._reach_boundary
        self._thread.start()
        # Between two steps, and on the other processes, a peer may be silent.
        patience = self._processes.patience
        patience.until = lambda: self._killed_at - MARGIN_S
        patience.record = self._interrupted
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        # For ever, if the boundary is being saved: that thread ends the process, whatever happened to this one.
        self._boundary_lock.acquire()
        if kind is not None and not self._processes.is_main_process and (reason := self._why_main_has_left()):
            self._exit(reason)  # the error is that the main process is gone, as it should be
        self._over.set()
        self._hook.remove()
        in_a_step = self._pace.step_started is not None and not self._moving
        if isinstance(error, PeerLost) and in_a_step and has_rounds():
            self._save_without_peers()

    @cached_property
    def _killed_at(self) -> float:
        launch, deadline = self._processes.launch, self._walltime.deadline
        return expected_kill(self._interrupts, self._config.grace_s, launch, deadline)

    def _interrupted(self, reason: str) -> None:
        self._attempt.interrupted(reason)
        self._attempt.last_act()

    # In the training thread

    def _begin_to_move(self, *_: object) -> None:
        # Blocks for ever once the saving thread holds the lock: the weights must stay those of the boundary.
        self._boundary_lock.acquire()
        self._moving = True

    def _mark_device(self) -> torch.cuda.Event | None:
        """An event behind the work that is queued on the GPU so far; None on a CPU."""
        device = self._processes.device
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def _reach_boundary(self) -> None:
        self._moved = self._mark_device()
        self._boundary = (self._step(), determinism.capture())
        if self._moving:
            self._moving = False
            self._boundary_lock.release()

    def _save_without_peers(self) -> None:
        """Commit the boundary from this process alone. It raises nothing, so that the error about the peer is seen."""
        step, own = self._boundary
        generators: list[dict[str, Any] | None] = [None] * self._processes.num_processes
        generators[self._processes.process_index] = own
        until = time.monotonic() + SURVIVORS_S
        self._attempt.finish_save_in_flight()
        logger.info(f"a process of this run is gone: step {step} is saved without it")
        while step > max(self._attempt.manager.all_steps(), default=0):
            try:
                with beside_the_step(self._processes.device, self._moved):
                    self._save(generators)
                break
            except WriterBusy as error:  # another process of the run has the lease: it saves the step now, or is dead
                if time.monotonic() > until:
                    logger.warning(f"step {step} is not saved: {error}")
                    break
                time.sleep(_POLL_S)
            except Exception as error:  # noqa: BLE001 - the run resumes from an older step
                logger.warning(f"step {step} could not be saved: {described(error)}")
                break

    # In a thread of the main process

    def _watch(self) -> None:
        if not self._wait_for_stop():
            return
        killed_at = self._killed_at
        while not self._over.wait(_POLL_S):
            if self._is_due(killed_at) and self._hold_back():
                if self._is_due(killed_at):  # else the step ended while this thread waited for the lock
                    self._save_and_exit()
                self._boundary_lock.release()

    def _wait_for_stop(self) -> bool:
        while not self._over.is_set():
            if self._interrupts.wait(_STOP_POLL_S):
                return True
        return False

    def _is_due(self, killed_at: float) -> bool:
        began, now = self._pace.step_started, time.monotonic()
        return began is not None and seconds_left(now, began, killed_at, self._pace.steps_s, self._pace.saves_s) <= 0

    def _hold_back(self) -> bool:
        """Block the optimizer; False if the run has ended by itself."""
        while not self._boundary_lock.acquire(timeout=_POLL_S):
            if self._over.is_set():
                return False
        return True

    def _save_and_exit(self) -> None:
        exit_code = 1
        try:
            self._save_boundary()
            reason = self._interrupts.stop_reason or ""
            self._attempt.interrupted(reason)
            exit_code = exit_code_after_stop(reason, self._config.interrupted_exit_code)
            try:
                self._attempt.mirror.flush_before_kill()  # only the request to requeue comes after it
            finally:
                self._attempt.last_act()
        except Exception as error:  # noqa: BLE001 - the process ends here: no caller could report it
            logger.error(f"the last boundary could not be saved: {described(error)}")
        finally:
            os._exit(exit_code_told(exit_code))  # no exit handlers: the main thread may sit in a call without end

    def _save_boundary(self) -> None:
        step, _ = self._boundary
        logger.info(f"step {step + 1} would not end within the grace: it is given up, and the run ends at step {step}")
        self._attempt.finish_save_in_flight()
        if step:
            with beside_the_step(self._processes.device, self._moved):
                self._save(self._all_generators())

    def _all_generators(self) -> list[dict[str, Any] | None]:
        """The generators of every process at the boundary, by index; None if a process has not left them in time."""
        step, own = self._boundary
        until = time.monotonic() + OTHERS_S
        found: list[dict[str, Any] | None] = [own]
        for index in range(1, self._processes.num_processes):
            file = self._generators_of(index)
            while not file.exists() and time.monotonic() < until:
                self._over.wait(_POLL_S)
            left = from_bytes(file.read_bytes()) if file.exists() else {}
            found.append(left["states"] if left.get("step") == step else None)
        return found

    # In a thread of every other process

    def _follow(self) -> None:
        if self._wait_for_stop():
            step, states = self._boundary
            make_folders(self._attempt.folder)
            write_bytes(self._generators_of(self._processes.process_index), to_bytes({"step": step, "states": states}))
            # The main process may still reach the next ballot: only its status says that it has given the step up.
            while not self._over.wait(_POLL_S):
                if reason := self._why_main_has_left():
                    self._exit(reason)

    def _why_main_has_left(self) -> str | None:
        """The reason for which the main process has saved and left; None if it is still there."""
        try:
            status = read_status(self._config.run_folder)
        except BadInput:
            return None
        left = status.attempt == self._attempt.number and status.status == "interrupted"
        return status.reason if left else None

    def _exit(self, reason: str) -> NoReturn:
        os._exit(exit_code_told(exit_code_after_stop(reason, self._config.interrupted_exit_code)))

    def _generators_of(self, index: int) -> Path:
        return self._attempt.folder / f"process_{index}.generators"
