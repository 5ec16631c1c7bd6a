"""`ci-llm agents`: the requests that a run gets, and the answers that are printed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ci_llm.cli.main import main
from ci_llm.core.run_status import RunStatus, last_status
from ci_llm.run.step.requests import decide, is_waiting, read_waiting
from tests.support.messages import Messages
from tools.testbed.events import DEADLINE_S


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run of this process."""
    status = RunStatus(tmp_path, 1, interval_s=DEADLINE_S)
    status.start(3)
    yield tmp_path
    status.finish("interrupted", "the test is over")


def ended(run: Path, status: str) -> None:
    written = last_status(run)
    assert written is not None
    (run / "status.json").write_text(json.dumps(asdict(replace(written, status=status))))  # type: ignore[arg-type]


def answering(run: Path, refused: str | None) -> threading.Thread:
    """A thread that takes the next request, as a run does between two steps."""

    def answer() -> None:
        waited = threading.Event()
        while not is_waiting(run):
            waited.wait(0.01)
        (asked,) = read_waiting(run, 4)
        decide(run, [replace(asked, refused=refused)])

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return thread


def test_a_running_job_gets_the_request_and_its_answer_is_printed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = answering(run, None)
    assert main(["agents", "stop", str(run), "1"]) == 0
    taken.join(DEADLINE_S)
    assert capsys.readouterr().out == "stop agent1: done after step 4\n"


def test_a_refusal_is_printed_with_its_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = answering(run, "there is no agent9: there are agent0, agent1")
    assert main(["agents", "stop", str(run), "9", "--json"]) == 1
    taken.join(DEADLINE_S)
    told = json.loads(capsys.readouterr().out)
    assert told["decision"] == {"step": 4, "refused": "there is no agent9: there are agent0, agent1"}


def test_a_request_to_a_run_that_is_not_training_is_left_until_it_resumes(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(run, "interrupted")
    assert main(["agents", "stop", str(run), "0"]) == 0
    assert "after its first step, once it resumes" in capsys.readouterr().out
    (asked,) = read_waiting(run, 3)
    assert asked.refused is None
    assert asked.agent == 0


@pytest.mark.parametrize(
    "words",
    [["stop", "RUN"], ["stop", "RUN", "one"], ["stop", "RUN", "1", "seed=3"], ["clone", "RUN", "0"]],
    ids=" ".join,
)
def test_a_bad_call_makes_no_request(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], messages: Messages
) -> None:
    assert main(["agents", *(str(run) if word == "RUN" else word for word in words)]) == 2
    messages.same(capsys.readouterr().err)
    assert not is_waiting(run)


def test_no_request_is_made_of_a_missing_or_completed_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ended(run, "completed")
    assert main(["agents", "stop", str(run), "agent0"]) == 2
    assert "this run is completed at step 3" in capsys.readouterr().err
    assert main(["agents", "stop", str(run / "nowhere"), "0"]) == 2
    assert not is_waiting(run)
