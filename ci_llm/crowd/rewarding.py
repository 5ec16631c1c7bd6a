"""Rewards of completions: what functions say of those of a prompt, and agents and crowd scored by them.

In an evaluation each agent and the crowd answer every prompt twice: by the most probable tokens, and by a sample. A
completion that no function rewards counts as 0.

Legend: K agents, U prompts, G completions of a prompt, F rewards; index K stands for the crowd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from ci_llm.crowd.decoding import Decoding, ends_of_base
from ci_llm.crowd.generation import Wanted, generate_each
from ci_llm.crowd.judging import Judged
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.scoring import Scores
from ci_llm.data.rows import Chat, Prompted
from ci_llm.data.tokens import TokenizedRows
from ci_llm.objectives.grpo import Grpo, total_rewards
from ci_llm.objectives.grpo.rewards import Reward, judged


@dataclass(frozen=True)
class Asking:
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
    def of(cls, rows: TokenizedRows, number: int) -> Asking:
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
    asking: Asking,
    texts: Sequence[str],
    tokens: Sequence[Sequence[int]],
    where: str,
    timeout: float | None,
) -> Tensor:
    """What every function gives for the completions of one prompt: [G, F] fp64, NaN where it gives none.

    Raises:
        RewardFailed: see `judged`.
    """
    count, is_chat = len(texts), not isinstance(asking.prompt, str)
    said = [[{"role": "assistant", "content": text}] for text in texts] if is_chat else [*texts]
    columns = {name: [value] * count for name, value in asking.columns.items() if name not in _GIVEN}
    given = {"prompts": [asking.prompt] * count, "completions": said, "completion_ids": [*map(list, tokens)], **columns}
    found = [judged(reward, given, where, timeout) for reward in rewards]
    return torch.tensor(found, dtype=torch.float64).view(len(rewards), count).T


class Rewarded(Judged):
    """The judgement by rewards: `found` [K, U, 2] of greedy and of drawn answers, `labels` [U, 2] of the crowd's."""

    part = "rewards"
    objective = "grpo"

    @property
    def everyone(self) -> Tensor:
        return torch.cat([self.found, self.labels[None]])

    @property
    def outcome(self) -> tuple[Tensor, Tensor]:
        """Whether a greedy answer has a reward of 1, and minus that reward."""
        greedy = self.everyone[..., 0]
        return greedy >= 1, -greedy

    @property
    def figures(self) -> dict[str, list[float]]:
        greedy, drawn = self.everyone.mean(1).unbind(-1)
        return {"reward": greedy.tolist(), "sampled_reward": drawn.tolist()}


@dataclass(frozen=True)
class RewardScorer:
    """Scores agents and crowd on prompts.

    Attributes:
        longest: the most tokens of an answer.
    """

    objective: Grpo
    rewards: Sequence[Reward]
    aggregator: str
    longest: int
    seed: int

    def scores(
        self,
        crowd: CrowdModel,
        rows: TokenizedRows,
        batches: Iterable[Sequence[int]],
        stop: Callable[[], bool] = lambda: False,
    ) -> Scores | None:
        """The scores of these rows, in their order; None if `stop`, which is asked before every token, says True.

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
        judged = Rewarded(of_all[:-1], of_all[-1])
        return Scores(*judged.outcome, torch.ones(len(found), dtype=torch.long), judged=judged)

    def _answered(
        self, crowd: CrowdModel, rows: TokenizedRows, batch: Sequence[int], stop: Callable[[], bool]
    ) -> list[Tensor]:
        """The rewards [K + 1, 2] of the answers to each prompt."""
        assert crowd.prompter is not None
        _, temperature = self.objective.of_agent(0)
        greedy = Decoding(
            self.longest, crowd.prompter.ends | ends_of_base(crowd.model), self.aggregator, seed=self.seed
        )
        drawn = replace(
            greedy,
            do_sample=True,
            temperature=temperature,
            top_p=self.objective.top_p,
            top_k=self.objective.top_k or None,
            min_p=self.objective.min_p or 0.0,
        )
        asked = [(number, rows[number].input_ids.tolist()) for number in batch]
        columns = [self._texts(crowd, asked, decoding, stop) for decoding in (greedy, drawn)]
        found = list[Tensor]()
        for place, number in enumerate(batch):
            asking = Asking.of(rows, number)
            of_both = []
            for texts in columns:
                if place >= len(texts):  # asked to stop
                    return found
                said = [crowd.prompter.text(ids) for ids in texts[place]]
                where, timeout = f"evaluation, {asking.place}", self.objective.reward_timeout
                rewards = rewards_of_group(self.rewards, asking, said, texts[place], where, timeout)
                of_both.append(total_rewards(rewards, self.objective.reward_weights).nan_to_num(nan=0.0))
            found.append(torch.stack(of_both, -1))
        return found

    def _texts(
        self,
        crowd: CrowdModel,
        asked: Sequence[tuple[int, Sequence[int]]],
        decoding: Decoding,
        stop: Callable[[], bool],
    ) -> list[list[list[int]]]:
        """The answers of K agents and of the crowd to each prompt, greedy ones or samples."""
        size, count = len(asked), crowd.num_agents
        if not decoding.do_sample:
            wanted = Wanted(decoding, include_agents=count > 1, stop=stop)
            written = [*generate_each(crowd, iter(asked), wanted, size)]
            return [[*(text for [text] in each.agents or [each.crowd]), each.crowd[0]] for each in written]
        who = [*(range(count) if count > 1 else ()), None]
        of_each = [
            [each.crowd[0] for each in generate_each(crowd, iter(asked), Wanted(decoding, agent=k, stop=stop), size)]
            for k in who
        ]
        of_each = of_each if count > 1 else of_each * 2
        return [[*texts] for texts in zip(*of_each, strict=False)]
