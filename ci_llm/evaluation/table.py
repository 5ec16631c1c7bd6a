"""An evaluation in lines for a terminal: agents, their mean, vote and crowd, with intervals; rows answered wrong."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ci_llm.evaluation.evaluate import Evaluation
from ci_llm.evaluation.predictions import Row
from ci_llm.report.scores import agents_of, gains, rows_evaluated, scores, surest_first, what_evaluated


def table(evaluation: Evaluation) -> Iterator[str]:
    """The figures, line by line."""
    record = evaluation.record
    if "perplexity" in record:
        yield from _text_table(record)
        rows = rows_evaluated(record["n"], record["rows_trained_on"])
        yield f"{rows}, {record['tokens']} tokens of {record['bytes'] / max(1, record['tokens']):.2f} bytes on average"
        return
    yield f"{'':<14}{'exact match':>12}{'95 % interval':>17}{'nats per token':>16}"
    are_several = len(agents_of(record)) > 1  # else the crowd is the agent
    for line in scores(record) if are_several else scores(record)[:1]:
        interval = "" if line.low is None or line.high is None else f"{line.low:.3f} to {line.high:.3f}"
        nll = "" if line.nll is None else f"{line.nll:.4f}"
        yield f"{line.who:<14}{line.exact_match:>12.3f}{interval:>17}{nll:>16}".rstrip()
    for name, gain in gains(record) if are_several else ():
        half = "" if gain.interval95 is None else f" ± {gain.interval95:.3f}"
        yield f"crowd - {name}: {gain.value:+.3f}{half}"
    metric = record["metric"]
    yield what_evaluated(record) + ("" if metric == "exact_match" else f"; right is what {metric} finds equal")


def sureness_lines(evaluation: Evaluation) -> Iterator[str]:
    """How far the numbers that say how sure the crowd is can be trusted, line by line."""
    if (sure := evaluation.record.get("sureness")) is None:
        return
    area = "" if sure["auroc"] is None else f"{sure['auroc']:.3f} AUROC of wrong answers, "
    yield (
        f"{sure['by']}: {area}{sure['calibration_error']:.3f} calibration error"
        f" ({sure['calibration_error_by_chance']:.3f} by chance alone),"
        f" {sure['exact_match_at_coverage']:.3f} right of the surest {sure['coverage']:.0%}"
    )
    if cut := sure.get("abstention"):
        right = "none" if cut["exact_match"] is None else f"{cut['exact_match']:.3f} of them right"
        yield f"answers of at least {cut['below']:g}: {cut['answered']:.0%} of the rows, {right}"
    if few := sure.get("escalation"):
        crowd = evaluation.record["exact_match"]["crowd"]
        kept = f", {few['exact_match'] / crowd:.0%} of the crowd's" if crowd else ""
        yield (
            f"{few['agent']} first, all where it is unsure: {few['agents_per_prompt']:.2f} agents per prompt,"
            f" exact match {few['exact_match']:.3f}{kept}"
        )
    if evaluation.calibrated:
        yield f"calibrated on these rows, in {evaluation.calibrated}: judge it on others"


def failed_lines(evaluation: Evaluation, most: int) -> Iterator[str]:
    """The rows that the crowd answered wrong, those first of which it was most sure; a line each.

    Args:
        most: list at most so many.
    """
    failed = failed_rows(evaluation.rows)
    for row in failed[:most]:
        answer, reference = (_short(evaluation.read(row[key]), 24) for key in ("answer", "reference"))
        yield (
            f"row {row['row']:<6} {row['confidence']:.2f}  answered {answer or 'nothing'}, right is {reference}:"
            f"  {_short(row['prompt'], 60)}"
        )
    if len(failed) > most:
        yield f"... and {len(failed) - most} more: --failed {len(failed)}"


def failed_rows(rows: Sequence[Row]) -> list[Row]:
    """The rows that the crowd answered wrong, those first of which it was most sure."""
    return sorted((row for row in rows if not row["correct"]), key=surest_first)


def _text_table(record: Mapping[str, Any]) -> Iterator[str]:
    yield f"{'':<14}{'perplexity':>12}{'bits per byte':>17}{'nats per token':>16}"
    figures = [record["perplexity"], record["bits_per_byte"], record["nll"]]
    for name, *numbers in zip(agents_of(record), *(each["agents"] for each in figures), strict=True):
        yield _text_line(name, *numbers)
    count = len(record["nll"]["agents"])
    bits, nll = (sum(each["agents"]) / count for each in figures[1:])
    yield _text_line("agents, mean", math.exp(nll), bits, nll)
    yield _text_line("crowd", *(each["crowd"] for each in figures))


def _text_line(who: str, perplexity: float, bits: float, nll: float) -> str:
    return f"{who:<14}{perplexity:>12.3f}{bits:>17.4f}{nll:>16.4f}"


def _short(text: str, width: int) -> str:
    return textwrap.shorten(text, width, placeholder=" ...")
