"""A signal at a random moment, again and again: is the run saved, and does it resume to the same bits?

    python -m benchmarks.interrupts                  200 moments, on one and on two processes, about five minutes
    python -m benchmarks.interrupts --trials 20

Every trial is a run of train.py that a SIGTERM, SIGINT or SIGUSR2 reaches after a random time, from its first moment to
its last: start-up, training, saving, evaluation, generation, the final checkpoint. What must hold: exit code 0 and no
traceback; a run that says that it is interrupted or completed; the same command completes it, with the weights, moments
and generators of the run that was never disturbed. With two processes the signal reaches one of them.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ci_llm.core.run_status import read_status
from ci_llm.errors import BadInput
from tools.testbed.forkserver import ForkServer
from tools.testbed.moments import STRUCK, arguments, train_for_a_while

SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR2")
EARLY_S = 0.01  # before this a process has not even looked at its command line


@dataclass
class Tally:
    """What became of the trials with one number of processes."""

    ranks: int
    seconds: float
    ends: Counter[str] = field(default_factory=Counter)
    latencies_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        tried = sum(self.ends.values())
        latencies = sorted(self.latencies_s) or [0.0]
        spread = " / ".join(f"{latencies[round(q * (len(latencies) - 1))]:.2f}" for q in (0.5, 0.95, 1.0))
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return f"| {self.ranks} | {tried} | {ends} | {tried - len(self.wrong)} of {tried} | {spread} |"


def train(
    server: ForkServer, folder: Path, ranks: int, after_s: float = 0.0, sent: str = "", rank: int = 0
) -> list[int]:
    """One attempt in `folder`; the exit codes of its processes."""
    folder.mkdir(exist_ok=True)
    how = {"folder": str(folder), "words": arguments(), "after_s": after_s, "sent": sent, "rank": rank}
    return server.run(train_for_a_while, folder / "log", ranks=ranks, **how)


def learned(folder: Path) -> dict[str, bytes]:
    """Weights, moments and generators at the end of a run."""
    final = folder / "run" / "final_checkpoint"
    return {str(path.relative_to(final)): path.read_bytes() for path in sorted(final.rglob("*.safetensors"))}


def trial(server: ForkServer, folder: Path, ranks: int, after_s: float, draw: random.Random, tally: Tally) -> None:
    """Interrupt a run, look at what it left, complete it."""
    sent, rank = draw.choice(SIGNALS), draw.randrange(ranks)
    codes, said = train(server, folder, ranks, after_s, sent, rank), (folder / "log").read_text()
    if (folder / STRUCK).exists():
        tally.latencies_s.append(time.time() - float((folder / STRUCK).read_text()))
    try:
        status = read_status(folder / "run")
        end = f"{status.status}"
        right = codes == [0] * ranks and end in ("interrupted", "completed") and "Traceback" not in said
    except BadInput:
        end, right = "nothing begun", after_s < EARLY_S
    tally.ends[end] += 1
    if not right:
        tally.wrong.append(f"{sent} to process {rank} after {after_s:.3f} s: {codes}, {end}\n{said}")


def trials(server: ForkServer, home: Path, ranks: int, count: int, draw: random.Random) -> Tally:
    """`count` trials over the whole life of a run on `ranks` processes."""
    began = time.monotonic()
    codes = train(server, home / "undisturbed", ranks)
    assert codes == [0] * ranks, (home / "undisturbed" / "log").read_text()
    tally = Tally(ranks, time.monotonic() - began)
    wanted = learned(home / "undisturbed")
    for number in range(count):
        folder = home / f"trial{number}"
        trial(server, folder, ranks, draw.uniform(0.0, tally.seconds), draw, tally)
        codes = train(server, folder, ranks)
        if codes != [0] * ranks or learned(folder) != wanted:
            tally.wrong.append(f"trial {number} resumed to other bits: {codes}\n{(folder / 'log').read_text()}")
        print(f"{ranks} process(es), trial {number + 1} of {count}: {len(tally.wrong)} wrong", end="\r", flush=True)
    return tally


def rows(count: int, seed: int) -> Iterator[Tally]:
    draw = random.Random(seed)
    with ForkServer("tools.testbed.moments") as server, tempfile.TemporaryDirectory() as scratch:
        for ranks, part in ((1, count - count // 4), (2, count // 4)):
            home = Path(scratch, str(ranks))
            home.mkdir()
            yield trials(server, home, ranks, part, draw)


def main() -> None:
    """Prints a table, and everything that went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    tallies = list(rows(given.trials, given.seed))
    print("\n| processes | moments | the run ended | right, same bits in the end | signal to exit, s (50/95/100 %) |")
    print("|---|---|---|---|---|")
    for tally in tallies:
        print(tally.line())
    for tally in tallies:
        for wrong in tally.wrong:
            print(f"\nWRONG, {tally.ranks} process(es): {wrong}")


if __name__ == "__main__":
    main()
