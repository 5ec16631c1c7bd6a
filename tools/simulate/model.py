"""The cluster and the job of a simulation: their keys and failures, and what theory says of them.

The keys are read from YAML and from a command line. Failures of the nodes are a stream of moments with exponential
distances, drawn by a seed. Theory says what saving and failing cost (Daly), and gives the bound that no policy can
pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import numpy as np
from annotated_types import Ge, Le
from numpy.random import Generator
from pydantic import Field

from ci_llm.config.parsing import COMMAND_LINE, nearest, parts_of
from ci_llm.config.problems import Problem, sound_values
from ci_llm.config.schema import DURATION, Amount, Count, Keys, Positive, Seconds, Share, Size
from ci_llm.config.yaml_file import dump_value, read_yaml
from ci_llm.errors import ConfigError


def best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Seconds of work between two saves that lose the least, by Daly's higher-order estimate.

    Saving too often costs stalls; saving too seldom costs the work since the last save. With a stall d and a mean time
    between failures M, the optimum is about sqrt(2 d M) seconds (Young, CACM 17(9), 1974), or more exactly Daly's
    estimate (Future Generation Computer Systems 22, 2006, eq. 20 and 21).

    Args:
        cost_s: seconds for which a save stops the work.
        mtbf_s: mean seconds between failures.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(share) / 3 + share / 9) - cost_s


def daly_goodput(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of time that is work, by Daly's complete model for exponential failures (FGCS 22, 2006, eq. 13).

    Args:
        interval_s: seconds of work between two saves.
        cost_s: seconds that a save adds.
        restart_s: seconds from a failure to the first step.
    """
    per_segment = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s)
    return interval_s / per_segment


def save_cost_s(cluster: Cluster) -> float:
    """All that one save costs the training, in seconds."""
    return cluster.stall + cluster.slowdown


def recovery_s(cluster: Cluster) -> float:
    """Mean seconds from a failure to the first step."""
    silent = cluster.silent_share
    by_node = max(0.0, 1 - silent - cluster.process_share)
    return cluster.start_s + by_node * cluster.queue + silent * cluster.watchdog


def announced_share(cluster: Cluster) -> float:
    """The share of time that preemptions and limits leave: each costs a wait in the queue and a start."""
    preempted_s, limit_s = cluster.preemption or math.inf, cluster.walltime or math.inf
    # A preempted job begins its time again, so that fewer of them reach their limit.
    mean_s = limit_s if math.isinf(preempted_s) else preempted_s * -math.expm1(-limit_s / preempted_s)
    return math.exp(-(cluster.start_s + cluster.queue) / mean_s)


def best_goodput(cluster: Cluster) -> float:
    """Daly's goodput at the best interval: what the best policy can reach with these costs."""
    cost_s, mtbf_s = save_cost_s(cluster), cluster.mtbf_s
    found = daly_goodput(best_interval_s(cost_s, mtbf_s), cost_s, recovery_s(cluster), mtbf_s)
    return found * announced_share(cluster)


def bound(cluster: Cluster) -> float:
    """The goodput with saves that cost nothing and lose nothing: every end costs its recovery alone."""
    return math.exp(-recovery_s(cluster) / cluster.mtbf_s) * announced_share(cluster)


def longest_recovery_s(cluster: Cluster, goodput: float) -> float:
    """The mean recovery that still reaches `goodput` at the best interval; negative if none does."""
    return recovery_s(cluster) + cluster.mtbf_s * math.log(best_goodput(cluster) / goodput)


HELP: Final = "python -m tools.simulate --help"
HOUR: Final = 3600.0

Wait: TypeAlias = Annotated[float, Ge(0), Le(10**9), DURATION]


def _key(default: Any, doc: str) -> Any:
    return Field(default, description=doc)


class Cluster(Keys):
    """The situation that is simulated. Times are in seconds, or written as 90, 1h30m, 300d or HH:MM:SS."""

    nodes: Count = _key(1, "nodes of the job; if one is lost, the job stands still")
    work: Seconds = _key(2 * 24 * HOUR, "training time that the job needs without any trouble")
    step: Seconds = _key(1.0, "one optimizer step")

    node_mtbf: Seconds = _key(300 * 24 * HOUR, "mean time between the failures of one node")
    job_mtbf: Seconds | None = _key(
        None, "mean time between the failures of the whole job, instead of node_mtbf / nodes"
    )
    process_share: Share = _key(0.3, "share of failures that end the processes only; the supervisor relaunches")
    silent_share: Share = _key(0.1, "share of failures that nobody is told of; the watchdog ends the job")
    disk_lost_share: Share = _key(0.0, "share of failures that take the checkpoints on disk with them")
    preemption: Seconds | None = _key(None, "mean time between preemptions; null: never")
    notice: Wait = _key(120.0, "time between the signal of a preemption and the kill")
    walltime: Seconds | None = _key(None, "limit of one job; null: none")

    restart: Wait = _key(60.0, "from the launch of the processes to the first step")
    base_mb: Amount = _key(0.0, "MB that every node reads from the shared storage when it starts")
    queue: Wait = _key(60.0, "wait in the queue before a job runs again")
    watchdog: Seconds = _key(120.0, "silence after which a silent failure is noticed")
    person: Seconds = _key(4 * HOUR, "until a person has called the job again, where the policies give up")

    state_mb: Positive = _key(134.0, "MB of a checkpoint")
    storage_mb_per_s: Positive = _key(345.0, "MB per second of the shared storage")
    stall: Wait = _key(0.0085, "time that the training waits for a save")
    slowdown: Wait = _key(0.155, "time by which a save that is being written makes the steps longer, together")
    mirror_lag: Seconds | None = _key(None, "time until a checkpoint has reached the mirror; null: no mirror")

    save_interval: Seconds = _key(300.0, "time between saves")
    save_steps: Count | None = _key(None, "and at each multiple of so many steps")
    max_retries: Size = _key(10, "of the supervisor")
    max_requeues: Size = _key(100, "of one job")
    seed: Size = _key(42, "of the failures")
    repeats: Count = _key(3, "simulated jobs per line")

    @property
    def mtbf_s(self) -> float:
        """Mean seconds between failures of the job."""
        return self.node_mtbf / self.nodes if self.job_mtbf is None else self.job_mtbf

    @property
    def start_s(self) -> float:
        """From the launch to the first step, all nodes reading their base at the same time."""
        return self.restart + self.nodes * self.base_mb / self.storage_mb_per_s

    @property
    def durable_s(self) -> float:
        """Seconds of a save until it is on the disk."""
        return max(self.state_mb / self.storage_mb_per_s, self.stall)

    def but(self, **values: object) -> Cluster:
        """This model with other values."""
        return Cluster.model_validate({**self.model_dump(), **values})


def read_cluster(path: Path | None, words: Sequence[str]) -> Cluster:
    """The cluster that a file and a command line describe; the command line wins.

    Args:
        words: `key=value`, `--key value`.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    entries = [] if path is None else read_yaml(_text(path), str(path))
    parts = [*parts_of(words, lambda _: "with a value")]
    strays = [word for words, entry in parts if entry is None for word in words]
    problems = [Problem(COMMAND_LINE, f"{word!r} is neither a key nor a value", HELP) for word in strays]
    typed = (entry for _, entry in parts if entry is not None)
    given = {entry.name.replace("-", "_"): entry for entry in (*entries, *typed)}
    for name, entry in given.items():
        if name not in Cluster.model_fields:
            near = nearest(name, Cluster.model_fields)
            problems.append(Problem(entry.where, f"{name} is no key", f"did you mean {near}?" if near else HELP))
    cluster = Cluster(**sound_values(given, problems, Cluster))
    if not problems and cluster.mtbf_s < cluster.step:  # it would end never, and be simulated for hours
        often = f"a failure every {cluster.mtbf_s:.2g} s, and a step takes {cluster.step:g} s: no step is ever done"
        raise ConfigError(f"{often} (in a duration m is a minute and d a day)", hint=HELP)
    if problems:
        one = str(problems[0]) if len(problems) == 1 else "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(one if len(problems) == 1 else f"{len(problems)} problems:{one}", hint=HELP)
    return cluster


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the cluster cannot be read: {error}", where=str(path), hint="name a YAML file") from error


def describe_keys() -> str:
    """All keys with their defaults, for --help."""
    fields = Cluster.model_fields
    wide = max(map(len, fields))
    return "\n".join(
        f"  {name:<{wide}}  {field.description} (default {dump_value(field.default)})" for name, field in fields.items()
    )


#: What strikes. A node takes the supervisor with it; after the others it lives. `damaged`: the newest checkpoint, too.
Kind: TypeAlias = Literal["node", "process", "silent", "damaged", "preempted", "disk_full"]


@dataclass(frozen=True)
class Strike:
    """One fault.

    Attributes:
        disk_lost: the checkpoints on the disk are gone as well.
    """

    kind: Kind
    disk_lost: bool = False


@dataclass(frozen=True)
class Planned:
    """A fault that strikes at a step and not at a time: a campaign. The steps before `step` are done then."""

    step: int
    kind: Kind


def moments(mean_s: float, dice: Generator) -> Iterator[float]:
    """Seconds from 0 on, without end, at which something happens that comes every `mean_s` seconds by chance."""
    at = 0.0
    while True:
        at += dice.exponential(mean_s)
        yield at


def strike(cluster: Cluster, dice: Generator) -> Strike:
    """The next failure."""
    drawn, disk = dice.random(2)
    kind: Kind = "node"
    if drawn < cluster.silent_share:
        kind = "silent"
    elif drawn < cluster.silent_share + cluster.process_share:
        kind = "process"
    return Strike(kind, kind != "process" and disk < cluster.disk_lost_share)


def generators(cluster: Cluster, repeat: int) -> Sequence[Generator]:
    """Independent generators of one simulated job: of its failures, of their kinds, of its preemptions."""
    return [np.random.default_rng(seed) for seed in np.random.SeedSequence([cluster.seed, repeat]).spawn(3)]
