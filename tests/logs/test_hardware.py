"""The hardware monitor: host values on every machine, GPU values with a driver, and no error without one."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from ci_llm.logs import hardware
from ci_llm.logs.hardware import FILE_NAME
from tools.testbed.events import DEADLINE_S


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """A semaphore that is released after every write of the file, so that tests wait for writes."""
    count = threading.Semaphore(0)
    write = hardware.write_json

    def write_and_count(*args: Any) -> None:
        try:
            write(*args)
        finally:
            count.release()

    monkeypatch.setattr(hardware, "write_json", write_and_count)
    return count


def monitored(folder: Path, written: threading.Semaphore) -> dict[str, Any]:
    """The content of the file after three samples."""
    with hardware.monitored(folder, lambda: True, interval_s=0.001):
        for _ in range(3):
            assert written.acquire(timeout=DEADLINE_S)
    content: dict[str, Any] = json.loads((folder / FILE_NAME).read_text(encoding="utf-8"))
    return content


def test_samples_host_until_stopped(tmp_path: Path, written: threading.Semaphore) -> None:
    content = monitored(tmp_path, written)
    assert len(content["samples"]) >= 3
    times = [sample["time"] for sample in content["samples"]]
    assert times == sorted(times)
    host = content["samples"][-1]["host"]
    assert 0 < host["process_memory_bytes"] <= host["memory_total_bytes"]
    assert content["peaks"]["host/process_memory_bytes"] >= host["process_memory_bytes"]
    assert "host/memory_total_bytes" not in content["peaks"]
    assert not any("hardware" in thread.name for thread in threading.enumerate())


def test_a_folder_of_another_attempt_is_left_alone(tmp_path: Path) -> None:
    with hardware.monitored(tmp_path, lambda: False, interval_s=3600):
        pass
    assert not (tmp_path / FILE_NAME).exists()


def test_a_disk_that_refuses_is_reported_once(
    tmp_path: Path, written: threading.Semaphore, caplog: pytest.LogCaptureFixture
) -> None:
    with hardware.monitored(tmp_path / "missing", lambda: True, interval_s=0.001):
        for _ in range(3):
            assert written.acquire(timeout=DEADLINE_S)
    assert len(caplog.messages) == 1
    assert FILE_NAME in caplog.messages[0]


def test_a_lost_gpu_does_not_hide_the_others(
    tmp_path: Path, written: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost_or_not(index: int) -> object:
        if index == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return object()

    def refuse(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lost_or_not)
    for name in ("MemoryInfo", "UtilizationRates", "Temperature", "Name", "PowerUsage"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGet{name}", refuse)
    sample = monitored(tmp_path, written)["samples"][0]
    assert [reading["index"] for reading in sample["gpus"]] == [1]


def test_the_file_has_the_values_of_the_driver_and_their_peaks(
    tmp_path: Path, written: threading.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads, closed = iter([20, 90]), []
    answers: dict[str, Any] = {
        "Init": lambda: None,
        "Shutdown": lambda: closed.append(True),
        "DeviceGetCount": lambda: 1,
        "DeviceGetHandleByIndex": lambda index: f"handle {index}",
        "DeviceGetName": lambda _: "GPU of a test",
        "DeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3 << 30, total=80 << 30),
        "DeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=next(loads, 40)),
        "DeviceGetPowerUsage": lambda _: 350_500,
        "DeviceGetTemperature": lambda _, sensor: 61 if sensor == pynvml.NVML_TEMPERATURE_GPU else 0,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    content = monitored(tmp_path, written)
    told = {"temperature_celsius": 61, "power_w": 350.5, "memory_used_bytes": 3 << 30, "memory_total_bytes": 80 << 30}
    assert content["samples"][0]["gpus"] == [{"index": 0, "name": "GPU of a test", "utilization_frac": 0.2, **told}]
    assert content["peaks"]["gpu0/utilization_frac"] == 0.9
    assert content["peaks"]["gpu0/memory_used_bytes"] == 3 << 30
    assert closed
