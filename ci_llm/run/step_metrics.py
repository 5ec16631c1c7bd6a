"""What a line of metrics says about the steps since the line before it: means of losses and norms, and the speed.

A checkpoint in the middle of an interval holds its sums, so that a run that goes on from there reports the means of the
undisturbed run. The speed is that of the present attempt.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

_KEY: Final = "interval"  # of a manifest


class StepMetrics:
    """Sums over the optimizer steps since the last line. Steps in which nothing was trained on are not among them.

    A loss is a mean over target tokens, so a long step weighs more than a short one. A norm is a mean over steps. The
    steps in which an agent was not finite do not count for that agent; the metrics say how many those are.

    Args:
        num_agents: K.
        device: on which the gradient norms are. They are added up there, because reading them would wait for it.
    """

    def __init__(self, num_agents: int, device: torch.device) -> None:
        self._names, self._device = [f"agent{k}" for k in range(num_agents)], device
        self.restart()

    def restart(self) -> None:
        """Begin the interval after a line; the clock of its speed starts now."""
        count = len(self._names)
        self._targets = [0] * (count + 1)  # of the agents, then of the diversity
        self._sums = [0.0] * (count + 1)
        self._norms = torch.zeros(2, count, dtype=torch.float64, device=self._device)  # sums, steps
        self._trained = 0  # steps among the sums
        self.restart_clock()

    def replace_agents(self, names: Sequence[str]) -> None:
        """Go on with the agents of these names; who is new begins without any step."""
        places = [self._names.index(name) if name in self._names else None for name in names]
        self._sums = [*(0.0 if at is None else self._sums[at] for at in places), self._sums[-1]]
        self._targets = [*(0 if at is None else self._targets[at] for at in places), self._targets[-1]]
        norms = torch.zeros(2, len(places), dtype=torch.float64, device=self._device)
        for place, at in enumerate(places):
            if at is not None:
                norms[:, place] = self._norms[:, at]
        self._names, self._norms = [*names], norms

    def restart_clock(self) -> None:
        """Measure the speed from here."""
        self._tokens, self._steps, self._since = 0, 0, time.perf_counter()

    def count(self, tokens: int) -> None:
        """One more step was taken, over so many packed tokens."""
        self._tokens += tokens
        self._steps += 1

    def add(self, targets: Sequence[int], sums: Sequence[float], norms: Tensor, left_out: Sequence[int] = ()) -> None:
        """Add a step that was trained on.

        Args:
            targets: [K + 1] target tokens of the step: of each agent, then of all.
            sums: [K + 1] over them: cross-entropy of each agent in nats, then the diversity.
            norms: [K] the gradient norm of each agent.
            left_out: agents that did not move in it, whose loss or gradient was not finite, or overflowed.
        """
        self._trained += 1
        for i, value in enumerate(sums):
            if math.isfinite(value) and i not in left_out:
                self._sums[i] += value
                self._targets[i] += targets[i]
        finite = torch.isfinite(norms)
        if left_out:
            finite[list(left_out)] = False
        self._norms += torch.stack([norms.where(finite, norms.new_zeros(())), finite.to(norms.dtype)]).double()

    def means(self) -> dict[str, float]:
        """The means by the names of metrics.jsonl; empty without a step that was trained on."""
        if not self._trained:
            return {}
        *losses, diversity = map(_mean, self._sums, self._targets)
        finite = [loss for loss in losses if math.isfinite(loss)] or losses
        means = {"train/task_loss": sum(finite) / len(finite), "train/diversity": diversity}
        for name, loss, total, count in zip(self._names, losses, *self._norms.tolist(), strict=True):
            means |= {f"train/{name}/loss": loss, f"train/{name}/grad_norm": _mean(total, count)}
        return means

    def speed(self) -> dict[str, float]:
        """Tokens per second and seconds per step, by the names of metrics.jsonl."""
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        return {"tokens_per_s": self._tokens / elapsed, "step_time_s": elapsed / max(self._steps, 1)}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around an evaluation: its time is not that of a step."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def record(self) -> dict[str, Any]:
        """What the manifest of a checkpoint says of the sums; nothing right after a line."""
        if not self._trained:
            return {}
        norms, norm_steps = self._norms.tolist()
        sums = {"sums": [*self._sums], "targets": [*self._targets], "norms": norms, "norm_steps": norm_steps}
        return {_KEY: {"steps": self._trained, **sums}}

    def load(self, info: Mapping[str, Any]) -> None:
        """Go on from the sums of a checkpoint, if its manifest holds any."""
        if saved := info.get(_KEY):
            self._trained = saved["steps"]
            self._sums, self._targets = [*saved["sums"]], [*saved["targets"]]
            self._norms = torch.tensor([saved["norms"], saved["norm_steps"]], dtype=torch.float64, device=self._device)


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan
