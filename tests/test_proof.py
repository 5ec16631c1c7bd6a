"""`make proof` in the smallest form, on a narrow base: that the script itself stays alive, and that it can fail."""

from __future__ import annotations

import hashlib
import os
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.proof import MOVED_AT, SAVE_STEPS, Form, Proof, prove
from tests.support.story_rows import write_stories

TINY = Form((2e-3, 8e-3), (4,), steps=12, rows=4, validation=8, test=8, rivals=0, by_steps=True)

#: An attempt stands before it gives the next checkpoint its name, until it is killed: no clock decides how far it is.
STAND = f"""
import os, sys, threading
name = "checkpoint_step_%d" % (int(os.environ.get("STAND_AFTER", 0)) + {SAVE_STEPS})
def stand(event, arguments):
    if event == "os.rename" and os.path.basename(str(arguments[1])) == name:
        threading.Event().wait()
if "STAND_AFTER" in os.environ:
    sys.addaudithook(stand)
"""


@pytest.mark.slow
def test_a_job_that_is_killed_wiped_and_moved_ends_with_the_bytes_of_an_undisturbed_one(
    narrow_base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STAND)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    stories = write_stories(tmp_path / "stories", 40)
    assert prove(TINY, narrow_base, stories, tmp_path, seed=0)
    shown = capsys.readouterr().out
    killed_after = [int(step) for step in re.findall(r"kill -9 .* of step (\d+)", shown)]
    assert killed_after == sorted(random.Random(0).sample(range(SAVE_STEPS, TINY.steps, SAVE_STEPS), MOVED_AT))
    assert "the disk is wiped; only the bucket has the run" in shown
    assert "the folder has moved to elsewhere/killed" in shown
    assert "2 of 2 agents are the same file" in shown
    files = [*tmp_path.glob("**/final_checkpoint/agent*/adapter_model.safetensors")]
    assert len(files) == 5  # two agents undisturbed, two killed, the winner alone
    digests = {hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    assert len(digests) == 2
    assert all(digest in shown for digest in digests & {*shown.split()})


def test_a_proof_with_another_byte_does_not_hold() -> None:
    found = Proof({}, {"undisturbed": ["a", "b"], "killed": ["a", "b"], "alone": ["b"]}, [0.5, 0.4], Path(), 3, 1)
    assert found.holds
    assert not replace(found, scores=[0.4, 0.5]).holds  # another trial has won, and its run alone is missing
    assert not replace(found, fills=0).holds
    for name in ("undisturbed", "killed"):
        assert not replace(found, digests={**found.digests, name: ["a", "c"]}).holds
