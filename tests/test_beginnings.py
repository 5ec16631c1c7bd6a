"""Wherever a run begins and however it is interrupted: it goes on from its own newest step, to the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.beginnings import BEGINS, ENDS, STEPS, Beginnings, begins_at
from tests.forkserver import ForkServer
from tests.trials import account, differences

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("beginnings")]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer("tests.beginnings") as server:
        yield server


@pytest.fixture(scope="module", params=[1, 2], ids=["1 process", "2 processes"])
def beginnings(
    request: pytest.FixtureRequest, server: ForkServer, tmp_path_factory: pytest.TempPathFactory
) -> Beginnings:
    return Beginnings(server, tmp_path_factory.mktemp("beginnings"), request.param)


@pytest.mark.parametrize("end", ENDS[:-1])
@pytest.mark.parametrize("begin", BEGINS)
def test_an_interrupted_run_goes_on_from_its_own_newest_step(
    begin: str, end: str, beginnings: Beginnings, tmp_path: Path
) -> None:
    undisturbed = beginnings.undisturbed(begin)
    beginnings.end(end, tmp_path, begin)
    assert not differences(account(undisturbed), account(tmp_path))
    log = (tmp_path / "run/training.log").read_text()
    newest = begins_at(begin) + 2
    told = f"resume    step {newest} of {STEPS}, verified, from run/checkpoint_step_{newest}\n"
    assert told in log.replace(f"{tmp_path}/", ""), log
    assert log.rpartition("resume    step")[2].count("exactness: bitwise\n") == 1, log
    assert not (tmp_path / "run/superseded").exists()


@pytest.mark.parametrize("begin", BEGINS)
def test_a_second_call_of_a_completed_run_changes_nothing(begin: str, beginnings: Beginnings) -> None:
    folder = beginnings.undisturbed(begin)
    before = {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*") if path.is_file()}
    (folder / "log").unlink()
    assert beginnings.train(folder, **BEGINS[begin](beginnings.source)) == [0] * beginnings.ranks
    assert f"This run is complete at step {STEPS}" in (folder / "log").read_text()
    assert before == {path: path.stat().st_mtime_ns for path in (folder / "run").rglob("*") if path.is_file()}
