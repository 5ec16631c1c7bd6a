"""The optimizer steps in numbers: means for a line of metrics, and a warning where agents do not learn.

Nothing here changes the training.

Legend: K agents.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from ci_llm.core.quantities import mean_of
from ci_llm.core.run_status import RunStatus

logger = logging.getLogger(__name__)


_KEY: Final = "interval"  # of a manifest
#: Metrics whose difference is a metric as well.
BETTER, WORSE = "rewards/chosen", "rewards/rejected"


class StepMetrics:
    """Sums over the optimizer steps since the last line of metrics; steps without training do not count.

    A loss is a mean over target tokens, so a long step weighs more than a short one. A norm is a mean over steps. Steps
    in which an agent was not finite do not count for that agent; the metrics tell their number.

    A checkpoint in the middle of an interval holds its sums, so that a resumed run reports the means of the undisturbed
    run. The speed is that of the present attempt.

    Args:
        names: of the agents.
        device: the device of the gradient norms. They are added up there, because reading them would wait for it.
    """

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        self._names, self._device = [*names], device
        self.restart()

    def restart(self) -> None:
        """Begin the interval after a line; the clock of its speed starts now."""
        count = len(self._names)
        self._targets = [0] * (count + 1)  # of the agents, then of the diversity
        self._sums = [0.0] * (count + 1)
        self._norms = torch.zeros(2, count, dtype=torch.float64, device=self._device)  # sums, steps
        self._named: dict[str, dict[str, list[float]]] = {}  # by agent and metric of the objective: sum and count
        self._trained = 0  # steps among the sums
        self.restart_clock()

    def keep_agents(self, kept: Sequence[int]) -> None:
        """Continue with the agents at these places."""
        self._names, self._norms = [self._names[place] for place in kept], self._norms[:, [*kept]]
        self._sums = [*(self._sums[place] for place in kept), self._sums[-1]]
        self._targets = [*(self._targets[place] for place in kept), self._targets[-1]]

    def restart_clock(self) -> None:
        """Measure the speed from here."""
        self._tokens, self._steps, self._since = 0, 0, time.perf_counter()

    def count(self, tokens: int) -> None:
        """One more step was taken, over this number of tokens."""
        self._tokens += tokens
        self._steps += 1

    def add(self, targets: Sequence[int], sums: Sequence[float], norms: Tensor, left_out: Sequence[int] = ()) -> None:
        """Add a step that was trained on.

        Args:
            targets: [K + 1] target tokens of the step: of each agent, then of all.
            sums: [K + 1] over them: loss of each agent in nats, then the diversity.
            norms: [K] the gradient norm of each agent.
            left_out: agents that did not move in the step, because they were not finite or overflowed.
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

    def add_named(self, metrics: Sequence[str], sums: Sequence[Sequence[float]], left_out: Sequence[int] = ()) -> None:
        """Add the metrics of the objective in the same step; arguments as in `StepSums.metrics` and `add`."""
        if not metrics:  # an objective without any has no sums of agents either
            return
        for k, (name, numbers) in enumerate(zip(self._names, sums, strict=True)):
            if k not in left_out:
                own = self._named.setdefault(name, {})
                for metric, total, count in zip(metrics, numbers[::2], numbers[1::2], strict=True):
                    before = own.get(metric, [0.0, 0.0])  # a resume may name other rewards than the checkpoint
                    own[metric] = [before[0] + total, before[1] + count]

    def means(self) -> dict[str, float]:
        """The means by the names of metrics.jsonl; empty without a step that was trained on."""
        if not self._trained:
            return {}
        *losses, diversity = map(_mean, self._sums, self._targets)
        means = {"train/task_loss": mean_of(losses), "train/diversity": diversity}
        for name, loss, total, count in zip(self._names, losses, *self._norms.tolist(), strict=True):
            means |= {f"train/{name}/loss": loss, f"train/{name}/grad_norm": _mean(total, count)}
            for metric, (total, count) in self._named.get(name, {}).items():
                means[f"train/{name}/{metric}"] = _mean(total, count)
            better = means.get(f"train/{name}/{BETTER}")
            if better is not None:
                means[f"train/{name}/rewards/margins"] = better - means[f"train/{name}/{WORSE}"]
        return means

    def speed(self) -> dict[str, float]:
        """Tokens per second and seconds per step, by the names of metrics.jsonl."""
        elapsed = max(time.perf_counter() - self._since, 1e-9)
        return {"tokens_per_s": self._tokens / elapsed, "step_time_s": elapsed / max(self._steps, 1)}

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock within the block, for an evaluation."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began

    def record(self) -> dict[str, Any]:
        """The sums for the manifest of a checkpoint; empty right after a line of metrics."""
        if not self._trained:
            return {}
        norms, norm_steps = self._norms.tolist()
        sums = {"sums": [*self._sums], "targets": [*self._targets], "norms": norms, "norm_steps": norm_steps}
        named = {"named": {name: {**own} for name, own in self._named.items()}} if self._named else {}
        return {_KEY: {"steps": self._trained, **sums, **named}}

    def load(self, info: Mapping[str, Any]) -> None:
        """Continue the sums in the manifest of a checkpoint, if there are any."""
        saved = info.get(_KEY)
        if saved:
            self._trained = saved["steps"]
            self._named = {name: {**own} for name, own in saved.get("named", {}).items()}
            self._sums, self._targets = [*saved["sums"]], [*saved["targets"]]
            self._norms = torch.tensor([saved["norms"], saved["norm_steps"]], dtype=torch.float64, device=self._device)


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


FIRST: Final = 3  # steps whose median is the loss at the beginning; a median ignores one bad batch
RECENT: Final = 20  # steps whose mean is the loss now
LEAST: Final = 5  # the fewest such steps, in a run that is shorter than two windows
RISE: Final = 1.25  # a loss has risen if it is this many times the loss at the beginning,
EARLY_RISE: Final = 2.0  # this many times over fewer than RECENT steps,
DEVIATIONS: Final = 3.0  # and if the rise is this many standard deviations of single batches
STILL: Final = 1e-9  # a gradient norm below this counts as none: weights in fp32 do not move by it
LOOKS: Final = 2  # looks in a row without a gradient before there is a warning
SMALL_LOSS: Final = 0.05  # below this loss an agent without a gradient has simply learned its rows


@dataclass
class Learning:
    """Tells by losses and gradient norms whether the agents learn, and warns if they clearly do not.

    It warns if the loss of an agent has risen above that of the first steps by more than batches differ, or if an agent
    gets no gradient any more while its loss is not small. The usual cause of both is a learning rate that is too large.
    The run continues; the warning is in its status and in its results.

    Attributes:
        names: the names of the agents, for messages.
        total_steps: the steps of the whole run.
        first_loss: nats per target at the beginning of the run, mean over agents; None until FIRST steps were seen.
        earlier: the warning of an earlier attempt; it holds until this attempt has seen enough steps.
    """

    names: Sequence[str]
    total_steps: int = 0
    first_loss: float | None = None
    earlier: str | None = None
    _first: list[float] = field(default_factory=list)
    _recent: deque[tuple[float, ...]] = field(default_factory=deque)
    _still: list[int] = field(default_factory=list)

    def keep_agents(self, kept: Sequence[int]) -> None:
        """Continue with the agents at these places."""
        self.names = [self.names[place] for place in kept]
        self._recent = deque(tuple(losses[place] for place in kept) for losses in self._recent)
        self._still = [self._still[place] for place in kept] if self._still else []

    @property
    def window(self) -> int:
        """Steps whose mean is the loss now."""
        return max(LEAST, min(RECENT, self.total_steps // 2))

    def count(self, losses: Sequence[float]) -> None:
        """Take the loss of every agent in one more step."""
        finite = [loss for loss in losses if math.isfinite(loss)]
        if self.first_loss is None and finite:
            self._first.append(statistics.fmean(finite))
            if len(self._first) == FIRST:
                self.first_loss = statistics.median(self._first)
        self._recent.append(tuple(losses))
        while len(self._recent) > self.window:
            self._recent.popleft()

    def look(self, norms: Sequence[float]) -> None:
        """Take the gradient norm of every agent in the last step counted."""
        before = self._still or [0] * len(norms)
        losses = self._recent[-1]
        self._still = [
            looks + 1 if norm < STILL and loss > SMALL_LOSS else 0
            for looks, norm, loss in zip(before, norms, losses, strict=True)
        ]

    def warning(self) -> str | None:
        """The warning in a sentence; None if there is none."""
        if still := [k for k, looks in enumerate(self._still) if looks >= LOOKS]:
            now = statistics.fmean(self._recent[-1][k] for k in still)
            return f"no gradient reaches {self._named(still)} any more, at a loss of {now:.3g}: nothing is learned"
        if self.first_loss is None or len(self._recent) < self.window:
            return self.earlier
        if risen := [k for k in range(len(self._recent[0])) if self._has_risen(k)]:
            now = statistics.fmean(loss for k in risen for loss in self._recent_of(k))
            return (
                f"the loss of {self._named(risen)} has risen from {self.first_loss:.3g} at the beginning to {now:.3g},"
                f" the mean of {self.window} steps"
            )
        return None

    def report(self, status: RunStatus, learning_rates: str) -> None:
        """Warn once when agents stop learning, and log when they learn again; the status has the present warning.

        Args:
            learning_rates: the learning rates of the agents, in words.
        """
        before = status.current.warning
        warning = self.warning()
        status.update(warning=warning, first_loss=self.first_loss)
        if warning is not None and before is None:
            rates = f"learning_rate {learning_rates}"
            logger.warning(f"{warning}; most often {rates} is too large, or num_warmup_steps too few")
        elif before is not None and warning is None:
            logger.info("the agents learn again: the warning no longer holds")

    def _has_risen(self, agent: int) -> bool:
        assert self.first_loss is not None
        recent = self._recent_of(agent)
        if len(recent) < LEAST:
            return False
        factor = RISE if self.window == RECENT else EARLY_RISE
        rise = statistics.fmean(recent) - self.first_loss
        return rise > (factor - 1) * self.first_loss and rise > DEVIATIONS * statistics.pstdev(recent)

    def _recent_of(self, agent: int) -> list[float]:
        return [losses[agent] for losses in self._recent if math.isfinite(losses[agent])]

    def _named(self, agents: Sequence[int]) -> str:
        if len(agents) == len(self._recent[-1]):
            return "every agent" if len(agents) > 1 else "the agent"
        return ", ".join(self.names[k] for k in agents)
