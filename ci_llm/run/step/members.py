"""The members of the crowd: who trains now, the changes that are planned, and the requests for more.

A run begins with the agents of its configuration, or with one agent: it branches into all of them later, or the others
join it unless it stays alone (`crowd: auto`). An agent can also be stopped or cloned. Changes act between two optimizer
steps. Members and changes are plain values, the same on every process, and part of the state of a run, so that a resume
builds the crowd of its checkpoint and makes the changes that follow at the same steps.

Anybody who may write to the run's folder may ask for a change: a request is a file in `requests/`, which the main
process takes between two steps. What it decides is in `crowd_changes.json` before it acts, with the step, so that an
attempt that resumes from an older checkpoint makes the change at the same step.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from ci_llm.config import Config
from ci_llm.config.agents import read_own
from ci_llm.config.config import entries_of
from ci_llm.config.own_keys import NAME, ORDER_KEYS, SHAPE_KEYS, from_plain, to_plain
from ci_llm.config.parsing import Entry
from ci_llm.core.determinism import derive_seed
from ci_llm.core.durable import read_json, write_json
from ci_llm.core.run_folder import CROWD_CHANGES, read_known, write_known
from ci_llm.errors import ConfigError

SEEDS: Final = 2**32  # a seed in a configuration is below it
#: New place -> old place of the agent that it continues or copies; None for a new agent.
OldPlaces: TypeAlias = "list[int | None]"
Verb = Literal["branch", "stop", "clone", "join", "stay_alone"]
#: Changes of a run that begins with one agent instead of those of its configuration.
OF_ONE: Final = ("branch", "join", "stay_alone")


@dataclass(frozen=True)
class Member:
    """One agent of the crowd.

    Attributes:
        number: names the agent for good; no other agent of the run gets it.
        own: its settings over the common keys, as an entry of `agents:` has them.
        index: with the seed it keys what the agent draws; a clone draws as its original does.
        origin: the number of the first agent of the run from which this one descends.
    """

    number: int
    own: Mapping[str, Any] = field(default_factory=dict)
    index: int = 0
    origin: int = 0

    @property
    def folder(self) -> str:
        """The name of the agent in metrics, in the log and in checkpoints."""
        return f"agent{self.number}"


@dataclass(frozen=True)
class CrowdChange:
    """A change of the crowd.

    Attributes:
        step: the optimizer steps taken when it acts.
        agent: the number of the agent that branches, is stopped, is cloned, is joined by the others, or stays alone.
        own: settings of a clone that differ from those of its original.
    """

    step: int
    verb: Verb
    agent: int = 0
    own: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.verb == "join":
            return f"the others join agent{self.agent}"
        if self.verb == "stay_alone":
            return f"agent{self.agent} stays alone"
        told = ", ".join(f"{key} {value}" for key, value in self.own.items())
        return f"{self.verb} agent{self.agent}" + (f" with {told}" if told else "")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CrowdChange:
        """The inverse of `dataclasses.asdict`, also after a way through JSON."""
        return cls(**{**values, "own": from_plain(values["own"])})


@dataclass(frozen=True)
class Members:
    """The crowd as it stands.

    Attributes:
        agents: in the order of the crowd's storage, which is that of their numbers.
        given: how many numbers were given to agents so far.
        since: the optimizer steps taken at the last change of the crowd.
        agent_steps: the steps taken until then, counted for every agent that took them.
        planned: changes to come, in order.
        made: changes so far.
    """

    agents: tuple[Member, ...]
    given: int
    since: int = 0
    agent_steps: int = 0
    planned: tuple[CrowdChange, ...] = ()
    made: tuple[CrowdChange, ...] = ()

    @classmethod
    def configured(cls, config: Config) -> Members:
        """The agents of the configuration."""
        entries = config.agents or ({},) * config.num_agents
        return cls(tuple(_member(k, own, k) for k, own in enumerate(entries)), len(entries))

    @classmethod
    def first(cls, config: Config, steps: int) -> Members | None:
        """The members with which a run begins; None: the agents of the configuration, until somebody asks for a change.

        With `branch_at` and with `crowd: auto` a run begins with one agent. All agent-steps together are those of
        `num_agents` agents over `steps` steps. The training of an agent that may stay alone is `num_agents` times as
        long, so its learning rate is divided by the square root of `num_agents` from the first step on.

        Args:
            steps: what the configuration asks for: `max_train_steps`, or the steps of `epochs`.

        Raises:
            ConfigError: the run would be over before the other agents come.
        """
        if steps < 2 and (config.crowd == "auto" or config.branch_at is not None):
            key = "crowd" if config.crowd == "auto" else "branch_at"
            raise ConfigError(
                "the run has one step, and its other agents would come after it",
                where=f"{key}, epochs",
                hint="set max_train_steps to 2 or more, or raise epochs",
            )
        if config.crowd == "auto":
            first = Member(0, {"learning_rate": config.learning_rate / math.sqrt(config.num_agents)})
            return cls((first,), 1, planned=(CrowdChange(_step_of_choice(config, steps) + 1, "join"),))
        if config.branch_at is None:
            return None
        of_branches = min(max(1, round((1 - config.branch_at) * steps)), max(1, steps - 1))
        branch = CrowdChange(config.num_agents * (steps - of_branches), "branch")
        return cls((Member(0),), 1, planned=(branch,))

    @property
    def folders(self) -> list[str]:
        """The name of every agent, in order."""
        return [each.folder for each in self.agents]

    @property
    def are_configured(self) -> bool:
        """Whether these are the agents of the configuration: nothing has changed, and no one waits."""
        return not self.made and not self.waits

    @property
    def waits(self) -> bool:
        """Whether one agent trains, and the others are still to come or to be decided about."""
        return any(change.verb in OF_ONE for change in self.planned)

    @property
    def common_start(self) -> bool:
        """Whether all agents are, after changes, copies of one first agent."""
        changed = any(change.verb not in ("join", "stay_alone") for change in self.made)
        return changed and len({each.origin for each in self.agents}) == 1

    def origins_within(self, num_agents: int) -> OldPlaces:
        """For each agent the place of its origin among the `num_agents` first ones; 0 for one that has joined since."""
        return [each.origin if each.origin < num_agents else 0 for each in self.agents]

    def outlook(self, total_steps: int) -> Iterator[str]:
        """Lines for people: the changes to come."""
        for change in self.planned:
            unless = ", unless it stays alone" if change.verb == "join" else ""
            yield f"crowd: after step {change.step} of {total_steps}, {change}{unless}"

    @property
    def trunk_steps(self) -> int | None:
        """Steps of the one agent before it branches; None if it never branches."""
        return next((change.step for change in (*self.planned, *self.made) if change.verb == "branch"), None)

    @property
    def joined_at(self) -> int | None:
        """Steps of the first agent before the others have joined it; None if they have not joined."""
        return next((change.step for change in self.made if change.verb == "join"), None)

    def schedule_step(self, config: Config, step: int) -> int:
        """The place in the learning-rate schedule after `step` optimizer steps.

        One step of K branches counts as K, so that the schedule spans the agent-steps: over optimizer steps it would be
        near its end when the crowd branches. When agents join, the schedule starts again for all.
        """
        if (joined := self.joined_at) is not None:
            return max(0, step - joined)
        trunk = self.trunk_steps
        return step if trunk is None else step + (config.num_agents - 1) * max(0, step - trunk)

    def total_steps(self, config: Config, steps: int) -> int:
        """The optimizer steps of the whole run where the configuration asks for `steps`.

        The step at which the crowd branches or is joined is fixed when the run begins, and stays if the run is made
        longer. An agent that stays alone takes the steps of all.
        """
        if (trunk := self.trunk_steps) is not None:
            return trunk + max(1, steps - trunk // config.num_agents)
        if (joined := self.joined_at) is not None:
            return joined + max(1, (config.num_agents * steps - joined) // config.num_agents)
        if any(change.verb in ("join", "stay_alone") for change in (*self.planned, *self.made)):
            return config.num_agents * steps
        return steps

    def agent_steps_at(self, step: int) -> int:
        """The agent-steps after `step` optimizer steps: steps, counted for every agent that took them."""
        return self.agent_steps + (step - self.since) * len(self.agents)

    def with_planned(self, changes: Sequence[CrowdChange]) -> Members:
        """The members with more changes to come. A known change counts once; `stay_alone` cancels `join`."""
        new = [change for change in changes if change not in (*self.planned, *self.made)]
        planned = sorted((*self.planned, *new), key=lambda change: change.step)
        if any(change.verb == "stay_alone" for change in planned):
            planned = [change for change in planned if change.verb != "join"]
        return replace(self, planned=tuple(planned))

    def at_once(self, step: int) -> Members:
        """The members with all planned changes moved to this step."""
        return replace(self, planned=tuple(replace(change, step=step) for change in self.planned))

    def objection(self, change: CrowdChange, dropped: Collection[int] = ()) -> str | None:
        """Why a change that somebody asks for cannot be made; None if it can.

        Args:
            dropped: numbers of the agents that take no steps any more.
        """
        if any(each.verb == "branch" for each in self.planned):
            return "the crowd is one agent until it branches"
        if any(each.verb == "join" for each in self.planned):
            return "it is not decided yet whether agent0 stays alone"
        if later := [each.step for each in self.planned if each.step > change.step]:
            return f"an earlier attempt was asked for changes, the last after step {max(later)}: ask again then"
        if change.agent not in (each.number for each in self.agents):
            return f"there is no agent{change.agent}: there are {', '.join(self.folders)}"
        if change.verb == "stop" and {each.number for each in self.agents} <= {change.agent, *dropped}:
            return f"agent{change.agent} is the only agent that trains"
        if change.verb == "clone" and change.agent in dropped:
            return f"agent{change.agent} was dropped, and its copy would not train either"
        if change.own.get(NAME) in {*self.folders, *(each.own.get(NAME) for each in self.agents)} - {None}:
            return f"the name {change.own[NAME]} is taken"
        if change in (*self.planned, *self.made):
            return "the same was asked for in the same step"
        return None

    def after(self, step: int, config: Config) -> tuple[Members, OldPlaces]:
        """The crowd after the changes that act when `step` steps are taken.

        Returns:
            the members, and for each its place in `self`, or that of its original; None for a new agent.
        """
        members, sources = self, list[int | None](range(len(self.agents)))
        for change in [change for change in self.planned if change.step <= step]:
            members, own = members._changed(change, config)
            sources = [None if place is None else sources[place] for place in own]
        if members is not self:
            members = replace(members, since=step, agent_steps=self.agent_steps_at(step))
        return members, sources

    def _changed(self, change: CrowdChange, config: Config) -> tuple[Members, OldPlaces]:
        places = list[int | None](range(len(self.agents)))
        at = next(place for place, each in enumerate(self.agents) if each.number == change.agent)
        agents, given = list(self.agents), self.given
        if change.verb == "branch":
            entries = config.agents or ({},) * config.num_agents
            agents = [_member(k, {**_of_branch(k, config), **own}, 0) for k, own in enumerate(entries)]
            places, given = [at] * len(agents), len(agents)
        elif change.verb == "stop":
            del agents[at], places[at]
        elif change.verb == "join":
            agents, given = [*Members.configured(config).agents], config.num_agents
            places = [at, *[None] * (given - 1)]
        elif change.verb == "clone":
            agents.append(_clone(agents[at], given, change.own))
            places.append(at)
            given += 1
        planned = tuple(each for each in self.planned if each != change)
        return replace(self, agents=tuple(agents), given=given, planned=planned, made=(*self.made, change)), places

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return to_plain(asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Members:
        """The inverse of `to_dict`, also after a way through JSON."""
        agents = tuple(Member(**{**each, "own": from_plain(each["own"])}) for each in values["agents"])
        changes = {key: tuple(CrowdChange.from_dict(each) for each in values[key]) for key in ("planned", "made")}
        return cls(**{**values, "agents": agents, **changes})


def _step_of_choice(config: Config, steps: int) -> int:
    """The step after which `crowd: auto` decides; `steps` is what `num_agents` agents would take.

    It is an eighth of the agent-steps: early enough for a crowd to have most of them, and late enough for the rows of a
    small data set to have come twice.
    """
    return max(1, config.num_agents * steps // 8)


def config_of(config: Config, members: Members | None) -> Config:
    """The configuration whose `agents` are those that stand in the crowd now."""
    if members is None or members.are_configured:
        return config
    entries = tuple({NAME: each.folder, **each.own} for each in members.agents)
    return config.model_copy(update={"agents": entries, "num_agents": len(entries)})


def _member(number: int, own: Mapping[str, Any], origin: int) -> Member:
    return Member(number, own, index=0 if "seed" in own else number, origin=origin)


def _of_branch(number: int, config: Config) -> dict[str, Any]:
    """The settings of a branch, unless its entry in `agents:` has others: own row weights, own order of the rows.

    A diversity term compares agents on the same rows, so with one the order stays common.
    """
    if config.diversity != "none":
        return {"row_weights": "bootstrap"}
    common = config.seed if config.data_seed is None else config.data_seed
    return {"row_weights": "bootstrap", "data_seed": derive_seed(common, "branch", number) % SEEDS}


def _clone(original: Member, number: int, own: Mapping[str, Any]) -> Member:
    inherited = {key: value for key, value in original.own.items() if key != NAME}
    index = 0 if "seed" in own else original.index
    return Member(number, {**inherited, **own}, index, original.origin)


FOLDER: Final = "requests"


@dataclass(frozen=True)
class CrowdRequest:
    """What somebody asks for, and what the run decided.

    Attributes:
        id: the name of its file.
        step: the optimizer steps taken when it acts, or when it was refused; 0 while it waits.
        refused: why it does not act; None if it waits or acts.
    """

    id: str
    step: int
    verb: str
    agent: int
    own: Mapping[str, Any] = field(default_factory=dict)
    refused: str | None = None

    @property
    def change(self) -> CrowdChange:
        """The change that it asks for."""
        return CrowdChange.from_dict({"step": self.step, "verb": self.verb, "agent": self.agent, "own": self.own})


@dataclass
class RecordFailure:
    """Why the disk takes no decisions at present; None if it takes them."""

    reason: str | None = None

    def failed(self, reason: str) -> bool:
        """Note why the disk took no decision; returns whether the reason differs from that of the step before."""
        before, self.reason = self.reason, reason
        return reason != before

    def succeeded(self) -> None:
        """Note that the disk took a decision."""
        self.reason = None


def ask(run_folder: Path, verb: Verb, agent: int, own: Mapping[str, Any]) -> CrowdRequest:
    """Leave a request for the run in this folder.

    Args:
        own: what a clone has of its own, see `settings_of_clone`.

    Raises:
        CheckpointError: the disk refuses the file.
    """
    request = CrowdRequest(f"{time.time_ns()}-{os.getpid()}", 0, verb, agent, own)
    write_known(_path(run_folder, request.id), {"verb": verb, "agent": agent, "own": to_plain(own)}, "the request")
    return request


def settings_of_clone(entries: Sequence[Entry]) -> dict[str, Any]:
    """The validated settings that a clone gets.

    Raises:
        ConfigError: a key or value that no clone can have.
    """
    own = read_own(entries)
    for keys, what in ((SHAPE_KEYS, "has the weights"), (ORDER_KEYS, "takes the rows")):
        if odd := [key for key in keys if key in own]:
            raise ConfigError(
                f"a clone {what} of its original, and so its {odd[0]}", where=entries[0].where, hint="leave it out"
            )
    return own


def is_waiting(run_folder: Path) -> bool:
    """Whether a request lies in the folder; asked at every step.

    It takes one system call if nobody has asked yet, and four afterwards. `stat` would take as long, and would not see
    a second request within the same tick of the disk's clock.
    """
    return bool(_names(run_folder))


def read_waiting(run_folder: Path) -> list[CrowdRequest]:
    """The requests in the folder that are not decided, the oldest first; a file that holds no request is refused."""
    known = {decided.id for decided in read_record(run_folder)}  # a kill may have come before they were removed
    return [_read(_path(run_folder, name)) for name in sorted(_names(run_folder)) if name not in known]


def decide(run_folder: Path, decided: Sequence[CrowdRequest]) -> None:
    """Put decided requests on record, and then remove the files of all that are on record.

    Raises:
        OSError: the disk refuses the record, and so nothing is decided.
    """
    known = [*read_record(run_folder), *decided]
    if decided:
        _write_record(run_folder, known)
    for request in known:
        with suppress(OSError):  # it is on record, and so it is not read again
            _path(run_folder, request.id).unlink(missing_ok=True)


def read_record(run_folder: Path) -> list[CrowdRequest]:
    """The requests that were decided so far.

    Raises:
        CheckpointError: the file is not of this program.
    """
    return read_known(run_folder / CROWD_CHANGES, _parsed_record, "no record of changes") or []


def _parsed_record(path: Path) -> list[CrowdRequest]:
    value: Any = read_json(path)
    return [CrowdRequest(**decided) for decided in value]


def forget_after(run_folder: Path, step: int) -> None:
    """Remove from the record what acts after `step`, because the run goes back to that step on purpose.

    Raises:
        CheckpointError: the file is not of this program.
    """
    kept = [decided for decided in read_record(run_folder) if decided.step <= step]
    if kept:
        _write_record(run_folder, kept)
    else:
        (run_folder / CROWD_CHANGES).unlink(missing_ok=True)


def _write_record(run_folder: Path, decided: Sequence[CrowdRequest]) -> None:
    write_json(run_folder / CROWD_CHANGES, [{**asdict(each), "own": to_plain(each.own)} for each in decided])


def _names(run_folder: Path) -> list[str]:
    try:
        return [name.removesuffix(".json") for name in os.listdir(run_folder / FOLDER) if name.endswith(".json")]
    except OSError:
        return []  # nobody has asked for anything


def _path(run_folder: Path, name: str) -> Path:
    return run_folder / FOLDER / f"{name}.json"


def _read(path: Path) -> CrowdRequest:
    try:
        value: Any = read_json(path)
        verb, agent, own = value["verb"], value["agent"], value.get("own", {})
        if verb not in ("stop", "clone") or type(agent) is not int or (own and verb == "stop"):
            raise ValueError("it asks for nothing that a run can do")
        return CrowdRequest(path.stem, 0, verb, agent, settings_of_clone(entries_of(own, path.name)))
    except (OSError, AttributeError, KeyError, TypeError, ValueError) as error:
        return CrowdRequest(path.stem, 0, "unknown", 0, refused=f"no request: {error}")
    except ConfigError as error:
        return CrowdRequest(path.stem, 0, verb, agent, refused=error.what)
