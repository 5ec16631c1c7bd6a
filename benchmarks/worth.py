"""Is a crowd worth its agent-steps on a real base? Three arms of equal compute, and a rule written before the runs.

    python -m benchmarks.worth --dataset DATA --base BASE --folder F --results benchmarks/worth.jsonl

DATA has a split to train on and one to test on, BASE is a folder of Transformers or a GGUF file (`python -m
tools.real_base` fetches one). A seed draws its training rows and all that is random. Every arm is judged on the same
test rows by teacher forcing: NLL in nats per answer token, and the share of rows whose whole answer greedy decoding
reproduces.

In this order:

choices       as many candidates for each arm, trained on a draw of as many rows as are used, with a seed that no test
              has; the one whose answers have the lowest NLL on the validation rows is taken
4x steps      one agent that takes all agent-steps, and ends at its best step on the validation rows
crowds        K = 4 agents of one rate, and K with rates of their own: eight agents of one job, in which nothing joins
              them. Beside each crowd: the mean of its agents, and its member that is best on the validation rows
base          without agents

Validation rows are neither trained on nor tested on. Arms of one seed come before those of the next, so what is done is
a fair table. An arm that is done is a line of the results file, with scores of every row and no path: the file can be
carried to another machine, and the same command resumes there. A started arm is a run folder below F, which resumes
too. `--show` renders the file. What was not run is named below.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from benchmarks.crowd import Results, over_rows, over_seeds, train
from benchmarks.crowd_answers import Answers, Measured, beside_each_other, everyone, folder_of, untrained
from benchmarks.record import surroundings
from ci_llm.config import Config
from ci_llm.core.durable import write_bytes
from ci_llm.core.evaluation_file import read_evaluation
from ci_llm.crowd.pretrained import open_pretrained
from ci_llm.data.rows import Chat
from ci_llm.data.sources import load_rows

K, ROWS_PER_STEP, RANK = 4, 8, 16
DTYPE = "fp32"  # of training and of scoring: processors without bf16 units take part
#: The rule, which decides what README may promise; `verdict` applies it.
RULE: Final = (
    "If no crowd beats the single agent of the same compute in NLL with its interval above zero in a regime,"
    " README does not promise it there."
)
#: For each arm as many candidates. A crowd with rates of its own takes four rates, each twice the one before.
CANDIDATES: Final[Mapping[str, Sequence[tuple[str, ...]]]] = {
    "4x steps": [("2.5e-4",), ("5e-4",), ("1e-3",)],
    "equal": [(rate,) * K for rate in ("5e-4", "1e-3", "2e-3")],
    "own rates": [
        ("2.5e-4", "5e-4", "1e-3", "2e-3"),
        ("5e-4", "1e-3", "2e-3", "4e-3"),
        ("1e-3", "2e-3", "4e-3", "8e-3"),
    ],
}
SINGLE, *CROWDS = CANDIDATES
SEED_OF_CHOICES = 7
VALIDATION_ROWS = 64
AT_A_TIME = 8  # rows that are scored at once: a vocabulary of 49,152 takes 0.2 MB a target and agent
LOOKS = 8  # evaluations of a run that looks for its best step
#: What is run at once and kept as one line.
BASE, CHOICES, STEPS, BOTH_CROWDS = "base", "choices", SINGLE, "crowds"


@dataclass(frozen=True)
class Regime:
    """The training rows of an arm: a number of them, drawn by a seed."""

    rows: int
    seed: int

    @property
    def steps(self) -> int:
        """The steps of each of K agents: four passes over the rows, and at least 32."""
        return max(32, 4 * self.rows // ROWS_PER_STEP)

    @property
    def choices(self) -> Regime:
        """The regime in which the rates of this one are chosen."""
        return Regime(self.rows, SEED_OF_CHOICES)


#: What needs no training rows.
NOWHERE: Final = Regime(0, 0)


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
        path = self._folder / f"{name}.jsonl"
        self._folder.mkdir(parents=True, exist_ok=True)
        each = ({"messages": [message.as_turn() for message in chat.messages]} for chat in chats)
        text = "".join(f"{json.dumps(row)}\n" for row in each)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_bytes(path, text.encode())
        return path


@dataclass(frozen=True)
class Line:
    """An arm that is done, as it stands in the results file.

    Attributes:
        test: digest of the test rows: only lines with the same are paired.
        settings: keys of the run, without paths.
        answers: by way; none of the choices.
        candidates: of the choices, by arm the NLL on the validation rows for each; else empty.
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
    candidates: Mapping[str, Sequence[float]]
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
            "model_name": str(base), "model_dtype": DTYPE,
            "mixed_precision": DTYPE, "batch_size": str(ROWS_PER_STEP),
            "lora_rank": str(RANK), "lora_alpha": str(2 * RANK), "num_workers": "0",
            "eval_dataset_name": str(self.rows.validation), "generation_eval_samples": "0",
            "save_interval_seconds": "900", "save_total_limit": "1", "max_seq_length": "512",
        }  # fmt: skip

    @property
    def lines(self) -> list[Line]:
        """The lines of this data set, this base and these test rows."""
        here = (self.rows.name, self.base.name, self._test)
        return [line for line in read_lines(self.file) if (line.dataset, line.base, line.test) == here]

    def rates(self, regime: Regime) -> Mapping[str, tuple[str, ...]] | None:
        """The chosen candidate of each arm, if they are chosen for this number of rows."""
        line = self.done(CHOICES, regime.choices)
        return line and {arm: CANDIDATES[arm][nll.index(min(nll))] for arm, nll in line.candidates.items()}

    def done(self, arm: str, regime: Regime) -> Line | None:
        """The line of an arm, if it was trained with the settings that it has now."""
        settings = self.settings(arm, regime)
        for line in reversed(self.lines):
            if (line.arm, line.rows, line.seed) == (arm, regime.rows, regime.seed):
                return line if line.settings == settings else None
        return None

    def settings(self, arm: str, regime: Regime) -> dict[str, str] | None:
        """The keys that its run has beside those that all have; None before its rates are chosen."""
        if arm == BASE:
            return {}
        if arm == CHOICES:
            return {name: f"{[*map('/'.join, each)]} at {ROWS_PER_STEP} rows" for name, each in CANDIDATES.items()}
        rates = self.rates(regime)
        if rates is None:
            return None
        if arm == STEPS:
            return _single(rates[SINGLE], regime)
        return _agents([rate for crowd in CROWDS for rate in rates[crowd]], regime.steps)

    def run(self, arm: str, regime: Regime) -> None:
        """Train and judge an arm, and append its line."""
        began, candidates = time.monotonic(), dict[str, list[float]]()
        answers: Answers = {}
        settings = self.settings(arm, regime)
        assert settings is not None  # the choices come first
        if arm == BASE:
            answers = {BASE: untrained(str(self.base), self._rows_of(self.rows.test), AT_A_TIME, DTYPE)}
        elif arm == CHOICES:
            candidates = self._candidates(regime)
            print(f"{arm}: {candidates}", flush=True)
        else:
            checkpoint = self._trained(arm, regime, settings)
            answers = self._single_answers(checkpoint) if arm == STEPS else self._crowd_answers(checkpoint)
        line = Line(
            self.rows.name, self.base.name, regime.rows, regime.seed, arm, self._test, settings,
            {way: _rounded(one) for way, one in answers.items()}, candidates,
            agent_steps(arm, regime), round(time.monotonic() - began, 1), surroundings(),
        )  # fmt: skip
        self.file.parent.mkdir(parents=True, exist_ok=True)
        before = self.file.read_bytes() if self.file.is_file() else b""
        write_bytes(self.file, before + json.dumps(vars(line)).encode() + b"\n")

    def _trained(self, name: str, regime: Regime, own: Mapping[str, str]) -> Path:
        """The final checkpoint; a run that was cut off resumes."""
        digest = xxhash.xxh3_64_hexdigest(json.dumps(own, sort_keys=True).encode())[:8]  # other rates are another run
        place = f"{name.replace(' ', '_')}_{digest}"
        run = self._folder / "runs" / self.rows.name / f"{regime.rows}" / f"{regime.seed}" / place
        run.mkdir(parents=True, exist_ok=True)
        defaults = self._folder / "defaults.yaml"
        defaults.touch()
        file = self.rows.drawn(regime.rows, regime.seed)
        return train({**self._common, **own, "dataset_name": str(file), "seed": str(regime.seed)}, run, defaults)

    def _single_answers(self, checkpoint: Path) -> Answers:
        saved = open_pretrained(checkpoint, "cpu")
        return {STEPS: everyone(saved, self._rows_of(self.rows.test), AT_A_TIME)[0]}

    def _crowd_answers(self, checkpoint: Path) -> Answers:
        """The answers of each crowd: the mean of its agents, its best one by validation, and the crowd."""
        saved, answers = open_pretrained(checkpoint, "cpu"), dict[str, Measured]()
        groups = [range(at, at + K) for at in range(0, len(saved.agents), K)]
        test, validation = (
            everyone(saved, self._rows_of(file), AT_A_TIME, groups) for file in (self.rows.test, self.rows.validation)
        )
        for number, (name, group) in enumerate(zip(CROWDS, groups, strict=True)):
            nll = [sum(validation[agent]["nll"]) for agent in group]
            members = [test[agent] for agent in group]
            three = beside_each_other([*members, test[len(saved.agents) + number]], nll.index(min(nll)))
            answers |= zip(ways_of_crowd(name), three.values(), strict=True)
        return answers

    def _rows_of(self, file: Path) -> Config:
        return Config(eval_dataset_name=str(file), eval_samples=None, max_seq_length=512)

    def _candidates(self, regime: Regime) -> dict[str, list[float]]:
        """The NLL of each candidate's answers on the validation rows, by arm.

        An agent learns the same in any company, so agents of one job make all crowds.
        """
        singles = [rate for (rate,) in CANDIDATES[SINGLE]]
        run = self._trained(f"{CHOICES} {SINGLE}", regime, _single(singles, regime)).parent
        found = {SINGLE: _best_values(run)}
        crowds = [crowd for name in CROWDS for crowd in CANDIDATES[name]]
        rates = [rate for rate in dict.fromkeys(sum(crowds, ())) for _ in range(max(c.count(rate) for c in crowds))]
        checkpoint = self._trained(f"{CHOICES} {BOTH_CROWDS}", regime, _agents(rates, regime.steps))
        groups = [_agents_with(crowd, rates) for crowd in crowds]
        validation = self._rows_of(self.rows.validation)
        measured = everyone(open_pretrained(checkpoint, "cpu"), validation, AT_A_TIME, groups)[len(rates) :]
        nll = iter([round(sum(one["nll"]) / sum(one["tokens"]), 5) for one in measured])
        return found | {name: [next(nll) for _ in CANDIDATES[name]] for name in CROWDS}


def _best_values(run: Path) -> list[float]:
    """The best NLL of each agent of a completed run on its validation rows."""
    evaluation = read_evaluation(run)
    assert evaluation is not None, "a completed run has one"
    assert evaluation.ending is not None, "a training has made it"
    return [best.value for best in evaluation.ending.best.agents if best is not None]


def _agents(rates: Sequence[str], steps: int) -> dict[str, str]:
    """Keys of agents with these rates, one for each."""
    each = rates[0] if len({*rates}) == 1 else f"[{','.join(rates)}]"
    return {"num_agents": str(len(rates)), "max_train_steps": str(steps), "learning_rate": each}


def _single(rates: Sequence[str], regime: Regime) -> dict[str, str]:
    """Keys of agents that each take the steps of K, and look for their best one."""
    steps = regime.steps * K
    looking = {"eval_steps": str(max(1, steps // LOOKS)), "eval_samples": "null", "load_best_model_at_end": "true"}
    return {**_agents(rates, steps), **looking}


def _agents_with(crowd: Sequence[str], rates: Sequence[str]) -> list[int]:
    """Numbers of agents that have the rates of a crowd, each number once."""
    free, found = [*rates], list[int]()
    for rate in crowd:
        found.append(free.index(rate))
        free[found[-1]] = ""
    return found


def agent_steps(arm: str, regime: Regime) -> int:
    """The agent-steps of an arm's training; 0 if it trains nothing."""
    crowds = [crowd for name in CROWDS for crowd in CANDIDATES[name]]
    agents = sum(max(crowd.count(rate) for crowd in crowds) for rate in dict.fromkeys(sum(crowds, ())))
    of = {STEPS: K, BOTH_CROWDS: K * len(CROWDS), CHOICES: K * len(CANDIDATES[SINGLE]) + agents}
    return regime.steps * of.get(arm, 0)


def ways_of_crowd(name: str) -> list[str]:
    """The names of its lines in the table."""
    return [f"{name}: {of}" for of in ("agents", "best", "crowd")]


def _rounded(one: Measured) -> Measured:
    return {**one, "nll": [round(nats, 5) for nats in one["nll"]], "ece": round(one["ece"], 5)}


# The table


@dataclass(frozen=True)
class Way:
    """A way to answer, with the seeds that have it."""

    results: Results
    seeds: tuple[int, ...]

    def gain_over(self, other: Way) -> tuple[float, float] | None:
        """(Its gain in NLL per token, the half-width of the interval over rows); None without a common seed."""
        common = [seed for seed in self.seeds if seed in other.seeds]
        if not common:
            return None
        mine, theirs = (
            way.results.nll[[way.seeds.index(seed) for seed in common]].mean(0) for way in (self, other)
        )  # [n]
        per_row = (theirs - mine) / self.results.tokens.mean()
        return float(per_row.mean()), over_rows(per_row)

    def gains_over(self, other: Way) -> list[float]:
        """The gain of each common seed."""
        mine, theirs = (dict(zip(way.seeds, way.results.mean_nll.tolist(), strict=True)) for way in (self, other))
        return [theirs[seed] - mine[seed] for seed in self.seeds if seed in theirs]


def ways_of(lines: Sequence[Line]) -> dict[str, Way]:
    """The ways to answer by name, from the lines of one regime; of an arm and seed the last line counts."""
    latest = {(line.arm, line.seed): line for line in lines}
    found: dict[str, dict[int, Measured]] = {}
    for line in latest.values():
        for way, measured in line.answers.items():
            found.setdefault(way, {})[line.seed] = measured
    return {way: Way(Results.of(way, [*each.values()]), tuple(each)) for way, each in found.items()}


def table(lines: Sequence[Line], base: Way | None) -> str:
    """In markdown; the last columns are paired by row with the single agent: over rows, and of each seed."""
    ways = ways_of(lines)
    shown = {**({"base": base} if base else {}), **ways}
    out = [
        f"| | seeds | exact match | NLL | less NLL than {SINGLE}, over rows | of each seed |",
        "|---|" * 3 + "---|---|---|",
    ]
    for name, way in shown.items():
        gain = way.gain_over(ways[SINGLE]) if SINGLE in ways and name not in ("base", SINGLE) else None
        cells = [name, str(len(way.seeds)), over_seeds(way.results.exact_match, ".3f")]
        cells += [over_seeds(way.results.mean_nll, ".4f"), f"{gain[0]:+.4f} ± {gain[1]:.4f}" if gain else ""]
        cells.append(", ".join(f"{each:+.3f}" for each in way.gains_over(ways[SINGLE])) if gain else "")
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def verdict(ways: Mapping[str, Way]) -> str:
    """The rule applied to one regime."""
    crowds = [way for name in CROWDS if (way := ways_of_crowd(name)[-1]) in ways]
    if SINGLE not in ways or not crowds:
        return "The rule needs a crowd and one agent of the same compute."
    gains = {name: gain for name in crowds if (gain := ways[name].gain_over(ways[SINGLE]))}
    leads = {name: gain for name, gain in gains.items() if gain[0] - gain[1] > 0}
    if not leads:
        return f"No crowd beats {SINGLE} with its interval above zero: README does not promise it here."
    told = ", ".join(f"{name} by {gain[0]:.3f} ± {gain[1]:.3f}" for name, gain in leads.items())
    return f"In NLL {SINGLE} is beaten by {told}: README may promise it here."


def page(study: Study, regimes: Sequence[Regime]) -> str:
    """All tables, the rule applied to each, and what was not run."""
    out = [f"{study.rows.name} on {study.base.name}. {RULE}"]
    base_line = study.done(BASE, NOWHERE)
    base = ways_of([base_line])["base"] if base_line else None
    missing = [] if base else [BASE]
    for rows in sorted({regime.rows for regime in regimes}):
        mine = [regime for regime in regimes if regime.rows == rows]
        out.append(f"{rows} training rows, {mine[0].steps} steps of {ROWS_PER_STEP} for each of {K} agents")
        if choices := study.done(CHOICES, mine[0].choices):
            out.append("\n".join(_told(name, nll) for name, nll in choices.candidates.items()))
        found = {(arm, regime): study.done(arm, regime) for regime in mine for arm in (STEPS, BOTH_CROWDS)}
        lines = [line for line in found.values() if line]
        missing += [] if choices else [f"{CHOICES} ({rows} rows)"]
        missing += [f"{arm} ({rows} rows, seed {r.seed})" for (arm, r), line in found.items() if line is None]
        if lines:
            out += [table(lines, base), verdict(ways_of(lines)), f"Trained on {_processors(lines)}."]
    return "\n\n".join([*out, f"Not run: {', '.join(missing) or 'nothing'}."])


def _processors(lines: Sequence[Line]) -> str:
    """Their kinds, on which the bits depend."""
    bf16 = {True: "bf16 units", False: "no bf16 units"}
    kinds = [f"{x.machine['processor']} ({x.machine['vector_units']}, {bf16[x.machine['bf16_units']]})" for x in lines]
    return "; ".join(dict.fromkeys(kinds))


def _told(name: str, nll: Sequence[float]) -> str:
    """The candidates of an arm, and the one that is taken."""
    each = [
        f"{' '.join(dict.fromkeys(rates))}: {found:.4f}" for rates, found in zip(CANDIDATES[name], nll, strict=True)
    ]
    return f"{name}: {'; '.join(each)}. Taken: {' '.join(dict.fromkeys(CANDIDATES[name][nll.index(min(nll))]))}."


def planned(regimes: Sequence[Regime]) -> list[tuple[str, Regime]]:
    """The arms to run, in order: those that come once, then all of a seed before those of the next."""
    choices = [(CHOICES, choices) for choices in dict.fromkeys(each.choices for each in regimes)]
    every = [(arm, regime) for regime in regimes for arm in (STEPS, BOTH_CROWDS)]
    return [*choices, *every, (BASE, NOWHERE)]


def main() -> None:
    """Runs what is not done yet, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True, help="a folder of rows with their splits")
    parser.add_argument("--base", type=Path, required=True, help="a folder of Transformers, or a GGUF file")
    parser.add_argument("--folder", type=Path, required=True, help="of rows, runs and, by default, results")
    parser.add_argument("--results", type=Path, help="the file of results (default: worth.jsonl in the folder)")
    parser.add_argument("--rows", type=int, nargs="+", default=[64], help="training rows (default: 64)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="default: 1 to 5")
    parser.add_argument("--eval-rows", type=int, default=200, help="test rows (default: 200)")
    parser.add_argument("--show", action="store_true", help="print what is measured already, and measure nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = options.folder.resolve()
    file = options.results or folder / "worth.jsonl"
    base = Path(folder_of(options.base)).resolve()
    study = Study(options.dataset.resolve(), base, folder, file, options.eval_rows)
    regimes = [Regime(rows, seed) for rows in options.rows for seed in options.seeds]
    for arm, regime in [] if options.show else planned(regimes):
        if study.done(arm, regime) is None:
            print(f"{arm}, {regime.rows} rows, seed {regime.seed}", flush=True)
            study.run(arm, regime)
    print(page(study, regimes))


if __name__ == "__main__":
    main()
