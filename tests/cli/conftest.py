"""A saved crowd for tests of commands; it is not trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci_llm.crowd.crowd import Crowd
from tests.support.crowds import disturbed_crowd, save_crowd


@pytest.fixture(scope="session")
def crowd() -> Crowd:
    return disturbed_crowd()


@pytest.fixture(scope="session")
def run(crowd: Crowd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with a final checkpoint."""
    folder = tmp_path_factory.mktemp("asked") / "run"
    save_crowd(crowd, folder / "final_checkpoint")
    return folder


@pytest.fixture(autouse=True)
def _logger_as_before() -> Iterator[None]:
    """Restores the package's logger, which `--debug` changes for the rest of the process."""
    package = logging.getLogger("ci_llm")
    level, propagate, handlers = package.level, package.propagate, [*package.handlers]
    yield
    package.setLevel(level)
    package.propagate, package.handlers[:] = propagate, handlers
