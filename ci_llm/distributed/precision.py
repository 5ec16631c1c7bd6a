"""The precision of a run: which one this machine multiplies fastest, and which ones do not work here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

import torch

from ci_llm.cluster.launch import is_cpu_wanted
from ci_llm.config import Config
from ci_llm.config.own_keys import AUTO
from ci_llm.core.determinism import units
from ci_llm.errors import LaunchError, ModelError

#: What `auto` becomes, by key: where bf16 is faster, and elsewhere.
CHOICES: Final = {"mixed_precision": ("bf16", "no"), "model_dtype": ("bf16", "fp32")}
#: The words of `model_dtype` and `mixed_precision`, and what they mean.
DTYPES: Final = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast_dtype(mixed_precision: str) -> torch.dtype | None:
    """The dtype in which an autocast computes; None without autocast, or if it is not decided yet."""
    return None if mixed_precision in ("no", AUTO) else DTYPES[mixed_precision]


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """The context of a forward pass outside of a run, as Accelerate makes it; on a CPU fp16 is computed in fp32."""
    dtype = autocast_dtype(config.mixed_precision)
    is_on = dtype is not None and (dtype != torch.float16 or device.type != "cpu")
    return torch.autocast(device.type, dtype, enabled=is_on)


@dataclass(frozen=True)
class Speed:
    """A device multiplies bf16 faster than fp32 or not, and why, for people."""

    bf16_is_faster: bool
    why: str


def runs_on_cpu() -> bool:
    """True if processes of this machine compute on the CPU: there is no GPU, or the environment says so."""
    return is_cpu_wanted(os.environ) or not torch.cuda.is_available()


def require_known_device() -> None:
    """Refuse an accelerator that this package does not run on, rather than to compute on the CPU beside it.

    Raises:
        LaunchError: it is Apple's (mps), Intel's (xpu) or any other that is not CUDA, and the CPU was not asked for.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    wanted = os.environ.get("ACCELERATE_TORCH_DEVICE", found.type if found is not None and runs_on_cpu() else "cuda")
    if wanted.partition(":")[0] not in ("cuda", "cpu") and not is_cpu_wanted(os.environ):
        raise LaunchError(
            f"this package runs on CUDA or on a CPU, and not on the device {wanted} (mps is Apple's, xpu Intel's)",
            where="this machine" if "ACCELERATE_TORCH_DEVICE" not in os.environ else "ACCELERATE_TORCH_DEVICE",
            hint="export ACCELERATE_USE_CPU=true to compute on the CPU, or take a machine with an NVIDIA GPU",
        )


def speed_of_bf16() -> Speed:
    """The speed of bf16 on the device of this process."""
    if not runs_on_cpu():
        name = torch.cuda.get_device_name()
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
        return Speed(fast, f"{name} multiplies bf16 faster" if fast else f"{name} has no bf16")
    # A processor without these units computes in bf16 as well, several times slower than in fp32.
    known = {"AMX": torch.cpu._is_amx_tile_supported(), "AVX512-BF16": torch.cpu._is_avx512_bf16_supported()}
    if here := [unit for unit, exists in known.items() if exists]:
        return Speed(True, f"this processor has {here[0]}, which multiplies bf16 faster")
    return Speed(False, f"this processor has neither {' nor '.join(known)}")


def slow_bf16(config: Config) -> str | None:
    """A line for people, if the configuration asks for bf16 and this processor computes it without units for it."""
    keys, speed = [key for key in CHOICES if getattr(config, key) == "bf16"], speed_of_bf16()
    if not keys or speed.bf16_is_faster or "bf16" in units().split():  # ARM's, of which torch does not tell
        return None
    faster = " ".join(f"{key}={CHOICES[key][1]}" for key in keys)
    return f"bf16 takes about ten times as long as fp32 here (7 to 29 with AVX2), as {speed.why}: {faster} is faster"


def chosen(config: Config, speed: Speed) -> dict[str, str]:
    """The values of the keys that say auto, by the speed of the device."""
    return {
        key: faster if speed.bf16_is_faster else usual
        for key, (faster, usual) in CHOICES.items()
        if getattr(config, key) == AUTO
    }


def check_precision(config: Config) -> None:
    """Refuse a precision that this device does not support.

    Raises:
        ModelError: naming the key.
    """
    on_cpu = runs_on_cpu()
    for key in CHOICES:
        value = getattr(config, key)
        if value == "fp16" and on_cpu:
            raise ModelError(
                "fp16 needs a GPU: on a CPU Accelerate would train in fp32 without a warning",
                where=f"{key}: fp16",
                hint=f"{key}=bf16 on this machine, or a machine with a GPU",
            )
        if value == "bf16" and not on_cpu and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ModelError(f"{torch.cuda.get_device_name()} has no bf16", where=f"{key}: bf16", hint=f"{key}=fp16")
