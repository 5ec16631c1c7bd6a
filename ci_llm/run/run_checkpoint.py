"""The checkpoint of a run: what each save (reporting.py) collects of it, and how a run resumes from one.

How exactly it resumes is said by exactness.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ci_llm.base.load import short_name
from ci_llm.checkpoints.checkpoint import Checkpoint
from ci_llm.checkpoints.saver import EachProcess
from ci_llm.config import Change, Config, as_typed, parse_config
from ci_llm.config.schema import with_trait
from ci_llm.core import determinism
from ci_llm.crowd.crowd import load_state, shape_of
from ci_llm.crowd.given_path import META
from ci_llm.errors import BadInput, CheckpointError, CiLlmError, ConfigError, ForeignCheckpoint
from ci_llm.run.optimizer import moments_of, placed, put_moments
from ci_llm.run.step.state import TrainState
from ci_llm.run.trainer import Trainer

STOPPED: Final = "stopped/"  # the folder of agents that have left the crowd
#: Keys whose effect `surroundings` (exactness.py) records, such as that of `batch_size`; the effect is compared.
_RECORDED: Final = frozenset(with_trait("recorded"))

#: Fingerprints that must be the same in a resumed run, and the message about another one.
_OTHER_INPUTS: Final = {
    "data": "the training rows are not those of the checkpoint: another data set, tokenizer, template or length,"
    " or a ci-llm that reads them in another way",
    "start": "the adapters of init_from are not those that agents were compared with: put those back",
}


def contents(
    trainer: Trainer, trackers: Mapping[str, str], generators: Sequence[dict[str, Any] | None] = ()
) -> dict[str, Any]:
    """The state of the run as the manager wants it: keys name files.

    Args:
        trackers: ids under which trackers know the run.
        generators: `determinism.capture()` of every process by index, None where it is not known; by default `save`
            collects them.

    Every micro-step sets the generators by a key, so an agent needs no state of them. They are exchanged all the
    same: a process without a row in a step keeps those of the step before, and a callback may draw from them. It
    costs about 16 kB a process in the one collective that a save needs anyway (tests/checkpoints/test_costs.py).
    """
    crowd, state = trainer.crowd, trainer.state
    moments = [moments_of(trainer.optimizer, row) for row in crowd.storage.rows]
    known = {f"process{i}": each for i, each in enumerate(generators) if each is not None}
    return {
        **{f"{agent.name}/adapter_model": agent.state_dict() for agent in crowd.agents},
        **trainer.description.files,
        **trainer.description.stopped,
        "optimizer": dict(zip(crowd.names, moments, strict=True)),
        "scheduler": {
            "type": trainer.config.lr_scheduler_type,
            "last_step": state.step,
            "last_learning_rate": trainer.last_learning_rate if state.step else trainer.learning_rate(0),
        },
        "train_state": state.to_dict(),
        # An agent outside of an episode is its own good snapshot: an older one would double every checkpoint.
        "guard": trainer.nonfinite.last_good.state_of(in_episode(state)),
        "trackers": dict(trackers),
        "rng": known if generators else EachProcess(determinism.capture()),
    }


def keep_as_good(trainer: Trainer) -> None:
    """Take the snapshots that a run which resumes from a checkpoint of this step begins with.

    Else the two would roll an agent back to different steps.
    """
    state = trainer.state
    for agent in {*range(len(state.agents))} - {*in_episode(state)}:
        trainer.nonfinite.last_good.keep(agent, state.step)


def in_episode(state: TrainState) -> list[int]:
    """The places of agents in an episode of nonfinite steps."""
    return [k for k, agent in enumerate(state.agents) if agent.recovery.episode_start is not None]


def config_of_checkpoint(checkpoint: Checkpoint) -> Config:
    """The configuration with which a checkpoint was made. Raises CheckpointError if it cannot be read."""
    where = str(checkpoint.folder)
    try:
        return parse_config(checkpoint.state["config.yaml"].decode(), where)
    except ConfigError as error:
        raise CheckpointError(f"its config.yaml cannot be read: {error.what}", where=where) from error


@dataclass(frozen=True)
class Resume:
    """A run that resumes.

    Attributes:
        trainer: the present run, which compares itself with the checkpoint and takes its contents.
        source: the checkpoint, which was verified.
    """

    trainer: Trainer
    source: Checkpoint

    @cached_property
    def _config(self) -> Config:
        return config_of_checkpoint(self.source)

    @property
    def fingerprints(self) -> Any:
        """The fingerprints in the checkpoint, as in `Description`."""
        return self.source.manifest.info["fingerprints"]

    def restore(self) -> TrainState:
        """Put weights and moments of the checkpoint in place. Nothing is changed if the checkpoint does not fit.

        Returns:
            the state beside them.

        Raises:
            ForeignCheckpoint: another K, rank, base or data.
            BadInput: a changed configuration would train on other samples or with other mathematics.
        """
        trainer, saved = self.trainer, self.source.state
        changes = self.changes()
        self._require_same_crowd(changes)
        self.require_same_settings()
        for key, what in _OTHER_INPUTS.items():
            is_same = self.fingerprints.get(key) == trainer.description.fingerprints.get(key)
            if not (is_same or trainer.config.allow_inexact_resume):
                raise self._refusal(ForeignCheckpoint, what, changes, but="the new ones")
        state = TrainState.from_dict(saved["train_state"])
        trainer.description.stopped.update({key: value for key, value in saved.items() if key.startswith(STOPPED)})
        load_state(trainer.crowd, saved, str(self.source.folder))
        for name, row in zip(trainer.crowd.names, trainer.crowd.storage.rows, strict=True):
            moments = placed(saved["optimizer"].get(name, {}), row, trainer.optimizer)
            put_moments(trainer.optimizer, row, moments)
        trainer.nonfinite.last_good.load(in_episode(state), saved["guard"])
        return state

    def told_changes(self) -> Iterator[str]:
        """What has changed since the checkpoint, for people."""
        changes = self.changes()
        for change in changes:
            if change.kind != "free" or not change.keeps_bits:
                yield f"changed since then: {change.key} {change.old} -> {change.new}"
        if any(change.kind == "schedule" for change in bits_changing(changes, self.trainer.config)):
            yield (
                "the schedule follows the new length from here;"
                " a run of this length from step 0 ends with other weights"
            )

    def _require_same_crowd(self, changes: Sequence[Change]) -> None:
        meta: Any = self.source.state[META]
        own = self.trainer.description.files[META]
        before, now = shape_of(self.source.state), shape_of({META: own})
        pairs = {key: (before[key], now[key]) for key in now}
        # A base that another device loads in another precision (`model_dtype: null`) is compared rounded to bf16.
        weights = "base" if len({*self.precisions()}) == 1 else "base_rounded"
        if self.fingerprints[weights] != self.trainer.description.fingerprints[weights]:
            pairs |= {
                "model_name": (short_name(meta["base_model_name_or_path"]), short_name(self.trainer.loaded.base.name)),
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
        changes = self.changes()
        breaking = [c for c in changes if c.kind == "sample-exact"]
        if breaking and not self.trainer.config.allow_inexact_resume:
            listed = "; ".join(f"{c.key} was {c.old}, is {c.new}" for c in breaking)
            what = f"the run in this folder has other settings: {listed}"
            raise self._refusal(BadInput, what, changes, but="the new settings")

    def _refusal(self, kind: type[CiLlmError], what: str, changes: Sequence[Change], but: str = "") -> CiLlmError:
        """The error of a run that is not the one that wrote the checkpoint.

        Args:
            but: what `allow_inexact_resume` continues with.
        """
        ways = [
            "experiment_name=NAME begins a new run beside it",
            "overwrite_output_dir=true begins here and moves the old run aside",
        ]
        if old := [f"{each.key}={as_typed(each.old)}" for each in changes if each.kind == "sample-exact"]:
            ways.append(f"{shlex.join(old)} continues the old run")
        if but:
            ways.append(f"allow_inexact_resume=true continues with {but} from this step")
        return kind(what, where=str(self.source.folder), hint="; ".join(ways))

    def changes(self) -> list[Change]:
        """What differs from the settings of the checkpoint; `model_dtype` by what it means on this device."""
        before, now = self.precisions()
        return [c for c in self._config.diff(self.trainer.config) if c.key != "model_dtype" or before != now]

    def precisions(self) -> tuple[str, str]:
        """The precision of the base, in the checkpoint and here."""
        return self.source.state[META]["base_dtype"], self.trainer.description.files[META]["base_dtype"]


def bits_changing(changes: Sequence[Change], config: Config) -> list[Change]:
    """The changes after which steps have other bits than without them."""
    schedules = {own.lr_scheduler_type for own in config.each_agent}
    follows_length = config.trial_steps is None and schedules != {"constant"}  # the learning rate of a step
    return [
        change
        for change in changes
        if not change.keeps_bits and change.key not in _RECORDED and (change.kind != "schedule" or follows_length)
    ]
