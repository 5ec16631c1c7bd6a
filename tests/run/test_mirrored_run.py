"""A run whose disk is gone: killed anywhere, it resumes from its mirror alone, to the bits of the undisturbed run."""

from __future__ import annotations

import json
import random
import shutil
from typing import Any

import pytest

from ci_llm.mirror.objects import open_objects
from ci_llm.mirror.reader import MirrorReader
from tests.support import campaign
from tests.support.crowds import bits_in_company
from tools.testbed.trials import STEPS, Cell, Fate, Trials, account, differences

pytestmark = pytest.mark.slow

TRIALS = campaign.size(2, 100)


@bits_in_company  # an evaluation after a kill has other batches
@pytest.mark.parametrize("seed", range(TRIALS))
def test_a_wiped_disk_comes_back_from_the_mirror_to_the_same_bits(trials: Trials, seed: int) -> None:
    draw = random.Random(seed)
    cell = Cell(dropout=0.1)
    folder = trials.new_folder()
    mirror: dict[str, Any] = {"mirror": f"file://{folder}/mirror", "save_steps": 2}
    # Killed in any step after the first save; the first trial waits until the mirror has that one, the others do not.
    fate = Fate("SIGKILL", draw.randrange(3, STEPS), committed=2 if seed == 0 else None, mirrored=seed == 0)
    trials.ended(cell, fate, folder, **mirror)
    shutil.rmtree(folder / "run")
    head = MirrorReader(open_objects(mirror["mirror"])).head()
    newest = head.newest if head else None
    assert newest is not None or seed > 0
    trials.complete(cell, folder, **mirror)
    log = (folder / "run/training.log").read_text()
    assert ("came from" in log) == (newest is not None), log
    if newest is not None:
        assert f"step {newest.step} came from {mirror['mirror']}" in log, log
        assert f"step {newest.step} of {STEPS}, verified" in log, log
    odd = differences(account(folder), trials.reference(cell))
    assert odd == [], (odd, (folder / "log").read_text())


def test_a_fresh_node_resumes_from_the_mirror_of_an_interrupted_run(trials: Trials) -> None:
    """A signal interrupts the run, which sends its newest step; on an empty disk the same command completes it."""
    cell = Cell()
    folder = trials.new_folder()
    mirror = {"mirror": f"file://{folder}/mirror"}
    trials.ended(cell, Fate("SIGTERM", 6), folder, **mirror)
    shutil.rmtree(folder / "run")
    trials.complete(cell, folder, **mirror)
    run = folder / "run"
    log = (run / "training.log").read_text()
    assert "step 7 came from file://" in log
    assert "[1] interrupted (signal:SIGTERM): step 7 is saved" in log
    assert "exactness: bitwise" in log
    status = json.loads((run / "status.json").read_text())
    assert (status["status"], status["attempt"]) == ("completed", 2)
    assert (status["mirror"]["step"], status["mirror"]["error"]) == (STEPS, None)
    assert sorted(path.name for path in (run / "attempts").iterdir()) == ["1", "2"]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sorted({line["attempt"] for line in metrics}) == [1, 2]
    assert differences(account(folder), trials.reference(cell)) == []
    # A third disk has nothing left to do.
    shutil.rmtree(run)
    trials.complete(cell, folder, **mirror)
    assert "This run is complete at step 12" in (folder / "log").read_text()
