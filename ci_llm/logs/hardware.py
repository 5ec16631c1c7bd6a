"""The load of GPUs and host, sampled in a thread while a run trains, in gpu_stats.json.

Without a driver the list of GPUs is empty. A value that a GPU does not report (MIG, containers) is null.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pynvml

from ci_llm.core.durable import Refusals, write_json

FILE_NAME = "gpu_stats.json"
SAMPLES_KEPT = 360
#: Values by name; None for one that is not known.
Reading: TypeAlias = "Mapping[str, float | str | None]"


@contextmanager
def monitored(folder: Path, still_held: Callable[[], bool], *, interval_s: float = 10.0) -> Iterator[None]:
    """Sample from the beginning of the block to its end; the file holds the last 360 samples and all peaks.

    Args:
        folder: the run's folder.
        still_held: called before each write. Once it returns False, another attempt owns the folder, and nothing is
            written any more.
        interval_s: seconds between samples.
    """
    over = threading.Event()
    arguments = folder / FILE_NAME, interval_s, still_held, over
    thread = threading.Thread(target=_monitor, args=arguments, name="ci_llm hardware", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _monitor(path: Path, interval_s: float, still_held: Callable[[], bool], over: threading.Event) -> None:
    """Sample until `over` is set."""
    samples, peaks = deque[Mapping[str, object]](maxlen=SAMPLES_KEPT), dict[str, float]()
    content = {"hostname": socket.gethostname(), "interval_s": interval_s, "peaks": peaks}
    refusals, is_over = Refusals(), False
    with gpus() as handles:
        while not is_over:
            # The first sample at once, and the last one at the end: even a short run has both.
            is_over = over.wait(interval_s if samples else 0)
            found, host = [_read_gpu(index, handle) for index, handle in handles.items()], read_host()
            samples.append({"time": round(time.time(), 3), "gpus": found, "host": host})
            for owner, values in {**{f"gpu{gpu['index']}": gpu for gpu in found}, "host": host}.items():
                _note_peaks(peaks, owner, values)
            with refusals.of(f"{FILE_NAME} cannot be written, the run continues"):
                if still_held():
                    write_json(path, content | {"samples": list(samples)})


def _note_peaks(peaks: dict[str, float], owner: str, values: Reading) -> None:
    for key, value in values.items():
        if isinstance(value, int | float) and key != "index" and not key.endswith("total_bytes"):
            peaks[f"{owner}/{key}"] = max(value, peaks.get(f"{owner}/{key}", value))


def read_host() -> Reading:
    """The CPU share since the last call, and the memory of the machine and of this process with its children."""
    memory = psutil.virtual_memory()
    return {
        "cpu_frac": psutil.cpu_percent() / 100,
        "load_1min": os.getloadavg()[0],
        "memory_used_bytes": memory.used,
        "memory_total_bytes": memory.total,
        "process_memory_bytes": _process_bytes(),
    }


def _process_bytes() -> int:
    process, total = psutil.Process(), 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.Error):  # it has ended since it was listed
            total += each.memory_info().rss
    return total


@contextmanager
def gpus() -> Iterator[Mapping[int, object]]:
    """The handles of the NVIDIA GPUs that this process may query, by index; none without a driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield {}
        return
    indices = range(_query(pynvml.nvmlDeviceGetCount) or 0)
    found = {index: _query(pynvml.nvmlDeviceGetHandleByIndex, index) for index in indices}
    try:  # the handle is None if a GPU is lost, or belongs to another container
        yield {index: handle for index, handle in found.items() if handle is not None}
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(index: int, handle: object) -> Reading:
    """One reading of a GPU: shares as fractions, memory in bytes, degrees Celsius, watts."""
    memory = _query(pynvml.nvmlDeviceGetMemoryInfo, handle)
    rates = _query(pynvml.nvmlDeviceGetUtilizationRates, handle)
    power_mw = _query(pynvml.nvmlDeviceGetPowerUsage, handle)
    return {
        "index": index,
        "name": _query(pynvml.nvmlDeviceGetName, handle),
        "utilization_frac": None if rates is None else rates.gpu / 100,
        "memory_used_bytes": None if memory is None else memory.used,
        "memory_total_bytes": None if memory is None else memory.total,
        "temperature_celsius": _query(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        "power_w": None if power_mw is None else power_mw / 1000,
    }


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer of the GPU; None if it has none."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None
