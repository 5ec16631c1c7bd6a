"""Is a crowd better than one agent of the same size or the same compute, and what do its answers cost? With controls.

    python -m benchmarks.crowd --rows 100 1500 --seeds 42 43 44 --folder runs

Each run is a training by `ci-llm train` at the operating point of configs.yaml on this many rows of the embedded task,
and takes as many agent-steps as the crowd. Every way to answer is evaluated by teacher forcing on the 1,000 rows of the
test split. Exact match is the share of rows whose whole solution greedy decoding reproduces, NLL is in nats per answer
token, and ECE is the calibration error of the most probable token, in ten bins. The best agent of a crowd is chosen on
the validation split.

What is measured lies in `--folder`, one file for each part and seed, and a later call takes it from there: a call that
was interrupted resumes, and one with more rows or seeds adds them. The table shows what is there.

Learning rates were chosen on the validation split with a seed that no test uses (`--learning-rates`).

Legend: K agents, n rows.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import log
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor

from benchmarks.crowd_answers import Answers, Measured, Way, answers_of, crowd_answers, distillates, merges
from ci_llm.core.durable import read_json, write_json
from ci_llm.core.evaluation_file import read_evaluation

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs.yaml"
#: No evaluation, checkpoint or tracker during the training: only the trained agents are needed.
BARE = {
    "report_to": "none",
    "save_steps": "null",
    "save_interval_seconds": "null",
    "eval_steps": "null",
    "generation_eval_samples": "1",
}


@dataclass(frozen=True, eq=False)
class System:
    """A training: its name, the keys of configs.yaml that it changes, and its learning rate by training rows."""

    name: str
    keys: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[int, str] = field(default_factory=dict)

    def settings(self, rows: int) -> dict[str, str]:
        """The keys for this number of rows; the learning rate is the one chosen for the nearest number."""
        nearest = min(self.rates, key=lambda known: abs(log(known / rows)), default=None)
        rate = {} if nearest is None else {"learning_rate": self.rates[nearest]}
        return {**self.keys, **rate, "max_train_samples": str(rows)}


CROWD = System("crowd")
# The best exact match on the validation split, with seed 7 and 100 rows. At 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2:
#   crowd                  0.397  0.434  0.431  0.463  0.209   8e-3 is in configs.yaml
#   one agent of rank 32   0.381  0.422  0.403  0.159  0.000
#   one agent, 1040 steps  0.412  0.422  0.419  0.356  0.000
# and at 1e-3, 2e-3, 4e-3, 8e-3 (rank 32 with 50 rows also at 5e-4: 0.291), with 50 rows and with 400:
#   one agent of rank 32   0.278  0.272  0.228         , and 0.659  0.662  0.706  0.256
#   one agent, 1040 steps  0.328  0.291  0.344  0.228  , and 0.806  0.863  0.922  0.781
# and at 2e-3, 4e-3, 8e-3, with 1,500 rows:
#   one agent, 1040 steps  0.978  0.984  0.788
RANK = System(
    "one agent of rank 32",
    {"num_agents": "1", "lora_rank": "32", "lora_alpha": "64"},
    {50: "5e-4", 100: "2e-3", 400: "4e-3", 1500: "2e-3"},
)
STEPS = System(
    "one agent, 1040 steps",
    {"num_agents": "1", "max_train_steps": "1040"},
    {50: "4e-3", 100: "2e-3", 400: "4e-3", 1500: "4e-3"},
)
LEARNING_RATES = ("1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2")
SEED_OF_CHOICES = 7


@dataclass(frozen=True)
class Part:
    """A measurement that is made at once and kept in one file.

    Attributes:
        system: the training that it needs.
        measure: from its final checkpoint, and a folder for what it leaves, to the answers.
    """

    system: System
    measure: Way


PARTS: Mapping[str, Part] = {
    "rank": Part(RANK, answers_of(RANK.name)),
    "steps": Part(STEPS, answers_of(STEPS.name)),
    "crowd": Part(CROWD, crowd_answers),
    "merges": Part(CROWD, merges(None, {"cat": "cat", "svd": "svd"})),
    "distilled": Part(CROWD, distillates),
}


@dataclass(frozen=True)
class Results:
    """The results of one way to answer, by seed and row.

    Attributes:
        right: [seeds, n], 1 for an exact match.
        nll: [seeds, n], nats summed over the answer tokens of a row; without columns where texts were generated.
        ece, agents: [seeds], calibration error, and agents that an answer takes.
        tokens: [n] answer tokens.
    """

    name: str
    right: Tensor
    nll: Tensor
    ece: Tensor
    agents: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, name: str, found: Sequence[Measured]) -> Results:
        """From the measurements of all seeds."""
        right, nll = (torch.tensor([one[key] for one in found], dtype=torch.float64) for key in ("right", "nll"))
        ece, agents = (torch.tensor([one[key] for one in found], dtype=torch.float64) for key in ("ece", "agents"))
        return cls(name, right, nll, ece, agents, torch.tensor(found[0]["tokens"], dtype=torch.float64))

    @property
    def exact_match(self) -> Tensor:
        """[seeds], share of rows."""
        return self.right.mean(1)

    @property
    def mean_nll(self) -> Tensor:
        """[seeds], nats per answer token."""
        return self.nll.sum(1) / self.tokens.sum()


def call(*words: str) -> subprocess.CompletedProcess[str]:
    """`ci-llm` in a process of its own, on one thread, with its output."""
    return subprocess.run(
        [sys.executable, "-m", "ci_llm", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def train(keys: Mapping[str, str], folder: Path, config: Path = CONFIG) -> Path:
    """Train in a process of its own, on one thread. A finished run in `folder` is kept as it is, another resumes.

    Args:
        config: the file that the keys are laid over.

    Returns:
        the final checkpoint.

    Raises:
        RuntimeError: the training failed or was interrupted; with the end of its output.
    """
    final = folder / "final_checkpoint"
    if read_evaluation(folder) is not None and final.exists():
        return final
    settings = [
        f"{key}={value}" for key, value in {**BARE, "eval_samples": "1", **keys, "output_dir": str(folder)}.items()
    ]
    done = call("train", "--config", str(config), *settings)
    if done.returncode or not final.exists():
        raise RuntimeError(f"training into {folder} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr}")
    return final


def measure(name: str, rows: int, seed: int, folder: Path) -> Answers:
    """The answers of one part with one seed: from its file, or trained and measured now."""
    part, file = PARTS[name], folder / f"{rows}" / name / f"{seed}.json"
    if not file.exists():
        run = folder / f"{rows}" / "runs" / part.system.name.replace(" ", "_") / f"{seed}"
        checkpoint = train({**part.system.settings(rows), "seed": str(seed)}, run)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, part.measure(checkpoint, run))
        print(f"measured  {rows} rows, seed {seed}: {name}", file=sys.stderr, flush=True)
    found: Answers = read_json(file)  # type: ignore[assignment]
    return found


def results_of(rows: int, seeds: Sequence[int], parts: Sequence[str], folder: Path) -> list[Results]:
    """The lines of a table, from the files that are there; a way to answer needs its file of every seed."""
    lines = []
    for name in parts:
        files = [folder / f"{rows}" / name / f"{seed}.json" for seed in seeds]
        found: list[Answers] = [read_json(file) for file in files if file.exists()]  # type: ignore[misc]
        if len(found) == len(files):
            lines += [Results.of(way, [one[way] for one in found]) for way in found[0]]
    return lines


def table(lines: Sequence[Results], against: str = CROWD.name) -> str:
    """The table in markdown. Every line but the crowd's, which is called `against`, shows the crowd's gain over it,
    paired by row."""
    crowd = next((line for line in lines if line.name == against), None)
    out = [
        "| | exact match | NLL | ECE | agents per answer | crowd's gain in exact match, over rows |",
        "|---|---|---|---|---|---|",
    ]
    for line in lines:
        nll = over_seeds(line.mean_nll, ".4f") if line.nll.numel() else ""
        cells = [line.name, over_seeds(line.exact_match, ".3f"), nll, over_seeds(line.ece, ".3f")]
        cells.append(f"{float(line.agents.mean()):.3g}")
        if crowd is not None and line is not crowd and nll:
            gain = crowd.right - line.right
            cells.append(f"{float(gain.mean()):+.3f} ± {over_rows(gain.mean(0)):.3f}")
        out.append("| " + " | ".join(cells) + " |" + " |" * (6 - len(cells)))
    return "\n".join(out)


def over_seeds(values: Tensor, form: str) -> str:
    """Mean with the half-width of Student's 95 % interval; the mean alone for a single seed."""
    mean, count = float(values.mean()), len(values)
    if count == 1:
        return f"{mean:{form}}"
    half = float(values.std()) / count**0.5 * float(stats.t.ppf(0.975, count - 1))
    return f"{mean:{form}} ± {half:{form}}"


def over_rows(values: Tensor) -> float:
    """Half-width of a normal 95 % interval."""
    return float(1.96 * values.std() / len(values) ** 0.5)


def choose_learning_rates(rows: int, folder: Path, jobs: int) -> str:
    """The results of crowd and controls on the validation split with each learning rate; no test row is used."""
    wanted = [(system, rate) for system in (CROWD, RANK, STEPS) for rate in LEARNING_RATES]
    paths = [folder / f"{rows}" / "rates" / system.name.replace(" ", "_") / rate for system, rate in wanted]
    with ThreadPoolExecutor(jobs) as pool:
        own = {"seed": str(SEED_OF_CHOICES)}
        keys = [{**system.settings(rows), **own, "learning_rate": rate} for system, rate in wanted]
        checkpoints = list(pool.map(train, keys, paths))
    out = ["| validation | learning rate | exact match | NLL |", "|---|---|---|---|"]
    for (system, rate), checkpoint in zip(wanted, checkpoints, strict=True):
        (found,) = answers_of(system.name, split="validation")(checkpoint, folder).values()
        line = Results.of(system.name, [found])
        out.append(f"| {system.name} | {rate} | {float(line.exact_match):.3f} | {float(line.mean_nll):.4f} |")
    return "\n".join(out)


def main() -> None:
    """Print a markdown table for each number of training rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100], help="training rows (default: 100)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(42, 49)], help="default: 42 to 48")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="default: all")
    parser.add_argument("--learning-rates", action="store_true", help="compare learning rates on the validation split")
    parser.add_argument("--show", action="store_true", help="print what is measured already, and measure nothing")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time, one core each (default: 1)")
    parser.add_argument("--folder", type=Path, help="keep runs and measurements here, and take those that are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        for rows in options.rows:
            if options.learning_rates:
                print(choose_learning_rates(rows, folder, options.jobs))
                continue
            if not options.show:
                _measure_all(rows, options.seeds, options.parts, folder, options.jobs)
            print(
                f"{rows} training rows\n\n{table(results_of(rows, options.seeds, options.parts, folder))}\n", flush=True
            )


def _measure_all(rows: int, seeds: Sequence[int], parts: Sequence[str], folder: Path, jobs: int) -> None:
    """Every part with every seed; those that share a training follow one another in one of the `jobs`."""
    chains: dict[tuple[System, int], list[Callable[[], Answers]]] = {}
    for seed in seeds:
        for name in parts:
            chain = chains.setdefault((PARTS[name].system, seed), [])
            chain.append(lambda name=name, seed=seed: measure(name, rows, seed, folder))  # type: ignore[misc]
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(lambda chain=chain: [work() for work in chain]) for chain in chains.values()]:
            done.result()


if __name__ == "__main__":
    main()
