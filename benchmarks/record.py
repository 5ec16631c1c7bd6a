"""The ratios that are kept: measured, written as JSON with machine and versions, compared with those recorded last.

    python -m benchmarks.record [--to FILE] [--rounds 3]        measures, writes and compares; about five minutes
    python -m benchmarks.record --keep                          and makes them the recorded ones

A ratio of two costs of one run, paired, hardly depends on the machine; seconds do, and are not compared. What is worse
by more than `TOLERANCE` is named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.harness import batches
from benchmarks.step import BF16, ORIGINAL, SEPARATE, measure
from ci_llm.core.durable import read_json, write_json

RECORDED: Final = Path(__file__).with_name("recorded.json")
#: Runs of one program on one machine differ by this much where others work on it too.
TOLERANCE: Final = 0.15
LIBRARIES: Final = ("ci_llm", "torch", "transformers", "accelerate", "peft")
SIZE: Final = "15M"
ROWS: Final = (2, 8)


def surroundings() -> dict[str, Any]:
    """The machine and the libraries of the figures."""
    return {
        "date": f"{date.today()}",
        "processor": getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", platform.processor()),
        "vector_units": torch.backends.cpu.get_cpu_capability(),
        "bf16_units": torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
    }


def ratios(each: Sequence[int], rounds: int) -> dict[str, float]:
    """Every figure by its name, for each number of rows; the larger, the better."""
    found = {}
    for rows in each:
        measured = measure(SIZE, batches(None, rows, rounds + 1))
        case = f"{SIZE}, {rows} rows"
        found[f"{case}: the original's way / ours"] = measured.ratio(ORIGINAL)
        found[f"{case}: separate runs / ours"] = measured.ratio(SEPARATE)
        found[f"{case}: ours / ours in bf16"] = 1 / measured.ratio(BF16)
        found[f"{case}: the floor / ours"] = statistics.median(measured.floor)
    return {name: round(figure, 3) for name, figure in found.items()}


def worse(found: dict[str, float], recorded: dict[str, float]) -> list[str]:
    """A line for each figure that is worse than the recorded one by more than `TOLERANCE`."""
    return [
        f"{name}: {found[name]:.2f}, recorded {before:.2f}"
        for name, before in recorded.items()
        if name in found and found[name] < before * (1 - TOLERANCE)
    ]


def main() -> int:
    """Measures, writes, compares; the exit code is 1 if a figure is worse."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("build/bench.json"), help="default: build/bench.json")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="rows per step (default: 2 8)")
    parser.add_argument("--rounds", type=int, default=3, help="batches measured for each number of rows (default: 3)")
    parser.add_argument("--keep", action="store_true", help="make these figures the recorded ones")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {"surroundings": surroundings(), "ratios": ratios(options.rows, options.rounds)}
    options.to.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.to, found)
    print(json.dumps(found, indent=2))
    before: Any = read_json(RECORDED) if RECORDED.is_file() else None
    if options.keep:
        write_json(RECORDED, found)
    if before is None:
        print(f"nothing is recorded yet to compare with; --keep makes {RECORDED.name}")
        return 0
    if before["surroundings"]["bf16_units"] != found["surroundings"]["bf16_units"]:
        before["ratios"] = {name: each for name, each in before["ratios"].items() if BF16 not in name}
    lines = worse(found["ratios"], before["ratios"])
    print("\n".join(["worse than recorded:", *lines] if lines else ["no figure is worse than recorded"]))
    return 1 if lines and not options.keep else 0


if __name__ == "__main__":
    sys.exit(main())
