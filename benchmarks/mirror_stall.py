"""What a mirror costs the loop whose checkpoints it sends: seconds between two saves, with it and without, in turns.

    python -m benchmarks.mirror_stall                            134.5 MB, 60 steps between two saves
    python -m benchmarks.mirror_stall --to s3://bucket/prefix    another store than a folder of this disk

One loop saves in turns into a folder without a mirror and into one with a mirror, and each pair of turns sees the same
machine. A turn is a save and the steps up to the next one. Figures are medians; the ratio is that of each pair.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.checkpoint_writers import Training
from benchmarks.timing import take_turns
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.mirror.filling import fill
from ci_llm.mirror.sender import Mirror

FLUSH_S = 600.0


class Turns:
    """The loop, and what a turn of each kind cost.

    Attributes:
        seconds: of each turn, by "plain" and "mirror".
        sent: bytes, for each save of the mirrored folder.
    """

    def __init__(self, training: Training, steps: int, home: Path, url: str | None) -> None:
        self._training, self._steps = training, steps
        self.seconds: dict[str, list[float]] = {"plain": [], "mirror": []}
        self.sent: list[int] = []
        self._managers = {
            name: CheckpointManager(home / name, max_to_keep=2, optimizers=[training.optimizer])
            for name in self.seconds
        }
        self._mirror = Mirror(url or (home / "away").as_uri(), home / "mirror", keep=2)
        manager = self._managers["mirror"]
        found = fill(self._mirror.reader, manager, ())
        self._mirror.begin(-1, manager.acquire_lease(), found)
        manager.after_save = lambda result: self._mirror.wake()

    def take(self, name: str, number: int) -> None:
        """One turn; what is still on its way at its end is waited for outside of it."""
        before, began = self._mirror.state.sent_bytes, time.perf_counter()
        assert self._managers[name].save(number, {"state": self._training.tensors})
        for _ in range(self._steps):
            self._training.step()
        self.seconds[name].append(time.perf_counter() - began)
        self._managers[name].wait_until_finished()
        if name == "mirror":
            assert self._mirror.flush(FLUSH_S)
            self.sent.append(self._mirror.state.sent_bytes - before)

    def close(self) -> None:
        for manager in self._managers.values():
            manager.wait_until_finished()
            manager.close()
        self._mirror.close()


def measure(scale: int, rounds: int, steps: int, home: Path, url: str | None = None) -> Turns:
    """So many pairs of turns, after one that is not counted."""
    turns = Turns(Training(scale), steps, home, url)
    variants: dict[str, Callable[[int], None]] = {
        name: lambda number, name=name: turns.take(name, number) for name in turns.seconds
    }
    try:
        take_turns(variants, range(rounds + 1))
    finally:
        turns.close()
    for costs in (*turns.seconds.values(), turns.sent):
        del costs[0]
    return turns


def table(turns: Turns) -> str:
    """Medians, and the ratio of each pair with its quartiles."""
    plain, mirror = turns.seconds["plain"], turns.seconds["mirror"]
    ratios = [with_it / without for with_it, without in zip(mirror, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return (
        f"s per turn, without and with a mirror: {statistics.median(plain):.2f} {statistics.median(mirror):.2f};"
        f" ratio {middle:.3f} ({low:.3f} to {high:.3f}, {len(ratios)} pairs);"
        f" sent per save: {statistics.median(turns.sent) / 1e6:.2f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=1, help="multiplies the bytes of every tensor")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=60, help="between two saves")
    parser.add_argument("--to", metavar="URL")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(table(measure(given.scale, given.rounds, given.steps, Path(scratch).resolve(), given.to)))


if __name__ == "__main__":
    main()
