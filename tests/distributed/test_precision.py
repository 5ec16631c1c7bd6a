"""The choice of `mixed_precision: auto`: by the hardware of all processes; a resumed run keeps its own."""

from __future__ import annotations

import pytest
import torch

from ci_llm.config import Config
from ci_llm.distributed.precision import Speed, chosen, require_known_device, speed_of_bf16
from ci_llm.distributed.processes import Processes
from ci_llm.errors import LaunchError, ModelError

FAST, SLOW = Speed(True, "it is fast"), Speed(False, "it is slow")
AUTO = Config(mixed_precision="auto", model_dtype="auto")


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return monkeypatch


@pytest.mark.parametrize(
    ("function", "unit"), [("_is_amx_tile_supported", "AMX"), ("_is_avx512_bf16_supported", "AVX512-BF16")]
)
def test_a_processor_with_units_for_bf16_is_faster_with_it(cpu: pytest.MonkeyPatch, function: str, unit: str) -> None:
    cpu.setattr(torch.cpu, function, lambda: True)
    speed = speed_of_bf16()
    assert speed.bf16_is_faster
    assert unit in speed.why


@pytest.mark.parametrize("native", [True, False])
def test_a_gpu_decides_by_its_own_support_and_not_by_emulation(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation or native)
    speed = speed_of_bf16()
    assert speed.bf16_is_faster == native
    assert speed.why.startswith("A GPU")


def test_only_auto_is_chosen_by_the_hardware() -> None:
    assert chosen(AUTO, FAST) == {"mixed_precision": "bf16", "model_dtype": "bf16"}
    assert chosen(AUTO, SLOW) == {"mixed_precision": "no", "model_dtype": "fp32"}
    assert chosen(Config(mixed_precision="auto"), SLOW) == {"mixed_precision": "no"}
    assert chosen(Config(mixed_precision="bf16"), SLOW) == {}


@pytest.mark.usefixtures("cpu")
def test_the_choice_is_the_precision_of_the_forward_pass() -> None:
    processes = Processes(AUTO)
    try:
        config, line = processes.choose_precision(AUTO)
        assert (config.mixed_precision, config.model_dtype) == ("no", "fp32")
        assert line == "mixed_precision=no, model_dtype=fp32: this processor has neither AMX nor AVX512-BF16"
        with processes.autocast():
            assert not torch.is_autocast_enabled("cpu")
        config, line = processes.choose_precision(AUTO.settled_as(Config(mixed_precision="bf16")))
        assert (config.mixed_precision, config.model_dtype, line) == ("bf16", None, "")
        with processes.autocast():
            assert torch.get_autocast_dtype("cpu") == torch.bfloat16
            assert torch.is_autocast_enabled("cpu")
        assert processes.choose_precision(config) == (config, "")
        with pytest.raises(ModelError, match="fp16 needs a GPU"):
            processes.choose_precision(AUTO.settled_as(Config(mixed_precision="fp16")))
    finally:
        processes.shutdown()


@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_an_accelerator_that_is_not_cuda_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(name))
    with pytest.raises(LaunchError, match=f"not on the device {name}"):
        require_known_device()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    require_known_device()
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    require_known_device()
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", f"{name}:0")
    with pytest.raises(LaunchError, match=f"not on the device {name}:0"):
        require_known_device()
