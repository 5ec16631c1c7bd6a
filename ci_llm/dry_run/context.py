"""The context that the checks of a dry run share: configuration, results of earlier checks, a scratch folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from transformers import PreTrainedConfig

from ci_llm.cluster.launch import Launch
from ci_llm.config import Config
from ci_llm.data.agent_rows import Lengths
from ci_llm.data.rows import Rows
from ci_llm.data.tokens import TokenizedRows
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts
from ci_llm.run.attempt import Attempt
from ci_llm.run.start.cost_model import Trace
from ci_llm.run.trainer import Trainer

TOY_STEPS = 2
TOY_ROWS_ON_CPU = 16  # on a CPU the real number would fit, but take long
TOY_EVAL_ROWS = 4


#: Tokens of a row where neither rows nor configuration say how many there are.
UNSEEN: Final = 512


@dataclass
class CheckContext:
    """The values that checks leave to later checks.

    An attribute without a default exists once the check that sets it has passed; checks that read it need that check.

    Attributes:
        tokens_per_s: tokens of training per second, all processes together; measured, as those that follow.
        checkpoint_bytes: the size of one checkpoint.
        row_evaluated_s: seconds per row of an evaluation.
        token_generated_s: seconds per token of the answers that are written at once, in the evaluation at the end.
    """

    config: Config
    launch: Launch
    interrupts: Interrupts
    scratch: Path = field(init=False)  # disk; on all processes: accelerate
    processes: Processes = field(init=False)  # port
    shape: PreTrainedConfig = field(init=False)  # architecture
    rows: Sequence[Rows] = ()  # of every agent; data
    eval_rows: Sequence[Rows] = field(init=False)  # of every agent; data
    examples: Sequence[TokenizedRows] = ()  # of every agent; template
    eval_examples: Sequence[TokenizedRows] = ()  # of every agent; template
    lengths: Lengths = field(init=False)  # measured once template has passed
    trace: Trace | None = None  # estimate, where the family can be traced
    trainer: Trainer = field(init=False)  # model
    attempt: Attempt = field(init=False)  # model
    tokens_per_s: float | None = None  # two steps
    checkpoint_bytes: int | None = None  # checkpoint
    row_evaluated_s: float = 0.0  # conclusion, as the next
    token_generated_s: float = 0.0
    at_end: ExitStack = field(default_factory=ExitStack)
    program_bytes: int = field(default_factory=lambda: int(psutil.Process().memory_info().rss))

    def __post_init__(self) -> None:
        longest = UNSEEN if self.config.is_open("max_seq_length") else self.config.max_seq_length
        self.lengths = Lengths(longest, 0.0, longest, learned=0.5, sampled=False)

    def settle(self, values: Mapping[str, Any]) -> None:
        """Put values in place of keys that say auto, as the run will."""
        self.config = self.config.model_copy(update=values)

    @property
    def rows_per_step(self) -> int:
        """The effective batch of the real run."""
        return self.config.rows_per_step(self.launch.num_processes)

    @property
    def num_rows(self) -> list[int]:
        """Rows to train on: of all agents, or of each that has its own.

        Rows that are left out later count. A text counts as its blocks, by the mean of the texts that were tokenised.
        """
        found = [len(rows) for rows in self.rows]
        for number, seen in enumerate(self.examples):
            found[number] = found[number] * max(len(seen), len(seen.rows)) // len(seen.rows)
        return found if self.config.has_own_rows else found[:1]

    @property
    def num_eval_rows(self) -> int:
        """Rows of an evaluation."""
        return sum(len(rows) for rows in {id(rows): rows for rows in self.eval_rows}.values())

    @property
    def micro_batch(self) -> int:
        """Rows that the real run computes at once on each process."""
        return min(self.config.batch_size, -(-self.rows_per_step // self.processes.num_processes))

    @property
    def longest_tokens(self) -> int:
        """Tokens per row to expect in the longest micro-batch."""
        return self.lengths.longest_in_batch(self.micro_batch)

    @property
    def toy_batch(self) -> int:
        """Rows of a micro-batch in the toy run."""
        on_cpu = self.processes.device.type == "cpu"
        return min(self.micro_batch, TOY_ROWS_ON_CPU) if on_cpu else self.micro_batch

    def toy_config(self) -> Config:
        """The configuration at toy size: few steps of one micro-batch, in the scratch folder."""
        toy: dict[str, object] = {
            "output_dir": str(self.scratch / "run"),
            "experiment_name": None,
            "max_train_steps": TOY_STEPS + 2,
            "batch_size": self.toy_batch,
            "global_batch_size": None,
            "gradient_accumulation_steps": 1,
            "num_workers": min(1, self.config.num_workers),
            "generation_eval_samples": min(TOY_EVAL_ROWS, self.config.generation_eval_samples),
            "max_new_tokens_eval": 8,
            "eval_steps": None,
            "logging_steps": 1,
            "report_to": (),
            "save_steps": None,
            "save_interval_seconds": None,
            "resume_from_checkpoint": "latest",
            "restart_from": None,
            "overwrite_output_dir": False,
            "mirror": None,
            "push_to_hub": False,
        }
        return self.config.model_copy(update=toy)
