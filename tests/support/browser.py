"""A headless Chromium for tests: it opens a page, lists its requests and console messages, and takes pictures.

The tests speak the DevTools protocol with it over a pair of pipes, which needs no package and no port.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tools.testbed.events import DEADLINE_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_CHROMIUM = "there is no chromium; apt-get install chromium"
_QUIET = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
_ALONE = ("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync")


class Browser:
    """One page; a context manager.

    Args:
        profile: an empty folder for what the browser keeps.

    Attributes:
        requests: addresses that the page has asked for.
        complaints: errors and warnings of its console.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser reads from its file 3 and writes to its file 4.
        command = [CHROMIUM, *_QUIET, *_ALONE, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        wired = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", wired, "browser", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, None
        target = next(one for one in self.ask("Target.getTargets")["targetInfos"] if one["type"] == "page")
        self._session = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def open(self, page: Path | str) -> None:
        """Load a page, a file or an address, and wait until it stands."""
        self.ask("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self._receive(lambda message: message.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def look(self, *, width: int = 1200, scheme: str = "light", media: str = "screen") -> None:
        """See the page in so many pixels, light or dark, on a screen or on paper."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=media, features=features)
        mobile = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=mobile)

    def picture(self, path: Path) -> Path:
        """A picture of the whole page."""
        taken = self.ask("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        path.write_bytes(base64.b64decode(taken["data"]))
        return path

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._receive(lambda each: each.get("id") == number)
        assert "result" in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self, wanted: Any) -> dict[str, Any]:
        until = time.monotonic() + DEADLINE_S
        while True:
            while b"\0" not in self._buffer:
                ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
                chunk = os.read(self._in, 1 << 20) if ready else b""
                assert chunk, "the browser is silent, or has ended"
                self._buffer += chunk
            text, _, self._buffer = self._buffer.partition(b"\0")
            message = json.loads(text)
            self._note(message)
            if wanted(message):
                return dict(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Log.entryAdded":
                self.complaints.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params))

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._out)  # it ends when nobody can speak to it any more
        try:
            self._process.wait(DEADLINE_S / 4)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
