"""The checkpoint of a run: what each save (reporting.py) collects, how a run resumes from one, and how exactly.

The log names a grade of exactness: `bitwise` (the names of `core/determinism.py` and the digest of a layer are those of
the checkpoint, and so are processes, micro-batch and threads), `sample-exact` (the same samples in the same optimizer
steps; sums may round differently), or `state-exact` (the same state to resume from, on a device that may round
differently each time). It adds which keys make it another run from here on, because rows, mathematics or the schedule
are others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn

from ci_llm.base.load import Base, short_name
from ci_llm.checkpoints.checkpoint import Checkpoint
from ci_llm.checkpoints.saver import EachProcess
from ci_llm.config import Change, Config, as_typed, parse_config
from ci_llm.config.own_keys import NAME, OWN_KEYS, to_plain
from ci_llm.config.schema import with_trait
from ci_llm.core import determinism
from ci_llm.core.determinism import differences
from ci_llm.crowd.crowd import Crowd, load_state, shape_of, state_of
from ci_llm.crowd.given_path import META
from ci_llm.crowd.importing import fingerprint_of_start
from ci_llm.data.agent_rows import fingerprint_of
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.processes import Processes
from ci_llm.errors import BadInput, CheckpointError, CiLlmError, ConfigError, ForeignCheckpoint
from ci_llm.run.step.nonfinite import LastGood, placed
from ci_llm.run.step.state import TrainState

STOPPED: Final = "stopped/"  # the folder of agents that have left the crowd
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


@dataclass
class RunCheckpoint:
    """Collects the contents of a run's checkpoints.

    Attributes:
        rows: the rows of the training; their fingerprint goes into the manifest.
        tokenizer_files: name -> content.
        last_good: the snapshots of agents; a checkpoint has those of agents in an episode of nonfinite steps.
        stopped: the adapters of agents that have left the crowd, by the names of their files.
        bits: the names and the digest of `record_bits` (run/one_layer.py).
        present_config: the configuration with the agents that stand in the crowd now.
    """

    config: Config
    base: Base
    crowd: Crowd
    optimizer: torch.optim.Optimizer
    rows: Sequence[TokenizedRows]
    tokenizer_files: Mapping[str, bytes]
    last_good: LastGood
    processes: Processes
    present_config: Config
    stopped: dict[str, Any] = field(default_factory=dict)
    bits: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def description(self) -> dict[str, Any]:
        """What each checkpoint of the present crowd holds alike, by the names of its files."""
        present = self.present_config
        each = zip(present.agent_names, present.each_agent, strict=True)
        own = [{NAME: name, **to_plain({key: getattr(agent, key) for key in OWN_KEYS})} for name, agent in each]
        settings = {"agents": own} if present.agents else {}
        state = state_of(self.crowd, self.base.fingerprint, **settings)
        return {
            # The tensors of agents move to new memory whenever the crowd is prepared: a save looks for them itself.
            **{key: value for key, value in state.items() if key == META or key.endswith("/adapter_config")},
            "config.yaml": self.config.dump().encode(),
            **{f"tokenizer/{name}": data for name, data in self.tokenizer_files.items()},
        }

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """Those that must be the same for a run to be the same run."""
        return {
            "base": self.base.fingerprint,
            "base_rounded": self.base.rounded_fingerprint,
            "data": fingerprint_of(self.rows),
            **fingerprint_of_start(self.crowd),
        }

    def crowd_changed(self, present_config: Config) -> None:
        """Other agents stand in the crowd from now on."""
        self.present_config = present_config
        for name in ("description", "fingerprints"):
            self.__dict__.pop(name, None)

    def contents(
        self,
        state: TrainState,
        learning_rate: float,
        trackers: Mapping[str, str],
        generators: Sequence[dict[str, Any] | None] = (),
    ) -> dict[str, Any]:
        """The state of the run as the manager wants it: keys name files.

        Args:
            learning_rate: the learning rate of the last step.
            trackers: ids under which trackers know the run.
            generators: `determinism.capture()` of every process by index, None where it is not known; by default `save`
                collects them.

        Every micro-step sets the generators by a key, so an agent needs no state of them. They are exchanged all the
        same: a process without a row in a step keeps those of the step before, and a callback may draw from them. It
        costs about 16 kB a process in the one collective that a save needs anyway (tests/checkpoints/test_costs.py).
        """
        known = {f"process{i}": each for i, each in enumerate(generators) if each is not None}
        return {
            **{f"{agent.name}/adapter_model": agent.state_dict() for agent in self.crowd.agents},
            **self.description,
            **self.stopped,
            "optimizer": {name: dict(self.optimizer.state[row]) for name, row in self.named_rows()},
            "scheduler": {
                "type": self.config.lr_scheduler_type,
                "last_step": state.step,
                "last_learning_rate": learning_rate,
            },
            "train_state": asdict(state),
            # An agent outside of an episode is its own good snapshot: an older one would double every checkpoint.
            "guard": self.last_good.state_of(in_episode(state)),
            "trackers": dict(trackers),
            "rng": known if generators else EachProcess(determinism.capture()),
        }

    def keep_as_good(self, state: TrainState) -> None:
        """Take the snapshots that a run which resumes from a checkpoint of this state begins with.

        Else the two would roll an agent back to different steps.
        """
        for agent in {*range(len(state.agents))} - {*in_episode(state)}:
            self.last_good.keep(agent, state.step)

    def named_rows(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and weights of each agent, as the optimizer's moments are saved."""
        return zip(self.crowd.names, self.crowd.storage.rows, strict=True)

    def surroundings(self, state: TrainState) -> dict[str, Any]:
        """What surrounds the run and must be the same for a run to have the same bits."""
        on_cpu = self.crowd.device.type == "cpu"
        parts = len(self.crowd.storage.gradients_to_add) if self.processes.num_processes > 2 else 1
        return {
            "processes": self.processes.num_processes,
            "micro_batch": state.recovery.limit(self.config.batch_size),
            "threads": torch.get_num_threads(),
            "pass_per_agent": self.crowd.storage.pass_per_agent,
            "shared_prompts": self.crowd.shares_prompts,
            "all_reduce": "one for each agent" if parts > 1 else "one",  # on two processes the bits are the same
            # Kernels with a deterministic form take it only where anything else is an error: attention does not after
            # warn_only (`deterministic: auto`).
            "deterministic": on_cpu
            or (
                torch.are_deterministic_algorithms_enabled()
                and not torch.is_deterministic_algorithms_warn_only_enabled()
            ),
            **self.bits,
        }


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
        run: the present run, which compares itself with the checkpoint and takes its contents.
        source: the checkpoint, which was verified.
    """

    run: RunCheckpoint
    source: Checkpoint

    @cached_property
    def _config(self) -> Config:
        return config_of_checkpoint(self.source)

    @property
    def _fingerprints(self) -> Any:
        """`RunCheckpoint.fingerprints` of when it was made."""
        return self.source.manifest.info["fingerprints"]

    def restore(self) -> TrainState:
        """Put weights and moments of the checkpoint in place. Nothing is changed if the checkpoint does not fit.

        Returns:
            the state beside them.

        Raises:
            ForeignCheckpoint: another K, rank, base or data.
            BadInput: a changed configuration would train on other samples or with other mathematics.
        """
        saved = self.source.state
        changes = self._changes()
        self._require_same_crowd(changes)
        self.require_same_settings()
        for key, what in _OTHER_INPUTS.items():
            is_same = self._fingerprints.get(key) == self.run.fingerprints.get(key)
            if not (is_same or self.run.config.allow_inexact_resume):
                raise self._refusal(ForeignCheckpoint, what, changes, but="the new ones")
        state = TrainState.from_dict(saved["train_state"])
        self.run.stopped.update({key: value for key, value in saved.items() if key.startswith(STOPPED)})
        load_state(self.run.crowd, saved, str(self.source.folder))
        for name, row in self.run.named_rows():
            self.run.optimizer.state[row] = placed(saved["optimizer"].get(name, {}), row, self.run.optimizer)
        self.run.last_good.load(in_episode(state), saved["guard"])
        return state

    def told_changes(self) -> Iterator[str]:
        """What has changed since the checkpoint, for people."""
        changes = self._changes()
        for change in changes:
            if change.kind != "free" or not change.keeps_bits:
                yield f"changed since then: {change.key} {change.old} -> {change.new}"
        if any(change.kind == "schedule" for change in _bits_changing(changes, self.run.config)):
            yield (
                "the schedule follows the new length from here;"
                " a run of this length from step 0 ends with other weights"
            )

    def restore_surroundings(self, state: TrainState) -> str:
        """Set the generators as they were; returns the grade, and what lowers it, for people. `bits` are recorded."""
        before: Any = self.source.manifest.info["surroundings"]
        same_processes = before["processes"] == self.run.processes.num_processes
        now = self.run.surroundings(state)
        if self.run.crowd.device.type != "cpu":
            now["threads"] = before["threads"]  # they compute no step
        odd = [f"{key} {before[key]} -> {now[key]}" for key in _COUNTED if before[key] != now[key]]
        odd += differences(before, now)
        precision, precision_now = self._precisions()
        if precision != precision_now:
            odd.append(f"precision of the base {precision} -> {precision_now}")
        odd += self._restore_generators(self.source.state["rng"], state.step, same_processes)
        changes = _bits_changing(self._changes(), self.run.config)
        odd += [f"{change.key} {change.old} -> {change.new}" for change in changes if change.kind == "free"]
        odd += _other_bits(before, now, odd)
        others = [change.key for change in changes if change.kind != "free"]
        if self._fingerprints["data"] != self.run.fingerprints["data"]:
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
        meta: Any = self.source.state[META]
        own: Any = self.run.description[META]
        before, now = shape_of(self.source.state), shape_of({META: own})
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
        return [c for c in self._config.diff(self.run.config) if c.key != "model_dtype" or before != now]

    def _is_same_base(self) -> bool:
        """True if the base has the weights of the checkpoint, bit by bit.

        If another device loads them in another precision (`model_dtype: null`), they are compared rounded to bf16.
        """
        (before, now), base = self._precisions(), self.run.base
        key, own = ("base", base.fingerprint) if before == now else ("base_rounded", base.rounded_fingerprint)
        return bool(self._fingerprints[key] == own)

    def _precisions(self) -> tuple[str, str]:
        """The precision of the base, in the checkpoint and here."""
        before, now = self.source.state[META], self.run.description[META]
        return before["base_dtype"], now["base_dtype"]


def _bits_changing(changes: Sequence[Change], config: Config) -> list[Change]:
    """The changes after which steps have other bits than those of the run as it was."""
    schedules = {own.lr_scheduler_type for own in config.each_agent}
    follows_length = config.trial_steps is None and schedules != {"constant"}  # the learning rate of a step
    return [
        change
        for change in changes
        if not change.keeps_bits and change.key not in _RECORDED and (change.kind != "schedule" or follows_length)
    ]


def _other_bits(before: Mapping[str, Any], now: Mapping[str, Any], odd: Sequence[str]) -> Iterator[str]:
    """The difference of the digests, for people; nothing if one is missing, or may change by itself."""
    if "layer" not in before or before["processes"] != now["processes"] or not now["deterministic"]:
        return
    old, new = before["layer"]["digests"], now["layer"]["digests"]
    if None in (*old, *new):
        yield "memory did not hold the layer that is compared"
    elif old != new:
        yield f"{'' if odd else 'the same names, and '}other bits in a layer"
