"""`python -m tools.simulate`: a few lines of YAML, a table."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.simulate.__main__ import main
from tools.simulate.model import read_cluster

YAML = """# one's own cluster
nodes: 500
node_mtbf: 300d
restart: 1m30s
queue: 5m
state_mb: 2000
storage_mb_per_s: 1000
work: 12h
"""
SHORT = ["work=2h", "repeats=2", "step=20", "job_mtbf=30m", "stall=5"]


def test_a_cluster_is_a_few_lines_and_the_command_line_overrules_them(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(YAML)
    cluster = read_cluster(tmp_path / "cluster.yaml", ["--queue", "4", "work=1d"])
    assert (cluster.nodes, cluster.restart) == (500, 90.0)
    assert (cluster.queue, cluster.work) == (4.0, 86400.0)
    assert cluster.mtbf_s == 300 * 86400 / 500
    assert cluster.durable_s == 2.0


def test_all_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodess=3", "step=x", "silent_share=2", "stray"]) == 2
    said = capsys.readouterr().err
    for part in ("4 problems", "did you mean nodes?", "step is 'x'", "of at least 0", "'stray' is neither"):
        assert part in said


def test_a_table_has_the_best_interval_and_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SHORT) == 0
    said = capsys.readouterr().out
    for part in ("every 300 s", "failures twice as often", "best: ", "Daly's formula", "bound: "):
        assert part in said
