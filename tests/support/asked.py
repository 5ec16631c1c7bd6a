"""Trials of runs whose crowd changes: requests that arrive in appointed steps, and kills at named moments."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ci_llm.cli import runs
from ci_llm.cli.main import main
from tools.testbed.moments import interfere
from tools.testbed.trials import train_watched

#: Called once per step, before its ballot, in a run that neither repeats a step nor skips one.
IN_A_STEP = "ci_llm.run.loop.agree_on_gradients"


def asked(*asks: tuple[int, Sequence[str]]) -> dict[str, Any]:
    """What a trial is told to which somebody speaks: see `train_asked`."""
    return {"trial": train_asked, "told": {"asks": asks}}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def train_asked(
    folder: str,
    arguments: list[str],
    asks: Sequence[tuple[int, Sequence[str]]] = (),
    fate: dict[str, Any] | None = None,
) -> int:
    """A trial for the fork server: `train.py`, to which somebody speaks by `ci-llm agents`.

    Args:
        asks: (step, words): the words behind `ci-llm agents`, said in this step of the attempt, counted from 1.
        fate: see `train_watched`.
    """
    for step, words in asks:
        if os.environ.get("RANK", "0") == "0":
            interfere(IN_A_STEP, step, partial(_ask, [*words]))
    return train_watched(folder, arguments, fate)


def _ask(words: list[str]) -> None:
    runs._PATIENCE_S = 0.0  # type: ignore[misc]  # this very step answers
    assert main(["agents", words[0], "run", *words[1:]]) == 0
