"""How far a confidence can be trusted: which number finds the wrong answers, and is the probability calibrated?

    python -m benchmarks.uncertainty [RUN] [--split validation] [--rows 320]

The crowd of RUN answers rows of the embedded task. Printed are, for every number of an answer, the AUROC of wrong
answers with a bootstrap interval over rows; the expected calibration error of the two probabilities (ten bins of equal
width, Guo et al., "On Calibration of Modern Neural Networks", 2017); and exact match on the surest 80 % of the rows.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from ci_llm import Crowd
from ci_llm.crowd.answers import final_answer
from ci_llm.crowd.asking import Answer
from ci_llm.embedded import rows

Numbers = np.ndarray[tuple[int], np.dtype[np.float64]]

#: What speaks for a wrong answer.
DOUBTS: dict[str, Callable[[Answer], float]] = {
    "confidence": lambda answer: -answer.confidence,
    "probability_per_token": lambda answer: -answer.probability_per_token,
    "entropy": lambda answer: answer.entropy,
    "expected_entropy": lambda answer: answer.expected_entropy,
    "disagreement": lambda answer: answer.disagreement,
    "agreement": lambda answer: -float(answer.agreement or 0),
}
BINS, COVERAGE, RESAMPLES = 10, 0.8, 1000


def auroc(doubts: Numbers, wrong: Numbers) -> float:
    """The chance that a wrong answer is doubted more than a right one; ties count half."""
    above = doubts[wrong == 1][:, None] - doubts[wrong == 0][None]
    return float((above > 0).mean() + (above == 0).mean() / 2)


def interval(doubts: Numbers, wrong: Numbers, seed: int = 0) -> tuple[float, float]:
    """The 95 % bootstrap interval of `auroc` over rows."""
    draws = np.random.default_rng(seed).integers(0, len(wrong), (RESAMPLES, len(wrong)))
    found = [auroc(doubts[draw], wrong[draw]) for draw in draws if 0 < wrong[draw].mean() < 1]
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)


def calibration_error(probabilities: Numbers, right: Numbers) -> float:
    """The mean distance of a bin's share of right answers from its mean probability, weighted by rows."""
    bins = np.minimum((probabilities * BINS).astype(int), BINS - 1)
    gaps = [abs((right - probabilities)[bins == number].sum()) for number in range(BINS)]
    return float(sum(gaps) / len(right))


def at_coverage(doubts: Numbers, right: Numbers) -> float:
    """Exact match on the share `COVERAGE` of rows with the least doubt."""
    kept = np.argsort(doubts, kind="stable")[: round(COVERAGE * len(right))]
    return float(right[kept].mean())


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="ci_llm_output", help="a run on the embedded task")
    parser.add_argument("--split", default="validation", choices=["validation", "test"])
    parser.add_argument("--rows", type=int, default=320)
    options = parser.parse_args()
    asked = rows(options.split)[: options.rows]
    answers = Crowd.from_pretrained(options.run).generate([row["question"] for row in asked], details=True)
    wanted = [final_answer(row["answer"], "marked") for row in asked]
    right = np.array([final_answer(a.answer, "marked") == w for a, w in zip(answers, wanted, strict=True)], float)
    print(f"{len(asked)} rows, exact match {right.mean():.3f}; on the surest {COVERAGE:.0%} of them:")
    print("| number | AUROC of wrong answers | exact match | calibration error |\n|---|---|---|---|")
    for name, doubt in DOUBTS.items():
        doubts = np.array([doubt(answer) for answer in answers])
        low, high = interval(doubts, 1 - right)
        error = f"{calibration_error(-doubts, right):.3f}" if name in ("confidence", "probability_per_token") else ""
        sure = at_coverage(doubts, right)
        print(f"| {name} | {auroc(doubts, 1 - right):.3f} ({low:.3f} to {high:.3f}) | {sure:.3f} | {error} |")


if __name__ == "__main__":
    main()
