"""What the probe wrote about one process of one run, read into plain values. Nothing but JSON is read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Step:
    """One optimizer step. Digests are short texts.

    Attributes:
        rows: of the data, of all micro-batches, in order.
        losses: at each backward.
        generators: at the first forward, by library.
        mode: which modules were in training mode.
        dropout: whether the model holds active dropout.
        scale: (scale, steps since it grew) of each loss scaler.
        lr, settings: of each parameter group.
        moments: of the optimizer, after the step.
        state: of every parameter and buffer, after the step.
        saved_before: whether a checkpoint has appeared since the step before.
    """

    rows: Sequence[str] = ()
    losses: Sequence[float] = ()
    generators: Mapping[str, str] = field(default_factory=dict)
    mode: str = ""
    dropout: bool = False
    scale: Sequence[Sequence[float]] = ()
    lr: Sequence[float] = ()
    settings: Sequence[Mapping[str, str]] = ()
    moments: Mapping[str, str] = field(default_factory=dict)
    grads: str = ""
    state: Mapping[str, str] = field(default_factory=dict)
    saved_before: bool = False
    time: float = 0.0


@dataclass(frozen=True)
class Trace:
    """One process of one run.

    Attributes:
        state, moments: before its first step.
        buffers: which of the state no optimizer changes.
        rounded: parameters that then held nothing that half precision could not hold.
        places: lines of the script, by what they do; the last one of each.
        enough: it was ended after as many steps as asked for.
    """

    steps: Sequence[Step]
    state: Mapping[str, str]
    moments: Mapping[str, str]
    buffers: Sequence[str]
    rounded: Sequence[str]
    framework: str
    places: Mapping[str, str]
    enough: bool

    @property
    def saves(self) -> list[int]:
        """Steps after which a checkpoint appeared before the next step was done."""
        return [number for number, step in enumerate(self.steps) if step.saved_before]

    def state_after(self, step: int) -> Mapping[str, str]:
        """Weights and buffers after so many steps."""
        return self.steps[step - 1].state if step else self.state

    def moments_after(self, step: int) -> Mapping[str, str]:
        """Of the optimizer, after so many steps."""
        return self.steps[step - 1].moments if step else self.moments


def read_traces(folder: Path) -> list[Trace]:
    """Of every process that took an optimizer step, by rank; none if the probe saw none."""
    paths = sorted(folder.glob("process_*.jsonl"), key=lambda path: int(path.stem.partition("_")[2]))
    return [trace for trace in map(_read, paths) if trace.steps or trace.state]


def _read(path: Path) -> Trace:
    # A kill may tear the last line, which then has no end.
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    begun = [line for line in lines if line["kind"] == "begin"]
    known = Step.__dataclass_fields__
    return Trace(
        steps=[
            Step(**{name: value for name, value in line.items() if name in known})
            for line in lines
            if line["kind"] == "step"
        ],
        state=_joined(begun, "state"),
        moments=_joined(begun, "moments"),
        buffers=[name for line in begun for name in line.get("buffers", [])],
        rounded=[name for line in begun for name in line.get("rounded", [])],
        framework=begun[0]["framework"] if begun else "torch",
        places={line["what"]: line["at"] for line in lines if line["kind"] == "place"},
        enough=any(line["kind"] == "enough" for line in lines),
    )


def _joined(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, str]:
    return {name: digest for line in lines for name, digest in line.get(key, {}).items()}
