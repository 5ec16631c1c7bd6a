"""The checkpoint of a run: what each save (reporting.py) collects; start/resume.py restores the run from one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final

import torch
from torch import nn

from ci_llm.base.load import Base
from ci_llm.checkpoints.saver import EachProcess
from ci_llm.config import Config
from ci_llm.config.own_keys import NAME, OWN_KEYS, to_plain
from ci_llm.core import determinism
from ci_llm.crowd.crowd import Crowd, state_of
from ci_llm.crowd.given_path import META
from ci_llm.crowd.importing import fingerprint_of_start
from ci_llm.data.agent_rows import fingerprint_of
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.processes import Processes
from ci_llm.run.step.nonfinite import LastGood
from ci_llm.run.step.state import TrainState

STOPPED: Final = "stopped/"  # the folder of agents that have left the crowd


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
        settings = {"agents": _settings_of_agents(present)} if present.agents else {}
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

    def agents_tokenizers(self) -> dict[str, bytes]:
        """The tokenizer, with the chat template that was in force, beside each adapter: each may be used alone."""
        files = self.tokenizer_files.items()
        return {f"{agent}/{name}": data for agent in self.crowd.names for name, data in files}

    def named_rows(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Name and weights of each agent, as the optimizer's moments are saved."""
        return zip(self.crowd.names, self.crowd.storage.rows, strict=True)

    def info(self, state: TrainState, epoch: float) -> dict[str, Any]:
        """The information for the manifest: the position, and what a resume compares."""
        return {
            "epoch": epoch,
            "position": state.samples_seen,
            "fingerprints": self.fingerprints,
            "surroundings": self.surroundings(state),
        }

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


def _settings_of_agents(config: Config) -> list[dict[str, Any]]:
    """Name and settings of every agent, as plain values."""
    return [
        {NAME: name, **to_plain({key: getattr(own, key) for key in OWN_KEYS})}
        for name, own in zip(config.agent_names, config.each_agent, strict=True)
    ]


def in_episode(state: TrainState) -> list[int]:
    """The places of agents in an episode of nonfinite steps."""
    return [k for k, agent in enumerate(state.agents) if agent.recovery.episode_start is not None]
