"""The fast tests on other processors, which variables of the environment emulate.

    python -m tools.processors [NAME=VALUE ...]

A library picks its kernels when a process starts. Under these variables it picks those of a processor with fewer vector
units. So a test that expects something of the processor that it was written on fails here, and not at a user's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
EMULATIONS: Final = (
    "MKL_CBWR=COMPATIBLE",
    "MKL_CBWR=AVX2",
    "ATEN_CPU_CAPABILITY=default",
    "ATEN_CPU_CAPABILITY=avx2",
    "ONEDNN_MAX_CPU_ISA=AVX2",
    "ONEDNN_MAX_CPU_ISA=SSE41",
    "MKL_ENABLE_INSTRUCTIONS=SSE4_2",
)
TESTS: Final = (
    *("-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"),
    *("-n", os.environ.get("JOBS", "2"), "--dist", "loadfile", "--no-loadscope-reorder"),
)


def run(emulation: str) -> tuple[int, str]:
    """The exit code of the tests under this emulation, and what they said."""
    name, _, value = emulation.partition("=")
    where = {**os.environ, "OMP_NUM_THREADS": "1", name: value}
    ended = subprocess.run(
        [sys.executable, *TESTS], cwd=ROOT, env=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return ended.returncode, ended.stdout


def main(emulations: Sequence[str]) -> int:
    """Run the tests under each; the table of CONTRIBUTING.md goes to stdout, what has failed to stderr: then 1."""
    codes = []
    print("| emulated by | passed | skipped | failed |\n|---|---|---|---|", flush=True)
    for emulation in emulations or EMULATIONS:
        code, said = run(emulation)
        lines = said.splitlines() or [""]
        found = {kind: number for number, kind in re.findall(r"(\d+) (passed|skipped|failed|error)", lines[-1])}
        cells = [found.get(kind, "0") for kind in ("passed", "skipped", "error" if "error" in found else "failed")]
        print("|", " | ".join([f"`{emulation}`", *cells]), "|", flush=True)
        codes.append(code)
        if code:
            named = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-20:]
            print(*(f"{emulation}: {line}" for line in named), sep="\n", file=sys.stderr, flush=True)
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
