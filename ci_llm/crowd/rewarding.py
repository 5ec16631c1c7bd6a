"""Completions that agents draw while they train, their rewards, and the scores of agents and crowd by rewards.

A completion is keyed by its agent's seed, the step, the row and its number: on one CPU thread it has the same tokens
alone, in company, and after a resume.

In an evaluation each agent and the crowd answer every prompt twice: by the most probable tokens, and by a sample. A
completion that no function rewards counts as 0. An agent whose numbers are not finite has no score.

Legend: K agents, U prompts, G completions of a prompt, F rewards; index K stands for the crowd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ci_llm.config import Config
from ci_llm.core.memory import halve_until_it_fits
from ci_llm.crowd.answering import ends_of_answers
from ci_llm.crowd.decoder import decodes
from ci_llm.crowd.generation import Wanted, base_errors, elect, requests_of, written
from ci_llm.crowd.judging import UnitScores
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import Decoding, Request, TokenIds, generate_key
from ci_llm.crowd.scoring import Scores
from ci_llm.data.rows import Chat, Prompted
from ci_llm.data.tokens import TokenizedRows
from ci_llm.errors import OutOfMemory
from ci_llm.objectives.grpo import Grpo, total_rewards
from ci_llm.objectives.grpo.rewards import Reward, compute_rewards

#: Texts that are open at a time, unless memory holds fewer: each has keys and values of its own.
MOST_OPEN = 512


@dataclass(frozen=True)
class AgentPrompt:
    """A prompt that an agent is to complete several times.

    Attributes:
        row: its number among the rows of the agent.
    """

    agent: int
    row: int
    prompt: TokenIds


@dataclass
class Drawer:
    """Draws completions.

    Args:
        tick: called after every token, as a sign of life.

    Attributes:
        most: how many texts are open at a time; fewer where memory ran out.
    """

    crowd: CrowdModel
    tick: Callable[[], object]
    most: int = MOST_OPEN

    def draw(self, asked: Sequence[AgentPrompt], objective: Grpo, step: int) -> list[list[Request]]:
        """The completions of every prompt, `num_generations` of them.

        Raises:
            OutOfMemory: a single text does not fit. ModelError: the base does not read packed rows.
        """

        def drawn(most: int) -> list[list[Request]]:
            requests = [self._requests(one, objective, step) for one in asked]
            waiting = [request for own in requests for request in own]
            with self.crowd.base_model.plain(), self.crowd.evaluating():
                write(self.crowd, waiting, most, stop=lambda: bool(self.tick()))
            return requests

        def refusal(complaint: str) -> OutOfMemory:
            return OutOfMemory(
                f"a single completion does not fit: {complaint}",
                where=f"step {step + 1}",
                hint="max_completion_length=N, a smaller base, or a machine with more memory",
            )

        at_once = min(self.most, len(asked) * objective.num_generations)
        found, fits = halve_until_it_fits("a batch of completions", drawn, at_once, refusal)
        if fits < at_once:
            self.most = fits
        return found

    def _requests(self, one: AgentPrompt, objective: Grpo, step: int) -> list[Request]:
        crowd, own = self.crowd, self.crowd.agents[one.agent].settings
        plain = Decoding(objective.max_completion_length, ends_of_answers(crowd), seed=own.seed)
        how = as_drawn(plain, objective, one.agent)
        numbers = range(objective.num_generations)
        return [Request(one.prompt, how, one.agent, ("grpo", own.index, step, one.row, n)) for n in numbers]


def as_drawn(how: Decoding, objective: Grpo, agent: int) -> Decoding:
    """These options, with tokens drawn as the agent draws them while it trains."""
    return replace(
        how,
        do_sample=True,
        temperature=objective.of_agent(agent)[1],
        top_p=objective.top_p,
        top_k=objective.top_k or None,
        min_p=objective.min_p or 0.0,
    )


def write(crowd: CrowdModel, requests: Sequence[Request], most: int, stop: Callable[[], bool] = lambda: False) -> None:
    """Write the texts of all requests, until `stop`, asked after every token.

    Args:
        most: the most texts that are open at a time.

    Raises:
        ModelError: the base does not read packed rows.
    """
    if not decodes(crowd):
        raise crowd.base_model.unusable("does not read packed rows, in which completions are drawn")
    groups = ([request] for request in requests)
    for _ in written(crowd, groups, 1, max(1, min(most, len(requests))), stop):
        pass


# Rewards


@dataclass(frozen=True)
class PromptRow:
    """A row as rewards see it.

    Attributes:
        prompt: its text, or its messages.
        columns: its cells, by the names of their columns.
        place: where it stands, in words.
    """

    prompt: Any
    columns: Mapping[str, Any]
    place: str

    @classmethod
    def of(cls, rows: TokenizedRows, number: int) -> PromptRow:
        """Row `number` of the tokenised rows."""
        at = rows.row_numbers[number]
        raw, column = rows.rows.cells(at)
        cell = raw[column]
        if not isinstance(cell, str):
            row = rows.rows[at]
            assert isinstance(row, Prompted)
            cell = [turn.as_turn() for turn in row.row.messages] if isinstance(row.row, Chat) else row.row.completion
        return cls(cell, raw, rows.rows.place(at))


#: Columns that are not handed over under their own names, as in TRL.
_GIVEN: Final = ("prompt", "prompts", "completion", "completions", "completion_ids")


def rewards_of_group(
    rewards: Sequence[Reward],
    row: PromptRow,
    texts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    where: str,
    timeout: float | None,
) -> Tensor:
    """The rewards of the completions of one prompt by every function: [G, F] fp64, NaN where it gives none.

    Raises:
        RewardFailed: see `compute_rewards`.
    """
    count = len(texts)
    said: list[Any] = [*texts]
    if not isinstance(row.prompt, str):  # a chat
        said = [[{"role": "assistant", "content": text}] for text in texts]
    given = {"prompts": [row.prompt] * count, "completions": said, "completion_ids": [*map(list, tokens)]}
    named = given | {name: [value] * count for name, value in row.columns.items() if name not in _GIVEN}
    whole = given | {"rows": [row.columns] * count}
    found = [compute_rewards(reward, whole if reward.reads_answer else named, where, timeout) for reward in rewards]
    return torch.tensor(found, dtype=torch.float64).view(len(rewards), count).T


class Rewarded(UnitScores):
    """The judgement by rewards: `found` [K, U, 2] of greedy and of drawn answers, `labels` [U, 2] of the crowd's."""

    part = "rewards"
    objective = "grpo"

    @property
    def everyone(self) -> Tensor:
        return torch.cat([self.found, self.labels[None]])

    @property
    def outcome(self) -> tuple[Tensor, Tensor]:
        """True where a greedy answer has a reward of 1; and minus that reward."""
        greedy = self.everyone[..., 0]
        return greedy >= 1, -greedy

    @property
    def figures(self) -> dict[str, list[float]]:
        greedy, drawn = self.everyone.mean(1).unbind(-1)
        return {"reward": greedy.tolist(), "sampled_reward": drawn.tolist()}


@dataclass(frozen=True)
class RewardScorer:
    """Scores agents and crowd on prompts, as the configuration of their run says."""

    config: Config
    objective: Grpo
    rewards: Sequence[Reward]
    aggregator: str

    def scores(
        self,
        crowd: CrowdModel,
        rows: TokenizedRows,
        batches: Iterable[Sequence[int]],
        stop: Callable[[], bool] = lambda: False,
    ) -> Scores | None:
        """The scores of these rows, in their order; None if `stop`, which is asked after every token, says True.

        Args:
            batches: numbers of rows, of which each batch is answered at the same time.
        """
        each = list[Tensor]()
        for batch in batches:
            each += self._answered(crowd, rows, batch, stop)
            if stop():
                return None
        found = torch.stack(each) if each else torch.zeros(0, crowd.num_agents + 1, 2, dtype=torch.float64)
        of_all = found.transpose(0, 1)
        units = Rewarded(of_all[:-1], of_all[-1])
        return Scores(*units.outcome, torch.ones(len(found), dtype=torch.long), units=units)

    def _answered(
        self, crowd: CrowdModel, rows: TokenizedRows, batch: Sequence[int], stop: Callable[[], bool]
    ) -> list[Tensor]:
        """The rewards [K + 1, 2] of the answers to each prompt; none if `stop` says True."""
        asked = [(number, rows[number].input_ids.tolist()) for number in batch]
        each = [self._requests(crowd, number, prompt) for number, prompt in asked]
        waiting = [request for of_row in each for own in of_row for wanted in own for request in wanted]
        with base_errors(crowd):
            write(crowd, waiting, len(batch) * (crowd.num_agents + 1), stop)
        if stop():
            return []
        found = list[Tensor]()
        for (number, prompt), of_row in zip(asked, each, strict=True):
            row = PromptRow.of(rows, number)
            of_each = [[self._reward(crowd, prompt, row, wanted) for wanted in own] for own in of_row]
            # An agent alone is the crowd.
            found.append(torch.tensor(of_each, dtype=torch.float64).expand(crowd.num_agents + 1, 2))
        return found

    def _requests(self, crowd: CrowdModel, number: int, prompt: TokenIds) -> list[list[list[Request]]]:
        """Of K agents and of the crowd those of two answers, a greedy and a drawn one: several where the crowd votes.

        Of an agent alone only those of the crowd.
        """
        agents = range(crowd.num_agents if crowd.num_agents > 1 else 0)
        of_agents = [[[Request(prompt, how, k, generate_key(number))] for how in self._ways(crowd, k)] for k in agents]
        return [*of_agents, [requests_of(crowd, number, prompt, Wanted(how)) for how in self._ways(crowd, 0)]]

    def _ways(self, crowd: CrowdModel, agent: int) -> tuple[Decoding, Decoding]:
        """The options of an agent's greedy and of its drawn answer, which has its temperature in training."""
        config = self.config
        longest = config.max_new_tokens_eval
        longest = config.max_completion_length if longest == "auto" else longest
        greedy = Decoding(longest, ends_of_answers(crowd), self.aggregator, seed=config.seed)
        return greedy, as_drawn(greedy, self.objective, agent)

    def _reward(self, crowd: CrowdModel, prompt: TokenIds, row: PromptRow, requests: Sequence[Request]) -> float:
        """The reward of the one text, or of the one that wins; NaN if the numbers of all writers are not finite."""
        texts = [request.tokens for request in requests if request.error is None]
        if not texts:
            return math.nan
        ids: TokenIds = texts[0]
        if len(texts) > 1:
            ids, _ = elect(crowd, prompt, texts, requests[0].decoding)
        where, timeout = f"evaluation, {row.place}", self.objective.reward_timeout
        rewards = rewards_of_group(self.rewards, row, [crowd.prompter.text(ids)], [ids], where, timeout)
        return float(total_rewards(rewards, self.objective.reward_weights).nan_to_num(nan=0.0))
