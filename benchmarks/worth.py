"""Is a crowd worth its agent-steps on a real base? Arms of equal compute, and a rule that was written before the runs.

    python -m benchmarks.worth --dataset DATA --base BASE --folder F --hours 8

DATA has a split to train on and one to test on, BASE is a folder of Transformers or a GGUF file. Each arm trains in a
run folder of its own and is judged on the same test rows by teacher forcing: NLL in nats per answer token, and the
share of rows whose whole answer greedy decoding reproduces. A seed draws its training rows and all that is random; rows
for validation, which choose rates, steps and the best agent, are neither trained on nor tested on.

An arm that is done is a line of `worth.jsonl`, with scores of every row and no path: the file can be carried to another
machine, and the same command resumes there. A started arm is a run folder below F, which resumes. With `--hours` no arm
is started that would not fit. `--show` renders the file. Arms that were not run are named below the table.

In this order:

base             without agents
rates            choose the rate: four agents with rates of their own, on 256 rows of another draw
long rates       the same for four times the steps, each at its best step
equal            K = 4 agents of one rate on the same rows
bootstrap        the same, and each agent draws its own weights of the rows (`row_weights=bootstrap`)
4x steps         one agent that takes all agent-steps, and ends at its best step on the validation rows
sweep's rates    K = 4 agents with the four rates of the sweep
disjoint         K = 4 agents, each with a quarter of the rows
ranks, layers    K = 4 agents of four ranks, or with adapters on other layers
branches         one agent, then four clones of it (`branch_at`)
4x rank, IVON    one agent with the parameters of four; one agent that takes all agent-steps under IVON
distilled        one agent that learned what the equal crowd answers, and its control
auto             `crowd=auto`
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from benchmarks.crowd import Results, over_rows, over_seeds, train
from benchmarks.crowd_answers import Answers, Measured, alone, beside_each_other, everyone, folder_of, untrained
from benchmarks.record import surroundings
from ci_llm.config import Config, parse_config
from ci_llm.core.durable import read_json, write_bytes
from ci_llm.crowd.distilling import distil
from ci_llm.crowd.merging import Distillation
from ci_llm.crowd.pretrained import open_pretrained
from ci_llm.data.rows import Chat
from ci_llm.data.sources import load_rows

K, ROWS_PER_STEP, RANK = 4, 16, 16
#: The rule, which decides what README may promise; `verdict` applies it.
RULE: Final = (
    "If no crowd beats the best single agent of the same compute in NLL with its interval above zero in a regime,"
    " README does not promise it there."
)
RATES: Final = ("5e-4", "1e-3", "2e-3", "4e-3")
SEED_OF_RATES, ROWS_OF_RATES = 7, 256
#: Before they are chosen: the rates of a first look at this base, by the kind of schedule.
UNTUNED: Final = {"short": "2e-3", "long": "5e-4"}
VALIDATION_ROWS = 100
#: Wall time of an agent-step before any arm was measured, as on one core without bf16.
GUESSED_S = 4.0
AT_A_TIME = 4  # rows that are scored at once: a vocabulary of 49,152 takes 0.2 MB a target and agent
LOOKS = 16  # evaluations of a run that looks for its best step


@dataclass(frozen=True)
class Regime:
    """What an arm is given: rows of one data set, drawn by a seed."""

    rows: int
    seed: int

    @property
    def steps(self) -> int:
        """Of each of K agents: four passes over the rows, and at least 32 steps."""
        return max(32, 4 * self.rows // ROWS_PER_STEP)


@dataclass(frozen=True)
class Arm:
    """A training and how it is judged.

    Attributes:
        keys: of the run, beside those that all have; of the regime and the chosen rates.
        is_crowd: for the rule: one agent of the same compute, or a crowd; None: neither.
        trained_as: the arm whose run it takes.
    """

    name: str
    keys: Callable[[Regime, Mapping[str, str]], dict[str, str]] = lambda regime, rates: {}
    is_crowd: bool | None = True
    trained_as: str | None = None

    @property
    def ways(self) -> list[str]:
        """The names of its lines in the table."""
        if self.name == "distilled":
            return ["distilled", "distilled, own labels"]
        return (
            [self.name] if self.is_crowd is not True else [f"{self.name}: {of}" for of in ("agents", "best", "crowd")]
        )


def _crowd(**keys: str) -> Callable[[Regime, Mapping[str, str]], dict[str, str]]:
    """K agents with the rate of a short schedule."""
    return lambda regime, rates: {
        "num_agents": str(K), "max_train_steps": str(regime.steps), "learning_rate": rates["short"], **keys,
    }  # fmt: skip


def _alone(factor: int = 1, **keys: str) -> Callable[[Regime, Mapping[str, str]], dict[str, str]]:
    """One agent; with K times the steps it ends at its best one."""
    looks = {"early_stopping_patience": str(LOOKS // 4), "load_best_model_at_end": "true", "eval_samples": "null"}

    def of(regime: Regime, rates: Mapping[str, str]) -> dict[str, str]:
        steps = regime.steps * factor
        looking = {**looks, "eval_steps": str(max(1, steps // LOOKS))} if factor > 1 else {}
        rate = rates["long" if factor > 1 else "short"]
        return {"num_agents": "1", "max_train_steps": str(steps), "learning_rate": rate, **looking, **keys}

    return of


def _without_rate(of: Callable[[Regime, Mapping[str, str]], dict[str, str]]) -> Callable[..., dict[str, str]]:
    return lambda *given: {key: value for key, value in of(*given).items() if key != "learning_rate"}


_LIST_OF_RATES = f"[{','.join(RATES)}]"
BASE = Arm("base", is_crowd=None)
#: By the kind of schedule whose rate it chooses.
TUNING: Final = {"short": Arm("rates", is_crowd=None), "long": Arm("long rates", is_crowd=None)}
FIRST: Final = (
    Arm("equal", _crowd()),
    Arm("bootstrap", _crowd(row_weights="bootstrap")),
    Arm("4x steps", _alone(K), is_crowd=False),
    Arm("sweep's rates", _crowd(learning_rate=_LIST_OF_RATES)),
)
LATER: Final = (
    Arm("disjoint", _crowd()),
    Arm("ranks", _crowd(lora_rank="[4,8,16,32]", lora_alpha="[8,16,32,64]")),
    Arm("layers", _crowd(agent_layers="[all,all,upper_half,upper_half]")),
    Arm("branches", _crowd(branch_at="0.75")),
    Arm("4x rank", _alone(lora_rank=str(4 * RANK), lora_alpha=str(8 * RANK)), is_crowd=False),
    Arm("IVON", _without_rate(_alone(K, optimizer="ivon")), is_crowd=False),
    Arm("distilled", _crowd(), is_crowd=None, trained_as="equal"),
    Arm("auto", _crowd(crowd="auto", eval_samples="null"), is_crowd=None),
)
ARMS: Final = (BASE, *TUNING.values(), *FIRST, *LATER)


class Rows:
    """The rows of a data set as files below a folder: to test on, to validate on, and the draws to train on."""

    def __init__(self, dataset: Path, folder: Path, eval_rows: int) -> None:
        self.name, self._folder, self._dataset = dataset.name, folder / dataset.name, dataset
        test = self._chats("eval")
        self.test = self._file("test", random.Random(0).sample(test, min(eval_rows, len(test))))
        self.validation = self._file("validation", self._shuffled[:VALIDATION_ROWS])

    def drawn(self, rows: int, seed: int) -> Path:
        """The training rows of a regime."""
        return self._file(f"train_{rows}_{seed}", random.Random(seed).sample(self._shuffled[VALIDATION_ROWS:], rows))

    def part(self, rows: int, seed: int, number: int) -> Path:
        """One of K parts of them."""
        lines = self.drawn(rows, seed).read_text(encoding="utf-8").splitlines()
        return self._written(f"train_{rows}_{seed}_{number}", lines[number::K])

    @cached_property
    def _shuffled(self) -> list[Chat]:
        chats = self._chats("train")
        return random.Random(0).sample(chats, len(chats))

    def _chats(self, split: Any) -> list[Chat]:
        """Raises SystemExit where the rows are no chats."""
        rows = [*load_rows(Config(dataset_name=str(self._dataset)), split)]
        chats = [row for row in rows if isinstance(row, Chat)]
        if len(chats) < len(rows):
            sys.exit(f"{self._dataset}: rows of questions and answers are needed")
        return chats

    def _file(self, name: str, chats: Sequence[Chat]) -> Path:
        return self._written(name, [json.dumps({"messages": [m.as_turn() for m in chat.messages]}) for chat in chats])

    def _written(self, name: str, lines: Sequence[str]) -> Path:
        path = self._folder / f"{name}.jsonl"
        self._folder.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in lines)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_bytes(path, text.encode())
        return path


@dataclass(frozen=True)
class Line:
    """An arm that is done, as it stands in the results file.

    Attributes:
        test: digest of the test rows: only lines with the same are paired.
        settings: keys of the run, without paths.
        answers: by way; none of an arm that chooses a rate.
        rates: what such an arm has chosen, by the kind of schedule, else empty.
        seconds: on the clock, for the training and the scores; agent_steps: of the training, as planned.
        machine: where it was trained.
    """

    dataset: str
    base: str
    rows: int
    seed: int
    arm: str
    test: str
    settings: Mapping[str, str]
    answers: Mapping[str, Measured]
    rates: Mapping[str, str]
    agent_steps: int
    seconds: float
    machine: Mapping[str, Any]


def read_lines(path: Path) -> list[Line]:
    """All lines of a results file."""
    if not path.is_file():
        return []
    return [Line(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


class Study:
    """The arms on one data set and one base.

    Args:
        base: a folder of Transformers.
        folder: of rows and runs.
        file: of results.
    """

    def __init__(self, dataset: Path, base: Path, folder: Path, file: Path, eval_rows: int) -> None:
        self.rows = Rows(dataset, folder / "rows", eval_rows)
        self.base, self._folder, self.file = base, folder, file
        self._test = xxhash.xxh3_64_hexdigest(self.rows.test.read_bytes())
        self._common = {
            "model_name": str(base), "model_dtype": "auto", "mixed_precision": "auto", "batch_size": str(ROWS_PER_STEP),
            "lora_rank": str(RANK), "lora_alpha": str(2 * RANK), "num_workers": "0", "progress_bar": "false",
            "eval_dataset_name": str(self.rows.validation), "generation_eval_samples": "0", "show_example": "false",
            "save_interval_seconds": "300", "save_total_limit": "1", "max_seq_length": "512",
        }  # fmt: skip

    @property
    def lines(self) -> list[Line]:
        """Those of this data set, this base and these test rows."""
        here = (self.rows.name, self.base.name, self._test)
        return [line for line in read_lines(self.file) if (line.dataset, line.base, line.test) == here]

    @property
    def rates(self) -> Mapping[str, str]:
        """The chosen ones, or those of a first look."""
        return {**UNTUNED, **self.chosen}

    @property
    def chosen(self) -> dict[str, str]:
        """The rates that were chosen on validation rows, by the kind of schedule."""
        return {kind: rate for line in self.lines for kind, rate in line.rates.items()}

    def done(self, arm: Arm, regime: Regime) -> Line | None:
        """Its line, if it was trained with the settings that it has now."""
        rates = self.rates
        for line in reversed(self.lines):
            if (line.arm, line.rows, line.seed) == (arm.name, regime.rows, regime.seed):
                return line if line.settings == arm.keys(regime, rates) else None
        return None

    def seconds(self, arm: Arm, regime: Regime) -> float:
        """About how long it takes, by what was measured on such a processor."""
        processor = surroundings()["processor"]
        known = [x for x in self.lines if x.agent_steps and x.machine["processor"] == processor]
        each = statistics.median(x.seconds / x.agent_steps for x in known) if known else GUESSED_S
        return each * agent_steps(arm, regime)

    def run(self, arm: Arm, regime: Regime) -> None:
        """Train and judge an arm, and append its line."""
        began, chosen = time.monotonic(), dict[str, str]()
        answers: Answers = {}
        if arm is BASE:
            answers = {"base": untrained(str(self.base), self._rows_of(self.rows.test), AT_A_TIME)}
        elif arm in TUNING.values():
            chosen = self._choose(arm, regime)
        else:
            answers = self._judged(arm, self._trained(arm, regime))
        line = Line(
            self.rows.name, self.base.name, regime.rows, regime.seed, arm.name, self._test,
            arm.keys(regime, self.rates), {way: _rounded(one) for way, one in answers.items()}, chosen,
            agent_steps(arm, regime), round(time.monotonic() - began, 1), surroundings(),
        )  # fmt: skip
        self.file.parent.mkdir(parents=True, exist_ok=True)
        before = self.file.read_bytes() if self.file.is_file() else b""
        write_bytes(self.file, before + json.dumps(vars(line)).encode() + b"\n")

    def _trained(self, arm: Arm, regime: Regime, keys: Mapping[str, str] | None = None) -> Path:
        """The final checkpoint; a run that was cut off resumes."""
        own = arm.keys(regime, self.rates) if keys is None else keys
        file = str(self.rows.drawn(regime.rows, regime.seed))
        if arm.name == "disjoint":
            file = f"[{','.join(f'[{self.rows.part(regime.rows, regime.seed, k)}]' for k in range(K))}]"
        rate = own.get("learning_rate", "").strip("[]").replace(",", "_")
        name = "_".join([(arm.trained_as or arm.name).replace(" ", "_").replace("'", ""), *([rate] if rate else [])])
        run = self._folder / "runs" / self.rows.name / f"{regime.rows}" / f"{regime.seed}" / name
        run.mkdir(parents=True, exist_ok=True)
        defaults = self._folder / "defaults.yaml"
        defaults.touch()
        keys = {**self._common, **own, "dataset_name": file, "seed": str(regime.seed)}
        return train(keys, run, defaults)

    def _judged(self, arm: Arm, checkpoint: Path) -> Answers:
        saved = open_pretrained(checkpoint, "cpu")
        test, validation = (self._rows_of(file) for file in (self.rows.test, self.rows.validation))
        if arm.name == "distilled":
            assert saved.run_config is not None
            student, control = distil(saved, parse_config(saved.run_config, "config.yaml"), Distillation())
            return {
                way: alone(saved, one, test, AT_A_TIME) for way, one in zip(arm.ways, (student, control), strict=True)
            }
        measured = everyone(saved, test, AT_A_TIME)
        if arm.is_crowd is not True:
            return {arm.name: {**measured[-1], "agents": float(len(saved.agents))}}
        nll = [sum(one["nll"]) for one in everyone(saved, validation, AT_A_TIME)[:-1]]
        three = beside_each_other(measured, nll.index(min(nll)))
        return dict(zip(arm.ways, three.values(), strict=True))

    def _rows_of(self, file: Path) -> Config:
        return Config(eval_dataset_name=str(file), eval_samples=None, max_seq_length=512)

    def _choose(self, arm: Arm, regime: Regime) -> dict[str, str]:
        """The rate with the lowest NLL on the validation rows, of four agents with rates of their own."""
        kind = next(kind for kind, each in TUNING.items() if each is arm)
        steps = agent_steps(arm, regime) // K
        every = steps if kind == "short" else steps // LOOKS
        keys = {"max_train_steps": str(steps), "eval_steps": str(every), "eval_samples": "null"}
        run = self._trained(arm, regime, {**_crowd(learning_rate=_LIST_OF_RATES)(regime, self.rates), **keys}).parent
        best = [each["value"] for each in read_json(run / "evaluation.json")["best"]["agents"]]
        print(f"{arm.name}: {dict(zip(RATES, best, strict=True))}", flush=True)
        return {kind: RATES[best.index(min(best))]}


def agent_steps(arm: Arm, regime: Regime) -> int:
    """Of the training, at most; 0 for what trains nothing."""
    if arm is BASE:
        return 0
    return regime.steps * K * (K if arm is TUNING["long"] else 1) // (K if arm.name == "4x rank" else 1)


def _rounded(one: Measured) -> Measured:
    return {**one, "nll": [round(nats, 5) for nats in one["nll"]], "ece": round(one["ece"], 5)}


# The table


@dataclass(frozen=True)
class Way:
    """A way to answer, with the seeds that have it."""

    results: Results
    seeds: tuple[int, ...]

    def gain_over(self, other: Way) -> tuple[float, float] | None:
        """By how much less NLL per token it has, and the half-width of the interval over rows; None without a common
        seed."""
        common = [seed for seed in self.seeds if seed in other.seeds]
        if not common:
            return None
        mine, theirs = (
            way.results.nll[[way.seeds.index(seed) for seed in common]].mean(0) for way in (self, other)
        )  # [n]
        per_row = (theirs - mine) / self.results.tokens.mean()
        return float(per_row.mean()), over_rows(per_row)


def ways_of(lines: Sequence[Line]) -> dict[str, Way]:
    """By name, from the lines of one regime, of which the last of an arm and seed counts."""
    latest = {(line.arm, line.seed): line for line in lines}
    found: dict[str, dict[int, Measured]] = {}
    for line in latest.values():
        for way, measured in line.answers.items():
            found.setdefault(way, {})[line.seed] = measured
    return {way: Way(Results.of(way, [*each.values()]), tuple(each)) for way, each in found.items()}


def table(lines: Sequence[Line], base: Way | None) -> str:
    """In markdown; the last column is paired by row with the best single agent."""
    ways = ways_of(lines)
    best = best_single(ways)
    shown = {**({"base": base} if base else {}), **ways}
    out = [f"| | seeds | exact match | NLL | less NLL than {best or 'one agent'}, over rows |", "|---|---|---|---|---|"]
    for name, way in shown.items():
        gain = None if best is None or name in ("base", best) else way.gain_over(ways[best])
        cells = [name, str(len(way.seeds)), over_seeds(way.results.exact_match, ".3f")]
        cells += [over_seeds(way.results.mean_nll, ".4f"), f"{gain[0]:+.4f} ± {gain[1]:.4f}" if gain else ""]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def best_single(ways: Mapping[str, Way]) -> str | None:
    """The single agent of the same compute with the lowest NLL on the test rows, which favours it."""
    singles = [arm.name for arm in ARMS if arm.is_crowd is False and arm.name in ways]
    return min(singles, key=lambda name: float(ways[name].results.mean_nll.mean()), default=None)


def verdict(ways: Mapping[str, Way]) -> str:
    """The rule applied to one regime."""
    best = best_single(ways)
    crowds = [f"{arm.name}: crowd" for arm in ARMS if arm.is_crowd and f"{arm.name}: crowd" in ways]
    if best is None or not crowds:
        return "The rule needs a crowd and one agent of the same compute."
    gains = {name: gain for name in crowds if (gain := ways[name].gain_over(ways[best]))}
    leads = {name: gain for name, gain in gains.items() if gain[0] - gain[1] > 0}
    if not leads:
        return f"No crowd beats {best} with its interval above zero: README does not promise it here."
    told = ", ".join(f"{name} by {gain[0]:.3f} ± {gain[1]:.3f}" for name, gain in leads.items())
    return f"In NLL {best} is beaten by {told}: README may promise it here."


def page(study: Study, regimes: Sequence[Regime]) -> str:
    """All tables, the rule applied to each, and what was not run."""
    rates, untuned = study.rates, [arm.name for kind, arm in TUNING.items() if kind not in study.chosen]
    told = "of a first look, not chosen on this data set" if untuned else "chosen on validation rows"
    out = [
        f"{study.rows.name} on {study.base.name}. {RULE}",
        f"Rates {told}: {rates['short']}; {rates['long']} for 4x.",
    ]
    bases = [line for line in study.lines if line.arm == BASE.name]
    base = ways_of(bases[-1:]).get("base")
    missing = [] if base else ["base"]
    missing += untuned
    for rows in sorted({regime.rows for regime in regimes}):
        mine = [regime for regime in regimes if regime.rows == rows]
        found = {(arm, regime): study.done(arm, regime) for arm in (*FIRST, *LATER) for regime in mine}
        lines = [line for line in found.values() if line]
        missing += [f"{arm.name} ({rows} rows, seed {r.seed})" for (arm, r), line in found.items() if line is None]
        if lines:
            out += [f"{rows} training rows", table(lines, base), verdict(ways_of(lines))]
    return "\n\n".join([*out, f"Not run: {', '.join(missing) or 'nothing'}."])


def planned(regimes: Sequence[Regime], arms: Sequence[str]) -> list[tuple[Arm, Regime]]:
    """What there is to do, in order: what comes first for all regimes, then the rest."""
    once = [(BASE, Regime(0, 0)), *((arm, Regime(ROWS_OF_RATES, SEED_OF_RATES)) for arm in TUNING.values())]
    every = [(arm, regime) for group in (FIRST, LATER) for regime in regimes for arm in group]
    return [(arm, regime) for arm, regime in (*once, *every) if arm.name in arms]


def main() -> None:
    """Runs what is not done yet, and prints the tables."""
    names = [arm.name for arm in ARMS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True, help="a folder of rows with their splits")
    parser.add_argument("--base", type=Path, required=True, help="a folder of Transformers, or a GGUF file")
    parser.add_argument("--folder", type=Path, required=True, help="of rows, runs and, by default, results")
    parser.add_argument("--results", type=Path, help="the file of results (default: worth.jsonl in the folder)")
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256], help="training rows (default: 64 256)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--arms", nargs="+", choices=names, default=names, help="default: all, in their order")
    parser.add_argument("--eval-rows", type=int, default=200, help="test rows (default: 200)")
    parser.add_argument("--hours", type=float, default=math.inf, help="start nothing that would not be done by then")
    parser.add_argument("--show", action="store_true", help="print what is measured already, and measure nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.folder.resolve()
    file = options.results or folder / "worth.jsonl"
    base = Path(folder_of(options.base)).resolve()
    study = Study(options.dataset.resolve(), base, folder, file, options.eval_rows)
    regimes = [Regime(rows, seed) for rows in options.rows for seed in options.seeds]
    until = time.monotonic() + options.hours * 3600
    for arm, regime in [] if options.show else planned(regimes, options.arms):
        if study.done(arm, regime):
            continue
        where = f"{arm.name}, {regime.rows} rows, seed {regime.seed}"
        if time.monotonic() + (takes_s := study.seconds(arm, regime)) > until:
            print(f"not started: {where}, which takes about {takes_s / 60:.0f} min", flush=True)
            continue
        print(f"{where}: about {takes_s / 60:.0f} min", flush=True)
        study.run(arm, regime)
    print(page(study, regimes))


if __name__ == "__main__":
    main()
