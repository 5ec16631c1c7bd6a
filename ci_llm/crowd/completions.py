"""Completions: the texts that agents draw while they train.

A completion is keyed by its agent's seed, the step, the row and its number: on one CPU thread it has the same tokens
alone, in company, and after a resume.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ci_llm.core.memory import unless_out_of_memory
from ci_llm.crowd.asking import ends_of_answers
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoder import decodes
from ci_llm.crowd.generation import written
from ci_llm.crowd.model import CrowdModel
from ci_llm.crowd.next_token import Decoding, Request, TokenIds
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
        tick: called after every token, as a sign of life.

    Attributes:
        most: how many texts are open at a time; fewer where memory ran out.
    """

    crowd: Crowd
    tick: Callable[[], object]
    most: int = field(default=MOST_OPEN)

    def draw(self, asked: Sequence[Asked], objective: Grpo, step: int) -> list[list[Request]]:
        """The completions of every prompt, `num_generations` of them.

        Raises:
            OutOfMemory: a single text does not fit. ModelError: the base does not read packed rows.
        """
        while True:
            requests = [self._requests(one, objective, step) for one in asked]
            waiting = [request for own in requests for request in own]
            with self.crowd.plain(), self.crowd.evaluating():
                work = partial(write, self.crowd, waiting, self.most, stop=lambda: bool(self.tick()))
                _, complaint = unless_out_of_memory(work)
            if complaint is None:
                return requests
            if self.most == 1:
                raise OutOfMemory(
                    f"a single completion does not fit: {complaint}",
                    where=f"step {step + 1}",
                    hint="max_completion_length=N, a smaller base, or a machine with more memory",
                )
            self.most = max(1, min(self.most, len(waiting)) // 2)
            logger.warning(f"memory    completions do not fit ({complaint}): {self.most} at a time from now on")

    def _requests(self, one: Asked, objective: Grpo, step: int) -> list[Request]:
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
    """Write the texts of all requests, of which so many are open at a time, until `stop`, asked after every token.

    Raises:
        ModelError: the base does not read packed rows.
    """
    if not decodes(crowd):
        raise unusable_base(crowd.model, crowd.base_name, "does not read packed rows, in which completions are drawn")
    groups = ([request] for request in requests)
    for _ in written(crowd, groups, 1, max(1, min(most, len(requests))), stop):
        pass
