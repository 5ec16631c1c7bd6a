"""What is counted in the rows before a run begins: its optimizer steps, and the rows of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from ci_llm.config import Config
from ci_llm.data.tokens import TokenizedRows

#: Rows of an evaluation at least, whatever it costs: fewer tell nothing.
LEAST: Final = 50
#: Training reads at least this many times what all evaluations read together.
RATIO: Final = 3


def steps_of(config: Config, num_rows: Sequence[int], rows_per_step: int) -> int:
    """The length of a run. Epochs are those of the agent with the most rows: all take their steps together.

    It is that of a crowd that does not branch; `Members.total_steps` has the other.

    Args:
        num_rows: of every agent that has its own, or of all.
        rows_per_step: of all agents, or of each; those of step 1 for good.
    """
    steps_per_epoch = max(-(-number // rows_per_step) for number in num_rows)
    # Rounded before it is rounded up: 0.1 x 30 is a little more than 3, and must not make a fourth step.
    by_epochs = math.ceil(round(config.epochs * steps_per_epoch, 6))
    return config.max_train_steps or max(1, by_epochs)


def _evaluations(config: Config, steps: int) -> int:
    return -(-steps // config.eval_steps) if config.eval_steps else 1


def eval_samples_of(config: Config, num_rows: Sequence[int], rows_per_step: int) -> int:
    """Rows of an evaluation, if all rows are of one length; for the arguments see `steps_of`."""
    steps = steps_of(config, num_rows, rows_per_step)
    read = steps * max(num_rows) // -(-max(num_rows) // rows_per_step)  # the last step of an epoch may be short
    return max(LEAST, read // (RATIO * _evaluations(config, steps)))


def tokens_of_evaluation(config: Config, each: Sequence[TokenizedRows], rows_per_step: int) -> int:
    """Tokens that an evaluation may read; those that training reads are the mean of the agents.

    Args:
        each: the training rows of every agent.
    """
    steps = steps_of(config, [len(own) for own in each], rows_per_step)
    read = sum(steps / -(-len(own) // rows_per_step) * own.num_tokens for own in each) / len(each)
    return int(read) // (RATIO * _evaluations(config, steps))


def num_tokens(each: Sequence[TokenizedRows]) -> int:
    """Tokens of all data sets."""
    return sum(rows.num_tokens for rows in {id(rows): rows for rows in each}.values())
