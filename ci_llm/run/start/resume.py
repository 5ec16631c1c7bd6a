"""How a run resumes from a checkpoint, and how exactly; what a checkpoint holds is said in run_checkpoint.py.

The log names a grade of exactness: `bitwise` (the names of `core/determinism.py` and the digest of a layer are those of
the checkpoint, and so are processes, micro-batch and threads), `sample-exact` (the same samples in the same optimizer
steps; sums may round differently), or `state-exact` (the same state to resume from, on a device that may round
differently each time). It adds which keys make it another run from here on, because rows, mathematics or the schedule
are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ci_llm.base.load import short_name
from ci_llm.checkpoints.checkpoint import Checkpoint, load_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.config import Change, Config, as_typed, parse_config
from ci_llm.config.schema import with_trait
from ci_llm.core import determinism
from ci_llm.core.determinism import differences
from ci_llm.core.remote import is_url
from ci_llm.crowd.crowd import load_state, shape_of
from ci_llm.crowd.given_path import META, require_checkpoint, require_run
from ci_llm.errors import BadInput, CheckpointError, CiLlmError, ConfigError, DamagedCheckpoint, ForeignCheckpoint
from ci_llm.mirror.filling import local_copy
from ci_llm.run.run_checkpoint import STOPPED, RunCheckpoint, in_episode
from ci_llm.run.step.last_good import placed
from ci_llm.run.step.state import TrainState

#: Keys whose effect `RunCheckpoint.surroundings` records, such as that of `batch_size`; the effect is compared.
_RECORDED: Final = frozenset(with_trait("recorded"))
#: The surroundings that are compared one by one.
_COUNTED: Final = ("processes", "micro_batch", "threads", "pass_per_agent", "kernels", "shared_prompts", "all_reduce")


#: Fingerprints that must be the same in a resumed run, and the message about another one.
_OTHER_INPUTS: Final = {
    "data": "the training rows are not those of the checkpoint: another data set, tokenizer, template or length,"
    " or a ci-llm that reads them in another way",
    "start": "the adapters of init_from are not those that agents were compared with: put those back",
}


@dataclass(frozen=True)
class Source:
    """The verified checkpoint from which a run resumes."""

    checkpoint: Checkpoint

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def step(self) -> int:
        return self.checkpoint.manifest.step

    @property
    def fingerprints(self) -> Any:
        """`RunCheckpoint.fingerprints` of when it was made."""
        return self.checkpoint.manifest.info["fingerprints"]

    @cached_property
    def config(self) -> Config:
        """The configuration with which the checkpoint was made. Raises CheckpointError if it cannot be read."""
        where = str(self.folder)
        try:
            return parse_config(self.checkpoint.state["config.yaml"].decode(), where)
        except ConfigError as error:
            raise CheckpointError(f"its config.yaml cannot be read: {error.what}", where=where) from error

    @property
    def shown(self) -> Path:
        """The folder as a person would type it here."""
        here = Path.cwd()
        return self.folder.relative_to(here) if self.folder.is_relative_to(here) else self.folder


def newest_source(manager: CheckpointManager, at_most: int | None = None) -> Source | None:
    """The newest checkpoint of a run's own folder that verifies; None if there is none.

    Args:
        at_most: the newest step that is trusted; None: any.
    """
    step = manager.latest_step(at_most=at_most)
    return None if step is None else Source(manager.read(step))


def open_source(given: str, where: str) -> Source:
    """The checkpoint at a path or URL that a key gives; of a run's folder or mirror it is the newest one.

    Args:
        where: the key that gave the path, for the error.

    Raises:
        ConfigError: there is no checkpoint of a run.
        DamagedCheckpoint: the checkpoint is not as it was written.
    """
    folder = local_copy(given, where) if is_url(given) else require_checkpoint(Path(given), where)
    try:
        require_run(read_manifest(folder), folder, where)
        return Source(load_checkpoint(folder))
    except DamagedCheckpoint as damage:
        damage.hint = f"ci-llm checkpoints list {folder.parent} says which others are whole: give one of them"
        raise


@dataclass(frozen=True)
class Restored:
    """What a run takes from a checkpoint beside weights and moments.

    Attributes:
        trackers: ids under which trackers know the run.
        lines: changes since then, for people.
    """

    state: TrainState
    trackers: dict[str, str]
    lines: Sequence[str]


@dataclass(frozen=True)
class Resume:
    """A run that resumes.

    Attributes:
        run: the present run, which compares itself with the checkpoint and takes its contents.
        source: the checkpoint.
    """

    run: RunCheckpoint
    source: Source

    def restore(self) -> Restored:
        """Put weights and moments of the checkpoint in place. Nothing is changed if the checkpoint does not fit.

        Raises:
            ForeignCheckpoint: another K, rank, base or data.
            BadInput: a changed configuration would train on other samples or with other mathematics.
        """
        saved = self.source.checkpoint.state
        changes = self._changes()
        self._require_same_crowd(changes)
        self.require_same_settings()
        self._require_same_rows(changes)
        state = TrainState.from_dict(saved["train_state"])
        self.run.stopped.update({key: value for key, value in saved.items() if key.startswith(STOPPED)})
        load_state(self.run.crowd, saved, str(self.source.folder))
        for name, row in self.run.named_rows():
            self.run.optimizer.state[row] = placed(saved["optimizer"].get(name, {}), row, self.run.optimizer)
        self.run.last_good.load(in_episode(state), saved["guard"])
        return Restored(state, dict(saved["trackers"]), _shown(changes, self.run.config))

    def restore_surroundings(self, state: TrainState) -> str:
        """Set the generators as they were; returns the grade, and what lowers it, for people. `bits` are recorded."""
        before: Any = self.source.checkpoint.manifest.info["surroundings"]
        same_processes = before["processes"] == self.run.processes.num_processes
        now = self.run.surroundings(state)
        if self.run.crowd.device.type != "cpu":
            now["threads"] = before["threads"]  # they compute no step
        odd = _differences(before, now)
        precision, precision_now = self._precisions()
        if precision != precision_now:
            odd.append(f"precision of the base {precision} -> {precision_now}")
        odd += self._restore_generators(self.source.checkpoint.state["rng"], state.step, same_processes)
        changes = _bits_changing(self._changes(), self.run.config)
        odd += [f"{change.key} {change.old} -> {change.new}" for change in changes if change.kind == "free"]
        odd += _other_bits(before, now, odd)
        others = [change.key for change in changes if change.kind != "free"]
        if self.source.fingerprints["data"] != self.run.fingerprints["data"]:
            others.append("training rows")
        grade = "bitwise"
        if odd or not now["deterministic"]:
            unsure = [] if now["deterministic"] else ["deterministic=true alone takes the same bits from every kernel"]
            grade = f"{'sample' if odd else 'state'}-exact ({'; '.join(odd + unsure)})"
        return f"{grade}; another run from here on ({', '.join(others)})" if others else grade

    def _restore_generators(self, saved: Any, step: int, same_processes: bool) -> list[str]:
        """Set the global generators; returns the reasons why they are not as they were.

        With as many processes as before, each process gets its own generators back. With another number, rows are dealt
        in another way, and the generators begin from a key, so that a repeated resume draws the same. Every micro-step
        sets them by a key in any case: this is for what draws between the steps, such as a callback.
        """
        index, count = self.run.processes.process_index, self.run.processes.num_processes
        if not same_processes:
            determinism.seed_everything(self.run.config.seed, "processes", step, count, index)
            return []  # the numbers of processes are named already
        odd = [f"no generators of process {i}" for i in range(count) if f"process{i}" not in saved]
        own = saved.get(f"process{index}")
        if own is not None and (hindrance := determinism.restore(own)):
            odd.append(hindrance)
        return odd

    def _require_same_crowd(self, changes: Sequence[Change]) -> None:
        meta: Any = self.source.checkpoint.state[META]
        own: Any = self.run.description[META]
        before, now = shape_of(self.source.checkpoint.state), shape_of({META: own})
        pairs = {key: (before[key], now[key]) for key in now}
        if not self._is_same_base():
            pairs |= {
                "model_name": (short_name(meta["base_model_name_or_path"]), short_name(self.run.base.name)),
                "weights of the base": (meta["base_fingerprint"], own["base_fingerprint"]),
            }
        odd = [f"{name} was {before!r}, is {now!r}" for name, (before, now) in pairs.items() if before != now]
        if odd:
            what = f"the run in this folder has another crowd: {'; '.join(odd)}"
            raise self._refusal(ForeignCheckpoint, what, changes)

    def require_same_settings(self) -> None:
        """Refuse a changed configuration that would train on other samples or with other mathematics.

        Raises:
            BadInput: unless `allow_inexact_resume` is set.
        """
        changes = self._changes()
        breaking = [c for c in changes if c.kind == "sample-exact"]
        if breaking and not self.run.config.allow_inexact_resume:
            listed = "; ".join(f"{c.key} was {c.old}, is {c.new}" for c in breaking)
            what = f"the run in this folder has other settings: {listed}"
            raise self._refusal(BadInput, what, changes, but="the new settings")

    def _refusal(self, kind: type[CiLlmError], what: str, changes: Sequence[Change], but: str = "") -> CiLlmError:
        """The error of a run that is not that of the checkpoint.

        Args:
            but: what `allow_inexact_resume` continues with.
        """
        ways = [
            "experiment_name=NAME begins a new run beside it",
            "overwrite_output_dir=true begins here and moves the old run aside",
        ]
        if old := [f"{each.key}={as_typed(each.old)}" for each in changes if each.kind == "sample-exact"]:
            ways.append(f"{' '.join(old)} continues the old run")
        if but:
            ways.append(f"allow_inexact_resume=true continues with {but} from this step")
        return kind(what, where=str(self.source.folder), hint="; ".join(ways))

    def _changes(self) -> list[Change]:
        """What differs from the settings of the checkpoint; `model_dtype` by what it means on this device."""
        before, now = self._precisions()
        return [c for c in self.source.config.diff(self.run.config) if c.key != "model_dtype" or before != now]

    def _is_same_base(self) -> bool:
        """True if the base has the weights of the checkpoint, bit by bit.

        If another device loads them in another precision (`model_dtype: null`), they are compared rounded to bf16.
        """
        (before, now), base = self._precisions(), self.run.base
        key, own = ("base", base.fingerprint) if before == now else ("base_rounded", base.rounded_fingerprint)
        return bool(self.source.fingerprints[key] == own)

    def _precisions(self) -> tuple[str, str]:
        """The precision of the base, in the checkpoint and here."""
        before, now = self.source.checkpoint.state[META], self.run.description[META]
        return before["base_dtype"], now["base_dtype"]

    def _require_same_rows(self, changes: Sequence[Change]) -> None:
        """Refuse other training rows, and other adapters at the start."""
        before, now = self.source.fingerprints, self.run.fingerprints
        for key, what in _OTHER_INPUTS.items():
            if before.get(key) != now.get(key) and not self.run.config.allow_inexact_resume:
                raise self._refusal(ForeignCheckpoint, what, changes, but="the new ones")


def _bits_changing(changes: Sequence[Change], config: Config) -> list[Change]:
    """The changes after which steps have other bits than those of the run as it was."""
    return [
        change
        for change in changes
        if not change.keeps_bits
        and change.key not in _RECORDED
        and (change.kind != "schedule" or _follows_length(config))
    ]


def _follows_length(config: Config) -> bool:
    """True if the learning rate of a step depends on the length of the run."""
    return config.trial_steps is None and any(own.lr_scheduler_type != "constant" for own in config.each_agent)


def _shown(changes: Sequence[Change], config: Config) -> list[str]:
    lines = [f"changed since then: {c.key} {c.old} -> {c.new}" for c in changes if c.kind != "free" or not c.keeps_bits]
    if any(c.kind == "schedule" for c in _bits_changing(changes, config)):
        lines.append(
            "the schedule follows the new length from here; a run of this length from step 0 ends with other weights"
        )
    return lines


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences of surroundings, apart from determinism, which has a grade of its own."""
    odd = [f"{key} {before[key]} -> {now[key]}" for key in _COUNTED if before[key] != now[key]]
    return odd + differences(before, now)


def _other_bits(before: Mapping[str, Any], now: Mapping[str, Any], odd: Sequence[str]) -> Iterator[str]:
    """The difference of the digests, for people; nothing if one is missing, or may change by itself."""
    if "layer" not in before or before["processes"] != now["processes"] or not now["deterministic"]:
        return
    old, new = before["layer"]["digests"], now["layer"]["digests"]
    if None in (*old, *new):
        yield "memory did not hold the layer that is compared"
    elif old != new:
        yield f"{'' if odd else 'the same names, and '}other bits in a layer"
