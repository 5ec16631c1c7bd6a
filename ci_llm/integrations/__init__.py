"""The checkpoints of this package under other people's trainers; each of them is loaded when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ci_llm.integrations.lightning import LightningCheckpoints as LightningCheckpoints
    from ci_llm.integrations.trainer import TrainerCheckpoints as TrainerCheckpoints

_HOMES = {
    "LightningCheckpoints": "ci_llm.integrations.lightning",
    "TrainerCheckpoints": "ci_llm.integrations.trainer",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ci_llm.integrations' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
