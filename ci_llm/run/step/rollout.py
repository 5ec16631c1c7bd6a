"""The completions of an optimizer step: drawn, rewarded, compared within their groups, and laid out for the passes.

Each process draws those of its own rows, and rewards them. A step that is repeated in smaller parts, because memory ran
out, takes the same completions: a part is some of the prompts, or some completions of a prompt. One collective tells
all processes the rewards of all: for metrics, for `scale_rewards: batch`, and whether a function has failed.

Legend: K agents, P prompts, G completions of each, F rewards.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any, Final

import pyarrow as pa  # type: ignore[import-untyped]
import torch
from torch import Tensor

from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.core.determinism import seed_everything
from ci_llm.core.durable import Refusals, make_folders, write_bytes
from ci_llm.core.run_folder import COMPLETIONS
from ci_llm.crowd.generation import continuation
from ci_llm.crowd.objective import GrpoObjective
from ci_llm.crowd.rewarding import AgentPrompt, Drawer, PromptRow, rewards_of_group
from ci_llm.data.agent_rows import OrderedRows, TrainingRows
from ci_llm.data.batches import Batch, MicroBatch, Owned, pack
from ci_llm.data.prompts import Prompter
from ci_llm.data.units import Unit, unit_of
from ci_llm.distributed.processes import Processes
from ci_llm.errors import RewardFailed
from ci_llm.objectives.grpo import SumAndCount, Watch, advantages, metrics_of, std, total_rewards
from ci_llm.objectives.grpo.rewards import failed_elsewhere
from ci_llm.run.step.step_metrics import StepMetrics


@dataclass(frozen=True)
class Group:
    """The completions of one prompt by one agent.

    Attributes:
        asked: the prompt.
        tokens: [G] of each completion, with its end.
        texts: [G] without special tokens.
        cut: [G] true where it ended without an end.
        failed: the agent's numbers were not finite.
        rewards: [G, F] fp64, NaN where a function gave none.
        advantages: [G] fp64, NaN for a completion that is left out of the step.
    """

    asked: AgentPrompt
    tokens: list[list[int]]
    texts: list[str]
    cut: list[bool]
    failed: bool
    rewards: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class Rollout:
    """The completions of a step that this process has drawn.

    Attributes:
        objective: the objective of the run, which knows whose numbers are not finite.
        groups: of every agent [K], in the order of its rows.
        failure: the error of a function that could not reward them, here or on another process.
    """

    objective: GrpoObjective
    groups: Sequence[Sequence[Group]]
    failure: RewardFailed | None = None

    def parts(self, prompts: int, parts_of_group: int = 1) -> list[MicroBatch]:
        """Micro-batches of at most this number of prompts of each agent; or of one prompt, whose group is divided."""
        size = -(-self.objective.grpo.num_generations // parts_of_group)
        each = []
        for agent, groups in enumerate(self.groups):
            pieces = [
                (group, range(at, min(at + size, len(group.tokens))))
                for group in groups
                for at in range(0, len(group.tokens), size)
            ]
            step = prompts if parts_of_group == 1 else 1
            each.append([Owned((agent,), self._packed(pieces[at : at + step])) for at in range(0, len(pieces), step)])
        return [[own for own in together if own is not None] for together in zip_longest(*each)]

    def _packed(self, pieces: Sequence[tuple[Group, range]]) -> Batch:
        grpo, counted = self.objective.grpo, 0
        units, gains, weights = list[Unit](), list[float](), list[float]()
        for group, numbers in pieces:
            units.append(unit_of([continuation(group.asked.prompt, group.tokens[n]) for n in numbers]))
            for number in numbers:
                gain = float(group.advantages[number])
                count = len(group.tokens[number])
                is_drawn = not math.isnan(gain)
                is_masked = group.cut[number] and grpo.mask_truncated_completions
                learned = count if is_drawn and not is_masked else 0
                gains.append(gain if is_drawn else 0.0)
                weights.append(grpo.weight_of(count) if learned else 0.0)
                counted += grpo.count_of(learned) if is_drawn else 0
        batch = pack(units, [group.asked.row for group, _ in pieces])
        return replace(
            batch,
            advantages=torch.tensor(gains, dtype=torch.float64),
            weights=torch.tensor(weights, dtype=torch.float64),
            counted=counted,
        )

    @property
    def records(self) -> list[dict[str, Any]]:
        """All completions with what is known of each, in TRL's form."""
        return [
            {
                "agent": self.objective.crowd.agents[group.asked.agent].name,
                "row": group.asked.row,
                "prompt": self._prompter.text(group.asked.prompt),
                "completion": text,
                **{reward.name: _or_none(group.rewards[n, f]) for f, reward in enumerate(self.objective.rewards)},
                "advantage": _or_none(group.advantages[n]),
                "cut": group.cut[n],
            }
            for group in self._all
            for n, text in enumerate(group.texts)
        ]

    @property
    def schema(self) -> Any:
        """The columns of a file of completions: a reward that gave nothing is still a number."""
        numbers = [*(reward.name for reward in self.objective.rewards), "advantage"]
        columns = [("step", pa.int64()), ("agent", pa.string()), ("row", pa.int64())]
        columns += [("prompt", pa.string()), ("completion", pa.string()), *((name, pa.float64()) for name in numbers)]
        return pa.schema([*columns, ("cut", pa.bool_())])

    def lines(self, count: int = 2) -> Iterator[str]:
        """A few completions of a prompt with their rewards, for people."""
        for group in self._all[:1]:
            yield f"prompt    {_one_line(self._prompter.question(group.asked.prompt))}"
            for text, found in [*zip(group.texts, group.rewards.tolist(), strict=True)][:count]:
                told = ", ".join(f"{own.name} {x:.3g}" for own, x in zip(self.objective.rewards, found, strict=True))
                yield f"          {told}: {_one_line(text)}"

    @cached_property
    def _all(self) -> list[Group]:
        return [group for groups in self.groups for group in groups]

    @property
    def _prompter(self) -> Prompter:
        return self.objective.crowd.prompter


def _or_none(value: Tensor) -> float | None:
    return None if math.isnan(value) else float(value)


def _one_line(text: str) -> str:
    line = text.strip().replace("\n", "⏎")
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]} ..."


_SHOWN: Final = 300


@dataclass
class Rollouts:
    """Draws and judges the completions of a run's steps.

    Args:
        drawer: draws them.

    Attributes:
        measured: [K] the metrics of the newest step, the same on every process.
        refusals: of the disk, to take completions.
    """

    drawer: Drawer
    processes: Processes
    watch: Watch = field(default_factory=Watch)
    measured: list[dict[str, SumAndCount]] = field(default_factory=list)
    refusals: Refusals = field(default_factory=Refusals)

    def of_step(
        self, objective: GrpoObjective, step: int, micro_batches: Sequence[MicroBatch], training_rows: TrainingRows
    ) -> Rollout:
        """Draw and judge the completions of this process's rows of a step. A collective.

        Raises:
            OutOfMemory: a single completion does not fit.
        """
        each, failure = self._drawn(objective, step, micro_batches, training_rows)
        told = self.processes.gather_object((failure is not None, [*map(_in_numbers, each)]))
        if failure is None and any(has_failed for has_failed, _ in told):
            failure = failed_elsewhere(f"step {step + 1}")
        found = [_measured(objective, of_agent) for of_agent in zip(*(numbers for _, numbers in told), strict=True)]
        self.measured = [measured for measured, _ in found]
        groups = [[*_compared(objective, own, of_batch)] for own, (_, of_batch) in zip(each, found, strict=True)]
        failed = frozenset(group.asked.agent for own in groups for group in own if group.failed)
        return Rollout(replace(objective, failed=failed), groups, failure)

    def _drawn(
        self, objective: GrpoObjective, step: int, micro_batches: Sequence[MicroBatch], training_rows: TrainingRows
    ) -> tuple[list[list[Group]], RewardFailed | None]:
        """The groups of every agent here, without advantages; up to the error of a function."""
        asked = list[tuple[AgentPrompt, OrderedRows]]()
        for own in (own for batch in micro_batches for own in batch):
            for at, row in enumerate(own.batch.sample_ids):
                ids = own.batch.input_ids[own.batch.bounds[at] : own.batch.bounds[at + 1]].tolist()
                asked += [(AgentPrompt(agent, row, ids), training_rows.each[agent]) for agent in own.agents]
        with self.processes.autocast():
            drawn = self.drawer.draw([one for one, _ in asked], objective.grpo, step)
        each: list[list[Group]] = [[] for _ in range(objective.crowd.num_agents)]
        for (one, ordered), requests in zip(asked, drawn, strict=True):
            self.drawer.tick()
            try:
                each[one.agent].append(self._group_of(objective, step, one, ordered, requests))
            except RewardFailed as error:  # raised when all processes know it
                return each, error
        return each, None

    def report(self, metrics: StepMetrics, step: int, left_out: Sequence[int]) -> None:
        """Add the metrics of the newest step to those of its interval, and warn where completions teach nothing."""
        sums = [[number for pair in own.values() for number in pair] for own in self.measured]
        metrics.add_named([*self.measured[0]], sums, left_out)
        self.watch.look(self.measured, step)

    def write(self, rollout: Rollout, step: int, manager: CheckpointManager) -> None:
        """Write the completions of all processes into the file of the step; a repeated step replaces it. A collective.

        The training needs none of these files.
        """
        import pyarrow.parquet as pq  # type: ignore[import-untyped]  # no other run needs it

        rows = [row for own in self.processes.gather_object(rollout.records) for row in own]
        if not (rows and manager.store.holds_lease()):
            return
        file = io.BytesIO()
        folder = manager.directory / COMPLETIONS
        pq.write_table(pa.Table.from_pylist([{"step": step + 1, **row} for row in rows], rollout.schema), file)
        with self.refusals.of(f"the completions of step {step + 1} are not written"):
            make_folders(folder)
            write_bytes(folder / f"completions_{step + 1:05}.parquet", file.getvalue(), staging=manager.store.staging)

    def _group_of(
        self, objective: GrpoObjective, step: int, one: AgentPrompt, ordered: OrderedRows, drawn: Sequence[Any]
    ) -> Group:
        prompter, grpo = objective.crowd.prompter, objective.grpo
        failed = any(request.error is not None for request in drawn)
        end = min(drawn[0].decoding.ends, default=0)
        tokens = [request.tokens or [end] for request in drawn]
        texts = [prompter.text(ids) for ids in tokens]
        agent = objective.crowd.agents[one.agent]
        if failed:
            rewards = torch.full((len(texts), len(objective.rewards)), math.nan, dtype=torch.float64)
        else:
            row, own = PromptRow.of(ordered.rows, one.row), agent.settings
            seed_everything(own.seed, "rewards", own.index, step, one.row)
            where = f"step {step + 1}, {agent.name}, {row.place}"
            rewards = rewards_of_group(objective.rewards, row, texts, tokens, where, grpo.reward_timeout)
        cut = [request.finish != "stop" for request in drawn]
        return Group(one, tokens, texts, cut, failed, rewards, rewards.new_zeros(len(texts)))


#: Of the groups of one agent in a process: rewards [P, G, F], and for each completion its tokens and whether it is cut.
_Numbers = tuple[list[Any], list[int], list[bool]]


def _in_numbers(groups: Sequence[Group]) -> _Numbers:
    lengths = [len(ids) for group in groups for ids in group.tokens]
    return [group.rewards.tolist() for group in groups], lengths, [cut for group in groups for cut in group.cut]


def _measured(
    objective: GrpoObjective, of_processes: Sequence[_Numbers]
) -> tuple[dict[str, SumAndCount], Tensor | None]:
    """The metrics of one agent in a step, and the deviation of all its rewards, if it divides advantages."""
    grpo = objective.grpo
    names = [reward.name for reward in objective.rewards]
    listed, lengths, cut = ([*chain.from_iterable(part)] for part in zip(*of_processes, strict=True))
    rewards = torch.tensor(listed, dtype=torch.float64).view(-1, grpo.num_generations, len(names))
    total = total_rewards(rewards, grpo.reward_weights)
    of_batch = std(total.flatten()) if grpo.scale_rewards == "batch" else None
    stds = std(total) if of_batch is None else of_batch.expand(len(total))
    return metrics_of(names, rewards, total, stds, lengths, cut), of_batch


def _compared(objective: GrpoObjective, groups: Sequence[Group], of_batch: Tensor | None) -> Iterator[Group]:
    """The groups of one agent with their advantages."""
    for group in groups:
        total = total_rewards(group.rewards, objective.grpo.reward_weights)[None]
        yield replace(group, advantages=advantages(total, objective.grpo.scale_rewards, of_batch)[0])
