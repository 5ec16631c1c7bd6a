"""The site builds without a warning, stands alone, and can be read on a screen and a phone, light and dark."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, NO_CHROMIUM, Browser
from tests.support.children import python
from tests.support.markdown import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = ["build", "--strict", "--site-dir", folder]
    done = python("-m", "mkdocs", *words, cwd=ROOT, NO_MKDOCS_2_WARNING="1")
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
    assert "K LoRA adapters on one frozen model" in (site / "index.html").read_text()
    assert "Interrupt it and resume" in (site / "first_run.html").read_text()
    names = (site / "api.html").read_text()
    assert "save_interval_steps" in names
    assert "KeyboardInterrupt" in names, "the docstring of train"
    assert "&gt;&gt;&gt;" not in re.sub(r"<code>.*?</code>", "", names, flags=re.DOTALL), "an example outside of code"


def test_no_page_loads_from_another_server(site: Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"?(https?:[^\" >]+)", page.read_text())
        loaded += re.findall(
            r"<link[^>]+rel=\"?(?:stylesheet|preconnect|icon)[^>]+href=\"?(https?:[^\" >]+)", page.read_text()
        )
        assert not loaded, page


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
@pytest.mark.parametrize(("page", "width", "scheme"), [("index", 1200, "dark"), ("messages", 390, "light")])
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
