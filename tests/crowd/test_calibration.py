"""Calibration: fits whose optimum is known, and what is kept of it with a crowd."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ci_llm import Crowd
from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.core.durable import write_json
from ci_llm.crowd.answering import Answer
from ci_llm.crowd.exporting import prepare
from ci_llm.crowd.pretrained import weights_fingerprint
from ci_llm.crowd.uncertainty import Calibration, Logistic, fit, fit_temperature, signals
from ci_llm.embedded import rows
from tests.support.crowds import save_crowd

QUESTIONS: list[Any] = [row["question"] for row in rows("test")[:6]]
SHORT: Any = {"max_new_tokens": 24}


@pytest.fixture(scope="module")
def plain(crowd: Crowd) -> list[Answer]:
    return crowd.generate(QUESTIONS, details=True, **SHORT)


def calibration_of(answers: list[Answer], **changes: Any) -> Calibration:
    """A calibration in which every second answer was right, and agent 1 is the best."""
    found = [signals(answer.tokens) for answer in answers]
    right = [number % 2 == 0 for number in range(len(found))]
    agents = [[False] * len(found), right, [False] * len(found)]
    about = {"aggregator": "probability", "rows": len(found), "data": "here"}
    made = fit(found, right, agents, **about)
    assert made.agent == 1
    return replace(made, **changes)


# Fits


def test_the_logistic_fit_is_at_its_optimum() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(3, 2, (400, 2))
    right = generator.random(400) < 1 / (1 + np.exp(-(x[:, 0] - x[:, 1])))
    found = Logistic.fit(x.tolist(), right.tolist())
    assert found.coefficients == pytest.approx((1, -1), abs=0.25)

    def loss(coefficients: tuple[float, ...], intercept: float) -> float:
        model = Logistic(coefficients, intercept)
        goals = np.where(right, (right.sum() + 1) / (right.sum() + 2), 1 / ((~right).sum() + 2))
        p = np.array([model(row) for row in x.tolist()])
        penalty = sum((c * s) ** 2 for c, s in zip(coefficients, x.std(0), strict=True)) / 2
        return float(-(goals * np.log(p) + (1 - goals) * np.log(1 - p)).sum() + penalty)

    best = loss(found.coefficients, found.intercept)
    for step in ((1e-3, 0, 0), (-1e-3, 0, 0), (0, 1e-3, 0), (0, -1e-3, 0), (0, 0, 1e-3), (0, 0, -1e-3)):
        a, b, c = step
        assert loss((found.coefficients[0] + a, found.coefficients[1] + b), found.intercept + c) > best


@pytest.mark.parametrize("wanted", [0.2, 1.0, 3.0])
def test_the_fitted_temperature_of_classes_has_the_lowest_nll(wanted: float) -> None:
    draw = torch.Generator().manual_seed(4)
    logits = 2 * torch.randn(4000, 5, generator=draw, dtype=torch.float64)
    labels = logits.softmax(-1).multinomial(1, generator=draw).flatten()
    log_probs = (wanted * logits).log_softmax(-1)
    found = fit_temperature(log_probs, labels)
    assert found == pytest.approx(wanted, rel=0.1)

    def nats(temperature: float) -> float:
        return float(-(log_probs / temperature).log_softmax(-1)[range(4000), labels].sum())

    assert nats(found) < min(nats(1.001 * found), nats(found / 1.001))
    assert fit_temperature(log_probs[:9], log_probs[:9].argmax(-1)) == pytest.approx(1 / 16), "all are right"


# How it is kept


@pytest.mark.slow
def test_a_calibration_is_saved_opened_and_exported_with_its_agents(
    crowd: Crowd, plain: list[Answer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_crowd(crowd, tmp_path / "run" / "final_checkpoint")
    made = calibration_of(plain, weights=weights_fingerprint(read_manifest(folder)))
    write_json(tmp_path / "run" / "calibration.json", made.record())
    opened = Crowd.from_pretrained(tmp_path / "run")
    assert opened.calibration == made
    opened.save_pretrained(tmp_path / "copy")
    assert Crowd.from_pretrained(tmp_path / "copy").calibration == made
    prepare(tmp_path / "run").write(tmp_path / "export", None)
    assert Crowd.from_pretrained(tmp_path / "export").calibration == made
    assert "after 6 rows of here" in (tmp_path / "export" / "README.md").read_text()
    write_json(tmp_path / "run" / "calibration.json", replace(made, weights="others").record())
    assert Crowd.from_pretrained(tmp_path / "run").calibration is None
    assert "it is of other agents" in caplog.text
    (tmp_path / "run" / "calibration.json").write_text("{}")
    assert Crowd.from_pretrained(tmp_path / "run").calibration is None
    assert "it is not a calibration" in caplog.text
