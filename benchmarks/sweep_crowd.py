"""Is a crowd of the best trials of a sweep better than a crowd of equals? On the embedded task.

For every seed a sweep compares the grid of benchmarks/sweep.py on the validation split. Then two crowds of four agents
are trained from their own random starts, with the same rows in the same order, and evaluated as in benchmarks/crowd.py
on the 1,000 rows of the test split:

the best four  the agents have the settings of the four best trials (the command that a sweep prints at its end)
equals         all have the settings of the best one
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.crowd import BARE, CONFIG, Results, call, table, train
from benchmarks.crowd_answers import Answers, crowd_answers
from benchmarks.sweep import GRID, RANKS, RATES
from ci_llm.sweep.sweep import read_record
from ci_llm.sweep.trials import CROWD, Trial, agents_of

BEST = "crowd of the best four"
SPACES = (f"lora_rank={[*RANKS]}", f"learning_rate={[float(f'{rate:.3g}') for rate in RATES]}")


def search(seed: int, folder: Path, common: Mapping[str, str]) -> list[Trial]:
    """The trials of a sweep, the best first; a finished sweep in `folder` is kept as it is.

    Raises:
        RuntimeError: the sweep failed; with the end of its output.
    """
    if (record := read_record(folder)) is None or not record.is_complete:
        own = {**BARE, "eval_samples": "200", "eval_split": "validation", "generation_eval_samples": "0"}
        keys = {**own, **common, "seed": str(seed), "output_dir": str(folder), "agents_per_pass": str(len(GRID))}
        words = [*(f"{key}={value}" for key, value in keys.items()), *SPACES]
        done = call("sweep", "--config", str(CONFIG), *words)
        record = read_record(folder)
        if done.returncode or record is None:
            raise RuntimeError(f"the sweep of seed {seed} failed:\n{done.stdout[-500:]}{done.stderr}")
    return record.standings.leaderboard


def crowds(seed: int, folder: Path, common: Mapping[str, str]) -> tuple[Path, Path]:
    """The final checkpoints of the crowd of the best trials, and of that of equals."""
    trials = search(seed, folder / "sweep", common)
    for trial in trials[:CROWD]:
        print(
            f"seed {seed}: trial {trial.id} {trial.settings} {trial.score:.4f} at rung {len(trial.scores)}", flush=True
        )
    keys = {**common, "seed": str(seed)}
    best = train({**keys, "agents": agents_of(trials[:CROWD])}, folder / "best")
    equals = train({**keys, "agents": agents_of(trials[:1] * CROWD)}, folder / "equals")
    return best, equals


def lines_of(best: Sequence[Answers], equals: Sequence[Answers]) -> list[Results]:
    """The rows of the table; the crowd of the best trials is the last one, which the others are held against."""
    mean = f"agents, mean of {CROWD}"
    ways = {
        "agents of the best four, mean": (best, mean),
        "agents of equals, mean": (equals, mean),
        "crowd of equals": (equals, "crowd"),
        BEST: (best, "crowd"),
    }
    return [Results.of(name, [one[way] for one in found]) for name, (found, way) in ways.items()]


def main() -> None:
    """Print a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(101, 106)], help="default: 101 to 105")
    parser.add_argument("--steps", type=int, default=260, help="optimizer steps of a crowd (default: 260)")
    parser.add_argument("--folder", type=Path, help="keep the runs here, and reuse those that are finished")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, common = (options.folder or Path(scratch)).absolute(), {"max_train_steps": str(options.steps)}
        made = [crowds(seed, folder / str(seed), common) for seed in options.seeds]
        best, equals = ([crowd_answers(checkpoint, folder) for checkpoint in each] for each in zip(*made, strict=True))
        print(f"\n{table(lines_of(best, equals), against=BEST)}")


if __name__ == "__main__":
    main()
