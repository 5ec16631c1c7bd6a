"""A sweep from the command line: every segment is trained by this process, which loads base and rows once."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.cluster.elastic import exit_code_after_stop
from ci_llm.cluster.launch import Launch
from ci_llm.config.sweep import SweepReading
from ci_llm.core.attempts import Failure, record_attempt, write_failure
from ci_llm.core.run_status import RunStatus, keep_status
from ci_llm.distributed.processes import Processes
from ci_llm.errors import NonFinite
from ci_llm.interrupts import Interrupts
from ci_llm.run.beginning import place_of_attempt
from ci_llm.run.callbacks import Callbacks
from ci_llm.run.job import meet, run_among
from ci_llm.run.loading import Loaded, choice_by_test_rows, load
from ci_llm.run.report import write_page
from ci_llm.run.setup import steps_of
from ci_llm.run.shutdown import command_line, end_at_once, reason_of
from ci_llm.sweep.best import write_best
from ci_llm.sweep.cost import described, trials_per_pass
from ci_llm.sweep.curves import Curves
from ci_llm.sweep.record import read_record
from ci_llm.sweep.sweep import Pack, Sweep, known_record
from ci_llm.sweep.trials import HalvingPlan


class SweepRunner:
    """One call of a sweep.

    Args:
        say: takes lines and tables for people, on the main process.
    """

    def __init__(
        self, reading: SweepReading, interrupts: Interrupts, launch: Launch, say: Callable[[Any], None]
    ) -> None:
        self._reading, self._interrupts, self._launch = reading, interrupts, launch
        self._say: Callable[[Any], None] = say if launch.is_main_process else lambda _: None
        self._folder = reading.config.run_folder
        self._last_act: Callable[[], str | None] = lambda: None  # of the segment; see `Attempt.interrupted`

    def plan(self) -> HalvingPlan:
        """What would be trained."""
        processes = meet(self._reading.config, self._launch, self._interrupts)
        try:
            self._settle_precision(processes)
            steps, per_pass = self._plan(load(self._reading.config, processes), processes)
            keys = self._reading.keys
            warmup = self._reading.warmup_steps(steps)
            return HalvingPlan.of(steps, keys.rungs, keys.trials or 1, per_pass, keys.keep, keys.metric, warmup)
        finally:
            processes.shutdown()

    def run(self) -> tuple[Sweep, str | None]:
        """Train until the sweep is complete or is asked to stop.

        Returns:
            the sweep, and the reason for which it stopped; None: it is complete.

        Raises:
            CiLlmError: the reason is on record in the folder of the sweep.
        """
        processes = meet(self._reading.config, self._launch, self._interrupts)
        code = 1
        try:
            sweep, stop = self._lead(processes)
            code = exit_code_after_stop(stop, self._reading.config.interrupted_exit_code) if stop else 0
            return sweep, stop
        finally:
            if not processes.shutdown():
                end_at_once(code, sys.exc_info()[1])

    def _lead(self, processes: Processes) -> tuple[Sweep, str | None]:
        """Hold the folder, keep its status, and train."""
        self._settle_precision(processes)
        loaded = load(self._reading.config, processes)
        sweep = Sweep.of(self._reading, processes.on_main, partial(self._plan, loaded, processes))
        processes.require_same_folder(self._folder)
        store = CheckpointStore(self._folder)
        try:
            number = processes.on_main(lambda: _begin(store, self._folder, _steps_done(sweep)))
            decided = sweep.standings.plan
            # Once more, because an attempt before this one may have written until it lost the folder.
            sweep = Sweep.of(self._reading, processes.on_main, lambda: (decided.steps[-1], decided.per_pass))
            sweep.staging, sweep.tracks_trials = lambda: store.staging, True
            status = RunStatus(
                self._folder,
                number,
                is_main_process=processes.is_main_process,
                still_held=store.holds_lease,
                staging=store.staging if processes.is_main_process else None,
            )
            status.update(total_steps=sum(steps for _, steps in sweep.standings.plan.segment_steps))
            status.start(_steps_done(sweep))
            try:
                stop = self._train(sweep, processes, loaded, status)
                sweep.require_winner()
            except KeyboardInterrupt:
                status.finish("interrupted", "signal:SIGINT", command_line(self._launch))
                raise
            except BaseException as error:
                self._fail(error, number, processes.process_index, status)
                raise
            status.finish("interrupted" if stop else "completed", stop, command_line(self._launch) if stop else None)
            write_page(self._reading.config, processes, self._interrupts, store)
            return sweep, stop
        finally:
            store.close()
            # Now that the status is written: SLURM ends what is left of the job. The log of the segment is closed.
            if line := self._last_act():
                self._say(line)

    def _settle_precision(self, processes: Processes) -> None:
        """Choose a precision where the configuration says auto; a sweep keeps what it began with. A collective."""
        record = processes.on_main(lambda: read_record(self._folder))
        config, line = processes.settle_precision(self._reading.config, None if record is None else record.config)
        self._reading = replace(self._reading, config=config)
        if line:
            self._say(f"precision {line}")

    def _plan(self, loaded: Loaded, processes: Processes) -> tuple[int, int]:
        """The steps of a whole run, and the trials of a pass. A collective."""
        config, keys = self._reading.config, self._reading.keys
        steps = steps_of(config, [len(loaded.rows[0])], config.rows_per_step(processes.num_processes))
        fit = partial(trials_per_pass, config, self._reading.spaces, keys.agents_per_pass, keys.trials or 1)
        return steps, processes.on_main(lambda: fit(loaded, processes))

    def _train(self, sweep: Sweep, processes: Processes, loaded: Loaded, status: RunStatus) -> str | None:
        """Train pack after pack; returns the reason of a stop."""
        for line in described(sweep.standings.plan, self._reading):
            self._say(f"sweep     {line}")
        if note := choice_by_test_rows("the best trial", loaded.eval_rows):
            self._say(f"sweep     {note}")
        sources: Sequence[str] = self._reading.lines
        curves = Curves(sweep, processes.accelerator)
        processes.on_main(curves.send)  # an earlier call may have been killed before
        while (pack := sweep.ask()) is not None:
            self._say(_head(pack, sweep))
            done, first = _steps_done(sweep), sweep.standings.plan.first_step(pack.rung)
            follow = _Follow(status, done - first)
            processes.on_main(partial(curves.begin, pack.trials[0]))
            try:
                told = Callbacks([follow])
                result = run_among(
                    processes,
                    pack.config,
                    self._interrupts,
                    sources=sources,
                    callbacks=told,
                    loaded=loaded,
                    end_by=self._keep_last_act,
                )
            except NonFinite as end:
                self._say(f"sweep     segment {pack.number} ends: {end.what}")
                scores = [math.nan] * len(pack.trials)
            else:
                if result.status == "interrupted":
                    return result.reason
                scores = pack.scores(result.metrics)
            sources = ()
            sweep.tell(pack, scores)
            status.update(step=_steps_done(sweep))
            processes.on_main(curves.send)
        processes.on_main(partial(write_best, sweep))
        return None

    def _keep_last_act(self, act: Callable[[], str | None]) -> None:
        self._last_act = act

    def _fail(self, error: BaseException, number: int, index: int, status: RunStatus) -> None:
        """Record why this process fails, for status and supervisor; no collective."""
        reason = reason_of(error)
        try:
            write_failure(self._folder, number, index, Failure.of(error, reason, index, status.current.step))
            status.finish("failed", reason, command_line(self._launch))
        except OSError as refusal:
            self._say(f"the failure could not be written down: {refusal}")


class _Follow:
    """A callback that keeps the step of the sweep's status current while a segment trains."""

    def __init__(self, status: RunStatus, offset: int) -> None:
        self._status, self._offset = status, offset

    def on_log(self, args: object, state: Any, control: object, **values: Mapping[str, Any]) -> None:
        self._status.update(step=self._offset + state.global_step)


def _begin(store: CheckpointStore, folder: Path, step: int) -> int:
    """Make the folder this attempt's; returns its number."""
    number = store.acquire_lease()
    keep_status(folder)
    record_attempt(folder, number, step, place_of_attempt())
    return number


def _steps_done(sweep: Sweep) -> int:
    plan = sweep.standings.plan
    over = [segment.rung for segment in sweep.standings.segments if segment.is_over]
    return sum(plan.steps[rung] - plan.first_step(rung) for rung in over)


def _head(pack: Pack, sweep: Sweep) -> str:
    plan = sweep.standings.plan
    ids = ", ".join(str(trial.id) for trial in pack.trials)
    span = f"steps {plan.first_step(pack.rung)} to {plan.steps[pack.rung]} of {plan.steps[-1]}"
    return f"sweep     segment {pack.number}, rung {pack.rung + 1} of {len(plan.steps)}, {span}: trials {ids}"


def known_sweep(reading: SweepReading) -> Sweep | None:
    """The sweep in the folder, if there is one: without processes, base and rows.

    Raises:
        BadInput: the folder holds another sweep, or a run.
    """
    if known_record(reading) is None:
        return None
    return Sweep.of(reading, lambda work: work(), lambda: (0, 0))
