"""What TensorBoard shows of a run: agents and crowd in one chart, Trainer's names, one curve over attempts."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ci_llm.core.measures import measures_of
from ci_llm.core.run_folder import METRICS_NAME
from ci_llm.logs.run_log import RunLog
from ci_llm.logs.trackers import layout
from tests.logs.test_run_log import make_accelerator

AGENTS = 3
STEPS = (10, 20, 30)
EVALUATION = {f"eval/{who}/nll": 0.5 for who in ("agent0", "agent1", "agent2", "crowd")}


def training(step: int) -> dict[str, Any]:
    """A line of metrics about training."""
    losses = {f"train/agent{k}/loss": 1.0 + k for k in range(AGENTS)}
    norms = {f"train/agent{k}/grad_norm": 10.0 * k for k in range(AGENTS)}
    return {"epoch": step / 10, "train/learning_rate": 0.1, "train/task_loss": 2.0, **losses, **norms}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has logged three lines and its final evaluation."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    folder.mkdir()
    log = RunLog(folder, terminal=io.StringIO())
    log.open(1)
    log.start_trackers(make_accelerator(), ("tensorboard",), hyperparameters={"num_agents": 3})
    for step in STEPS:
        log.metrics(step, training(step))
    log.track(30, EVALUATION | {"final/crowd/exact_match": 0.75, "final/vote/exact_match": 0.5})
    log.close()
    return folder


@pytest.fixture(scope="module")
def events(run: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    return accumulator


def points(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


@pytest.mark.parametrize(
    ("theirs", "values"),
    [
        ("train/loss", [2.0, 2.0, 2.0]),
        ("train/grad_norm", [10.0, 10.0, 10.0]),
        ("train/epoch", [1.0, 2.0, 3.0]),
        ("train/learning_rate", pytest.approx([0.1] * 3)),
    ],
)
def test_the_names_of_trainer_stand_beside_ours(theirs: str, values: list[float], events: EventAccumulator) -> None:
    assert [value for _, value in points(events, theirs)] == values
    assert [step for step, _ in points(events, theirs)] == [*STEPS]


def test_in_the_folder_our_names_stand_alone(run: Path) -> None:
    lines = [json.loads(line) for line in (run / METRICS_NAME).read_text().splitlines()]
    assert len(lines) == len(STEPS)
    assert not {"train/loss", "train/grad_norm", "train/epoch", "eval/loss"} & set(lines[0])


def test_charts_are_those_of_the_objective() -> None:
    held_out = "the crowd and its agents, on rows held out"
    assert {*layout(measures_of("classification"))[held_out]} == {
        *("nats per row", "accuracy", "F1, mean over classes", "AUROC", "calibration error")
    }
    pairs = layout(measures_of("dpo"))[held_out]
    assert {*pairs} == {"nll", "exact match", "pairs ranked right", "margin of the rewards"}
    assert pairs["pairs ranked right"][1][1] == "eval/crowd/rewards/accuracies$"


def test_all_agents_and_the_crowd_are_in_one_chart(events: EventAccumulator) -> None:
    assert "custom_scalars__config__" in events.Tags()["tensors"]
    charts = {title: chart[1] for group in layout(measures_of("sft")).values() for title, chart in group.items()}
    assert {*charts} == {"loss", "gradient norm", "nll", "exact match"}
    drawn = {
        title: {tag for tag in events.Tags()["scalars"] if any(re.match(pattern, tag) for pattern in patterns)}
        for title, patterns in charts.items()
    }
    agents = [f"agent{k}" for k in range(AGENTS)]
    assert drawn["loss"] == {*(f"train/{agent}/loss" for agent in agents), "train/task_loss"}
    assert drawn["gradient norm"] == {f"train/{agent}/grad_norm" for agent in agents}
    assert drawn["nll"] == {f"eval/{who}/nll" for who in (*agents, "crowd")}
