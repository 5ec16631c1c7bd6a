"""Where a start goes: the time to the first line and the first step of train.py, its imports, and small commands.

    python -m benchmarks.start [--rounds 5]        about a minute on an idle machine

A run of the embedded base is watched from outside: at each of its lines, the seconds since the call and the CPU
seconds of the process. It is ended after its first step. Medians; on a busy machine only CPU seconds count.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path(__file__).parents[1]
#: What a line of the run begins with, and what has come to its end when it is written.
MOMENTS: Final = {
    "ci_llm ": "first line",
    "config ": "imports",
    "model ": "base loaded",
    "agents ": "rows as tokens, route probed",
    "batch ": "folder leased, logs open",
    "step 1/": "first step",
}
COMMANDS: Final = ("--help", "status RUN", "watch --help", "checkpoints list RUN", "report RUN")
_IMPORT: Final = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\w+)")


def moments(run: Path) -> Iterator[tuple[str, float, float]]:
    """(what is done, seconds, CPU seconds) of one start, up to its first step."""
    command = [sys.executable, "train.py", f"output_dir={run}", "max_train_steps=2"]
    start, waited = time.perf_counter(), dict(MOMENTS)
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        watched = psutil.Process(child.pid)
        for line in child.stdout:
            found = next((word for word in waited if line.startswith(word)), None)
            if found is not None:
                used = watched.cpu_times()
                yield waited.pop(found), time.perf_counter() - start, used.user + used.system
            if not waited:
                child.kill()
        if waited:
            raise SystemExit(f"the run ended before: {', '.join(waited.values())}")


def imports() -> Counter[str]:
    """Seconds that the modules of each package take by themselves, when the training is imported."""
    command = [sys.executable, "-X", "importtime", "-c", "import ci_llm.run.job"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stderr
    found: Counter[str] = Counter()
    for microseconds, package in _IMPORT.findall(listed):
        found[package] += int(microseconds) / 1e6  # type: ignore[assignment]
    return found


def cost(words: list[str]) -> tuple[float, float]:
    """Seconds and CPU seconds of one command."""
    start, before = time.perf_counter(), _children_s()
    subprocess.run([sys.executable, "-m", "ci_llm", *words], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - start, _children_s() - before


def _children_s() -> float:
    used = psutil.Process().cpu_times()
    return float(used.children_user + used.children_system)


def main() -> None:
    """Prints three markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="starts, and calls of each command (default: 5)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="ci-llm-start-") as folder:
        starts = [[*moments(Path(folder, str(number)))] for number in range(rounds)]
        print("| train.py | s | CPU s |\n|---|---|---|")
        for same in zip(*starts, strict=True):
            print(f"| {same[0][0]} | {_median(same, 1):.2f} | {_median(same, 2):.2f} |")
        print("\n| package | its own modules, s |\n|---|---|")
        for package, seconds in islice(imports().most_common(), 8):
            print(f"| {package} | {seconds:.2f} |")
        print("\n| ci-llm | s | CPU s |\n|---|---|---|")
        for command in COMMANDS:
            costs = [cost(command.replace("RUN", f"{folder}/0").split()) for _ in range(rounds)]
            print(f"| {command} | {_median(costs, 0):.2f} | {_median(costs, 1):.2f} |", flush=True)


def _median(rows: tuple[tuple[str, float, float], ...] | list[tuple[float, float]], column: int) -> float:
    return statistics.median(float(row[column]) for row in rows)


if __name__ == "__main__":
    main()
