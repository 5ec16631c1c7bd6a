"""What decides the bits of a run: its random generators, and the names of processor, libraries and our arithmetic.

A sequential generator must be saved and restored at exactly the right moment. A keyed generator has no state to save:
what is drawn in a micro-step depends on (seed, step, process, micro-step) and on nothing that happened before.

Two machines with the same names may still round differently: see the digest in `ci_llm/run/exactness.py`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from ci_llm._version import __version__


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from integers and strings, by BLAKE2b: the same on every platform and in every version."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # 63 bits, which fit a signed integer


def generator_for(*parts: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator for one purpose, for example `generator_for(seed, "adapter", agent)`."""
    return torch.Generator(device).manual_seed(derive_seed(*parts))


def seed_everything(*parts: int | str) -> None:
    """Set the global generators of Python, NumPy and PyTorch (every device) from a key.

    Args:
        parts: such as seed, step and process; other parts give independent numbers.

    Examples:
        >>> ci_llm.seed_everything(42, 7)
        >>> first = torch.rand(2)
        >>> ci_llm.seed_everything(42, 7)
        >>> torch.equal(torch.rand(2), first)
        True
    """
    key = derive_seed(*parts)
    random.seed(key)
    np.random.seed(key % 2**32)  # NumPy takes 32 bits
    torch.manual_seed(key)


def capture() -> dict[str, Any]:
    """The state of every global generator of this process, as tensors and plain values, for `restore`."""
    # Tensors and plain values only: a checkpoint holds nothing that must be unpickled.
    version, internal, gauss = random.getstate()
    name, keys, pos, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "internal": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "pos": int(pos),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # else this process has drawn nothing there
        state["cuda"] = {f"{i}": s for i, s in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore(state: dict[str, Any]) -> str | None:
    """Set every global generator to a captured state.

    Returns:
        the generators that keep their state, because this machine has more or fewer GPUs; None if all are restored.
    """
    cuda = state.get("cuda", {})
    here = torch.cuda.device_count() if cuda or torch.cuda.is_initialized() else 0
    python = state["python"]
    numpy = state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["pos"], numpy["has_gauss"], numpy["cached_gaussian"]))
    torch.set_rng_state(_bytes(state["torch"]))
    # With another number of GPUs there is no right assignment: all keep their present state, and the caller is told.
    if len(cuda) != here:
        return f"CUDA generators {len(cuda)} -> {here}"
    if cuda:
        torch.cuda.set_rng_state_all([_bytes(cuda[f"{i}"]) for i in range(here)])
    return None


def _bytes(state: Tensor) -> Tensor:
    return state.to(torch.uint8).cpu()


# Names

PLAIN: Final = "plain"
FAST: Final = "fast"
#: The versions of this package's own arithmetic, by `kernels`. Raise one with every change of ours that changes its
#: bits: another order of a sum, another operation, another draw. A run of the version before then resumes as
#: sample-exact, and says why; nothing translates the one into the other.
NUMERICS: Final = {PLAIN: 1, FAST: 4}
#: The version of this package's arithmetic that changes the bits of a GPU alone.
NUMERICS_OF_A_GPU: Final = 1

LIBRARIES: Final = ("accelerate", "numpy", "safetensors", "tokenizers", "torch", "transformers")
#: Variables of the environment by which a library picks its kernels.
SETTINGS: Final = re.compile(
    r"ATEN_CPU_CAPABILITY|MKL_CBWR|MKL_ENABLE_INSTRUCTIONS|ONEDNN_MAX_CPU_ISA|DNNL_\w+"
    r"|CUBLAS_WORKSPACE_CONFIG|CUBLASLT_\w+|CUDNN_\w+|NVIDIA_TF32_OVERRIDE"
)
#: Units of a processor with kernels of their own, beside those that torch's capability stands for.
UNITS: Final = re.compile(r"avx_vnni|avx512_(bf16|fp16|vnni)|amx_\w+|bf16|i8mm|sve2?")
_KINDS: Final = ("machine", "settings", "versions")


def names(device: torch.device, kernels: str = PLAIN) -> dict[str, Any]:
    """The names that decide bits on this device in this process; `differences` compares the names of two runs.

    Args:
        kernels: the kernels of the run, as its checkpoints record them.
    """
    machine = _gpu(device) if device.type == "cuda" else {"processor": processor(), "instruction set": units()}
    settings = {key: value for key, value in sorted(os.environ.items()) if SETTINGS.fullmatch(key)}
    numerics = str(NUMERICS[kernels.split()[0]])
    if device.type == "cuda":
        numerics += f".{NUMERICS_OF_A_GPU}"
    versions = {"ci_llm": __version__} | {name: version(name) for name in LIBRARIES} | _built_in()
    return {"machine": machine, "settings": settings | {"numerics": numerics}, "versions": versions}


def names_of_all(each: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The names of the first process, and what is called otherwise in another one."""
    first = dict(each[0])
    for kind in _KINDS:
        odd = {
            f"{key} of process {i}": new for i, own in enumerate(each) for key, _, new in _changed(each[0], own, kind)
        }
        first[kind] = first[kind] | odd
    return first


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names that have changed, in words."""
    odd: list[str] = []
    if ("GPU" in before["machine"]) != ("GPU" in now["machine"]):
        odd = [f"device {', '.join(before['machine'].values())} -> {', '.join(now['machine'].values())}"]
        before = {**before, "machine": now["machine"]}
    return odd + [f"{key} {old} -> {new}" for kind in _KINDS for key, old, new in _changed(before, now, kind)]


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> Iterator[tuple[str, str, str]]:
    """(name, its value before, its value now) of what has changed."""
    for key in {**before[kind], **now[kind]}:
        old, new = (names[kind].get(key, "not set") for names in (before, now))
        if old != new:
            yield key, old, new


def processor() -> str:
    """The model of this machine's processor, as its maker calls it."""
    found = re.search(r"^model name\s*: (.+)$", _told_by(Path("/proc/cpuinfo")), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _told_by(path: Path) -> str:
    """The text of a file of the kernel; "" where the system is another one, or a container hides it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def units() -> str:
    """Architecture, the vector units that torch uses, and what else the processor has."""
    units = sorted({word for word in _told_by(Path("/proc/cpuinfo")).split() if UNITS.fullmatch(word)})
    return " ".join([platform.machine(), torch.backends.cpu.get_cpu_capability(), *units])


def _gpu(device: torch.device) -> dict[str, str]:
    about = torch.cuda.get_device_capability(device)
    driver = re.search(r"\s(\d+(?:\.\d+)+)\s", _told_by(Path("/proc/driver/nvidia/version")))
    return {
        "GPU": torch.cuda.get_device_name(device),
        "capability": ".".join(map(str, about)),
        "driver": driver[1] if driver else "unknown",
        "cuDNN": str(torch.backends.cudnn.version()),
    }


def _built_in() -> dict[str, str]:
    """Versions of the libraries inside of torch that compute its products."""
    kinds = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)"}
    found = {name: re.search(pattern, torch.__config__.show()) for name, pattern in kinds.items()}
    return {name: match[1] for name, match in found.items() if match}
