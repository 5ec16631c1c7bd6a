"""Completions that agents draw, each for itself, while they train.

The decoder writes those of all agents together. A completion is keyed by its agent's seed, the step, the row and its
number: on one CPU thread it has the same tokens alone, in company, and after a resume.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoder import Decoder, decodes
from ci_llm.crowd.decoding import Decoding, Request, TokenIds, ends_of_base
from ci_llm.errors import OutOfMemory
from ci_llm.lora.passes import unusable_base
from ci_llm.objectives.grpo import Grpo

logger = logging.getLogger(__name__)

#: Texts that are open at a time, unless memory holds fewer: each has keys and values of its own.
MOST_OPEN = 512


@dataclass(frozen=True)
class Asked:
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
        tick: called before every token, as a sign of life.

    Attributes:
        most: how many texts are open at a time; fewer where memory ran out.
    """

    crowd: Crowd
    tick: Callable[[], object]
    most: int = field(default=MOST_OPEN)

    def draw(self, asked: Sequence[Asked], objective: Grpo, step: int, *, greedy: bool = False) -> list[list[Request]]:
        """The completions of every prompt, `num_generations` of them, or only the most probable one.

        Raises:
            OutOfMemory: a single text does not fit. ModelError: the base does not read packed rows.
        """
        while True:
            requests = [[*self._requests(one, objective, step, greedy=greedy)] for one in asked]
            with self.crowd.plain(), self.crowd.evaluating():
                _, complaint = unless_out_of_memory(partial(self._write, requests))
            if complaint is None:
                return requests
            if self.most == 1:
                raise OutOfMemory(
                    f"a single completion does not fit: {complaint}",
                    where=f"step {step + 1}",
                    hint="max_completion_length=N, a smaller base, or a machine with more memory",
                )
            self.most = max(1, min(self.most, sum(map(len, requests))) // 2)
            logger.warning(f"memory    completions do not fit ({complaint}): {self.most} at a time from now on")

    def _requests(self, one: Asked, objective: Grpo, step: int, *, greedy: bool) -> list[Request]:
        crowd, (_, temperature) = self.crowd, objective.of_agent(one.agent)
        assert crowd.prompter is not None
        own = crowd.agents[one.agent].settings
        how = Decoding(
            max_new_tokens=objective.max_completion_length,
            ends=crowd.prompter.ends | ends_of_base(crowd.model),
            do_sample=not greedy,
            temperature=temperature,
            top_p=objective.top_p,
            top_k=objective.top_k or None,
            min_p=objective.min_p or 0.0,
            seed=own.seed,
        )
        numbers = range(1 if greedy else objective.num_generations)
        return [Request(one.prompt, how, one.agent, ("grpo", own.index, step, one.row, n)) for n in numbers]

    def _write(self, groups: Sequence[Sequence[Request]]) -> None:
        crowd = self.crowd
        if crowd.decodes is None:
            crowd.decodes = decodes(crowd)
        if not crowd.decodes:
            raise unusable_base(
                crowd.model, crowd.base_name, "does not read packed rows, in which completions are drawn"
            )
        waiting = deque(request for group in groups for request in group)
        decoder = Decoder(crowd, max(1, min(self.most, len(waiting))))
        while waiting or decoder.open:
            self.tick()
            decoder.admit([waiting.popleft() for _ in range(min(decoder.free, len(waiting)))])
            decoder.step()
