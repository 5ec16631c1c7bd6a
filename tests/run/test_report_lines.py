"""The lines that stay on the terminal: where rows are from, an evaluation, a solved example; how one is left early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ci_llm.config import Config
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import tokenize
from ci_llm.distributed.ballot import Ballot, Verdict
from ci_llm.distributed.processes import OneProcess
from ci_llm.embedded import BASE_FOLDER
from ci_llm.evaluation.evaluator import Rounds
from ci_llm.run.start.loading import describe_rows
from tests.support.log_lines import log_lines


@pytest.mark.parametrize(
    ("keys", "choice"),
    [
        ({"early_stopping_patience": 3}, "the best step"),
        ({"load_best_model_at_end": True}, "the best step"),
        ({"early_stopping_patience": 3, "val_set_size": 9}, None),
        ({"early_stopping_patience": 3, "dataset_split": "test", "val_set_size": 9}, None),
        ({}, None),
    ],
)
def test_the_log_warns_where_something_is_chosen_by_test_rows(
    keys: dict[str, Any], choice: str | None, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER)
    config = Config(eval_samples=9, **keys)
    evaluated = tokenize(load_rows(config, "eval"), tokenizer, max_seq_length=500, cache_folder=tmp_path)
    with log_lines() as lines:
        describe_rows(config, [], EvaluationRows.of([evaluated]))
    said = [line for line in lines if "chosen" in line]
    assert [line.split(";")[0] for line in said] == (
        [f"data      {choice} is chosen on the rows of split test"] if choice else []
    )


@pytest.mark.parametrize("asked", [{"stop": "signal:SIGTERM"}, {"out_of_memory": True}, {"failed": True}])
def test_all_leave_an_evaluation_whose_last_batches_were_asked_for_early(asked: dict[str, Any]) -> None:
    """Texts are written side by side: every prompt is taken before the first answer is done."""
    wanted: dict[str, Any] = {}
    rounds = Rounds(OneProcess(), lambda: wanted.get("stop"), count=5, batch_size=2)
    assert [len(batch) for batch in rounds.batches] == [2, 2, 1]
    wanted |= asked
    assert rounds.end(Ballot(0, **asked)) == Verdict(0, **asked)
