"""The cluster that all scenarios share, and the base that they train."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import scenarios
from tests.slurm.cluster import Cluster, missing

NUM_NODES = 10


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """One cluster for all scenarios, which run on it side by side."""
    if reason := missing():
        pytest.skip(reason)
    scratch = tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)
    with scratch as folder, Cluster(Path(folder), NUM_NODES) as cluster:
        yield cluster


@pytest.fixture(scope="package", autouse=True)
def base(narrow_base: str) -> Iterator[None]:
    """The scenarios ask nothing of a run but its bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scenarios.KEYS, "model_name", narrow_base)
        yield
