"""The benchmark of worth: its rows, its results file, its table, and the rule that was written before the runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import worth
from benchmarks.crowd_answers import Measured
from benchmarks.worth import (
    BASE,
    BOTH_CROWDS,
    CANDIDATES,
    CHOICES,
    CROWDS,
    SINGLE,
    STEPS,
    Regime,
    Rows,
    Study,
    verdict,
    ways_of,
)
from ci_llm.embedded import BASE_FOLDER
from tests.support.story_rows import write_stories

REGIME = Regime(64, 1)
EQUAL, OWN = (f"{name}: crowd" for name in CROWDS)
CALL = ["worth", "--rows", "8", "--seeds", "1", "--eval-rows", "6"]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stories(tmp_path_factory.mktemp("data") / "stories", 200)


def answers(nll: list[float]) -> Measured:
    """Of rows of two tokens each."""
    return {"right": [1.0] * len(nll), "nll": nll, "tokens": [2] * len(nll), "ece": 0.1, "agents": 1.0}


def line(study: Study, arm: str, regime: Regime, nll: dict[str, list[float]], **other: Any) -> dict[str, Any]:
    """As `Study.run` writes it."""
    own = {"dataset": study.rows.name, "base": study.base.name, "rows": regime.rows, "seed": regime.seed}
    cost = {"agent_steps": 100, "seconds": 200.0, "machine": worth.surroundings()}
    found = {way: answers(each) for way, each in nll.items()}
    settings = study.settings(arm, regime)
    given = {"arm": arm, "settings": settings, "answers": found, "candidates": {}, "test": study._test}
    return own | cost | given | other


def choices(study: Study, rows: int = 64, **other: list[float]) -> dict[str, Any]:
    """The middle candidate of each arm is taken, unless `other` says otherwise."""
    return line(
        study,
        CHOICES,
        Regime(rows, 0).choices,
        {},
        candidates={**{arm: [2.0, 1.0, 3.0] for arm in CANDIDATES}, **other},
    )


def write(study: Study, *lines: dict[str, Any]) -> None:
    study.file.write_text("".join(f"{json.dumps(each)}\n" for each in lines))


@pytest.fixture
def study(stories: Path, tmp_path: Path) -> Study:
    return Study(stories, BASE_FOLDER, tmp_path, tmp_path / "worth.jsonl", 6)


def contents(*files: Path) -> list[str]:
    return [each for file in files for each in file.read_text().splitlines()]


def test_no_row_is_trained_on_and_judged_on(stories: Path, tmp_path: Path) -> None:
    rows = Rows(stories, tmp_path, 6)
    drawn = contents(rows.drawn(64, 1))
    assert len({*drawn}) == 64
    assert len(contents(rows.test)) == 6
    assert len(contents(rows.validation)) == worth.VALIDATION_ROWS
    assert not {*drawn} & {*contents(rows.validation, rows.test)}
    assert drawn == contents(Rows(stories, tmp_path / "again", 6).drawn(64, 1))
    assert {*contents(rows.drawn(64, 2))} != {*drawn}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("crowd", "told"),
    [
        ([1.0, 1.4, 1.2, 1.1], "In NLL 4x steps is beaten by equal: crowd by 0.413 ± 0.0"),
        ([2.0, 2.0, 2.1, 1.8], "No crowd beats 4x steps with its interval above zero"),
        ([9.0, 9.0, 9.0, 9.0], "No crowd beats 4x steps with its interval above zero"),
    ],
    ids=["above zero", "holds zero", "worse"],
)
def test_the_rule_asks_for_an_interval_above_zero(study: Study, crowd: list[float], told: str) -> None:
    write(study, choices(study))
    lines = [line(study, STEPS, REGIME, {SINGLE: [2.0] * 4}), line(study, BOTH_CROWDS, REGIME, {EQUAL: crowd})]
    write(study, choices(study), *lines)
    assert verdict(ways_of(study.lines)).startswith(told)


@pytest.mark.slow
def test_an_arm_is_trained_judged_and_written_once(
    stories: Path,
    narrow_base: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The file names no folder: it can be carried along."""
    monkeypatch.setattr(Regime, "steps", property(lambda self: 2))
    monkeypatch.setattr(worth, "VALIDATION_ROWS", 8)
    base = BASE_FOLDER if narrow_base == "embedded" else narrow_base
    place = ["--dataset", str(stories), "--base", str(base), "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*CALL, *place])
    worth.main()
    shown = capsys.readouterr().out
    file = tmp_path / "worth.jsonl"
    text = file.read_text()
    lines = [json.loads(each) for each in text.splitlines()]
    assert [each["arm"] for each in lines] == [CHOICES, STEPS, BOTH_CROWDS, BASE]
    assert {arm: len(nll) for arm, nll in lines[0]["candidates"].items()} == dict.fromkeys(CANDIDATES, 3)
    ways = {way for each in lines for way in each["answers"]}
    assert ways == {BASE, SINGLE, *(way for name in CROWDS for way in worth.ways_of_crowd(name))}
    assert str(tmp_path) not in text
    assert str(stories) not in text
    assert shown.rstrip().endswith("Not run: nothing.")
    monkeypatch.setattr(Study, "run", lambda *_: pytest.fail("trained again"))
    worth.main()
    assert file.read_text() == text
    assert capsys.readouterr().out.strip() == shown[shown.index("stories on") :].strip()
