"""A check that memory holds the copies of a base, made before anything heavy is imported."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open

from ci_llm.base.gguf import gguf_file, kept_folder
from ci_llm.core.memory import free_host_memory
from ci_llm.core.quantities import size
from ci_llm.errors import LaunchError, ModelError

if TYPE_CHECKING:
    from ci_llm.config import Config

#: Bytes per number in memory. On a CPU a base without a `model_dtype` is fp32; auto may become bf16.
_WIDTHS: Final = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "auto": 2.0, "int8": 1.0, "nf4": 0.5}


def require_memory(config: Config, copies: int) -> None:
    """Refuse copies of a base that do not fit into memory; a base without safetensors on this disk is not checked.

    Args:
        copies: how many processes of this machine hold the base, or with `base_sharding` a part of it.

    Raises:
        LaunchError: the copies take more memory than is free.
    """
    width = _WIDTHS[config.quantization or config.model_dtype or "fp32"]
    one = int(_count_parameters(config.model_name) * width)
    needed = one * (1 if config.base_sharding == "layers" else copies)
    free, _ = free_host_memory()
    if needed > free:
        sizes = f"{size(needed)} of memory for their bases alone, and {size(free)} are free"
        raise LaunchError(
            f"{copies} processes need {sizes}",
            where=f"model_name={config.model_name}: {size(one)} each",
            hint="fewer processes, model_dtype=bf16, or base_sharding=layers, which keeps one base for all of them",
        )


def _count_parameters(model_name: str) -> int:
    """The parameters in the safetensors files of a base; 0 if there are none on this disk."""
    with suppress(ModelError):  # loading it fails as well, and says why
        if file := gguf_file(model_name):
            return _numbers(kept_folder(file))
    if Path(model_name).is_dir():
        return _numbers(Path(model_name))
    with suppress(ValueError):  # not a name of the hub
        found = try_to_load_from_cache(model_name, "config.json")
        return _numbers(Path(found).parent) if isinstance(found, str) else 0
    return 0


def _numbers(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        # Loading a damaged file fails as well, and says why.
        with suppress(OSError, SafetensorError), safe_open(path, "np") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return total
