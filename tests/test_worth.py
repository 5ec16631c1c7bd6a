"""The benchmark of worth: its rows, its results file, its table, and the rule that was written before the runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import worth
from benchmarks.crowd_answers import Measured
from benchmarks.worth import ARMS, BASE, FIRST, TUNING, UNTUNED, Regime, Rows, Study, page, planned, verdict, ways_of
from ci_llm.embedded import BASE_FOLDER
from tests.support.story_rows import write_stories

EQUAL, BOOTSTRAP, STEPS, SWEEP = FIRST
REGIME = Regime(64, 1)
CALL = ["worth", "--rows", "8", "--seeds", "1", "--eval-rows", "6"]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stories(tmp_path_factory.mktemp("data") / "stories", 200)


def answers(nll: list[float]) -> Measured:
    """Of rows of two tokens each."""
    return {"right": [1.0] * len(nll), "nll": nll, "tokens": [2] * len(nll), "ece": 0.1, "agents": 1.0}


def line(study: Study, arm: worth.Arm, regime: Regime, nll: dict[str, list[float]], **other: Any) -> dict[str, Any]:
    """As `Study.run` writes it."""
    settings = arm.keys(regime, study.rates)
    own = {"dataset": study.rows.name, "base": study.base.name, "rows": regime.rows, "seed": regime.seed}
    cost = {"agent_steps": 100, "seconds": 200.0, "machine": worth.surroundings()}
    found = {way: answers(each) for way, each in nll.items()}
    given = {"arm": arm.name, "settings": settings, "answers": found, "rates": {}, "test": study._test}
    return own | cost | given | other


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
    parts = contents(*(rows.part(64, 1, number) for number in range(worth.K)))
    assert sorted(parts) == sorted(drawn)


def test_arms_of_one_regime_take_the_same_agent_steps() -> None:
    taken = {arm.name: worth.agent_steps(arm, REGIME) for arm in ARMS}
    assert {taken[arm.name] for arm in FIRST} == {worth.K * REGIME.steps}
    for arm in FIRST:
        keys = arm.keys(REGIME, UNTUNED)
        assert int(keys["num_agents"]) * int(keys["max_train_steps"]) == taken[arm.name]
    assert "learning_rate" not in next(arm for arm in ARMS if arm.name == "IVON").keys(REGIME, UNTUNED)


def test_the_first_arms_come_first_in_all_regimes() -> None:
    regimes = [Regime(64, 1), Regime(64, 2)]
    order = planned(regimes, [arm.name for arm in ARMS])
    assert [arm for arm, _ in order[:3]] == [BASE, *TUNING.values()]
    assert [arm for arm, _ in order[3:11]] == [*FIRST, *FIRST]
    assert [regime.seed for _, regime in order[3:11]] == [1] * 4 + [2] * 4


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
    write(
        study,
        line(study, STEPS, REGIME, {"4x steps": [2.0, 2.0, 2.0, 2.0]}),
        line(study, EQUAL, REGIME, {"equal: crowd": crowd}),
    )
    assert verdict(ways_of(study.lines)).startswith(told)


def test_pairs_are_of_the_same_seed_and_row(study: Study) -> None:
    """Seeds differ by ten nats, rows by one: the gain over the same seed is even."""
    lines = [line(study, STEPS, Regime(64, seed), {"4x steps": [10.0 * seed, 10.0 * seed + 1]}) for seed in (1, 2, 4)]
    lines += [line(study, EQUAL, Regime(64, 2), {"equal: crowd": [19.0, 20.0]})]
    write(study, *lines)
    ways = ways_of(study.lines)
    assert ways["equal: crowd"].gain_over(ways["4x steps"]) == pytest.approx((0.5, 0.0))


def test_the_page_has_the_rule_the_table_and_the_missing_arms(study: Study) -> None:
    write(
        study,
        line(study, STEPS, REGIME, {"4x steps": [2.0, 2.0]}),
        line(study, EQUAL, REGIME, {"equal: crowd": [1.0, 1.0]}),
    )
    text = page(study, [REGIME, Regime(256, 1)])
    assert worth.RULE in text
    assert "of a first look" in text
    assert "| equal: crowd | 1 | 1.000 | 0.5000 | +0.5000 ± 0.0000 |" in text
    last = text.splitlines()[-1]
    assert last.startswith(
        "Not run: base, rates, long rates, bootstrap (64 rows, seed 1), sweep's rates (64 rows, seed 1)"
    )
    assert "equal (256 rows, seed 1)" in last
    assert "equal (64 rows" not in last


def test_a_line_counts_only_with_the_settings_of_today(study: Study) -> None:
    """Once the rates are chosen, an arm with another one is to do again."""
    equal = line(study, EQUAL, REGIME, {"equal: crowd": [1.0, 1.0]})
    write(study, equal)
    assert study.done(EQUAL, REGIME)
    assert not study.done(EQUAL, Regime(64, 2))
    every = [equal, line(study, TUNING["long"], Regime(256, 7), {}, rates={"long": "1e-3"})]
    write(study, *every)
    assert study.rates == {**UNTUNED, "long": "1e-3"}
    assert study.done(EQUAL, REGIME)  # which takes the other rate
    write(study, *every, line(study, TUNING["short"], Regime(256, 7), {}, rates={"short": "4e-3"}))
    assert study.rates == {"short": "4e-3", "long": "1e-3"}
    assert not study.done(EQUAL, REGIME)


def test_a_rate_is_chosen_by_the_best_evaluation_of_each(study: Study, monkeypatch: pytest.MonkeyPatch) -> None:
    place = study.file.parent / "run"
    place.mkdir()
    best = [{"step": 4, "value": value} for value in (0.9, 0.7, 0.8, 1.0)]
    (place / "evaluation.json").write_text(json.dumps({"best": {"agents": best}}))
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(Study, "_trained", lambda self, arm, regime, keys: seen.append(keys) or place / "final")
    assert study._choose(TUNING["long"], Regime(256, 7)) == {"long": worth.RATES[1]}
    assert (seen[0]["max_train_steps"], seen[0]["eval_steps"]) == ("256", "16")


def test_a_line_counts_only_with_the_rows_of_today(study: Study) -> None:
    equal = line(study, EQUAL, REGIME, {"equal: crowd": [1.0, 1.0]})
    write(study, {**equal, "test": "other rows"})
    assert not study.done(EQUAL, REGIME)


def test_nothing_is_started_that_would_not_be_done(
    study: Study, stories: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(study, line(study, STEPS, REGIME, {"4x steps": [2.0, 2.0]}))  # 2 s an agent-step
    monkeypatch.setattr(Study, "run", lambda *_: pytest.fail("started"))
    place = ["--dataset", str(stories), "--base", str(BASE_FOLDER), "--folder", str(study.file.parent)]
    monkeypatch.setattr(sys, "argv", [*CALL, *place, "--arms", "equal", "--hours", "0.07"])
    worth.main()
    assert "not started: equal, 8 rows, seed 1, which takes about 4 min" in capsys.readouterr().out


@pytest.mark.slow
def test_an_arm_is_trained_judged_and_written_once(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file names no folder: it can be carried along."""
    monkeypatch.setattr(Regime, "steps", property(lambda self: 2))
    place = ["--dataset", str(stories), "--base", str(BASE_FOLDER), "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*CALL, *place, "--arms", "base", "bootstrap", "4x steps"])
    worth.main()
    shown = capsys.readouterr().out
    file = tmp_path / "worth.jsonl"
    text = file.read_text()
    ways = {way for each in text.splitlines() for way in json.loads(each)["answers"]}
    assert ways == {"base", "bootstrap: agents", "bootstrap: best", "bootstrap: crowd", "4x steps"}
    assert str(tmp_path) not in text
    assert str(stories) not in text
    assert "| 4x steps | 1 |" in shown
    monkeypatch.setattr(Study, "run", lambda *_: pytest.fail("trained again"))
    worth.main()
    assert file.read_text() == text
    assert capsys.readouterr().out.strip() == shown[shown.index("stories on") :].strip()
