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
    NOWHERE,
    SINGLE,
    STEPS,
    Regime,
    Rows,
    Study,
    page,
    planned,
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


def test_every_arm_is_tuned_as_it_is_used() -> None:
    """As many candidates, the same rows, steps and looks, and a seed that no test has."""
    assert {len(each) for each in CANDIDATES.values()} == {3}
    assert {len(crowd) for name in CROWDS for crowd in CANDIDATES[name]} == {worth.K}
    regimes = [Regime(64, seed) for seed in (1, 2, 3, 4, 5)]
    assert {regime.choices for regime in regimes} == {Regime(64, worth.SEED_OF_CHOICES)}
    assert worth.SEED_OF_CHOICES not in {regime.seed for regime in regimes}
    alone, three = (worth._single(rates, REGIME) for rates in (["1e-3"], ["1e-3", "2e-3", "4e-3"]))
    different = {key for key in {*alone, *three} if alone[key] != three[key]}
    assert different == {"num_agents", "learning_rate"}


def test_arms_take_the_same_agent_steps() -> None:
    assert worth.agent_steps(STEPS, REGIME) == worth.K * REGIME.steps
    assert worth.agent_steps(BOTH_CROWDS, REGIME) == len(CROWDS) * worth.K * REGIME.steps
    keys = worth._single(["1e-3"], REGIME)
    assert int(keys["num_agents"]) * int(keys["max_train_steps"]) == worth.K * REGIME.steps


def test_all_arms_of_a_seed_come_before_those_of_the_next() -> None:
    order = planned([Regime(64, 1), Regime(64, 2)], worth.ARMS)
    assert order == [
        (CHOICES, Regime(64, 7)), (STEPS, Regime(64, 1)), (BOTH_CROWDS, Regime(64, 1)),
        (STEPS, Regime(64, 2)), (BOTH_CROWDS, Regime(64, 2)), (BASE, NOWHERE),
    ]  # fmt: skip


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


def test_pairs_are_of_the_same_seed_and_row(study: Study) -> None:
    """Seeds differ by ten nats, rows by one: the gain over the same seed is even."""
    lines = [line(study, STEPS, Regime(64, seed), {SINGLE: [10.0 * seed, 10.0 * seed + 1]}) for seed in (1, 2, 4)]
    lines += [line(study, BOTH_CROWDS, Regime(64, 2), {EQUAL: [19.0, 20.0]})]
    write(study, *lines)
    ways = ways_of(study.lines)
    assert ways[EQUAL].gain_over(ways[SINGLE]) == pytest.approx((0.5, 0.0))
    assert ways[EQUAL].gains_over(ways[SINGLE]) == pytest.approx([0.5])


def test_the_page_has_the_rule_the_choices_the_table_and_the_missing_arms(study: Study) -> None:
    write(study, choices(study))
    lines = [line(study, STEPS, REGIME, {SINGLE: [2.0, 2.0]}), line(study, BOTH_CROWDS, REGIME, {EQUAL: [1.0, 1.0]})]
    write(study, choices(study), *lines)
    text = page(study, [REGIME, Regime(256, 1)])
    assert worth.RULE in text
    assert "4x steps: 2.5e-4: 2.0000; 5e-4: 1.0000; 1e-3: 3.0000. Taken: 5e-4." in text
    assert "| equal: crowd | 1 | 1.000 | 0.5000 | +0.5000 ± 0.0000 | +0.500 |" in text
    told = f"base, {CHOICES} (256 rows), 4x steps (256 rows, seed 1), crowds (256 rows, seed 1)"
    assert text.splitlines()[-1] == f"Not run: {told}."


def test_a_line_counts_only_with_the_settings_of_today(study: Study) -> None:
    """Once other rates are chosen, an arm is to do again."""
    assert study.settings(STEPS, REGIME) is None
    write(study, choices(study))
    steps = line(study, STEPS, REGIME, {SINGLE: [1.0, 1.0]})
    write(study, choices(study), steps)
    assert study.done(STEPS, REGIME)
    assert not study.done(STEPS, Regime(64, 2))
    write(study, choices(study, equal=[3.0, 2.0, 1.0]), steps)
    assert study.done(STEPS, REGIME)  # which takes the same rate
    write(study, choices(study, **{SINGLE: [1.0, 2.0, 3.0]}), steps)
    assert study.rates(REGIME) == {SINGLE: ("2.5e-4",), "equal": ("1e-3",) * 4, "own rates": CANDIDATES["own rates"][1]}
    assert not study.done(STEPS, REGIME)


def test_agents_of_one_job_make_all_crowds_and_are_judged_as_such(
    study: Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd has agents of its rates, each once; the single agent counts at its best evaluation."""
    place = study.file.parent / "run"
    place.mkdir()
    best = [{"step": 4, "value": value} for value in (0.9, 0.7, 0.8)]
    (place / "evaluation.json").write_text(json.dumps({"best": {"agents": best}}))
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(Study, "_trained", lambda self, name, regime, keys: seen.append(keys) or place / "final")
    monkeypatch.setattr(worth, "open_pretrained", lambda *_: None)
    asked: list[list[int]] = []

    def judged(saved: None, rows: Any, at_a_time: int, groups: list[list[int]]) -> list[Measured]:
        asked.extend(groups)
        return [answers([1.0])] * 15 + [answers([float(number)]) for number in range(len(groups))]

    monkeypatch.setattr(worth, "everyone", judged)
    assert study._candidates(REGIME.choices) == {
        SINGLE: [0.9, 0.7, 0.8], "equal": [0.0, 0.5, 1.0], "own rates": [1.5, 2.0, 2.5],
    }  # fmt: skip
    single, crowds = seen
    assert (single["max_train_steps"], single["eval_steps"]) == ("128", "16")
    rates = crowds["learning_rate"].strip("[]").split(",")
    assert len(rates) == 15
    for group, crowd in zip(asked, [crowd for name in CROWDS for crowd in CANDIDATES[name]], strict=True):
        assert tuple(rates[agent] for agent in group) == crowd
        assert len({*group}) == worth.K


def test_a_line_counts_only_with_the_rows_of_today(study: Study) -> None:
    write(study, {**choices(study), "test": "other rows"})
    assert not study.done(CHOICES, REGIME.choices)


def test_nothing_is_started_that_would_not_be_done(
    study: Study, stories: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(study, choices(study, 8))
    write(study, choices(study, 8), line(study, STEPS, Regime(8, 2), {SINGLE: [2.0, 2.0]}))  # 2 s an agent-step
    monkeypatch.setattr(Study, "run", lambda *_: pytest.fail("started"))
    place = ["--dataset", str(stories), "--base", str(BASE_FOLDER), "--folder", str(study.file.parent)]
    monkeypatch.setattr(sys, "argv", [*CALL, *place, "--arms", STEPS, "--hours", "0.07"])
    worth.main()
    assert "not started: 4x steps, 8 rows, seed 1, which takes about 4 min" in capsys.readouterr().out


@pytest.mark.slow
def test_an_arm_is_trained_judged_and_written_once(
    stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file names no folder: it can be carried along."""
    monkeypatch.setattr(Regime, "steps", property(lambda self: 2))
    place = ["--dataset", str(stories), "--base", str(BASE_FOLDER), "--folder", str(tmp_path)]
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
