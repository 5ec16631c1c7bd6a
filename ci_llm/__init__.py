"""CI-LLM: a crowd within one model. K LoRA agents, one frozen base, one fused pass, unkillable.

The public names load their rooms at first use, so that `import ci_llm` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ci_llm._version import __version__ as __version__

if TYPE_CHECKING:
    from ci_llm.checkpoints.manager import CheckpointManager as CheckpointManager
    from ci_llm.config import Config as Config
    from ci_llm.config import load_config as load_config
    from ci_llm.core.run_status import read_status as read_status
    from ci_llm.crowd.lora import LoraSettings as LoraSettings
    from ci_llm.crowd.model import Crowd as Crowd
    from ci_llm.crowd.objective import Objective as Objective
    from ci_llm.data.batches import Batch as Batch
    from ci_llm.data.sampler import StatefulSampler as StatefulSampler
    from ci_llm.errors import CiLlmError as CiLlmError
    from ci_llm.interrupts import Interrupts as Interrupts

_HOMES = {
    "Batch": "ci_llm.data.batches",
    "CheckpointManager": "ci_llm.checkpoints.manager",
    "CiLlmError": "ci_llm.errors",
    "Config": "ci_llm.config",
    "Crowd": "ci_llm.crowd.model",
    "Interrupts": "ci_llm.interrupts",
    "LoraSettings": "ci_llm.crowd.lora",
    "Objective": "ci_llm.crowd.objective",
    "StatefulSampler": "ci_llm.data.sampler",
    "load_config": "ci_llm.config",
    "read_status": "ci_llm.core.run_status",
}

__all__ = sorted([*_HOMES, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ci_llm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__]
