"""Kill a run, call it again, compare it bit for bit with the run that was never killed: here and elsewhere.

    python -m benchmarks.exactness --quick       a tenth of the matrix, a few minutes
    python -m benchmarks.exactness               all of it, an hour on two cores

Every combination of {mid epoch 0, epoch boundary, mid epoch 1} x {1, 4 micro-steps per optimizer step} x {dropout 0,
0.1} x {0, 2 loader workers} x {1, 2 processes} x {fp32, bf16} is tried with every system: trained undisturbed;
killed two steps after a checkpoint, in the middle of an accumulation window (or asked to stop by a SIGTERM, where a
system saves then), and resumed. Exact means: the same rows in every optimizer step on every process and the same
weights after it; for ours also moments, generators, metrics and evaluation. Processes really die.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import rivals
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import LOST_STEPS, MOMENTS, WITNESSED, Cell, Fate, Trials, differences, matrix, witnessed

Facts = dict[str, Any]


@dataclass
class System:
    """One line of the table.

    Attributes:
        reference: facts about the undisturbed run of a cell.
        disturbed: facts about the run that was ended and resumed; None if it could not be resumed.
        inexact: cells in which something differed.
    """

    name: str
    reference: Callable[[Cell], Facts]
    disturbed: Callable[[Cell], Facts | None]
    inexact: list[str] = field(default_factory=list)
    wrong_order: int = 0
    failed: int = 0
    tried: int = 0

    def try_cell(self, cell: Cell) -> str:
        """Returns the verdict on one cell."""
        self.tried += 1
        wanted, found = self.reference(cell), self.disturbed(cell)
        if found is None:
            self.failed += 1
            return "could not be resumed"
        different = differences(wanted, found)
        if not different:
            return "bitwise"
        self.inexact.append(str(cell))
        wrong_order = rows_of(wanted) != rows_of(found)
        self.wrong_order += wrong_order
        return "other rows" if wrong_order else f"same rows, other bits: {different[0]} and {len(different) - 1} more"

    @property
    def exact(self) -> int:
        return self.tried - self.failed - len(self.inexact)


def rows_of(facts: Facts) -> dict[str, Any]:
    """The rows of every step, without the weights."""
    steps = {name: fact for name, fact in facts.items() if name.startswith(WITNESSED)}
    return {name: {line.partition('"weights"')[0] for line in lines} for name, lines in steps.items()}


class Rival:
    """The trials of one function of rivals.py; references are made once.

    Args:
        asks: ended by a SIGTERM that it heeds, and not by a SIGKILL after a checkpoint.
    """

    def __init__(self, server: ForkServer, train: Callable[..., int], folder: Path, *, asks: bool = False) -> None:
        self._server, self._train, self._folder, self._asks = server, train, folder, asks
        self._references: dict[tuple[Any, ...], Facts] = {}

    def reference(self, cell: Cell) -> Facts:
        key = (cell.accumulation, cell.dropout, cell.workers, cell.ranks, cell.precision)
        if key not in self._references:
            folder = self._new_folder(f"reference{len(self._references)}")
            codes = self._attempt(cell, folder)
            if any(codes):
                raise RuntimeError(f"{self._train.__name__} cannot train at all:\n{(folder / 'log').read_text()}")
            self._references[key] = witnessed(folder)
        return self._references[key]

    def disturbed(self, cell: Cell) -> Facts | None:
        folder = self._new_folder(str(cell))
        saved = cell.saved_step
        if self._asks:
            codes = self._attempt(cell, folder, Fate("SIGTERM", saved))
        else:
            codes = self._attempt(cell, folder, Fate("SIGKILL", saved + LOST_STEPS, cell.accumulation // 2), saved)
        if codes != [0 if self._asks else -signal.SIGKILL] * cell.ranks:
            raise RuntimeError(f"it did not end as it should: {codes}\n{(folder / 'log').read_text()}")
        return None if any(self._attempt(cell, folder)) else witnessed(folder)

    def _new_folder(self, name: str) -> Path:
        folder = self._folder / self._train.__name__ / name
        folder.mkdir(parents=True)
        return folder

    def _attempt(self, cell: Cell, folder: Path, fate: Fate | None = None, save_step: int | None = None) -> list[int]:
        return self._server.run(
            self._train,
            folder / "log",
            ranks=cell.ranks,
            folder=str(folder),
            cell=asdict(cell),
            fate=asdict(fate) if fate else None,
            save_step=save_step,
        )


def systems(server: ForkServer, folder: Path) -> list[System]:
    ours = Trials(server, folder / "ours")
    listed = [
        System("CI-LLM, killed", ours.reference, ours.killed),
        System("CI-LLM, SIGTERM", ours.reference, ours.interrupted),
    ]
    for name, train, asks in [
        ("Accelerate: save_state, load_state, skip_first_batches, killed", rivals.accelerate_plain, False),
        ("Accelerate: the same, use_seedable_sampler and set_epoch, killed", rivals.accelerate_seedable, False),
        ("HF Trainer: resume_from_checkpoint, killed", rivals.trainer_plain, False),
        ("HF Trainer: enable_jit_checkpoint, SIGTERM", rivals.trainer_sigterm, True),
    ]:
        rival = Rival(server, train, folder, asks=asks)
        listed.append(System(name, rival.reference, rival.disturbed))
    return listed


def cells(quick: bool) -> list[Cell]:
    if not quick:
        axes = {"accumulation": (1, 4), "dropout": (0.0, 0.1), "workers": (0, 2), "ranks": (1, 2)}
        return matrix(moment=MOMENTS, **axes, precision=("no", "bf16"))
    return [
        *matrix(moment=MOMENTS, accumulation=(1,), dropout=(0.0,)),
        *matrix(moment=MOMENTS, accumulation=(4,), dropout=(0.1,), workers=(2,)),
        *matrix(moment=MOMENTS, accumulation=(1,), dropout=(0.1,), ranks=(2,), precision=("bf16",)),
    ]


def table(listed: list[System]) -> str:
    lines = ["| system | bitwise | same rows in every step | not resumed |", "|---|---|---|---|"]
    for system in listed:
        ordered = system.tried - system.failed - system.wrong_order
        lines.append(f"| {system.name} | {system.exact} of {system.tried} | {ordered} | {system.failed} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="nine cells of the matrix")
    parser.add_argument("--only", default="", help="systems whose name holds this text")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        environment = {"HF_DATASETS_CACHE": f"{scratch}/cache"}
        with ForkServer("tools.testbed.trials", "benchmarks.rivals", environment=environment) as server:
            listed = [system for system in systems(server, Path(scratch)) if chosen.only in system.name]
            for system in listed:
                for cell in cells(chosen.quick):
                    began = time.perf_counter()
                    verdict = system.try_cell(cell)
                    seconds = time.perf_counter() - began
                    print(f"{system.name}; {cell}: {verdict} ({seconds:.1f} s)", file=sys.stderr, flush=True)
    print(table(listed))
    return int(any(system.exact < system.tried for system in listed if system.name.startswith("CI-LLM")))


if __name__ == "__main__":
    sys.exit(main())
