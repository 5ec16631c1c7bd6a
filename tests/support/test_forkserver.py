"""The process groups of two tests never use the same port."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from tests.support.children import Child
from tools.testbed.forkserver import free_port

CLAIMS = """
from tools.testbed.forkserver import free_port
print("port", free_port())
input()
"""


def test_a_port_that_another_test_has_claimed_is_free_when_its_process_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(numbers: Iterator[int]) -> None:
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(numbers))

    with Child.python(CLAIMS) as child:
        theirs = int(child.read_until("port").split()[1])  # nobody listens there yet
        draw(itertools.chain([theirs], itertools.count(16000)))
        assert free_port() != theirs
    draw(iter([theirs]))
    assert free_port() == theirs
