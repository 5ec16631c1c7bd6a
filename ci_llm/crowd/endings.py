"""What ends a text that is being generated, beside its end token: a request for all texts, or what one of them says.

Legend: K agents, R rows per agent, of which the last are the crowd's, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria


class StopOnRequest(StoppingCriteria):  # type: ignore[misc]
    """Ends every row as soon as `stop` returns True."""

    def __init__(self, stop: Callable[[], bool]) -> None:
        self._stop = stop

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return torch.full((len(input_ids),), self._stop(), dtype=torch.bool, device=input_ids.device)


class EndWhenOver(StoppingCriteria):  # type: ignore[misc]
    """Ends every text that `is_over` says is over, and remembers how long it was.

    Args:
        num_agents: K.
        first: number of rows per agent that are the agent's own; a row behind them is the crowd's, and the same
            under every agent.
        width: tokens of a prompt with its padding.
        ends: token ids that end a text.
        is_over: called with the new tokens of each text that has not ended, after each token.
    """

    def __init__(
        self, num_agents: int, first: int, width: int, ends: frozenset[int], is_over: Callable[[Sequence[int]], bool]
    ) -> None:
        self._num_agents, self._first, self._width, self._ends, self._is_over = num_agents, first, width, ends, is_over
        self._lengths: dict[tuple[int, int], int] = {}  # by agent and row

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        new = input_ids[:, self._width :].unflatten(0, (self._num_agents, -1)).tolist()
        over = [
            [self._has_ended(k, row, tokens) for row, tokens in enumerate(agent[: self._first])]
            for k, agent in enumerate(new)
        ]
        # The crowd's rows are the same under every agent: `is_over` may decode a text, so it is asked once.
        crowd = [self._has_ended(0, row, tokens) for row, tokens in enumerate(new[0][self._first :], self._first)]
        return torch.tensor([own + crowd for own in over], device=input_ids.device).flatten()

    def cut(self, agent: int, row: int, tokens: list[int]) -> list[int]:
        """A text up to the token with which it was over; all of it, if it never was."""
        return tokens[: self._lengths.get(self._key(agent, row))]

    def _has_ended(self, agent: int, row: int, tokens: list[int]) -> bool:
        key = self._key(agent, row)
        if key not in self._lengths and (tokens[-1] in self._ends or self._is_over(tokens)):
            self._lengths[key] = len(tokens)
        return key in self._lengths

    def _key(self, agent: int, row: int) -> tuple[int, int]:
        return (0 if row >= self._first else agent), row
