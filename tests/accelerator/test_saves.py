"""A save copies behind a step, and what makes that right is what keeps poison out of the copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.accelerator.conftest import Simulated

pytestmark = pytest.mark.slow


def test_a_copy_without_a_wait_for_its_stream_or_for_the_writer_is_poison(simulated: Simulated) -> None:
    ran = simulated(options=["--program", str(Path(__file__).parent / "programs/mutants.py")])
    found = json.loads(ran.said.partition("\nfound ")[2])
    assert found == {"none": True, "no_synchronize": False, "no_wait_event": False, "no_event": False}
    assert [what for what, _, _ in ran.trace["races"]] == [
        "a copy of memory whose writer this stream has not waited for"
    ]
