"""The compiled device: built once per version of PyTorch and of its source, and loaded before PyTorch is imported."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Final

from ci_llm.core.remote import cache_folder

SOURCE: Final = Path(__file__).with_name("device.cpp")
NAME: Final = "ci_llm_simulated_cuda"
BUILD_TIMEOUT_S: Final = 600
#: What torch loads itself, in an order in which each finds what it needs.
LIBRARIES: Final = ("torch_global_deps", "c10", "torch_cpu", "torch", "shm", "torch_python")


class CannotBuild(Exception):
    """There is no simulated device on this machine; the text is the reason."""


def built() -> Path:
    """The compiled library, made by the first caller, for which others wait.

    Raises:
        CannotBuild: no compiler, no headers of Python, a build of torch with CUDA, or the compiler's first error.
    """
    torch_version = version("torch")
    key = (torch_version, platform.python_version(), SOURCE.read_bytes())
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
    place = cache_folder("testbed") / f"{NAME}-{digest}.so"
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            _compile(place)
    return place


def load() -> ModuleType:
    """The library as a module of Python.

    Raises:
        CannotBuild: see `built`.
        RuntimeError: PyTorch is imported already, and has no device.
    """
    if "torch" in sys.modules:
        raise RuntimeError("load the simulated device before torch is imported: torch makes its hooks once")
    place = built()
    folder = _torch() / "lib"
    for name in LIBRARIES:
        if (library := folder / f"lib{name}.so").exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(place), mode=ctypes.RTLD_GLOBAL)
    import torch  # noqa: F401  its types must be known before the module's functions are made

    spec = importlib.util.spec_from_file_location(NAME, place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _torch() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _compile(place: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    headers, python = _torch() / "include", Path(sysconfig.get_paths()["include"])
    if compiler is None:
        raise CannotBuild("no C++ compiler")
    if not (python / "Python.h").exists():
        raise CannotBuild("no headers of Python")
    if (_torch() / "lib" / "libtorch_cuda.so").exists():
        raise CannotBuild("this build of torch has CUDA of its own")
    includes = [f"-isystem{folder}" for folder in (headers, headers / "torch/csrc/api/include", python)]
    libraries = [f"-l{name}" for name in ("c10", "torch_cpu", "torch", "torch_python")]
    with tempfile.NamedTemporaryFile(dir=place.parent, suffix=".so", delete=False) as unfinished:
        found = subprocess.run(
            [
                *(compiler, "-shared", "-fPIC", "-O1", "-std=c++20", f"-DTORCH_EXTENSION_NAME={NAME}", *includes),
                *(str(SOURCE), f"-L{_torch() / 'lib'}", *libraries, "-o", unfinished.name),
            ],
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
        )
    if found.returncode:
        Path(unfinished.name).unlink()
        error = next((line for line in found.stderr.splitlines() if "error" in line), "the compiler failed")
        raise CannotBuild(error)
    os.replace(unfinished.name, place)
