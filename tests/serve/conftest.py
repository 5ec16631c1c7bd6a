"""A crowd served on a real port of this process, which most tests of this folder query."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ci_llm.crowd.crowd import Crowd
from ci_llm.serve import Options
from ci_llm.serve.app import of_run
from tests.serve.listening import Listening
from tests.support.crowds import disturbed_crowd, save_crowd

KEY = "a key"


@pytest.fixture(scope="session")
def crowd() -> Crowd:
    """The crowd that answers in process; the served one is another object with the same weights."""
    return disturbed_crowd()


@pytest.fixture(scope="session")
def saved(crowd: Crowd, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_crowd(crowd, tmp_path_factory.mktemp("served") / "final_checkpoint")


@pytest.fixture(scope="session")
def served() -> Iterator[Listening]:
    """Four texts at a time, and eight that may wait."""
    with Listening(of_run(disturbed_crowd(), Options(key=KEY, slots=4, queue=8)), KEY) as listening:
        yield listening
        assert listening.load() == (0, 0), "a slot is not free"
