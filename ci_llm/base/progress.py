"""What Transformers loads and dequantises, counted as work, which the log of a run shows in place of its bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers import modeling_gguf_pytorch_utils as gguf_reader
from transformers.utils import logging as transformers_logging

from ci_llm.core.work import counted


@contextmanager
def weights_counted() -> Iterator[None]:
    """Without the progress bars of Transformers; what they count goes to the run's log."""
    shown, hook = transformers_logging.is_progress_bar_enabled(), transformers_logging.set_tqdm_hook(_count)
    bar = gguf_reader.tqdm  # of tqdm itself, which knows neither hook nor switch
    gguf_reader.tqdm = lambda tensors, **_: counted(tensors, "dequantise", len(tensors), "tensors")
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        gguf_reader.tqdm = bar
        transformers_logging.set_tqdm_hook(hook)
        if shown:
            transformers_logging.enable_progress_bar()


def _count(bar: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """In place of a bar of Transformers."""
    if len(arguments) == 1 and options.get("desc") == "Loading weights":
        return counted(arguments[0], "load", len(arguments[0]), "weights")
    return bar(*arguments, **options)
