"""What the end of an attempt means."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ci_llm.core.run_folder import Failure, earliest_failure
from ci_llm.core.run_status import Status
from ci_llm.supervisor import child
from ci_llm.supervisor.child import AttemptResult, _out_of_memory_kills
from ci_llm.supervisor.policy import Kind, classify_by_output, classify_by_status
from tests.supervisor.heard import heard


def result(*lines: str, **facts: Any) -> AttemptResult:
    return AttemptResult(heard(*lines), **{"returncode": 0, **facts})


BOOM = ("Traceback (most recent call last):", '  File "fit.py", line 3, in <module>', "    main()", "ValueError: boom")


@pytest.mark.parametrize(
    ("end", "kind", "detail"),
    [
        (result("fine"), "completed", ""),
        (result("Loss=nan", "fine"), "nonfinite", "Loss=nan"),
        (result("Loss=nan", returncode=-15, stop_reason="nonfinite"), "nonfinite", "Loss=nan"),
        (result("Loss=nan", returncode=-15, stop_reason="signal:SIGTERM"), "interrupted", "signal:SIGTERM"),
        (result(stop_reason="signal:SIGINT"), "interrupted", "signal:SIGINT"),
        (result("CUDA out of memory", returncode=1), "out_of_memory", "CUDA out of memory"),
        (result("CUDA out of memory"), "out_of_memory", "CUDA out of memory"),
        (result("CUDA out of memory", *["half the batch"] * 100), "completed", ""),
        (result("CUDA out of memory", *["step"] * 30, *BOOM, returncode=1), "crashed", "exit code 1: ValueError: boom"),
        (result("CUDA out of memory", *["step"] * 5000, returncode=1), "crashed", "exit code 1: step"),
        (result("CUDA out of memory", *BOOM, returncode=1), "out_of_memory", "CUDA out of memory"),
        (
            result(BOOM[0], "  File", "MemoryError", *[*BOOM[:1], *["  File"] * 60, BOOM[-1]], returncode=1),
            "out_of_memory",
            "MemoryError",
        ),
        (result(returncode=-9), "killed", "killed by signal 9"),
        (result(returncode=137), "killed", "killed by signal 9"),
        (result(returncode=-9, memory_pressure=True), "out_of_memory", "killed by signal 9, while memory was short"),
        (
            result("DataLoader worker (pid 3) is killed by signal: Killed.", returncode=1, memory_pressure=True),
            "out_of_memory",
            "DataLoader worker (pid 3) is killed by signal: Killed., while memory was short",
        ),
        (result(returncode=1, memory_pressure=True), "crashed", "exit code 1: it said nothing"),
        (result(returncode=-15), "interrupted", "it was told to stop: signal 15"),
        *[(result(returncode=-n), "interrupted", f"it was told to stop: signal {n}") for n in (1, 2)],
        *[(result(returncode=n), "interrupted", f"it was told to stop: exit code {n}") for n in (129, 130, 143)],
        (result("OSError: [Errno 28] No space left on device", returncode=1), "disk_full", "OSError: [Errno 28]"),
        (
            result("Traceback (most recent call last):", "KeyError: 3", "wandb: View run", "HYDRA", returncode=1),
            "crashed",
            "exit code 1: KeyError: 3",
        ),
        (result(returncode=-11), "crashed", "signal 11: it said nothing"),
        (result(error="No such file", returncode=None), "refused", "it cannot be started: No such file"),
    ],
)
def test_a_script_is_classified_by_exit_code_signal_and_output(end: AttemptResult, kind: Kind, detail: str) -> None:
    found, told = classify_by_output(end)
    assert found == kind
    assert told.startswith(detail)


def test_the_kernel_says_how_often_it_killed_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(r"^oom_kill \d+$", Path("/proc/vmstat").read_text(), re.MULTILINE), "the kernel's name of it"
    told = tmp_path / "vmstat"
    monkeypatch.setattr(child, "Path", {"/proc/vmstat": told}.__getitem__)
    assert _out_of_memory_kills() == 0, "a kernel that does not say"
    told.write_text("nr_free_pages 795925\noom_kill_disable 3\noom_kill 7\nzone_reclaim_failed 1\n")
    assert _out_of_memory_kills() == 7


def test_a_kill_for_memory_explains_only_what_ends_right_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts kills of the whole machine, so that an old kill in another job must not count."""
    clock, kills = [1000.0], [7]
    monkeypatch.setattr(child, "_out_of_memory_kills", lambda: kills[0])
    monkeypatch.setattr(child, "_SCARCE_FRACTION", 0.0)
    monkeypatch.setattr(child, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    watch = child._MemoryWatch()
    assert not watch.was_short()
    kills[0] += 1
    assert watch.was_short()  # seen at the end alone
    clock[0] += 3600
    watch.sample()
    assert not watch.was_short()
    kills[0] += 1
    watch.sample()
    clock[0] += 5
    assert watch.was_short()


def status(state: str, reason: str | None = None) -> Status:
    return Status(state, reason, 12, 3, 1, "host", "space", 0.0, 0.0)  # type: ignore[arg-type]


def failure(reason: str, message: str = "as planned", time: float = 1.0, process: int = 0) -> Failure:
    return Failure(reason, message, process, time, step=11)


def failed(reason: str, message: str = "as planned", **facts: Any) -> tuple[Status, list[Failure], AttemptResult]:
    """What an attempt wrote that failed for one reason, and its end."""
    return status("failed", reason), [failure(reason, message)], result(**{"returncode": 1, **facts})


LOST = [failure("peer_lost", time=1.0), failure("out_of_memory", time=2.0, process=1)]
KILLED = "DataLoader worker (pid 3) is killed by signal: Killed."


@pytest.mark.parametrize(
    ("told", "failures", "end", "kind", "detail"),
    [
        (status("completed"), [], result(returncode=1), "completed", "step 12"),
        (status("interrupted", "walltime"), [], result(), "interrupted", "walltime, step 12"),
        (*failed("nonfinite"), "nonfinite", "nonfinite: as"),
        (*failed("hang"), "hang", "hang: as planned"),
        (status("failed", "peer_lost"), LOST, result(returncode=1), "out_of_memory", "out_of_memory: as planned"),
        (*failed("error:OutOfMemoryError"), "out_of_memory", "error:OutOfMemoryError"),
        (*failed("error:OSError", "[Errno 28] No space left on device"), "disk_full", "[Errno 28]"),
        (*failed("all_trials_failed", returncode=2), "refused", "all_trials_failed: as planned"),
        (*failed("error:KeyError"), "crashed", "error:"),
        (status("vanished", "no heartbeat"), [], result(returncode=-9), "killed", "no word after step 12"),
        (*failed("peer_lost", memory_pressure=True), "out_of_memory", "peer_lost: as planned, while memory was short"),
        (*failed("error:RuntimeError", KILLED), "killed", "error:RuntimeError: DataLoader worker"),
        (status("running"), [], result(returncode=1), "killed", "no word after step 12"),  # on another machine
        (status("running"), [], result(stop_reason="hang", returncode=-9), "hang", "no heartbeat and no output"),
        (None, [], result(), "completed", "nothing was left to do"),
        (status("running"), [failure("nonfinite")], result(returncode=1), "nonfinite", "nonfinite: as"),
        (status("failed", "error:KeyError"), [], result(returncode=1), "crashed", "error:KeyError: error:KeyError"),
        (None, [], result("error: no data", returncode=2), "refused", "error: no data"),
        (None, [], result("ImportError: torch", returncode=1), "crashed", "exit code 1: ImportError: torch"),
        (None, [], result(returncode=-9), "killed", "killed by signal 9"),
    ],
)
def test_an_own_run_is_classified_by_what_it_wrote(
    told: Status | None, failures: list[Failure], end: AttemptResult, kind: Kind, detail: str
) -> None:
    found, words = classify_by_status(end, told, earliest_failure(failures), has_begun=False)
    assert found == kind
    assert words.startswith(detail)


def test_a_refusal_after_a_good_beginning_is_not_a_bad_call() -> None:
    """For instance, the lease of a writer whose machine died is valid for another minute."""
    assert classify_by_status(result("busy", returncode=2), None, None, has_begun=True)[0] == "crashed"
