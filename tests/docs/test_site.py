"""The site builds without a warning, stands alone, and can be read on a screen and a phone, light and dark."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, NO_CHROMIUM, Browser
from tests.support.markdown import ROOT
from tools.testbed.events import DEADLINE_S

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "WARNING" not in said
    return folder


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """The site as a server of this machine shows it."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """Writes no line for each request."""

    def log_message(self, *_: object) -> None:
        pass


def test_the_site_has_the_first_page_the_first_run_and_the_signatures(site: Path) -> None:
    assert "ensemble of LoRA adapters" in (site / "index.html").read_text()
    assert "Interrupt it and resume" in (site / "first_run.html").read_text()
    names = (site / "api.html").read_text()
    assert "save_interval_steps" in names
    assert "KeyboardInterrupt" in names, "the docstring of train"
    assert "&gt;&gt;&gt;" not in re.sub(r"<code>.*?</code>", "", names, flags=re.DOTALL), "an example outside of code"


def test_links_to_files_of_the_repository_lead_to_copies(site: Path) -> None:
    page = (site / "architecture.html").read_text()
    assert 'href="source/ci_llm/run/loop.py"' in page
    assert (site / "source/ci_llm/run/loop.py").read_bytes() == (ROOT / "ci_llm/run/loop.py").read_bytes()
    assert 'href="slurm.html' in (site / "interruptions.html").read_text()


def test_no_page_loads_from_another_server(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"?(https?:[^\" >]+)", page.read_text())
        loaded += re.findall(
            r"<link[^>]+rel=\"?(?:stylesheet|preconnect|icon)[^>]+href=\"?(https?:[^\" >]+)", page.read_text()
        )
        assert not loaded, page


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
@pytest.mark.parametrize("page", ["index", "messages"])
@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (1200, "dark"), (390, "light")])
def test_a_browser_shows_it_without_a_complaint(
    page: str, width: int, scheme: str, address: str, tmp_path: Path
) -> None:
    with Browser(tmp_path / "profile") as browser:
        browser.look(width=width, scheme=scheme)
        browser.open(f"{address}/{page}.html")
        picture = browser.picture(tmp_path / f"{page}-{width}-{scheme}.png")
        assert picture.stat().st_size > 20_000
        background = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        brightness = sum(map(int, re.findall(r"\d+", background)[:3]))
        assert (brightness < 200) == (scheme == "dark"), background
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")
        assert not [request for request in browser.requests if not request.startswith((address, "data:"))]
        assert not browser.complaints


#: What people type, and the page that they want, or several of which each says it.
QUESTIONS = {
    "two GPUs": "recipes/large_models.html",
    "memory of an 8B": "recipes/large_models.html",
    "W&B": "recipes/following.html",
    "only answers": "own_data.html",
    "DPO": "objectives.html",
    "vLLM": "recipes/using.html",
    "early stopping": "recipes/settings.html",
    "another machine": "recipes/clusters.html",
    "license": "install.html index.html",  # the README says it too
    "own loss": "recipes/own_code.html",
}
#: Types into the search of the theme, and waits until the list of what it found stands still.
TYPE = """new Promise((done) => {
  const box = document.querySelector("[data-md-component=search-query]");
  const list = document.querySelector(".md-search-result__list");
  const said = document.querySelector(".md-search-result__meta");
  const look = () => {
    const first = list.querySelector(".md-search-result__link");
    if (box.value && /\\d/.test(said.textContent)) done(first && new URL(first.href).pathname);
  };
  new MutationObserver(look).observe(said, {childList: true, subtree: true, characterData: true});
  document.querySelector("#__search").checked = true;
  box.focus();
  box.value = QUESTION;
  box.dispatchEvent(new Event("keyup", {bubbles: true}));
})"""


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_the_search_finds_the_right_page_for_typical_questions(address: str, tmp_path: Path) -> None:
    found = {}
    with Browser(tmp_path / "profile") as browser:
        for question in QUESTIONS:
            browser.open(f"{address}/install.html")
            typed = TYPE.replace("QUESTION", json.dumps(question))
            found[question] = browser.ask("Runtime.evaluate", expression=typed, awaitPromise=True)["result"].get(
                "value"
            )
    wrong = {question: page for question, page in found.items() if str(page)[1:] not in QUESTIONS[question].split()}
    assert not wrong
