"""What was skipped: noted by every process of pytest, and shown as one table at the end of `make test`.

A reason to skip is "why; what brings it", for example "there is no chromium; apt-get install chromium".

python -m tests.support.skips FILE prints the table of what `pytest --note-skips=FILE` has noted.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


class Notes:
    """A plugin of pytest: a line of JSON for every test that is skipped, and for a whole file.

    Args:
        file: is appended to, by several processes at a time.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("a", buffering=1, encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            _, _, reason = report.longrepr  # type: ignore[misc]  # a path, a line and the reason
            line = {"test": report.nodeid, "reason": reason.removeprefix("Skipped: ")}
            self._file.write(json.dumps(line) + "\n")

    def pytest_unconfigure(self) -> None:
        self._file.close()


def table(notes: Sequence[dict[str, str]]) -> Iterator[str]:
    """The lines of the table; a test counts once, whoever has skipped it."""
    reasons = Counter({note["test"]: note["reason"] for note in notes}.values())
    if not reasons:
        yield "nothing was skipped"
        return
    rows = [("skipped", "why", "what brings it")]
    for reason, count in reasons.most_common():
        why, _, remedy = reason.rpartition("; ")
        rows.append((str(count), why, remedy))
    width = max(len(why) for _, why, _ in rows)
    for count, why, remedy in rows:
        yield f"{count:>7}  {why:<{width}}  {remedy}".rstrip()


def main(file: Path) -> None:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    print(*table([json.loads(line) for line in lines]), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
