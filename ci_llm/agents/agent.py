"""`Agent`: one LoRA agent of a crowd, with all that it has: adapters, weights, and how and on what it trains.

Its numbers are views of the crowd's storage (`AgentStorage`), which gives it new ones whenever the crowd changes. Its
learning rate is a pure function of the step, by the schedules of Transformers, with no position to save.

Legend: P numbers of the agent, r rank, D hidden width, n numbers of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from ci_llm.config import Config
from ci_llm.data.agent_rows import Course
from ci_llm.errors import ForeignCheckpoint
from ci_llm.lora.heads import SCORE
from ci_llm.lora.settings import AgentLora


@dataclass(frozen=True)
class Training:
    """How and on what an agent trains.

    Attributes:
        learning_rate: the rate of a 0-based optimizer step, before any factor.
        weight_decay: the weight decay of the optimizer.
        max_grad_norm: the clipping bound of its gradient; None for none.
        course: its rows, and their order. Agents that train on the same rows in the same order have one object.
    """

    learning_rate: Callable[[int], float]
    weight_decay: float
    max_grad_norm: float | None
    course: Course

    def __deepcopy__(self, memo: object) -> Training:
        """The same object: a copy of an agent trains on the same rows, which may be large."""
        return self


@dataclass(eq=False)
class Agent:
    """One LoRA agent on a frozen base.

    Attributes:
        settings: shape, scale and seeds of its adapters.
        adapted: the names of the modules that it adapts, in the order of the base.
        name: its folder in checkpoints, `agent<k>`.
        place: its place in the crowd, and its row in the storage.
        weights: [P] all of its numbers, for an optimizer.
        gradients: [P] their gradients.
        adapters: A [r, in] and B [out, r] by the name of the module; parts of `weights`.
        head: [n, D], for agents that score texts; else None.
        training: how and on what it trains, where a run trains it.
    """

    settings: AgentLora
    adapted: Sequence[str]
    name: str
    place: int = -1
    weights: nn.Parameter = field(init=False, repr=False)
    gradients: Tensor = field(init=False, repr=False)
    adapters: dict[str, tuple[nn.Parameter, nn.Parameter]] = field(default_factory=dict, repr=False)
    head: nn.Parameter | None = field(default=None, repr=False)
    training: Training = field(init=False, repr=False)

    def learning_rate(self, step: int, factor: float = 1.0) -> float:
        """Its learning rate at a 0-based step: that of its schedule times what faults have left of it.

        Args:
            factor: see `TrainState.lr_factor`; 1 in a run without faults.
        """
        return self.training.learning_rate(step) * factor

    @property
    def size(self) -> int:
        """The number of its trainable numbers."""
        return self.weights.numel()

    def state_dict(self) -> dict[str, Tensor]:
        """The content of its `adapter_model.safetensors`: tensors by PEFT's names, as views."""
        tensors = {}
        for name, pair in self.adapters.items():
            for side, parameter in zip("AB", pair, strict=True):
                tensors[f"base_model.model.{name}.lora_{side}.weight"] = parameter.detach()
        if self.head is not None:
            tensors[SCORE] = self.head.detach()
        return tensors

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Copy PEFT tensors into the agent. Names and shapes must be exactly its own.

        Args:
            tensors: the tensors by PEFT's names.
            where: the source, for the error.

        Raises:
            ForeignCheckpoint: names or shapes differ.
        """
        own = self.state_dict()
        odd = sorted(own.keys() ^ tensors.keys()) or sorted(n for n in own if own[n].shape != tensors[n].shape)
        if odd:
            raise ForeignCheckpoint(
                f"agent{self.place} does not fit: {len(odd)} tensors differ in name or shape, the first is {odd[0]}",
                where=where,
                hint="use the lora_rank, lora_target_modules, agent_layers and model_name it was trained with",
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


#: Where the schedules `with_min_lr` end, as a share of the peak.
SMALLEST: Final = 0.1


def schedule(config: Config, total_steps: int) -> Callable[[int], float]:
    """The learning rate as a pure function of the 0-based step.

    That of a trial follows the length of a whole trial, wherever this run ends; later steps have the last rate.
    """
    total = config.trial_steps or total_steps
    share = factor(config.lr_scheduler_type, config.warmup_steps(total), total)
    return lambda step: config.learning_rate * share(min(step, total))


def factor(kind: str, warmup: int, total: int) -> Callable[[int], float]:
    """A function from the 0-based step, at most `total`, to the learning rate as a share of its peak.

    Args:
        kind: a name in Transformers; not of those that follow the loss.
        warmup: the steps in which the rate rises to the peak.
        total: the steps of the whole schedule; `warmup_stable_decay` decays in the last tenth of them.
    """
    from transformers import get_scheduler  # its module imports PEFT, which takes more than a second

    own: dict[str, Any] = {"min_lr_rate": SMALLEST} if kind.endswith("with_min_lr") else {}
    if kind == "warmup_stable_decay":
        own = {"num_decay_steps": max(1, total // 10)}
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    if kind == "polynomial":
        total = max(total, warmup + 1)  # it divides by what lies between
    scheduler = get_scheduler(kind, optimizer, warmup, total, scheduler_specific_kwargs=own)
    share: Callable[[int], float] = scheduler.lr_lambdas[0]
    return share
