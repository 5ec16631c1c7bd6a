"""The ways of making one adapter of K: their names, what each does, and what a call may ask for.

A merge works on the agents' products B A, or on their factors A and B. Agents with random starts lie in different
subspaces: there the mean of their factors is meaningless, and only the products can be combined. This file loads no
torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ci_llm.errors import BadInput


@dataclass(frozen=True)
class Method:
    """A way to merge.

    Attributes:
        peft: PEFT's `combination_type`.
        does: what comes out, in a line.
        cut: whether the result is brought to a rank by SVD; otherwise its rank follows from the agents'.
        of_factors: whether A and B are combined separately.
    """

    peft: str
    does: str
    cut: bool = False
    of_factors: bool = False


METHODS: Final[Mapping[str, Method]] = {
    "cat": Method("cat", "the mean of the agents' products B A, exactly; its rank is the sum of theirs"),
    "svd": Method("cat", "the mean of the products, cut to the rank of the agents by SVD", cut=True),
    "mean": Method("linear", "mean of A and mean of B, for agents with a common start", of_factors=True),
}
#: Names that people know from PEFT and from papers.
ALIASES: Final[Mapping[str, str]] = {
    "soup": "mean",
    "linear": "mean",
}
#: What PEFT makes of exported agents, and this program does not.
_OF_PEFT: Final = ("ties", "dare", "magnitude_prune")


@dataclass(frozen=True)
class Merge:
    """A merge as it was asked for.

    Attributes:
        weights: one per agent, in any unit; None: all alike.
        rank: the rank of the result; None: that of the agents.
    """

    name: str
    weights: tuple[float, ...] | None = None
    rank: int | None = None

    @property
    def method(self) -> Method:
        return METHODS[self.name]

    def shares(self, num_agents: int) -> list[float]:
        """The agents' weights, with the sum 1.

        Raises:
            BadInput: there are not as many weights as agents.
        """
        weights = self.weights or (1.0,) * num_agents
        if len(weights) != num_agents:
            raise BadInput(
                f"{len(weights)} weights for {num_agents} agents", where="--weights", hint="give one weight per agent"
            )
        return [weight / sum(weights) for weight in weights]

    def peft_weights(self, num_agents: int) -> list[float]:
        """The weights with which PEFT gives this merge.

        PEFT puts the root of a weight on each factor, so it is squared here.
        """
        shares = self.shares(num_agents)
        return [share**2 for share in shares] if self.method.of_factors else shares


#: The merge that trains: see `ci_llm.crowd.distilling`.
DISTILLED: Final = "distilled"
DISTILLED_DOES: Final = "one agent trained on the crowd's distributions; beside it a control trained on its own labels"


@dataclass(frozen=True)
class Distillation:
    """How one agent learns from the crowd.

    Attributes:
        prompts: a file of prompts without answers; None: prompts of the embedded generator for a run on its stories,
            and no prompts for any other run.
        generated: so many of the embedded generator.
        steps: optimizer steps, each on the run's `batch_size` rows.
        temperature: the temperature of both distributions, crowd's and agent's, while they are compared.
        soft: weight of the crowd's distributions; the rest is that of the texts.
        learning_rate: at its peak; None: a quarter of the run's.
        start: the agent that it begins as; None: the one that a calibration found best, or the first.
    """

    prompts: Path | None = None
    generated: int = 800
    steps: int = 120
    temperature: float = 1.0
    soft: float = 1.0
    learning_rate: float | None = None
    start: int | None = None

    def __post_init__(self) -> None:
        wrong = {
            "--steps must be at least 1": self.steps < 1,
            "--distill-temperature must be above 0": not self.temperature > 0,
            "--soft is a share, from 0 to 1": not 0 <= self.soft <= 1,
            "--distill-rate must be above 0": self.learning_rate is not None and not self.learning_rate > 0,
        }
        if problems := [text for text, holds in wrong.items() if holds]:
            raise BadInput("; ".join(problems), where=f"--merge {DISTILLED}", hint="ci-llm export --help")


def merge_of(name: str, weights: Sequence[float] | None = None, rank: int | None = None) -> Merge:
    """The merge that a call asks for.

    Raises:
        BadInput: all that is wrong with it, in one message.
    """
    from ci_llm.config.parsing import nearest  # it loads the schema, which --help does without

    known = ALIASES.get(name, name)
    if known not in METHODS:
        close = nearest(name, [*METHODS, *ALIASES, DISTILLED])
        hint = f"{f'did you mean {close}? ' if close else ''}one of: {', '.join([*METHODS, DISTILLED])}"
        if name.startswith(_OF_PEFT):
            hint = f"{hint}; PEFT makes it of exported agents, as docs/commands.md shows"
        raise BadInput(f"there is no merge {name!r}", where="--merge", hint=hint)
    wrong = []
    if weights is not None and not (all(0 <= w < math.inf for w in weights) and 0 < sum(weights) < math.inf):
        wrong.append("--weights: each must be a number of at least 0, and one above 0")
    if rank is not None and not METHODS[known].cut:
        wrong.append(f"--rank: the rank of {known} follows from the agents'; svd cuts it")
    elif rank is not None and rank < 1:
        wrong.append(f"--rank {rank}: it must be at least 1")
    if wrong:
        raise BadInput("; ".join(wrong), where=f"--merge {name}", hint="ci-llm export --help")
    return Merge(known, tuple(weights) if weights else None, rank)
