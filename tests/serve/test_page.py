"""The page at /, in a real browser: a chat that shows where the agents disagree."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci_llm.crowd.next_token import Request
from ci_llm.serve import Options
from ci_llm.serve.app import of_run
from ci_llm.serve.engine import Job
from tests.report.test_story import CONTRAST
from tests.serve.listening import QUESTION, Listening
from tests.support.browser import CHROMIUM, NO_CHROMIUM, Browser
from tests.support.crowds import disturbed_crowd
from tools.testbed.events import DEADLINE_S

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]

SAID = "[...document.querySelectorAll('.answered .said')].map(each => each.textContent)"


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[Listening]:
    with Listening(of_run(disturbed_crowd(), Options())) as listening:
        yield listening


@pytest.fixture
def browser(open_to_all: Listening, tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        browser.look()
        browser.open(open_to_all.url)
        wait(browser, "at('model').options.length === 5")
        yield browser


def wait(browser: Browser, condition: str) -> None:
    until = time.monotonic() + DEADLINE_S
    while not browser.evaluate(condition):
        assert time.monotonic() < until, f"never {condition}: {browser.complaints}"
        time.sleep(0.02)


def press(browser: Browser, key: str, code: int, modifiers: int = 0) -> None:
    for kind in ("keyDown", "keyUp"):
        text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
        params = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers, **text}
        browser.ask("Input.dispatchKeyEvent", type=kind, **params)


def ask(browser: Browser, text: str = QUESTION) -> None:
    """Type a question and send it by the keyboard alone: the field has the focus."""
    browser.ask("Input.insertText", text=text)
    press(browser, "Enter", 13)


def answered(browser: Browser) -> None:
    wait(browser, "!running && document.querySelectorAll('.retry').length === 1")


def test_a_question_is_answered_and_a_click_shows_each_agent(
    browser: Browser, open_to_all: Listening, tmp_path: Path
) -> None:
    [wanted] = open_to_all.ask(ci_llm={"include_agents": True})["choices"]
    ask(browser)
    answered(browser)
    assert browser.evaluate(SAID) == [wanted["message"]["content"]]
    assert "1 of 3 agents give this answer" in browser.evaluate("document.querySelector('.about').textContent")
    assert not browser.evaluate("document.querySelector('dl').checkVisibility()")
    browser.evaluate("document.querySelector('summary').click()")
    assert browser.evaluate("document.querySelector('dl').checkVisibility()")
    told = browser.evaluate("[...document.querySelectorAll('dd')].map(each => each.textContent)")
    assert told == list(wanted["ci_llm"]["answers"].values())
    signs = browser.evaluate("[...document.querySelectorAll('dt')].map(each => each.textContent[0])")
    assert signs == ["=" if text == wanted["message"]["content"] else "≠" for text in told]
    assert browser.evaluate("document.querySelectorAll('mark').length") > 0, "words that differ are marked"
    assert browser.evaluate("document.activeElement.id") == "text", "one can write on"
    for look in ({}, {"scheme": "dark"}, {"width": 390}, {"width": 320, "scheme": "dark"}):
        browser.look(**look)
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
        assert browser.evaluate(CONTRAST) > 7
        name = "_".join(map(str, look.values())) or "light"
        assert browser.picture(tmp_path / f"{name}.png").stat().st_size > 5_000
    assert browser.complaints == []
    assert {request.rpartition("/")[0] for request in browser.requests} <= {
        open_to_all.url, f"{open_to_all.url}/v1", f"{open_to_all.url}/v1/chat",
    }  # fmt: skip


def test_an_answer_can_be_stopped_and_asked_for_again(
    browser: Browser, open_to_all: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, take = threading.Event(), Job.take

    def take_slowly(job: Job, request: Request) -> None:
        assert len(request.tokens) < 9 or stopped.wait(DEADLINE_S)
        take(job, request)

    monkeypatch.setattr(Job, "take", take_slowly)
    endless = "const once = fetch; window.fetch = (path, how) => once(path, how && how.body ? {...how, body:"
    endless += " JSON.stringify({...JSON.parse(how.body), ignore_eos: true, ci_llm: undefined})} : how); 1"
    browser.evaluate(endless)
    ask(browser)
    wait(browser, "document.querySelector('.answered .said') && document.querySelector('.answered .said').textContent")
    assert browser.evaluate("at('send').hidden && !at('stop').hidden")
    press(browser, "Escape", 27)
    answered(browser)
    assert "Stopped." in browser.evaluate("document.querySelector('.answered').textContent")
    stopped.set()
    open_to_all.wait_for((0, 0))
    browser.evaluate("window.fetch = once; document.querySelector('.retry').click(); 1")
    answered(browser)
    assert browser.evaluate(SAID) == [open_to_all.ask()["choices"][0]["message"]["content"]]
    assert browser.evaluate("turns.length") == 2


def test_answers_are_shown_as_text_and_never_as_markup(browser: Browser) -> None:
    ask(browser, "<img src=x onerror='window.bad = 1'> <b>7</b>")
    answered(browser)
    assert browser.evaluate("document.querySelectorAll('main img, main b').length") == 0
    assert browser.evaluate("typeof window.bad") == "undefined"


def test_the_page_asks_for_a_key_where_there_is_one(served: Listening, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.open(served.url)
        wait(browser, "document.body.classList.contains('locked')")
        assert browser.evaluate("document.activeElement.id") == "key"
        browser.evaluate(f"at('key').value = {served.key!r}; at('key').onchange(); 1")
        wait(browser, "at('model').options.length === 5")
        browser.evaluate("at('text').focus(); 1")
        ask(browser)
        answered(browser)
        assert browser.evaluate("document.querySelectorAll('.problem').length") == 0


def test_the_page_is_one_file_and_nothing_in_it_comes_from_elsewhere(open_to_all: Listening) -> None:
    answer = open_to_all.http.get("/")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not re.findall(r"https?://|url\(|@import|innerHTML|\bsrc=", answer.text)
    assert not re.findall(r"<(?:iframe|img|object|link(?! rel=\"icon\" href=\"data:,\"))", answer.text)
