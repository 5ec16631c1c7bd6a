"""W&B runs of failed attempts: which are deleted, which stay, and through the real client."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from ci_llm.supervisor import wandb_cleanup
from ci_llm.supervisor.output_scan import Evidence
from ci_llm.supervisor.wandb_cleanup import WandbCleanup
from tests.supervisor.heard import heard
from tests.supervisor.terminal import ran
from tests.supervisor.wandb_server import WandbServer

KEY = "0123456789" * 4


class FakeTask:
    """Stands in for the process that talks to W&B: every run is deleted, but for those it is told about."""

    def __init__(self, done: bool = True, **results: str) -> None:
        self.done, self.results, self.asked = done, results, list[str]()

    def __call__(self, module: str, arguments: Sequence[str], *, timeout_s: float) -> str:
        assert module == "wandb_cleanup"
        assert float(arguments[0]) <= time.time()
        self.asked += arguments[1:]
        lines = ["wandb: some chatter"]
        for path in arguments[1:] if self.done else ():
            why = self.results.get(path.rpartition("/")[2])
            stays = f"the W&B run of a failed attempt stays: {path} ({why})"
            lines.append(f"ci_llm: {stays if why else f'deleted the W&B run of a failed attempt: {path}'}")
        return "\n".join([*lines, "wandb.errors.UsageError: api_key not configured"])


def told(task: FakeTask, *failed: Evidence, kept: Evidence | None = None, **environ: str) -> list[str]:
    """The lines of a cleanup after these attempts."""
    runs = WandbCleanup(environ)
    for evidence in failed:
        runs.note(evidence, failed=True)
    if kept is not None:
        runs.note(kept, failed=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wandb_cleanup, "run_task", task)
        return runs.delete_failed(timeout_s=1)


def url(run: str) -> str:
    return f"wandb: 🚀 View run at https://wandb.ai/team/project/runs/{run}"


def test_only_runs_of_failed_attempts_are_deleted() -> None:
    task = FakeTask()
    assert told(task, heard(url("one"), url("two")), kept=heard(url("three"))) == [
        "deleted the W&B run of a failed attempt: team/project/one",
        "deleted the W&B run of a failed attempt: team/project/two",
    ]
    assert task.asked == ["team/project/one", "team/project/two"]


def test_a_run_that_is_resumed_stays() -> None:
    task, resumed = FakeTask(), "wandb: Resuming run calm-sky-3"
    assert told(task, heard(resumed, url("older")), heard(url("same")), kept=heard(resumed, url("same"))) == []
    assert task.asked == []


def test_what_the_output_does_not_name_is_in_the_environment() -> None:
    line = "wandb: Run data is saved locally in wandb/run-20240115_103045-abc"
    for environ, asked in (
        ({"WANDB_ENTITY": "e", "WANDB_PROJECT": "p"}, ["e/p/abc"]),
        ({"WANDB_PROJECT": "p"}, ["p/abc"]),
        ({}, []),
    ):
        task = FakeTask()
        [answer] = told(task, heard(line), **environ)
        assert task.asked == asked
    assert answer == "W&B run abc of a failed attempt stays: no project is known (set WANDB_PROJECT)"


def test_a_failure_is_reported_and_not_raised() -> None:
    [line] = told(FakeTask(one="CommError: Could not find run"), heard(url("one")))
    assert line == "the W&B run of a failed attempt stays: team/project/one (CommError: Could not find run)"
    [line] = told(FakeTask(done=False), heard(url("one")))
    assert line.endswith("(wandb.errors.UsageError: api_key not configured)")


def test_without_wandb_nothing_is_deleted_and_nothing_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(sys, "argv", ["wandb_cleanup", "0", "a/b/c"])
    assert wandb_cleanup.main() == 1
    assert capsys.readouterr().out == "wandb is not installed\n"


def fit(folder: Path, runs: list[str]) -> None:
    """A script that names another run at each launch, and has NaN in all but the last."""
    (folder / "fit.py").write_text(
        "import pathlib\ncount = pathlib.Path('count')\n"
        "launch = int(count.read_text()) if count.exists() else 0\ncount.write_text(str(launch + 1))\n"
        f"run = {runs!r}[launch]\n"
        "print('wandb: View run calm-sky-3 at: https://wandb.ai/team/project/runs/' + run)\n"
        f"print('loss', 'nan' if launch < {len(runs) - 1} else 0.1)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_the_real_client_deletes_runs_of_failed_attempts(tmp_path: Path, keep: bool) -> None:
    pytest.importorskip("wandb", reason="there is no wandb; make install-dev")
    fit(tmp_path, ["bad1", "bad2", "older", "good"])
    now = time.time()
    ages = {"bad1": now, "bad2": now, "older": now - 86400, "good": now, "stranger": now}
    server = WandbServer({f"team/project/{run}": created for run, created in ages.items()})
    words = [*["--no-delete-wandb-runs"] * keep, "--lr-key", "lr", "lr=1e-3", "--", sys.executable, "fit.py"]
    with server.serving() as url:
        env = {"WANDB_BASE_URL": url, "WANDB_API_KEY": KEY, "WANDB_CONFIG_DIR": str(tmp_path / "wandb")}
        ran(tmp_path, *words, env=env)
    assert server.deleted == ([] if keep else ["team/project/bad1", "team/project/bad2"])
    log = (tmp_path / "safe_train.log").read_text()
    assert ("deleted the W&B run of a failed attempt: team/project/bad2" in log) == (not keep)
    assert ("stays: team/project/older (it is older than this supervision)" in log) == (not keep)
