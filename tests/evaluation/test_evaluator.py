"""The evaluator on one process: what it ranks, smaller batches where memory runs out, and its record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ci_llm.config import Config
from ci_llm.crowd import scoring
from ci_llm.crowd.judging import rank
from ci_llm.crowd.objective import objective_of
from ci_llm.data.agent_rows import EvaluationRows
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import tokenize
from ci_llm.distributed.processes import OneProcess
from ci_llm.errors import OutOfMemory
from ci_llm.evaluation import evaluator
from ci_llm.evaluation.evaluator import Evaluator
from tests.support.crowds import K, disturbed_crowd

ROWS = 6


@pytest.fixture
def made(tmp_path: Path) -> Evaluator:
    """Of agents that were trained by dpo, on six pairs."""
    rows = [{"prompt": f"{n} + 1?\n", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(ROWS)]
    for split in ("train", "validation"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(dataset_name=str(tmp_path), num_agents=K, objective="dpo")
    crowd = disturbed_crowd("text")
    how: Any = {"max_seq_length": 64, "cache_folder": tmp_path / "cache", "evaluated": True}
    answers = tokenize(load_rows(config, "eval"), crowd.prompter.tokenizer, **how)
    pairs = tokenize(load_rows(config, "preferences"), crowd.prompter.tokenizer, **how)
    common, objective = EvaluationRows.of([answers] * K), objective_of(config, crowd)
    return Evaluator(config, crowd, common, objective, [pairs] * K, OneProcess(), lambda _, told: OutOfMemory(told))


def test_agents_are_ranked_once_and_the_base_is_not(made: Evaluator, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = []

    def counted(*given: Any, **how: Any) -> Any:
        ranked.append(given)
        return rank(*given, **how)

    monkeypatch.setattr(evaluator, "rank", counted)
    scores = made.scores(0, 2)
    assert scores is not None
    assert scores.units is not None
    base = made.base(0, 2, answers=False)
    assert base is not None
    assert base.nll not in scores.mean_nll
    assert len(ranked) == 1
    record = made.evaluation(scores, None, step=0, base=base)
    assert (record.n, record.base, record.best_agent) == (ROWS, base, None)
    assert record.preferences is not None
    assert record.preferences.n == ROWS


def test_a_batch_that_does_not_fit_is_scored_in_halves_and_the_next_ones_too(
    made: Evaluator, monkeypatch: pytest.MonkeyPatch
) -> None:
    ample = made.scores(0, 2)
    sizes: list[int] = []
    original = scoring._score_batch

    def limited(crowd: Any, batch: Any, aggregator: str) -> Any:
        sizes.append(batch.num_rows)
        if batch.num_rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(crowd, batch, aggregator)

    monkeypatch.setattr(scoring, "_score_batch", limited)
    most = 2
    short = made.scores(0, 2)
    assert ample is not None
    assert short is not None
    assert short.mean_nll == pytest.approx(ample.mean_nll)
    assert (sizes, made.at_most) == ([6, 3, 1, 1, 1, 1, 1, 1], 1)
    most = 0
    with pytest.raises(OutOfMemory, match="Tried to allocate"):
        made.scores(0, 2)
    assert sizes[8:] == [1]
