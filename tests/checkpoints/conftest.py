"""What the tests of checkpoints share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.log_lines import log_lines


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged during the test."""
    with log_lines() as lines:
        yield lines
