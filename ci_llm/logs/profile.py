"""The profile of the first steps of an attempt: a trace for Perfetto or chrome://tracing, and a table."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ci_llm.core.durable import make_folders

logger = logging.getLogger(__name__)

FOLDER: Final = "profile"
OPERATORS_LISTED: Final = 30

Step = TypeVar("Step")


def profiled(steps: Iterator[Step], count: int | None, folder: Path, name: str) -> Iterator[Step]:
    """Yield the same steps, the first `count` of them under the profiler of PyTorch; None profiles none.

    After these steps the trace is written as `<name>.json.gz` and `<name>.txt` into the sub-folder `profile`. An
    attempt that ends before writes nothing. If the disk refuses a file, a warning is logged and the run continues.

    Args:
        steps: the steps of the run.
        count: steps to profile.
        folder: the run's folder.
        name: tells the files of this attempt and process from others.
    """
    if count is not None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        with profile(activities=activities, record_shapes=True) as profiler:
            for number, step in zip(range(count), steps, strict=False):
                with record_function(f"ci_llm step {number + 1} of the attempt"):
                    yield step
        _write(profiler, folder / FOLDER, name)
    yield from steps


def _write(profiler: profile, folder: Path, name: str) -> None:
    trace = folder / f"{name}.json.gz"
    busiest = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=busiest, row_limit=OPERATORS_LISTED)
    try:
        make_folders(folder)
        profiler.export_chrome_trace(str(trace))
        (folder / f"{name}.txt").write_text(table, encoding="utf-8")
    except (OSError, RuntimeError) as error:  # a full disk is a RuntimeError to the exporter
        logger.warning(f"the profile cannot be written, the run continues: {error}")
    else:
        logger.info(f"profile   {trace} opens in https://ui.perfetto.dev; its table: {name}.txt")
