"""The memory that copies of a base on this disk take, checked before anything heavy is imported."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci_llm.base.gguf import gguf_file, kept_folder
from ci_llm.core.memory import free_host_memory
from ci_llm.errors import LaunchError

if TYPE_CHECKING:
    from ci_llm.config import Config

#: Bytes of a number in memory. On a CPU a base without a `model_dtype` is fp32; auto may become bf16.
_WIDTHS: Final = {"fp64": 8.0, "fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "auto": 2.0, "int8": 1.0, "nf4": 0.5}


def require_memory(config: Config, copies: int) -> None:
    """Refuse copies of the base that do not fit. A base that is not on this disk yet, or no safetensors, is not judged.

    Args:
        copies: of processes on this machine; with `base_sharding` each holds a part of one base.

    Raises:
        LaunchError: they take more memory than is free.
    """
    width = _WIDTHS[config.quantization or config.model_dtype or "fp32"]
    one = int(_count_parameters(config.model_name) * width)
    needed = one * (1 if config.base_sharding == "layers" else copies)
    free, _ = free_host_memory()
    if needed > free:
        sizes = f"{needed / 1e9:,.1f} GB of memory for their bases alone, and {free / 1e9:,.1f} GB are free"
        raise LaunchError(
            f"{copies} processes need {sizes}",
            where=f"model_name={config.model_name}: {one / 1e9:,.1f} GB each",
            hint="fewer processes, model_dtype=bf16, or base_sharding=layers, which keeps one base for all of them",
        )


def _count_parameters(model_name: str) -> int:
    """Numbers of a base in its safetensors files; 0 where none are on this disk."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", cache), "hub")).expanduser()
    snapshots = (hub / f"models--{model_name.replace('/', '--')}").glob("snapshots/*")
    if file := gguf_file(model_name):
        folders: Iterable[Path] = [kept_folder(file)]
    else:
        folders = [Path(model_name)] if Path(model_name).is_dir() else snapshots
    return max((sum(map(_numbers, folder.glob("*.safetensors"))) for folder in folders), default=0)


def _numbers(path: Path) -> int:
    """How many numbers a file holds, by its header: a length in 8 bytes, then JSON with the shape of each tensor."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, path.stat().st_size)))
    except (OSError, ValueError):  # loading it fails as well, and says why
        return 0
    return sum(math.prod(one["shape"]) for name, one in header.items() if name != "__metadata__")
