"""The benchmark of a GPU runs to its table on a simulated one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.conftest import Simulated

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).parents[2] / "benchmarks/gpu.py")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_case_ends_in_the_table(simulated: Simulated) -> None:
    first = simulated(options=["--program", PROGRAM, "--tiny", "--to", "gpu"])
    table = (simulated.folder / "gpu/table.md").read_text()
    assert "failed" not in table
    rows = [line.split("|")[1:-1] for line in table.splitlines() if "K=4" in line]
    assert len(rows) == 6
    assert all(int(kernels) > 0 and int(waits) > 0 for _, *_, kernels, waits, _ in rows)
    assert first.said.count(" ...\n") == len(list((simulated.folder / "gpu").glob("*.json")))
