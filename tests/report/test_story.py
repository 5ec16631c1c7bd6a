"""The report of a real run that was healed, interrupted, killed and out of memory, and resumed three times."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci_llm.core.quantities import duration
from ci_llm.report.facts import RunFacts, seconds_by_kind
from tests.report.test_page import MEGABYTE, text_of
from tests.support.browser import CHROMIUM, NO_CHROMIUM, Browser
from tests.support.faults import Fault, fired, said, train
from tools.testbed.forkserver import ForkServer

pytestmark = pytest.mark.slow

KEYS = {
    "max_train_steps": 16,
    "max_train_samples": 64,
    "save_steps": 3,
    "eval_steps": 4,
    "eval_samples": 12,
    "generation_eval_samples": 12,
    "max_new_tokens_eval": 8,
}


@pytest.fixture(scope="module")
def folder(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four attempts of one run."""
    folder = tmp_path_factory.mktemp("eventful")
    nan, term = Fault("nan gradient", steps=(1, 2), agents=(1,)), Fault("terminate", steps=(3,))
    assert train(server, folder, nan, term, **KEYS) == [0]
    assert (folder / "run/report.html").exists(), "an interruption leaves a report"
    too_large, kill = Fault("out of memory", steps=(5,), amount=2), Fault("kill", steps=(8,), committed=6)
    assert train(server, folder, too_large, kill, **KEYS) == [-9]
    assert train(server, folder, Fault("out of memory in the optimizer", steps=(10,)), **KEYS) == [1]
    assert train(server, folder, **KEYS) == [0], said(folder)
    assert len(fired(folder)) == 6
    return folder


@pytest.fixture(scope="module")
def page(folder: Path) -> Path:
    """As the run itself has left it at its end."""
    return folder / "run/report.html"


@pytest.fixture(scope="module")
def facts(folder: Path) -> RunFacts:
    return RunFacts(folder / "run")


def test_the_page_tells_the_story(page: Path, facts: RunFacts) -> None:
    told = text_of(page)
    assert re.search(r"Completed at step 16, in 4 attempts and ", told)
    for line in (
        "Attempt 1 interrupted: signal:SIGTERM Began afresh at ",
        "agent1 not finite in step 2, 1 in a row: left out",
        "Attempt 2 killed Went on after step 4 at ",
        "The process ended without writing a reason",
        "micro-batch 4 -> 2 row(s), the effective batch of 4 holds",
        "Attempt 3 failed: out_of_memory Went on after step 6 at ",
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "Attempt 4 completed Went on after step 9 at ",
        "agent1 was left out of 2 steps that were not finite for it; its learning rate is 0.444 of the schedule's.",
        "Memory ran out: a micro-batch has 2 rows instead of 4; the effective batch is the same.",
    ):
        assert line in told, line
    first, second, third, last = facts.attempts
    assert f"Its end cost {duration(first.cost_s)} : no step lost" in told
    assert "at least 2 steps lost" in told, "of the killed one: steps 7 and 8"
    assert "1 step lost" in told, "of the one without memory: step 10"
    assert f"{sum(one.redone_steps for one in facts.attempts)} steps lost and taken again" in told
    assert (second.last_step, third.last_step, last.last_step) == (8, 10, 16)


def test_the_scores_are_those_of_the_run(page: Path, folder: Path) -> None:
    record = json.loads((folder / "run/evaluation.json").read_text())
    told = text_of(page)
    assert f"over {record['n']} held-out rows; data set embedded" in told
    assert f"{record['exact_match']['crowd']:.3f}" in told
    for nll in (*record["nll"]["agents"], record["nll"]["crowd"]):
        assert f"{nll:.4f}" in told


def test_every_second_of_the_run_is_accounted_for_once(facts: RunFacts) -> None:
    seconds = seconds_by_kind(facts.attempts)
    assert sum(seconds.values()) == pytest.approx(facts.wall_s)
    between = seconds.pop("no process")  # a forked attempt may begin in the moment in which the one before ends
    assert between >= 0
    assert all(spent > 0 for spent in seconds.values()), seconds


def test_metrics_and_attempts_agree_on_what_was_kept(facts: RunFacts) -> None:
    steps = [line["step"] for line in facts.metrics.lines if "epoch" in line]
    assert steps == list(range(1, 17))
    for one, after in zip(facts.attempts, facts.attempts[1:], strict=False):
        assert one.kept_step == after.first_step


def test_the_page_stays_below_a_megabyte(page: Path) -> None:
    assert page.stat().st_size < MEGABYTE


def test_a_report_that_fails_is_a_warning_and_the_run_completed(server: ForkServer, tmp_path: Path) -> None:
    keys = {**KEYS, "max_train_steps": 2, "eval_steps": "null", "generation_eval_samples": 0}
    assert train(server, tmp_path, Fault("no report", steps=(1,)), **keys) == [0]
    assert len(fired(tmp_path)) == 1
    assert "report.html was not written: RuntimeError: nothing can be drawn" in said(tmp_path)
    assert json.loads((tmp_path / "run/status.json").read_text())["status"] == "completed"
    assert not (tmp_path / "run/report.html").exists()


# In a browser

LOOKS = {
    "light": {"scheme": "light"},
    "dark": {"scheme": "dark"},
    "phone": {"width": 390},
    "paper": {"media": "print", "width": 800},
}
#: Contrast of two colours as WCAG 2 defines it.
CONTRAST = """
(() => {
  const parts = colour => colour.match(/[\\d.]+/g).map(Number).slice(0, 3);
  const light = colour => parts(colour).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const [a, b] = [getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]
    .map(light).sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
})()
"""


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        browser.open(page)
        yield browser


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_the_page_complains_about_nothing_and_asks_for_nothing(browser: Browser, page: Path) -> None:
    assert browser.complaints == []
    assert browser.requests == [page.resolve().as_uri()]


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
@pytest.mark.parametrize("look", LOOKS)
def test_the_page_fits_and_can_be_read(look: str, browser: Browser, tmp_path: Path) -> None:
    browser.look(**LOOKS[look])
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    assert browser.evaluate(CONTRAST) > 7
    drawings = browser.evaluate(
        "[...document.querySelectorAll('svg')].map(each => each.getBoundingClientRect().height)"
    )
    assert len(drawings) == 6
    assert min(drawings) > 40
    assert browser.picture(tmp_path / f"{look}.png").stat().st_size > 20_000


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_light_and_dark_differ(browser: Browser) -> None:
    seen = []
    for scheme in ("light", "dark"):
        browser.look(scheme=scheme)
        seen.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert seen == ["rgb(255, 255, 255)", "rgb(20, 24, 29)"]
