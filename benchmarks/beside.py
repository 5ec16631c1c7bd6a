"""The commands of two checkouts beside each other: CPU time and memory of `ci-llm generate --file` and `evaluate`.

    OMP_NUM_THREADS=1 python -m benchmarks.beside CHECKOUT --run RUN --data ROWS --rows 1 4 16 64

RUN is one that both checkouts can read: train it with the older one. Each command is a process of its own with the same
libraries, its imports included; the checkouts take turns. `other / this` is the ratio of CPU seconds, of each round and
number of rows; memory is the peak of the process. `same` counts the
rows whose answers, of crowd and agents, are equal in both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

THIS: Final = Path(__file__).parent.parent


class Call(NamedTuple):
    """What a command took: CPU seconds, bytes at its peak, and the answers that it wrote."""

    cpu_s: float
    peak: int
    answers: list[str]


def generate(run: Path, rows: Path, answers: Path) -> list[str]:
    """The words of a command that answers each row."""
    return ["generate", str(run), "--file", str(rows), "--json"]


def evaluate(run: Path, rows: Path, answers: Path) -> list[str]:
    """The words of a command that scores the answers of agents and crowd to each row."""
    return ["evaluate", str(run), "--data", str(rows), "--output", str(answers), "--overwrite", "--json"]


COMMANDS: Final = {"generate": generate, "evaluate": evaluate}


def called(checkout: Path, command: str, run: Path, rows: Path, more: Sequence[str]) -> Call:
    """Run the command of a checkout.

    Raises:
        RuntimeError: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        answers, printed = Path(folder, "answers.jsonl"), Path(folder, "printed.jsonl")
        words = [sys.executable, "-P", "-m", "ci_llm", *COMMANDS[command](run, rows, answers), *more]
        own = {**os.environ, "PYTHONPATH": str(checkout.absolute()), "HF_HUB_OFFLINE": "1"}
        actions = [(os.POSIX_SPAWN_OPEN, 1, printed, os.O_WRONLY | os.O_CREAT, 0o600)]
        process = os.posix_spawn(sys.executable, words, own, file_actions=actions)
        _, status, usage = os.wait4(process, 0)
        if status:
            raise RuntimeError(f"{' '.join(words)} in {checkout} ended with {os.waitstatus_to_exitcode(status)}")
        lines = (answers if command == "evaluate" else printed).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    texts = [json.dumps([each["answer"], *each["agents"]]) for each in found]
    return Call(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, texts)


def line(command: str, count: int, calls: Sequence[tuple[Call, Call]]) -> str:
    """A line of the table, from the calls of the other checkout and this one."""
    ratios = sorted(other.cpu_s / this.cpu_s for other, this in calls)
    seconds = [f"{statistics.median(each[side].cpu_s for each in calls):.1f}" for side in (0, 1)]
    peaks = [f"{statistics.median(each[side].peak for each in calls) / 2**20:.0f}" for side in (0, 1)]
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    same = sum(one == other for one, other in zip(calls[0][0].answers, calls[0][1].answers, strict=True))
    return f"| {command} | {count} | {' | '.join(seconds)} | {spread} | {' | '.join(peaks)} | {same} |"


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="another checkout of this program")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="JSON lines; the first ones are taken")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commands", choices=COMMANDS, nargs="+", default=[*COMMANDS])
    parser.add_argument("--words", nargs="*", default=[], help="more words of the commands, as max_new_tokens_eval=16")
    options = parser.parse_args()
    drawn = options.data.read_text().splitlines(keepends=True)
    print("| command | rows | other, CPU s | this | other / this | other, MB | this | same |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for command in options.commands:
            for count in options.rows:
                rows = Path(folder, f"{count}.jsonl")
                rows.write_text("".join(drawn[:count]))
                calls = []
                for number in range(options.rounds):
                    sides, order = (options.checkout, THIS), ((0, 1), (1, 0))[number % 2]
                    found = {at: called(sides[at], command, options.run, rows, options.words) for at in order}
                    calls.append((found[0], found[1]))
                print(line(command, count, calls), flush=True)


if __name__ == "__main__":
    main()
