"""Generators are restored exactly, and keyed seeds give the same numbers whatever was drawn before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from ci_llm.core import determinism


def draw() -> tuple[object, ...]:
    """Draw from every global generator; the second normal number of each uses the cached half of the first."""
    numbers = (random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn()))
    return *numbers, *torch.rand(2).tolist(), float(torch.randn(()))


def test_every_generator_continues_from_its_saved_state() -> None:
    draw()  # a normal number of Python and NumPy is left over for the next call
    state = determinism.capture()
    wanted = draw()
    assert draw() != wanted
    assert determinism.restore(state) is None
    assert draw() == wanted


def test_a_key_sets_every_generator_and_each_part_of_it_counts() -> None:
    keys = [(42, "micro-step", 3, 0, 1), (43, "micro-step", 3, 0, 1), (42, "micro-step", 3, 1, 0), (42, "x", 3, 0, 1)]
    drawn = []
    for key in keys:
        determinism.seed_everything(*key)
        drawn.append(draw())
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(keys)
    determinism.seed_everything(*keys[0])
    assert draw() == drawn[0]


def test_keys_are_pinned() -> None:
    """Another key would change the start, the dropout and the data order of runs that resume."""
    assert determinism.derive_seed(42, "adapter", 0) == 5490992225335850112


def test_a_gpu_that_this_process_has_not_used_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop on the CPU of a machine with GPUs resumes on one without."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    state = determinism.capture()
    assert "cuda" not in state
    assert determinism.restore(state) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert determinism.restore(state) == "CUDA generators 0 -> 2"
