"""What the machine does meanwhile: GPUs and host, sampled in a thread into gpu_stats.json.

Without a driver the list of GPUs is empty; a value that a card does not tell (MIG, containers) is null.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pynvml

from ci_llm.core.durable import write_json

logger = logging.getLogger(__name__)

FILE_NAME = "gpu_stats.json"
SAMPLES_KEPT = 360


class HardwareMonitor:
    """Samples until `stop`; the file holds the last samples and the peaks of the attempt.

    Args:
        folder: the run's folder.
        interval_s: seconds between samples.
        still_held: asked before each write; once it says no, another attempt owns the folder.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        interval_s: float = 10.0,
        still_held: Callable[[], bool] = lambda: True,
    ) -> None:
        self._path, self._interval_s = Path(folder, FILE_NAME), interval_s
        self._still_mine = still_held
        self._samples: deque[dict[str, Any]] = deque(maxlen=SAMPLES_KEPT)
        self._peaks: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ci_llm hardware", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """Take one last sample and end."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        gpus = Gpus()
        failing = False
        over = False
        while not over:
            over = self._over.wait(self._interval_s if self._samples else 0)
            self._take({"time": round(time.time(), 3), "gpus": gpus.read(), "host": read_host()})
            try:
                self._write()
                failing = False
            except OSError as error:
                if not failing:
                    logger.warning(f"{FILE_NAME} cannot be written, the run goes on: {error}")
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
        if self._still_mine():
            samples = list(self._samples)
            content = {
                "hostname": socket.gethostname(),
                "interval_s": self._interval_s,
                "peaks": self._peaks,
                "samples": samples,
            }
            write_json(self._path, content)


def read_host() -> dict[str, float | int]:
    """CPU share since the last call, memory of the machine and of this process with its children."""
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
    except psutil.Error:  # it ended meanwhile
        return 0


class Gpus:
    """The NVIDIA GPUs of this machine that may be asked; none where there is no driver."""

    def __init__(self) -> None:
        self._handles: dict[int, Any] = {}
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return
        for index in range(_ask(pynvml.nvmlDeviceGetCount) or 0):
            handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:  # lost, or not this container's
                self._handles[index] = handle

    def read(self) -> list[dict[str, Any]]:
        """One reading per GPU: shares as fractions, memory in bytes, degrees Celsius, watts."""
        return [_read_gpu(index, handle) for index, handle in self._handles.items()]

    def close(self) -> None:
        """Let go of the driver."""
        if self._handles:
            pynvml.nvmlShutdown()
            self._handles.clear()


def _read_gpu(index: int, handle: Any) -> dict[str, Any]:
    memory = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    power_mw = _ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    return {
        "index": index,
        "name": _ask(pynvml.nvmlDeviceGetName, handle),
        "utilization_frac": None if rates is None else rates.gpu / 100,
        "memory_used_bytes": None if memory is None else memory.used,
        "memory_total_bytes": None if memory is None else memory.total,
        "temperature_celsius": _ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
        "power_w": None if power_mw is None else power_mw / 1000,
    }


def _ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """The card's answer, or None where it has none."""
    try:
        return question(*arguments)
    except pynvml.NVMLError:
        return None
