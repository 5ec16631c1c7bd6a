"""A run with its own evaluation, and a checkpoint that no run made: what evaluations are asked about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ci_llm import embedded
from tests.evaluation.trials import train
from tests.support.crowds import disturbed_crowd, save_crowd
from tools.testbed.forkserver import ForkServer


@pytest.fixture(scope="session")
def trained(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps; returns its folder, in which nothing may be changed."""
    folder = tmp_path_factory.mktemp("trained")
    assert server.run(train, folder / "log", folder=str(folder)) == [0], (folder / "log").read_text()
    return folder / "run"


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of agents of which some are right."""
    return save_crowd(disturbed_crowd(), tmp_path_factory.mktemp("saved") / "crowd")


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows of the embedded task as a file of a user's own."""
    path = tmp_path_factory.mktemp("data") / "mine.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in embedded.rows("test")[:10]))
    return path
