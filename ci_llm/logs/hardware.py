"""The load of GPUs and host, sampled in a thread while a run trains, in gpu_stats.json.

Without a driver the list of GPUs is empty. A value that a GPU does not report (MIG, containers) is null.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pynvml

from ci_llm.core.durable import write_json

logger = logging.getLogger(__name__)

FILE_NAME = "gpu_stats.json"
SAMPLES_KEPT = 360


@contextmanager
def monitored(folder: Path, still_held: Callable[[], bool], *, wanted: bool) -> Iterator[None]:
    """A monitor around the block, if it is wanted; see `HardwareMonitor`."""
    monitor = HardwareMonitor(folder, still_held=still_held)
    if wanted:
        monitor.start()
    try:
        yield
    finally:
        monitor.stop()


class HardwareMonitor:
    """Samples from `start` to `stop`; the file holds the last 360 samples and the peaks of the attempt.

    Args:
        folder: the run's folder.
        interval_s: seconds between samples.
        still_held: called before each write. Once it returns False, another attempt owns the folder, and nothing is
            written any more.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        interval_s: float = 10.0,
        still_held: Callable[[], bool] = lambda: True,
    ) -> None:
        self._path, self._interval_s = Path(folder, FILE_NAME), interval_s
        self._still_held = still_held
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES_KEPT)
        self._peaks: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ci_llm hardware", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Take one last sample and end the thread."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        gpus = Gpus()
        failing = False
        stopping = False
        while not stopping:
            # The first sample at once, and the last one after `stop`: even a short run has both.
            stopping = self._stopping.wait(self._interval_s if self._samples else 0)
            self._take({"time": round(time.time(), 3), "gpus": gpus.read(), "host": read_host()})
            try:
                self._write()
                failing = False
            except OSError as error:
                if not failing:
                    logger.warning(f"{FILE_NAME} cannot be written, the run continues: {error}")
                failing = True
        gpus.close()

    def _take(self, sample: dict[str, Any]) -> None:
        self._samples.append(sample)
        named = {f"gpu{gpu['index']}": gpu for gpu in sample["gpus"]} | {"host": sample["host"]}
        for owner, values in named.items():
            for key, value in values.items():
                if isinstance(value, int | float) and key != "index" and not key.endswith("total_bytes"):
                    self._peaks[f"{owner}/{key}"] = max(value, self._peaks.get(f"{owner}/{key}", value))

    def _write(self) -> None:
        if self._still_held():
            content = {"hostname": socket.gethostname(), "interval_s": self._interval_s, "peaks": self._peaks}
            write_json(self._path, content | {"samples": list(self._samples)})


def read_host() -> dict[str, float | int]:
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
    process = psutil.Process()
    return sum(_resident_bytes(each) for each in [process, *process.children(recursive=True)])


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # the process has ended since it was listed
        return 0


class Gpus:
    """The NVIDIA GPUs that this process may query; none without a driver."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        for index in range(_query(pynvml.nvmlDeviceGetCount) or 0):
            handle = _query(pynvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:  # None if the GPU is lost, or belongs to another container
                self._handles[index] = handle

    def read(self) -> list[dict[str, Any]]:
        """One reading per GPU: shares as fractions, memory in bytes, degrees Celsius, watts."""
        return [_read_gpu(index, handle) for index, handle in self._handles.items()]

    def close(self) -> None:
        """Release the driver."""
        if self._handles:
            pynvml.nvmlShutdown()
            self._handles.clear()


def _read_gpu(index: int, handle: Any) -> dict[str, Any]:
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
