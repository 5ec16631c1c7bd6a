"""A sweep as ask and tell: it says which trials train next, takes their scores, and keeps its state in sweep.json.

    sweep = Sweep("configs.yaml", learning_rate="log(5e-4,1.6e-2)", trials=16, output_dir="rates")
    while pack := sweep.ask():
        result = ci_llm.train(pack.config)
        sweep.tell(pack, pack.scores(result.metrics))

A pack is an ordinary run: its training may have callbacks, and may be interrupted and resumed. sweep.json is written
durably before a segment begins and after its trials were scored, so that the call after a kill at any moment finds the
same trials. It is plain JSON, for people and for programs; NaN scores are null.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from ci_llm.cluster.launch import accelerate_settings
from ci_llm.config import Config, parse_config
from ci_llm.config.own_keys import AUTO, NAME, SHAPE_KEYS, from_plain
from ci_llm.config.sweep import Choices, Space, SweepKeys, SweepReading, read_sweep_call
from ci_llm.core.durable import make_folders, write_bytes
from ci_llm.core.evaluation_file import Evaluation
from ci_llm.core.run_folder import BEGINNING, SEGMENTS, SWEEP, Recovery, parsed, read_recovery, write_recovery
from ci_llm.core.typed_json import as_type
from ci_llm.errors import AllTrialsFailed, BadInput, CheckpointError
from ci_llm.sweep.samplers import new_settings
from ci_llm.sweep.successive_halving import HalvingPlan, Segment, Standings, Trial

FORMAT_VERSION: Final = 1


@dataclass(frozen=True)
class Record:
    """The contents of sweep.json.

    Attributes:
        spaces: the spaces as plain values.
        keys: the keys of the sweep, with values in place of auto.
        config: the settings that all trials share.
        is_complete: true if nothing is left to train.
    """

    spaces: Mapping[str, Any]
    keys: SweepKeys
    config: Config
    standings: Standings
    is_complete: bool = False

    def to_json(self) -> bytes:
        """The text of the file."""
        best = self.standings.best
        value = {
            "format_version": FORMAT_VERSION,
            "best": None if best is None or best.failed else best.id,
            "complete": self.is_complete,
            "trials": [_trial(self.standings, trial) for trial in self.standings.trials],
            "segments": [asdict(segment) for segment in self.standings.segments],
            "plan": asdict(self.standings.plan),
            "spaces": self.spaces,
            "keys": self.keys.model_dump(),
            "config": self.config.dump(),
        }
        return (json.dumps(value, indent=2, allow_nan=False) + "\n").encode()


def plain_spaces(spaces: Mapping[str, Space]) -> dict[str, Any]:
    """The spaces as plain values."""
    return {
        key: json.loads(json.dumps(space.values)) if isinstance(space, Choices) else asdict(space)
        for key, space in spaces.items()
    }


def write_record(folder: Path, record: Record, staging: Path | None = None) -> None:
    """Replace sweep.json, durably.

    Raises:
        CheckpointError: the disk refuses the file.
    """
    try:
        write_bytes(folder / SWEEP, record.to_json(), staging=staging)
    except OSError as error:
        what = f"{SWEEP} cannot be written: {error.strerror}"
        raise CheckpointError(what, where=str(folder), hint="make space there; the same command resumes") from error


def read_record(folder: Path) -> Record | None:
    """The state of the sweep in a folder; None if there is none.

    Raises:
        CheckpointError: the file is not of this program.
    """
    try:
        return parsed(folder / SWEEP, _parsed_record, "this is not the record of a sweep", error=CheckpointError)
    except FileNotFoundError:
        return None


def _parsed_record(path: Path) -> Record:
    value = json.loads(path.read_bytes())
    if value["format_version"] != FORMAT_VERSION:
        raise ValueError(f"format version {value['format_version']}")
    plan = as_type(HalvingPlan, value["plan"])
    segments = as_type(tuple[Segment, ...], value["segments"])
    standings = Standings(plan, tuple(map(_read_trial, value["trials"])), segments)
    keys, config = SweepKeys.model_validate(value["keys"]), parse_config(value["config"], str(path))
    return Record(value["spaces"], keys, config, standings, value["complete"])


def _trial(standings: Standings, trial: Trial) -> dict[str, Any]:
    scores = [None if math.isnan(score) else score for score in trial.scores]
    return {
        "id": trial.id,
        "settings": dict(trial.settings),
        "rung": len(scores),
        "score": scores[-1] if scores else None,
        "status": standings.status(trial),
        "scores": scores,
        "segment": trial.segment,
        "agent": trial.place,
    }


def _read_trial(value: Mapping[str, Any]) -> Trial:
    settings = from_plain(value["settings"])
    scores = tuple(math.nan if score is None else float(score) for score in value["scores"])
    return Trial(value["id"], settings, scores, value["segment"], value["agent"])


def require_same_sweep(record: Record, reading: SweepReading, folder: Path) -> None:
    """Refuse to resume a sweep under other spaces, keys or settings.

    Raises:
        BadInput: names everything that differs.
    """
    odd = list[str]()
    spaces = plain_spaces(reading.spaces)
    for key in dict.fromkeys([*record.spaces, *spaces]):
        if record.spaces.get(key) != spaces.get(key):
            odd.append(f"the space of {key} was {_space_of(record.spaces, key)}, is {_space_of(spaces, key)}")
    for key, value in reading.keys.model_dump().items():
        before = getattr(record.keys, key)
        if value != before and key != "agents_per_pass":
            odd.append(f"{key} was {before}, is {value}")
    changes = record.config.diff(reading.config.settled_as(record.config))
    # The record has values where the call may say auto.
    changes = [each for each in changes if each.kind != "free" and each.new != AUTO]
    odd += [f"{each.key} was {each.old}, is {each.new}" for each in changes]
    if odd:
        raise BadInput(
            f"the sweep in this folder is another one: {'; '.join(odd)}",
            where=str(folder),
            hint="experiment_name=NAME begins a new sweep beside it; the old values continue this one",
        )


def _space_of(spaces: Mapping[str, Any], key: str) -> str:
    return json.dumps(spaces[key]) if key in spaces else "none"


#: The settings that decide the shape of an adapter: neighbours of the same shape share their matrix products.
_SHAPE: Final = (*SHAPE_KEYS, "lora_dropout")


@dataclass(frozen=True)
class Pack:
    """A segment as a caller trains it: its trials as they are before it, and the configuration of their run.

    Attributes:
        number: the number of the segment, 1, 2, ...
        rung: the rung at whose end the trials are scored, counted from 0.
        trials: trial k is agent k of the run.
        config: the configuration of the run that trains them, to the end of the rung.
    """

    number: int
    rung: int
    trials: tuple[Trial, ...]
    config: Config
    metric: str

    def scores(self, evaluation: Mapping[str, Any]) -> list[float]:
        """The score of every trial, from the `metrics` of a `Result`; NaN for a trial that was dropped from the run.

        Raises:
            ValueError: these are no metrics of an evaluation. KeyError: they lack the metric of the sweep.
        """
        found = Evaluation.from_dict(evaluation)
        return [math.nan if k in found.dropped else score for k, score in enumerate(found.figures[self.metric].agents)]


class Sweep:
    """The trials of one configuration.

    Args:
        config: a YAML file, a mapping of keys, or a Config; None: the defaults of docs/keys.md and no file.
        keys: keys of a run and of a sweep over `config`, as on the command line of `ci-llm sweep`. A key has a space
            where its value is a list, "log(low,high)", "uniform(low,high)" or {"low": , "high": , "log": True}.

    Raises:
        BadInput: everything that is wrong with the keys; or the folder holds another sweep.

    Examples:
        >>> sweep = ci_llm.Sweep(learning_rate=[1e-3, 2e-3, 4e-3, 8e-3], output_dir=folder / "sweep", max_train_steps=4)
        >>> pack = sweep.ask()
        >>> len(pack.trials), pack.config.num_agents
        (4, 4)
        >>> sweep.tell(pack, [0.9, 0.7, 0.4, 0.8])  # of each trial, as `metric` has it: here nats per token
    """

    def __init__(self, config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None, **keys: Any) -> None:
        reading = read_sweep_call(config, keys, accelerate_settings(os.environ))
        self._open(reading, lambda work: work(), lambda: _default_plan(reading))

    @classmethod
    def of(
        cls, reading: SweepReading, on_main: Callable[[Callable[[], Any]], Any], plan: Callable[[], tuple[int, int]]
    ) -> Sweep:
        """The sweep of a command line, on all its processes. A collective.

        Args:
            on_main: runs its argument on the main process and gives every process the result.
            plan: returns the steps of a whole run and the trials per pass; called only for a new sweep.
        """
        sweep = cls.__new__(cls)
        sweep._open(reading, on_main, plan)
        return sweep

    def _open(
        self, reading: SweepReading, on_main: Callable[[Callable[[], Any]], Any], plan: Callable[[], tuple[int, int]]
    ) -> None:
        self._reading, self._on_main = reading, on_main
        #: Where sweep.json is begun; a command gives the folder of its lease, which it may lose.
        self.staging: Callable[[], Path | None] = lambda: None
        self.folder = reading.config.run_folder
        record: Record | None = on_main(lambda: known_record(reading))
        if record is None:
            decided = plan_of(reading, *plan())
            record = Record(plain_spaces(reading.spaces), reading.keys, reading.config, Standings(decided))
        elif isinstance(wanted := reading.keys.agents_per_pass, int):
            standings = record.standings
            per_pass = min(wanted, standings.plan.trials)
            record = replace(record, standings=replace(standings, plan=replace(standings.plan, per_pass=per_pass)))
        self._record: Record = record

    @property
    def standings(self) -> Standings:
        """All trials so far, with their scores."""
        return self._record.standings

    @property
    def config(self) -> Config:
        """The settings that all trials share."""
        return self._reading.config

    @property
    def best(self) -> Trial | None:
        """The best trial of the highest rung that any has reached; None before the first scores."""
        return self.standings.best

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to train."""
        return self._record.is_complete

    @property
    def has_winner(self) -> bool:
        """True if any trial has a score that is a number."""
        return self.best is not None and not self.best.failed

    def require_winner(self) -> None:
        """Refuse a sweep that is complete without a score.

        Raises:
            AllTrialsFailed: every trial has failed.
        """
        if self.is_complete and not self.has_winner:
            raise AllTrialsFailed(
                "every trial has failed: none gave finite numbers to its first rung",
                where=str(self.folder),
                hint="other spaces, such as lower learning rates, with experiment_name=NAME",
            )

    def ask(self) -> Pack | None:
        """The pack that trains next, with its first checkpoint in place; None at the end. A collective.

        The answer stays the same until `tell`, in this process and in later ones.

        Raises:
            CheckpointError: the disk refuses the record or the checkpoint, or a checkpoint of trials is damaged.
        """
        self._record = self._on_main(self._advance)
        segment = self.standings.open_segment
        if segment is None:
            return None
        trials = tuple(self.standings.trials[id] for id in segment.trials)
        return Pack(segment.number, segment.rung, trials, self._config_of(segment), self.standings.plan.metric)

    def tell(self, pack: Pack, scores: Sequence[float]) -> None:
        """Record the scores of a pack: for every trial its `metric`, or NaN if it failed. A collective.

        Raises:
            BadInput: the pack is not the one that `ask` returned last, or has another number of trials.
        """
        segment = self.standings.open_segment
        if segment is None or (segment.number, len(segment.trials)) != (pack.number, len(scores)):
            raise BadInput(
                f"{len(scores)} scores for pack {pack.number}, which is not what was asked for",
                where="Sweep.tell",
                hint="tell what ask() returned last, with one score for each of its trials",
            )
        trials = [*self.standings.trials]
        for place, (id, score) in enumerate(zip(segment.trials, scores, strict=True)):
            known = float(score) if math.isfinite(score) else math.nan
            scored = (*trials[id].scores, known)
            trials[id] = replace(trials[id], scores=scored, segment=segment.number, place=place)
        segments = [replace(each, is_over=True) if each == segment else each for each in self.standings.segments]
        self._record = self._with(trials, segments)
        self._on_main(self._write)

    def segment_folder(self, number: int) -> Path:
        """The folder of the run that trains or trained a segment."""
        return self.folder / SEGMENTS / str(number)

    def _write(self) -> None:
        write_record(self.folder, self._record, self.staging())

    def _advance(self) -> Record:
        """On the main process: the record with an open segment whose first checkpoint exists, or a complete record."""
        if self._record.standings.open_segment is None and not self._record.is_complete:
            make_folders(self.folder)
            self._record = self._opened()
            self._write()
        if (segment := self.standings.open_segment) is not None:
            self._prepare(segment)
        return self._record

    def _opened(self) -> Record:
        """The record with the next segment; or complete, if there is none."""
        standings = self.standings
        trials, following = [*standings.trials], standings.next()
        if following is not None and following.rung == 0:
            trials += self._begun(len(following.trials))
            if len(trials) == len(standings.trials):  # no settings are left that no trial has had
                following = standings.next(exhausted=True)
        if following is None:
            return replace(self._record, is_complete=True)
        ids = (id for id in following.trials if id < len(trials))
        order = sorted(ids, key=lambda id: (_shape(trials[id]), id))
        return self._with(trials, [*standings.segments, replace(following, trials=tuple(order))])

    def _begun(self, count: int) -> list[Trial]:
        """At most `count` new trials."""
        known, keys, config = self.standings.trials, self._reading.keys, self._reading.config
        settings = new_settings(self._reading.spaces, str(keys.sampler), config.seed, known, count, keys.metric)
        return [Trial(id, each) for id, each in enumerate(settings, start=len(known))]

    def _with(self, trials: Sequence[Trial], segments: Sequence[Segment]) -> Record:
        standings = replace(self.standings, trials=tuple(trials), segments=tuple(segments))
        return replace(self._record, standings=standings)

    def _prepare(self, segment: Segment) -> None:
        """Write what the run of a segment finds in its folder: requests of the supervisor, its first checkpoint."""
        from ci_llm.sweep.handover import hand_over  # here, because it loads torch

        config = self._config_of(segment)
        make_folders(config.run_folder)
        asked = read_recovery(self.folder)
        if asked.micro_batch_size is not None:  # what the supervisor asks of the sweep holds for its segments
            write_recovery(config.run_folder, Recovery(micro_batch_size=asked.micro_batch_size, because=asked.because))
        if segment.rung:
            trials = [self.standings.trials[id] for id in segment.trials]
            sources = [(self.segment_folder(trial.segment or 0), trial.place) for trial in trials]
            hand_over(sources, config, self.standings.plan.first_step(segment.rung))

    def _config_of(self, segment: Segment) -> Config:
        """The configuration of a segment: its trials are the agents, with the common seed, as each would be alone."""
        shared, plan = self._reading.config, self.standings.plan
        folder = self.segment_folder(segment.number)
        trials = [self.standings.trials[id] for id in segment.trials]
        answers = segment.rung == len(plan.steps) - 1 or plan.metric == "exact_match"
        changes: dict[str, Any] = {
            "agents": tuple({NAME: f"trial{t.id}", "seed": shared.seed, **t.settings} for t in trials),
            "num_agents": len(trials),
            "max_train_steps": plan.steps[segment.rung],
            "output_dir": str(folder.parent),
            "experiment_name": folder.name,
            "resume_from_checkpoint": "latest",
            "generation_eval_samples": shared.generation_eval_samples if answers else 0,
        }
        return shared.of_trials(plan.steps[-1], changes)


def plan_of(reading: SweepReading, steps: int, per_pass: int) -> HalvingPlan:
    """The plan of a sweep whose longest trial takes `steps`, with `per_pass` trials in a pass."""
    keys, warmup = reading.keys, reading.warmup_steps(steps)
    return HalvingPlan.of(steps, keys.rungs, keys.trials or 1, per_pass, keys.keep, keys.metric, warmup)


def known_record(reading: SweepReading) -> Record | None:
    """The record in the folder; None if the sweep can begin there.

    Raises:
        BadInput: the folder holds another sweep, or a run.
    """
    folder = reading.config.run_folder
    record = read_record(folder)
    if record is not None:
        require_same_sweep(record, reading, folder)
    elif (folder / BEGINNING).exists():
        what = "this folder holds a run and not a sweep"
        raise BadInput(what, where=str(folder), hint="experiment_name=NAME, or another output_dir, for the sweep")
    return record


def _default_plan(reading: SweepReading) -> tuple[int, int]:
    """Steps and trials per pass, by the keys alone."""
    steps, per_pass = reading.config.max_train_steps, reading.keys.agents_per_pass
    if steps is None:
        raise BadInput(
            "the length of a trial is not known", where="Sweep(...)", hint="give max_train_steps; epochs need the rows"
        )
    return steps, per_pass if isinstance(per_pass, int) else reading.keys.trials or 1


def _shape(trial: Trial) -> str:
    return str([trial.settings.get(key) for key in _SHAPE])
