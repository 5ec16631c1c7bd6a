"""How far an answer can be trusted: which number finds the wrong answers, what a calibration and escalation are worth.

    python -m benchmarks.uncertainty [RUN] [--votes rerank majority]

RUN is a run on the embedded task. Its crowd answers the 320 validation rows, on which it is calibrated, and the 1,000
test rows, on which nothing was chosen. A call that was killed resumes, as `ci-llm evaluate` does. Printed are:

- for every number of an answer, the AUROC of wrong answers with a bootstrap interval over rows, exact match of the
  surest 80 %, and for probabilities the calibration error beside that of true probabilities, by chance alone
- what asking one agent first keeps of the crowd's exact match, by its price
- exact match of aggregators that vote
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ci_llm.cli.main import main as ci_llm
from ci_llm.core.durable import read_json
from ci_llm.crowd.answers import Calibration
from ci_llm.crowd.judging import auroc, calibration_error
from ci_llm.evaluation.predictions import at_coverage, honest_error, sureness_record

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]
Row = dict[str, Any]

RESAMPLES = 1000
PRICES = (1.0, 1.3, 1.6, 2.0, 3.0)


def sureness(calibration: Calibration) -> dict[str, Callable[[Row], float]]:
    """What speaks for a right answer, by name; the first two are probabilities."""
    return {
        "probability_right": lambda row: calibration.right(row["signals"]),
        "confidence": lambda row: row["confidence"],
        "probability_per_token": lambda row: float(np.exp(row["signals"][1])),
        "least probable token": lambda row: row["signals"][2],
        "entropy": lambda row: -row["signals"][3],
        "disagreement": lambda row: -row["signals"][4],
        "agreement": lambda row: agreement(row),
    }


def agreement(row: Row) -> float:
    """The share of agents whose final answer is the crowd's."""
    from ci_llm.crowd.answers import agreement as share

    return share(row["answer"], row["agents"])


def interval(sure: Numbers, right: Numbers, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of `auroc` over rows."""
    draws = np.random.default_rng(seed).integers(0, len(right), (RESAMPLES, len(right)))
    found = [auroc(sure[draw], right[draw]) for draw in draws]
    low, high = np.quantile([each for each in found if each is not None], [0.025, 0.975])
    return float(low), float(high)


def table(rows: Sequence[Row], calibration: Calibration) -> str:
    """One line per number, in markdown."""
    right = np.array([row["correct"] for row in rows], float)
    lines = [
        f"{len(rows)} rows, exact match {right.mean():.3f}",
        "| number | AUROC of wrong answers | exact match of the surest 80 % | calibration error | by chance |",
        "|---|---|---|---|---|",
    ]
    for name, number in sureness(calibration).items():
        sure = np.array([number(row) for row in rows])
        order = np.array([row["signals"][0] for row in rows]) if name == "confidence" else sure  # 0 for long answers
        low, high = interval(order, right)
        is_probability = name in ("probability_right", "confidence", "probability_per_token")
        errors = (f"{calibration_error(sure, right):.3f}", f"{honest_error(sure):.3f}") if is_probability else ("", "")
        area = auroc(order, right) or 0.0
        cells = [name, f"{area:.3f} ({low:.3f} to {high:.3f})", f"{at_coverage(order, right):.3f}", *errors]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def escalation(rows: Sequence[Row], calibration: Calibration) -> str:
    """What asking one agent first keeps of the crowd's exact match, by its price, in markdown."""
    crowd = float(np.mean([row["correct"] for row in rows]))
    lines = ["| asked for | agents per prompt | exact match | of the crowd's |", "|---|---|---|---|"]
    for price in PRICES:
        found = sureness_record(rows, calibration, calibration.aggregator, agents_per_prompt=price)["escalation"]
        kept = found["exact_match"] / crowd
        lines.append(f"| {price:g} | {found['agents_per_prompt']:.2f} | {found['exact_match']:.3f} | {kept:.1%} |")
    return "\n".join(lines)


def ask(run: Path, split: str, output: Path, *options: str) -> list[Row]:
    """The answers to a split of the embedded task, one per row."""
    words = [str(run), "--split", split, "--output", str(output), *options]
    if ci_llm(["evaluate", *words]):
        raise SystemExit(2)
    return [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Measures and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="ci_llm_output", type=Path, help="a run on the embedded task")
    parser.add_argument("--votes", nargs="*", default=["rerank", "majority"], help="aggregators to compare with")
    options = parser.parse_args()
    run: Path = options.run
    ask(run, "validation", run / "uncertainty_validation.jsonl", "--calibrate")
    rows = ask(run, "test", run / "uncertainty_test.jsonl")
    calibration = Calibration.of(read_json(run / "calibration.json"))  # type: ignore[arg-type]
    print(table(rows, calibration), escalation(rows, calibration), sep="\n\n")
    for name in options.votes:
        found = ask(run, "test", run / f"uncertainty_{name}.jsonl", f"aggregator={name}")
        gain = np.mean([one["correct"] - other["correct"] for one, other in zip(found, rows, strict=True)])
        print(f"{name}: exact match {np.mean([row['correct'] for row in found]):.3f}, {gain:+.3f} to the crowd's")


if __name__ == "__main__":
    main()
