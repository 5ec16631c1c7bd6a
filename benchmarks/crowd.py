"""Is a crowd better than one agent of the same size or the same compute? On the embedded task, with controls.

Each system is trained by `ci-llm train` at the operating point of configs.yaml, once per seed, and evaluated by teacher
forcing on the 1,000 rows of the embedded test split. Exact match is the share of rows whose whole solution greedy
decoding reproduces; NLL is in nats per answer token. The best agent of a crowd is chosen on the validation split.

the crowd              K = 4 agents of rank 8, 260 steps; its answer is the mean of their probabilities
one agent of rank 32   4 x the rank and alpha, so the crowd's number of trainable parameters
one agent, 1040 steps  rank 8, 4 x the steps, so the crowd's compute

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
from pathlib import Path

import torch
from scipy import stats
from torch import Tensor

from ci_llm.config import load_config
from ci_llm.crowd.model import Crowd
from ci_llm.crowd.scoring import Scores, score
from ci_llm.data.batches import Batch, pack
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import tokenize

ROOT = Path(__file__).parent.parent
CONFIG = ROOT / "configs.yaml"
ROWS_AT_A_TIME = 50
#: No evaluation, checkpoint or tracker during the training: only the trained agents are needed.
BARE = {
    "report_to": "none",
    "write_report": "false",
    "save_steps": "null",
    "save_interval_seconds": "null",
    "eval_steps": "null",
    "eval_samples": "1",
    "generation_eval_samples": "1",
}


@dataclass(frozen=True, eq=False)
class System:
    """One row of the table: its name, and the keys of configs.yaml that it changes."""

    name: str
    keys: Mapping[str, str] = field(default_factory=dict)


CROWD = System("crowd")
# The best exact match on the validation split, with seed 7. At 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2:
#   crowd                  0.397  0.434  0.431  0.463  0.209   8e-3 is in configs.yaml
#   one agent of rank 32   0.381  0.422  0.403  0.159  0.000
#   one agent, 1040 steps  0.412  0.422  0.419  0.356  0.000
RANK = System(
    "one agent of rank 32", {"num_agents": "1", "lora_rank": "32", "lora_alpha": "64", "learning_rate": "2e-3"}
)
STEPS = System("one agent, 1040 steps", {"num_agents": "1", "max_train_steps": "1040", "learning_rate": "2e-3"})
SYSTEMS = (CROWD, RANK, STEPS)
LEARNING_RATES = ("1e-3", "2e-3", "4e-3", "8e-3", "1.6e-2")
SEED_OF_CHOICES = 7


@dataclass(frozen=True)
class Results:
    """The results of one system or agent, by seed and row.

    Attributes:
        right: [seeds, n], 1 for an exact match.
        nll: [seeds, n], nats summed over the answer tokens of a row.
        tokens: [n] answer tokens.
    """

    name: str
    right: Tensor
    nll: Tensor
    tokens: Tensor

    @property
    def exact_match(self) -> Tensor:
        """[seeds], share of rows."""
        return self.right.mean(1)

    @property
    def mean_nll(self) -> Tensor:
        """[seeds], nats per answer token."""
        return self.nll.sum(1) / self.tokens.sum()

    def minus(self, other: Results) -> Results:
        """The difference, paired by seed and row."""
        return Results(f"{self.name} - {other.name}", self.right - other.right, self.nll - other.nll, self.tokens)


def train(keys: Mapping[str, str], folder: Path) -> Path:
    """Train in a process of its own, on one thread. A finished run in `folder` is kept as it is.

    Returns:
        the final checkpoint.

    Raises:
        RuntimeError: the training failed; with the end of its output.
    """
    settings = [f"{key}={value}" for key, value in {**BARE, **keys, "output_dir": str(folder)}.items()]
    done = subprocess.run(
        [sys.executable, "-m", "ci_llm", "train", "--config", str(CONFIG), *settings],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"training into {folder} ended with {done.returncode}:\n{done.stdout[-500:]}{done.stderr}")
    return folder / "final_checkpoint"


class Evaluator:
    """Scores checkpoints on one split of the embedded task."""

    def __init__(self, split: str, scratch: Path) -> None:
        self.scratch = scratch
        self.config = load_config(CONFIG, [f"eval_split={split}", "eval_samples=null"])
        self._batches: list[Batch] = []

    def __call__(self, checkpoint: Path) -> Scores:
        crowd = Crowd.from_pretrained(checkpoint, device="cpu")
        scores = score(crowd, self.batches(crowd), self.config.aggregator)
        assert scores is not None  # it has no `stop`
        return scores

    def batches(self, crowd: Crowd) -> list[Batch]:
        """All rows of the split, in order."""
        if not self._batches:
            assert crowd.prompter is not None
            rows = tokenize(
                load_rows(self.config, "eval"),
                crowd.prompter.tokenizer,
                max_seq_length=self.config.max_seq_length,
                cache_folder=self.scratch,
            )
            parts = [range(at, min(at + ROWS_AT_A_TIME, len(rows))) for at in range(0, len(rows), ROWS_AT_A_TIME)]
            self._batches = [pack([rows[i] for i in part], part) for part in parts]
        return self._batches


def compare(seeds: Sequence[int], extra: Mapping[str, str], folder: Path, jobs: int) -> str:
    """Train all systems with all seeds, and tabulate their results on the test split."""
    wanted = [(system, seed) for system in SYSTEMS for seed in seeds]
    paths = [folder / system.name.replace(" ", "_") / str(seed) for system, seed in wanted]
    with ThreadPoolExecutor(jobs) as pool:
        keys = [{**system.keys, **extra, "seed": str(seed)} for system, seed in wanted]
        checkpoints = dict(zip(wanted, pool.map(train, keys, paths), strict=True))
    test, validation = Evaluator("test", folder), Evaluator("validation", folder)
    chosen = [best_agent(validation(checkpoints[CROWD, seed])) for seed in seeds]
    scores = {system: [test(checkpoints[system, seed]) for seed in seeds] for system in SYSTEMS}
    return table(lines_of(scores, chosen))


def best_agent(scores: Scores) -> int:
    """The agent with the highest exact match, and among equals the one with the lowest NLL."""
    agents = zip(scores.exact_match[:-1], scores.mean_nll[:-1], strict=True)
    ranked = [(match, -nll, k) for k, (match, nll) in enumerate(agents)]
    return max(ranked)[2]


def lines_of(scores: Mapping[System, Sequence[Scores]], chosen: Sequence[int]) -> list[Results]:
    """The rows of the table, the crowd last; `chosen` holds the best agent of every seed's crowd."""
    crowds = scores[CROWD]
    lines = [
        line_of("agents, mean of 4", crowds, lambda values, _: values[:-1].mean(0)),
        line_of("best agent by validation", crowds, lambda values, number: values[chosen[number]]),
    ]
    lines += [line_of(system.name, scores[system], lambda values, _: values[0]) for system in (RANK, STEPS)]
    return [*lines, line_of("crowd", crowds, lambda values, _: values[-1])]


def line_of(name: str, scores: Sequence[Scores], pick: Callable[[Tensor, int], Tensor]) -> Results:
    """One row of the table; `pick` reduces [K+1, n] of the seed with the given index to [n]."""
    right = torch.stack([pick(one.right.double(), number) for number, one in enumerate(scores)])
    nll = torch.stack([pick(one.nll.double(), number) for number, one in enumerate(scores)])
    return Results(name, right, nll, scores[0].tokens.double())


def table(lines: Sequence[Results]) -> str:
    """The table in markdown. The crowd is the last line; every other line shows the crowd's gain over it."""
    crowd = lines[-1]
    out = [
        "| | exact match | NLL | crowd's gain in exact match | over rows | crowd's change of NLL | over rows |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        cells = [line.name, _over_seeds(line.exact_match, ".3f"), _over_seeds(line.mean_nll, ".4f")]
        if line is not crowd:
            gain = crowd.minus(line)
            per_row = gain.nll.mean(0) / gain.tokens.mean()
            cells += [_over_seeds(gain.exact_match, "+.3f"), f"± {_over_rows(gain.right.mean(0)):.3f}"]
            cells += [_over_seeds(gain.mean_nll, "+.4f"), f"± {_over_rows(per_row):.4f}"]
        out.append("| " + " | ".join(cells) + " |" + " |" * (7 - len(cells)))
    return "\n".join(out)


def _over_seeds(values: Tensor, form: str) -> str:
    """Mean with the half-width of Student's 95 % interval; the mean alone for a single seed."""
    mean, count = float(values.mean()), len(values)
    if count == 1:
        return f"{mean:{form}}"
    half = float(values.std()) / count**0.5 * float(stats.t.ppf(0.975, count - 1))
    return f"{mean:{form}} ± {half:{form.lstrip('+')}}"


def _over_rows(values: Tensor) -> float:
    """Half-width of a normal 95 % interval."""
    return float(1.96 * values.std() / len(values) ** 0.5)


def choose_learning_rates(extra: Mapping[str, str], folder: Path, jobs: int) -> str:
    """The results of each system on the validation split with each learning rate; no test row is used."""
    wanted = [(system, rate) for system in SYSTEMS for rate in LEARNING_RATES]
    paths = [folder / "rates" / system.name.replace(" ", "_") / rate for system, rate in wanted]
    with ThreadPoolExecutor(jobs) as pool:
        own = {"seed": str(SEED_OF_CHOICES)}
        keys = [{**system.keys, **extra, **own, "learning_rate": rate} for system, rate in wanted]
        checkpoints = list(pool.map(train, keys, paths))
    evaluator = Evaluator("validation", folder)
    out = ["| validation | learning rate | exact match | NLL |", "|---|---|---|---|"]
    for (system, rate), checkpoint in zip(wanted, checkpoints, strict=True):
        scores = evaluator(checkpoint)
        out.append(f"| {system.name} | {rate} | {scores.exact_match[-1]:.3f} | {scores.mean_nll[-1]:.4f} |")
    return "\n".join(out)


def main() -> None:
    """Print a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*range(42, 49)], help="default: 42 to 48")
    parser.add_argument("--max-train-samples", type=int, help="training rows (default: as in configs.yaml)")
    parser.add_argument("--learning-rates", action="store_true", help="compare learning rates on the validation split")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at the same time, one core each (default: 1)")
    parser.add_argument("--folder", type=Path, help="keep the runs here, and reuse those that are finished")
    options = parser.parse_args()
    extra = {} if options.max_train_samples is None else {"max_train_samples": str(options.max_train_samples)}
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        if options.learning_rates:
            print(choose_learning_rates(extra, folder, options.jobs))
        else:
            print(compare(options.seeds, extra, folder, options.jobs))


if __name__ == "__main__":
    main()
