"""`python -m tools.simulate`: ten lines of YAML, what a run has measured, a table, an object for scripts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.folders import leave_run
from tools.simulate.__main__ import main
from tools.simulate.model import Cluster, observe, read_cluster

YAML = """# one's own cluster
nodes: 500
node_mtbf: 300d
failures: weibull
restart: 1m30s
queue: 5m
state_mb: 2000
storage_mb_per_s: 1000
price: 2.5
work: 12h
"""
SHORT = ["work=2h", "repeats=2", "step=20", "job_mtbf=30m", "stall=5"]


def test_a_cluster_is_ten_lines_and_the_command_line_overrules_them(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(YAML)
    cluster = read_cluster(tmp_path / "cluster.yaml", ["--price", "4", "work=1d"], {"restart": 7.0, "step": 3.0})
    assert (cluster.nodes, cluster.failures, cluster.queue) == (500, "weibull", 300.0)
    assert (cluster.restart, cluster.step, cluster.price, cluster.work) == (90.0, 3.0, 4.0, 86400.0)
    assert cluster.mtbf_s == 300 * 86400 / 500
    assert cluster.durable_s == 2.0


def test_all_that_is_wrong_is_said_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nodess=3", "step=x", "silent_share=2", "stray"]) == 2
    said = capsys.readouterr().err
    for part in ("4 problems", "did you mean nodes?", "step is 'x'", "of at least 0", "'stray' is neither"):
        assert part in said


def test_a_table_has_the_best_interval_and_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "price=2"]) == 0
    said = capsys.readouterr().out
    for part in (
        "auto (ours)",
        "every 300 s",
        "failures twice as often",
        "best: ",
        "Daly's formula",
        "bound: ",
        "cost",
    ):
        assert part in said


def test_a_run_tells_how_often_it_failed_and_how_long_it_took(tmp_path: Path) -> None:
    known = observe(leave_run(tmp_path / "run"))
    assert known["step"] > 0
    assert {*known} <= {*Cluster.model_fields}
    assert read_cluster(None, [], known).step == known["step"]
