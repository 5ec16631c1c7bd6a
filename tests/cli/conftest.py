"""A saved crowd that commands are asked about; nothing is trained for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci_llm.crowd.model import Crowd
from tests.support.crowds import disturbed_crowd, save_crowd


@pytest.fixture(scope="module")
def crowd() -> Crowd:
    return disturbed_crowd()


@pytest.fixture(scope="module")
def run(crowd: Crowd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with a final checkpoint."""
    folder = tmp_path_factory.mktemp("asked") / "run"
    save_crowd(crowd, folder / "final_checkpoint")
    return folder
