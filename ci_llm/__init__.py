"""CI-LLM: K LoRA adapters on one frozen base, in one job that resumes exactly.

What `__all__` lists is public; docs/api.md describes each name in a line. A name loads its module at first use, so
that `import ci_llm` loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ci_llm._version import __version__ as __version__

if TYPE_CHECKING:
    from ci_llm import orbax as orbax
    from ci_llm.base.load import load_base as load_base
    from ci_llm.checkpoints.manager import CheckpointManager as CheckpointManager
    from ci_llm.config import Config as Config
    from ci_llm.config import load_config as load_config
    from ci_llm.core.determinism import seed_everything as seed_everything
    from ci_llm.crowd.crowd import Crowd as Crowd
    from ci_llm.data.batches import pack as pack
    from ci_llm.data.prompts import Prompter as Prompter
    from ci_llm.data.sources import load_rows as load_rows
    from ci_llm.data.stateful_sampler import StatefulSampler as StatefulSampler
    from ci_llm.data.tokens import tokenize as tokenize
    from ci_llm.errors import CiLlmError as CiLlmError
    from ci_llm.integrations.accelerate import latest_state as latest_state
    from ci_llm.integrations.accelerate import register_hooks as register_hooks
    from ci_llm.integrations.lightning import LightningCheckpoints as LightningCheckpoints
    from ci_llm.integrations.trainer import TrainerCheckpoints as TrainerCheckpoints
    from ci_llm.interrupts import Interrupts as Interrupts
    from ci_llm.lora.settings import LoraSettings as LoraSettings
    from ci_llm.run.call import train as train
    from ci_llm.sweep.sweep import Sweep as Sweep

_MODULES = {
    "CheckpointManager": "ci_llm.checkpoints.manager",
    "CiLlmError": "ci_llm.errors",
    "Config": "ci_llm.config",
    "Crowd": "ci_llm.crowd.crowd",
    "Interrupts": "ci_llm.interrupts",
    "LightningCheckpoints": "ci_llm.integrations.lightning",
    "LoraSettings": "ci_llm.lora.settings",
    "Prompter": "ci_llm.data.prompts",
    "StatefulSampler": "ci_llm.data.stateful_sampler",
    "Sweep": "ci_llm.sweep.sweep",
    "TrainerCheckpoints": "ci_llm.integrations.trainer",
    "latest_state": "ci_llm.integrations.accelerate",
    "load_base": "ci_llm.base.load",
    "load_config": "ci_llm.config",
    "load_rows": "ci_llm.data.sources",
    "orbax": "ci_llm.orbax",
    "pack": "ci_llm.data.batches",
    "register_hooks": "ci_llm.integrations.accelerate",
    "seed_everything": "ci_llm.core.determinism",
    "tokenize": "ci_llm.data.tokens",
    "train": "ci_llm.run.call",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'ci_llm' has no attribute {name!r}")
    module = import_module(_MODULES[name])
    return module if module.__name__.endswith(f".{name}") else getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
