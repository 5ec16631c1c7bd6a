"""Finding the best of 16 settings on the embedded task: our sweep beside full runs, and beside Optuna's own pruner.

Each way looks for the best of a grid of eight learning rates and two ranks, by the NLL of the validation rows, on one
thread, with the base in memory and rows as tokens. What counts is process CPU time, since the machine may be shared;
and the regret: the final NLL of the chosen setting, minus that of the best of all.

sweep       ci_llm.Sweep: packs, three rungs; 16 -> 4 -> 1 trials with the default --keep 0.25
grid        all 16 to the end in one pass
packed      16 runs of one agent, one after the other, by our trainer
pruned      the same under Optuna's ask and tell, with its SuccessiveHalvingPruner
peft        16 full runs of PEFT: one adapter, dynamic padding, all logits
peft pruned Optuna, PEFT and that pruner

A trial has the same bits in each of our ways, so that the regret of every way is taken from one table, that of `grid`;
what a run of one agent comes to is held against it. PEFT's runs draw other starts: of them only the choice counts. Of
full runs, some are measured, and the others are taken to cost the same.

With --folder F what was measured is kept there, and the same command resumes where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from random import Random
from typing import Any

import optuna
import peft
import torch
from torch import nn

from benchmarks.step import rectangle
from ci_llm.base.load import load_base
from ci_llm.cluster.launch import read_launch
from ci_llm.config import Config, load_config
from ci_llm.config.sweep import Choices, SweepKeys, SweepReading
from ci_llm.data.batches import pack
from ci_llm.data.order import Plan
from ci_llm.distributed.processes import Processes
from ci_llm.interrupts import Interrupts
from ci_llm.run.job import run_among
from ci_llm.run.start.agent_settings import schedule
from ci_llm.run.start.loading import Loaded, load
from ci_llm.sweep import trials
from ci_llm.sweep.sweep import Sweep

ROOT = Path(__file__).parent.parent
RATES = tuple(5e-4 * 2 ** (n * 6 / 7) for n in range(8))  # 5e-4 to 3.2e-2
RANKS = (4, 16)
GRID = [{"lora_rank": rank, "learning_rate": float(f"{rate:.3g}")} for rank in RANKS for rate in RATES]
RUNGS = 3
BARE = ("report_to=none", "write_report=false", "save_steps=null", "save_interval_seconds=null", "eval_steps=null")
#: Rows of one evaluation pass of PEFT.
EVALUATED_AT_A_TIME = 50

WAYS = ("sweep", "grid", "peft", "peft pruned", "packed", "pruned")


@dataclass
class Way:
    """What one way has come to.

    Attributes:
        chosen: the setting it takes for the best.
        scores: setting (its place in GRID) -> final NLL, of those that were trained to the end.
    """

    name: str
    cpu_s: float
    chosen: int
    scores: dict[int, float]

    @property
    def whole_cpu_s(self) -> float:
        """With the runs that were not measured, of a way that makes 16 full ones."""
        return self.cpu_s * len(GRID) / len(self.scores) if self.name in ("packed", "peft") else self.cpu_s


class Bench:
    """One seed: base and rows in memory, on one process."""

    def __init__(
        self,
        seed: int,
        folder: Path,
        steps: int,
        rows: int,
        keep: float = 0.25,
        warmup: int | None = None,
        train_rows: int | None = None,
    ) -> None:
        changed = [] if warmup is None else [f"num_warmup_steps={warmup}"]
        changed += [] if train_rows is None else [f"max_train_samples={train_rows}"]
        words = [*BARE, *changed, f"seed={seed}", f"max_train_steps={steps}", "num_agents=1"]
        words += [f"eval_samples={rows}", "eval_split=validation", "generation_eval_samples=0"]
        self.config = load_config(ROOT / "configs.yaml", words)
        self.folder, self.steps, self.rows, self.keep = folder, steps, rows, keep
        self.processes = Processes(self.config, launch=read_launch())
        self.loaded: Loaded = load(self.config, self.processes)
        self.warmup = self.config.warmup_steps(steps)
        first = trials.HalvingPlan.of(steps, RUNGS, len(GRID), len(GRID), keep, "nll", self.warmup).steps[0]
        #: Where Optuna's pruner compares: a rung is 1 / keep times as long as the one before.
        self.rungs = [*takewhile(lambda step: step < steps, (round(first / keep**n) for n in count())), steps]

    def timed(self, name: str, work: Callable[[], tuple[int, dict[int, float]]]) -> Way:
        """The result of `work`, with the CPU time of this process that it took."""
        began = time.process_time()
        chosen, scores = work()
        way = Way(name, time.process_time() - began, chosen, scores)
        told = {_told(number): round(score, 4) for number, score in scores.items()}
        print(f"seed {self.config.seed}: {name} {way.cpu_s:.1f} CPU s, chose {_told(chosen)}; {told}", flush=True)
        return way

    # Ours

    def train(self, config: Config) -> Mapping[str, Any]:
        """Train one of our runs; returns its evaluation."""
        with Interrupts() as interrupts:
            return run_among(self.processes, config, interrupts, loaded=self.loaded).metrics

    def sweep(self, per_pass: int, rungs: int = RUNGS) -> tuple[int, dict[int, float]]:
        spaces = {"lora_rank": Choices(RANKS), "learning_rate": Choices(tuple(s["learning_rate"] for s in GRID[:8]))}
        keys = SweepKeys(trials=len(GRID), rungs=rungs, keep=self.keep, sampler="grid", agents_per_pass=per_pass)
        config = self.config.model_copy(update={"output_dir": str(self.folder / f"sweep of {rungs}")})
        sweep = Sweep.of(SweepReading(config, spaces, keys), lambda work: work(), lambda: (self.steps, per_pass))
        while (pack_of_trials := sweep.ask()) is not None:
            sweep.tell(pack_of_trials, pack_of_trials.scores(self.train(pack_of_trials.config)))
        best = sweep.best
        assert best is not None
        ended = [trial for trial in sweep.standings.trials if sweep.standings.status(trial) == "completed"]
        return GRID.index(dict(best.settings)), {GRID.index(dict(t.settings)): t.scores[-1] for t in ended}

    def single(self, way: str, number: int) -> Iterator[tuple[int, float]]:
        """(step, NLL) of a run of one agent at the end of each rung, by our trainer."""
        own = {**GRID[number], "output_dir": str(self.folder / way / str(number)), "drop_nonfinite_agents": True}
        for step in self.rungs:
            config = self.config.model_copy(update={**own, "max_train_steps": step, "schedule_steps": self.steps})
            yield step, self.train(config)["nll"]["agents"][0]

    def whole(self, way: str, number: int) -> float:
        """The NLL of a run of one agent that is trained to its end at once, by our trainer."""
        own = {**GRID[number], "output_dir": str(self.folder / way / str(number))}
        nll: float = self.train(self.config.model_copy(update=own))["nll"]["agents"][0]
        return nll

    # PEFT

    def peft_run(self, number: int, rungs: Sequence[int]) -> Iterator[tuple[int, float]]:
        """(step, NLL) of a PEFT run at the end of each of these rungs: the same rows, rates, clipping and AdamW."""
        settings, config, [rows] = GRID[number], self.config, self.loaded.rows
        base = load_base("embedded").model
        lora = peft.LoraConfig(
            r=settings["lora_rank"], lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        torch.manual_seed(config.seed)
        model: nn.Module = peft.get_peft_model(base, lora)
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, weight_decay=config.weight_decay, fused=True)
        rate = schedule(config.model_copy(update=dict(settings)), self.steps)
        plan, step = Plan(len(rows), config.batch_size, config.seed), 0
        for end in rungs:
            model.train()
            for step in range(step, end):  # noqa: B020 - it continues where the rung before has ended
                chosen = plan.rows(step)
                for group in optimizer.param_groups:
                    group["lr"] = rate(step)
                model(**rectangle(pack([rows[i] for i in chosen], chosen))).loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, config.max_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            step = end
            yield end, self.peft_nll(model)

    @torch.no_grad()
    def peft_nll(self, model: nn.Module) -> float:
        """Nats per target of the evaluation rows."""
        model.eval()
        [rows], nats, targets = self.loaded.eval_rows, 0.0, 0
        for first in range(0, len(rows), EVALUATED_AT_A_TIME):
            chosen = range(first, min(first + EVALUATED_AT_A_TIME, len(rows)))
            batch = pack([rows[i] for i in chosen], list(chosen))
            nats += float(model(**rectangle(batch)).loss) * batch.num_targets
            targets += batch.num_targets
        return nats / targets

    # Ways

    def one_by_one(self, run: Callable[[int], float], numbers: Sequence[int]) -> tuple[int, dict[int, float]]:
        scores = {number: run(number) for number in numbers}
        return min(scores, key=lambda number: _rank(scores[number])), scores

    def pruned(self, run: Callable[[int], Iterator[tuple[int, float]]]) -> tuple[int, dict[int, float]]:
        """Optuna over the grid, with its pruner at the same rungs."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        factor = round(1 / self.keep)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=self.rungs[0], reduction_factor=factor)
        study = optuna.create_study(direction="minimize", pruner=pruner)
        for number in Random(self.config.seed).sample(range(len(GRID)), len(GRID)):
            study.enqueue_trial({"number": number})
        ends: dict[int, float] = {}
        for _ in GRID:
            trial = study.ask()
            number = trial.suggest_categorical("number", range(len(GRID)))
            nll = math.nan
            for step, nll in run(number):
                trial.report(nll, step)
                if step < self.steps and trial.should_prune():
                    break
            else:
                ends[number] = nll
            told = {"values": nll} if number in ends else {"state": optuna.trial.TrialState.PRUNED}
            study.tell(trial, **told)
        return min(ends, key=lambda number: _rank(ends[number])), ends


def _rank(nll: float) -> float:
    return nll if math.isfinite(nll) else math.inf


def measure(bench: Bench, names: Sequence[str], per_pass: int, runs: int, folder: Path | None) -> list[Way]:
    """The ways of these names with one seed.

    Args:
        runs: full runs of one adapter that are measured.
        folder: of what was measured earlier, and is now; None: none.
    """
    everything = range(len(GRID))
    some = [*everything][:: max(1, len(GRID) // runs)][:runs]
    works: dict[str, Callable[[], tuple[int, dict[int, float]]]] = {
        "sweep": lambda: bench.sweep(per_pass),
        "grid": lambda: bench.sweep(per_pass, rungs=1),
        "pruned": lambda: bench.pruned(lambda n: bench.single("pruned", n)),
        "packed": lambda: bench.one_by_one(lambda n: bench.whole("packed", n), some),
        "peft pruned": lambda: bench.pruned(lambda n: bench.peft_run(n, bench.rungs)),
        "peft": lambda: bench.one_by_one(lambda n: dict(bench.peft_run(n, [bench.steps]))[bench.steps], some),
    }
    ways = []
    for name in names:
        seed = bench.config.seed
        [train_rows] = bench.loaded.rows
        what = f"{len(train_rows)} training rows, {bench.steps} steps, warm-up {bench.warmup}, "
        what += f"{bench.rows} rows, seed {seed}, {name}"
        if name in ("sweep", "pruned", "peft pruned"):
            what += f", keep {bench.keep:g}"
        path = folder and folder / f"{what}.json"
        if path and path.exists():
            ways.append(_read(path))
            continue
        ways.append(bench.timed(name, works[name]))
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(asdict(ways[-1])))
    _require_equal(ways)
    return ways


def _read(path: Path) -> Way:
    value = json.loads(path.read_text())
    return Way(**value | {"scores": {int(number): nll for number, nll in value["scores"].items()}})


def _require_equal(ways: Sequence[Way]) -> None:
    """Refuse to continue if a trial of ours has not the same score in all ways."""
    ours = [way for way in ways if not way.name.startswith("peft")]
    for number in range(len(GRID)):
        found = {way.name: way.scores[number] for way in ours if number in way.scores}
        if len({*map(_rank, found.values())}) > 1:
            raise SystemExit(f"{_told(number)} ends differently: {found}")


def table(found: Mapping[int, Sequence[Way]]) -> str:
    """One row per way: means over seeds."""
    lines = ["| way | CPU s | times ours | regret, nats | chose |", "|---|---|---|---|---|"]
    for place, way in enumerate(next(iter(found.values()))):
        costs = [ways[place].whole_cpu_s for ways in found.values()]
        times = [ways[place].whole_cpu_s / ways[0].whole_cpu_s for ways in found.values()]
        spread = f"{_mean(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        told, regret = "", ""
        if all(len(ways[place].scores) == len(GRID) or way.name not in ("packed", "peft") for ways in found.values()):
            regrets = [_regret(ways, ways[place]) for ways in found.values()]
            told = ", ".join(_told(ways[place].chosen) for ways in found.values())
            regret = "" if any(map(math.isnan, regrets)) else f"{_mean(regrets):.4f} (at most {max(regrets):.4f})"
        lines.append(f"| {way.name} | {_mean(costs):.1f} | {spread} | {regret} | {told} |")
    return "\n".join(lines)


def _regret(ways: Sequence[Way], way: Way) -> float:
    """By the pass of the whole grid; NaN if there is none."""
    reference = next((each for each in ways if each.name == "grid"), None)
    if reference is None:
        return math.nan
    return _rank(reference.scores[way.chosen]) - min(map(_rank, reference.scores.values()))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _told(number: int) -> str:
    return f"rank {GRID[number]['lora_rank']} at {GRID[number]['learning_rate']:g}"


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42], help="one sweep of each way per seed")
    parser.add_argument("--steps", type=int, default=260, help="optimizer steps of a full run (default: 260)")
    parser.add_argument("--train-rows", type=int, help="training rows (default: as configured)")
    parser.add_argument("--rows", type=int, default=200, help="evaluation rows (default: 200)")
    parser.add_argument("--per-pass", type=int, default=16, help="trials of one pass of ours (default: 16)")
    parser.add_argument("--runs", type=int, default=2, help="full runs of one adapter that are measured (default: 2)")
    parser.add_argument("--keep", type=float, default=0.25, help="share that continues after a rung (default: 0.25)")
    parser.add_argument("--warmup", type=int, help="steps of the warm-up (default: as configured)")
    parser.add_argument("--folder", type=Path, help="folder for what was measured (default: none)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="those to measure (default: all)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {}
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as folder:
            chosen = options.keep, options.warmup, options.train_rows
            bench = Bench(seed, Path(folder), options.steps, options.rows, *chosen)
            found[seed] = measure(bench, options.ways, options.per_pass, options.runs, options.folder)
            bench.processes.shutdown()
    print(f"\n{len(GRID)} settings, {options.steps} steps, one thread\n\n{table(found)}")


if __name__ == "__main__":
    main()
