"""Where a run stands: plain values, frozen, advanced step by step, the same on every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ci_llm.run.health import Healing, Health
from ci_llm.run.validation import Validation


@dataclass(frozen=True)
class TrainState:
    """The position of a run.

    Attributes:
        step: optimizer steps taken; the next one is number `step`.
        samples_seen: rows consumed by all processes.
        tokens_seen: packed tokens consumed by all processes.
        effective_batch: rows of one optimizer step, fixed at step 1 for the whole run.
        skipped: per agent, the steps in which it was left out because its gradient was not finite.
        healing: what the run does differently because of what happened to it.
        loss_scale: the factor on fp16 losses; None in every other precision.
        clean_steps: steps since the last overflow or the last growth of the loss scale.
        validation: what the evaluations on the way have shown.
    """

    step: int = 0
    samples_seen: int = 0
    tokens_seen: int = 0
    effective_batch: int = 0
    skipped: tuple[int, ...] = ()
    healing: Healing = field(default_factory=Healing)
    loss_scale: float | None = None
    clean_steps: int = 0
    validation: Validation = field(default_factory=Validation)

    def advance(self, samples: int, tokens: int, left_out: Sequence[int], overflowed: Sequence[int] = ()) -> TrainState:
        """The state after one optimizer step over `samples` rows; `overflowed` are those left out but not sick."""
        skipped = tuple(n + (k in left_out) for k, n in enumerate(self.skipped))
        moved = replace(
            self,
            step=self.step + 1,
            samples_seen=self.samples_seen + samples,
            tokens_seen=self.tokens_seen + tokens,
            skipped=skipped,
        )
        return moved if self.loss_scale is None else moved._rescaled(self.loss_scale, overflow=bool(overflowed))

    def _rescaled(self, scale: float, overflow: bool) -> TrainState:
        """Halve on overflow, double after 2000 clean steps, as PyTorch's GradScaler does."""
        if overflow:
            return replace(self, loss_scale=scale / 2, clean_steps=0)
        if self.clean_steps + 1 >= 2000:
            return replace(self, loss_scale=scale * 2, clean_steps=0)
        return replace(self, clean_steps=self.clean_steps + 1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"skipped": list(self.skipped), "healing": self.healing.to_dict()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainState:
        """The inverse of `to_dict`; what an older checkpoint does not know has its default."""
        skipped, healing = tuple(values["skipped"]), values.get("healing")
        rebuilt = {
            "skipped": skipped,
            "healing": Healing.from_dict(healing) if healing else Healing(agents=(Health(),) * len(skipped)),
            "validation": Validation.from_dict(values.get("validation", {})),
        }
        return cls(**{**values, **rebuilt})
