"""The runner of a sweep from the command line: this process trains every segment, and then makes `best/`.

One pass takes as many trials as fit into memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ci_llm.base.load import auto_class, load_architecture
from ci_llm.checkpoints.layout import FINAL
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import Opened, open_folder
from ci_llm.cluster.launch import Launch, exit_code_after_stop
from ci_llm.config import Config, as_typed
from ci_llm.config.auto import AUTO, stands_for
from ci_llm.config.own_keys import NAME
from ci_llm.config.sweep import Choices, Space, SweepReading
from ci_llm.core.durable import new_folder, remove_tree, write_new
from ci_llm.core.evaluation_file import read_evaluation
from ci_llm.core.quantities import count, size
from ci_llm.core.run_folder import BEST
from ci_llm.core.run_status import RunStatus
from ci_llm.crowd.card import CardFacts, adapter_card, public_name
from ci_llm.crowd.given_path import META_FILE
from ci_llm.crowd.pretrained import class_names
from ci_llm.data.agent_rows import sampled
from ci_llm.distributed.processes import Processes
from ci_llm.errors import BadInput, CheckpointError, ConfigError, NonFinite, StoppedBeforeMeeting
from ci_llm.interrupts import Interrupts
from ci_llm.run.attempt import Attempt
from ci_llm.run.job import joined, opened, run_attempt, stopped_before_meeting
from ci_llm.run.result import write_page
from ci_llm.run.start.cost_model import USABLE, Untraceable, lengths_of, trace_longest
from ci_llm.run.start.loading import Loaded, choice_by_test_rows, load, steps_of
from ci_llm.run.step.callbacks import Callbacks
from ci_llm.sweep.successive_halving import HalvingPlan, Trial, describe_boundary
from ci_llm.sweep.sweep import Sweep, known_record, plan_of, read_record

#: Trials of a pack where nothing can be estimated.
CAUTIOUS: Final = 4


def trials_per_pass(
    config: Config, spaces: Mapping[str, Space], wanted: int | str, trials: int, loaded: Loaded, processes: Processes
) -> int:
    """The number of trials of one pass: as configured, or as many as fit.

    Args:
        wanted: `agents_per_pass`.
        trials: the number of trials in the sweep.

    Raises:
        ConfigError: the configured number does not fit.
    """
    fit = _that_fit(config, spaces, loaded, processes)
    if wanted == "auto":
        return max(1, min(trials, CAUTIOUS if fit is None else fit))
    if fit is not None and min(int(wanted), trials) > max(fit, 1):
        free = processes.free_memory()
        what = f"{min(int(wanted), trials)} trials of one pass do not fit into memory: {size(free)} are free"
        raise ConfigError(what, where=f"agents_per_pass: {wanted}", hint=f"agents_per_pass={max(fit, 1)}, or auto")
    return int(wanted)


def _that_fit(config: Config, spaces: Mapping[str, Space], loaded: Loaded, processes: Processes) -> int | None:
    """The number of the largest trials that fit beside the base in memory, as the dry run estimates; None: unknown."""
    lengths = lengths_of(config, sampled(loaded.rows))
    shape = load_architecture(config.model_name)
    alone = config.model_copy(update={"agents": (dict(_largest(config, spaces)),), "num_agents": 1})
    try:
        found = trace_longest(alone, shape, processes.device, config.batch_size, lengths)
    except Untraceable:
        return None
    # Every agent has activations of its own; only the base is shared.
    return int(USABLE * processes.free_memory() // (found.agents_bytes + found.activation_bytes))


def _largest(config: Config, spaces: Mapping[str, Space]) -> Iterator[tuple[str, Any]]:
    """The keys that decide an adapter's size, each with the value that makes the largest adapter."""
    known = stands_for(config)
    for key, kind in (("lora_rank", int), ("lora_dropout", float)):
        if space := spaces.get(key):
            values = space.values if isinstance(space, Choices) else [kind(space.high)]
            yield key, max(known[key][0] if value == AUTO else value for value in values)


def as_one_run(reading: SweepReading, plan: HalvingPlan) -> Config:
    """A run that costs what the sweep costs: a full pack of the largest trials, for the steps of all segments."""
    steps = sum(steps * trials / plan.per_pass for trials, steps in plan.segment_steps)
    largest = dict(_largest(reading.config, reading.spaces))
    pack = tuple({NAME: f"trial{k}", "seed": k, **largest} for k in range(plan.per_pass))
    changes = {"agents": pack, "num_agents": plan.per_pass, "max_train_steps": max(1, round(steps))}
    return reading.config.model_copy(update=changes)


def described(plan: HalvingPlan, reading: SweepReading) -> Iterator[str]:
    """Lines for people: rungs, segments and steps."""
    sampler, wanted = reading.keys.sampler, reading.trials_wanted
    rungs = ", ".join(f"{plan.places(rung)} to step {end}" for rung, end in enumerate(plan.steps))
    yield f"{plan.trials} trials by sampler {sampler}, compared by {plan.metric}: {rungs}"
    if wanted is not None:
        yield f"trials={wanted} asks for more trials than the spaces have settings: they have only {plan.trials}"
    parts = plan.segment_steps
    runs = sum(trials * steps for trials, steps in parts) / plan.steps[-1]
    steps = sum(steps for _, steps in parts)
    yield (
        f"{count(len(parts), 'segment')} of at most {count(plan.per_pass, 'trial')}, {count(steps, 'step')}:"
        f" the work of {runs:.3g} full runs instead of {plan.trials}"
    )


_CONFIG: Final = "adapter_config.json"


def write_best(sweep: Sweep) -> Path | None:
    """Make `best/` of the best trial, unless it exists; None if every trial has failed.

    It is a plain PEFT folder with its card, copied bit by bit from the segment that trained the trial.

    Raises:
        DamagedCheckpoint: the final checkpoint of the trial's last segment is not as it was written.
        CheckpointError: the disk refuses the folder.
    """
    target, trial = sweep.folder / BEST, sweep.best
    if trial is None or not sweep.has_winner:
        return None
    if (target / _CONFIG).is_file():
        return target
    opened = open_folder(sweep.segment_folder(trial.segment or 0) / FINAL)
    prefix = f"agent{trial.place}/"
    files = {name.removeprefix(prefix): data for name, data in opened.files.items() if name.startswith(prefix)}
    files["README.md"] = _card(sweep, trial, opened, json.loads(files[_CONFIG])).encode()
    try:
        for leftover in sweep.folder.glob(f".{BEST}.*"):
            remove_tree(leftover)
        with new_folder(target) as draft:
            for name, data in files.items():
                write_new(draft / name, [data])
    except OSError as error:
        raise CheckpointError(f"{BEST} cannot be written: {error.strerror}", where=str(target)) from error
    return target


def _card(sweep: Sweep, trial: Trial, opened: Opened, config: Mapping[str, object]) -> str:
    standings, shared = sweep.standings, sweep.config
    head = json.loads(opened.files[META_FILE]).get("head", {})
    own = shared.model_copy(update={"agents": (trial.settings,), "num_agents": 1}).of_agent(0)
    settings = ", ".join(f"`{key}` {as_typed(getattr(own, key))}" for key in trial.settings)
    what = (
        f"This LoRA adapter is the best of {len(standings.trials)} trials of a sweep, by {standings.plan.metric}"
        f" {trial.score:.4f} on the rows that the trials were compared on: {settings}."
    )
    facts = CardFacts(
        base=str(config["base_model_name_or_path"]),
        ranks=[int(str(config["r"]))],
        trained=f" for {opened.manifest.step} optimizer steps on `{', '.join(map(public_name, shared.dataset_names))}`",
        opened_with=auto_class(load_architecture(shared.model_name)).__name__,
        num_labels=head.get("num_labels", 0),
        classes=class_names(head),
    )
    return adapter_card(facts, f"The best of {len(standings.trials)} trials", what)


class SweepRunner:
    """One call of a sweep.

    Args:
        say: takes lines for people, on the main process.
    """

    def __init__(
        self, reading: SweepReading, interrupts: Interrupts, launch: Launch, say: Callable[[str], None]
    ) -> None:
        self._reading, self._interrupts, self._launch = reading, interrupts, launch
        self._say: Callable[[str], None] = say if launch.is_main_process else lambda _: None
        self._folder = reading.config.run_folder
        self._segment: Attempt | None = None  # at the newest run

    def plan(self) -> HalvingPlan:
        """The plan of the sweep, for a dry run."""
        with joined(self._reading.config, self._launch, self._interrupts, lambda: 1) as processes:
            steps, per_pass = self._plan(self._load(processes), processes)
            return plan_of(self._reading, steps, per_pass)

    def run(self) -> tuple[Sweep | None, int]:
        """Train until the sweep is complete or is asked to stop.

        Returns:
            the sweep, None if it was asked to stop before its processes had met; and the exit code.

        Raises:
            CiLlmError: the reason is on record in the folder of the sweep.
        """
        config, code = self._reading.config, 1
        try:
            with joined(config, self._launch, self._interrupts, lambda: code) as processes:
                sweep, reason = self._lead(processes)
                code = exit_code_after_stop(reason, config.interrupted_exit_code) if reason else 0
                return sweep, code
        except StoppedBeforeMeeting as stop:
            known = known_sweep(self._reading)
            done = 0 if known is None else _steps_done(known)
            reason, _ = stopped_before_meeting(config, self._launch, self._interrupts, stop, done)
            return None, exit_code_after_stop(reason, config.interrupted_exit_code)

    def _lead(self, processes: Processes) -> tuple[Sweep, str | None]:
        """Lease the folder, keep its status, and train."""
        loaded = self._load(processes)
        sweep = Sweep.of(self._reading, processes.on_main, partial(self._plan, loaded, processes))
        manager = CheckpointManager(self._folder, processes=processes, interrupts=self._interrupts)
        attempt = Attempt(self._reading.config, self._launch, manager, self._interrupts)
        try:
            attempt.begin(processes, _steps_done(sweep))
            decided = sweep.standings.plan
            # Once more, because an attempt before this one may have written until it lost the folder.
            sweep = Sweep.of(self._reading, processes.on_main, lambda: (decided.steps[-1], decided.per_pass))
            sweep.staging = lambda: manager.store.staging
            attempt.status.update(total_steps=sum(steps for _, steps in sweep.standings.plan.segment_steps))
            attempt.status.start(_steps_done(sweep))
            with attempt.recorded(lambda: attempt.status.current.step):
                stop = self._train(sweep, processes, loaded, attempt)
                sweep.require_winner()
            if stop is None:
                attempt.status.finish("completed")
            else:
                attempt.interrupted(stop)
            write_page(attempt)
            return sweep, stop
        finally:
            try:
                manager.close()
            finally:
                # Now that the status is written: SLURM ends what is left of the job. The log of the segment is closed.
                if self._segment is not None and (line := self._segment.last_act()):
                    self._say(line)

    def _load(self, processes: Processes) -> Loaded:
        """Load base and rows, and settle keys that say auto; a sweep keeps the values it began with. A collective."""
        record = processes.on_main(lambda: read_record(self._folder))
        before = None if record is None else record.config
        config, line = processes.choose_precision(self._reading.config.settled_as(before))
        if line:
            self._say(f"precision {line}")
        loaded = load(config, processes, before.max_seq_length if before else None)
        self._reading = replace(self._reading, config=config.model_copy(update=loaded.settled))
        return loaded

    def _plan(self, loaded: Loaded, processes: Processes) -> tuple[int, int]:
        """The steps of a whole run, and the trials of a pass. A collective."""
        config, keys = self._reading.config, self._reading.keys
        steps = steps_of(config, [len(loaded.rows[0])], config.rows_per_step(processes.num_processes))
        fit = partial(trials_per_pass, config, self._reading.spaces, keys.agents_per_pass, keys.trials or 1)
        return steps, processes.on_main(lambda: fit(loaded, processes))

    def _train(self, sweep: Sweep, processes: Processes, loaded: Loaded, attempt: Attempt) -> str | None:
        """Train pack after pack; returns the reason of a stop."""
        for line in described(sweep.standings.plan, self._reading):
            self._say(f"sweep     {line}")
        if note := choice_by_test_rows("the best trial", loaded.eval_rows):
            self._say(f"sweep     {note}")
        sources: Sequence[str] = self._reading.lines
        while (pack := sweep.ask()) is not None:
            if pack.rung and all(segment.rung < pack.rung for segment in sweep.standings.segments if segment.is_over):
                self._say_boundary(sweep, pack.rung - 1)
            done, first = _steps_done(sweep), sweep.standings.plan.first_step(pack.rung)
            ends = sweep.standings.plan.steps
            ids = ", ".join(str(trial.id) for trial in pack.trials)
            span = f"rung {pack.rung + 1} of {len(ends)}, steps {first} to {ends[pack.rung]} of {ends[-1]}"
            self._say(f"sweep     segment {pack.number}, {span}: trials {ids}")
            follow = Callbacks([_Follow(attempt.status, done - first)])
            try:
                with opened(processes, pack.config, self._interrupts, sources=sources, callbacks=follow) as segment:
                    self._segment = segment
                    result = run_attempt(segment, processes, loaded=loaded)
            except NonFinite as end:
                self._say(f"sweep     segment {pack.number} ends: {end.what}")
                scores = [math.nan] * len(pack.trials)
            else:
                if result.status == "interrupted":
                    return result.reason
                scores = pack.scores(result.metrics)
            sources = ()
            sweep.tell(pack, scores)
            attempt.status.update(step=_steps_done(sweep))
        self._say_boundary(sweep, len(sweep.standings.plan.steps) - 1)
        processes.on_main(partial(write_best, sweep))
        return None

    def _say_boundary(self, sweep: Sweep, rung: int) -> None:
        """Say whether the rows of a rung tell the trials at its boundary apart."""
        if not self._launch.is_main_process or (pair := sweep.standings.boundary(rung)) is None:
            return
        try:
            rows = [_of_rows(sweep, trial) for trial in pair]
            line = describe_boundary(rung, *pair, rows, sweep.standings.plan.metric)
        except (BadInput, ValueError, KeyError) as error:  # a damaged record
            line = f"rung {rung + 1}: whether its rows tell trials apart is not known ({error!r})"
        self._say(f"sweep     {line}")


def _of_rows(sweep: Sweep, trial: Trial) -> Sequence[float]:
    """The score of every row for a trial, in the segment that trained it last."""
    found = read_evaluation(sweep.segment_folder(trial.segment or 0))
    rows = (found and found.of_rows) or {}
    metric = sweep.standings.plan.metric
    return rows["nll" if metric == "mse" else metric][trial.place]


class _Follow:
    """A callback that keeps the step of the sweep's status current while a segment trains."""

    def __init__(self, status: RunStatus, offset: int) -> None:
        self._status, self._offset = status, offset

    def on_log(self, args: object, state: Any, control: object, **values: Mapping[str, Any]) -> None:
        self._status.update(step=self._offset + state.global_step)


def _steps_done(sweep: Sweep) -> int:
    plan = sweep.standings.plan
    over = [segment.rung for segment in sweep.standings.segments if segment.is_over]
    return sum(plan.steps[rung] - plan.first_step(rung) for rung in over)


def known_sweep(reading: SweepReading) -> Sweep | None:
    """The sweep in the folder, if there is one: without processes, base and rows.

    Raises:
        BadInput: the folder holds another sweep, or a run.
    """
    if known_record(reading) is None:
        return None
    return Sweep.of(reading, lambda work: work(), lambda: (0, 0))
