"""`ci-llm evaluate`: agents, vote and crowd on the rows of a run or on other ones; every answer kept in a file."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ci_llm.cli.command import add_json, parser_of, print_result, whole_checkpoint
from ci_llm.core.help import at_least, probability
from ci_llm.core.imports import importing
from ci_llm.core.quantities import duration
from ci_llm.core.remote import is_url
from ci_llm.core.work import Work

if TYPE_CHECKING:
    from ci_llm.evaluation.saved_crowd import Evaluated

_COMMON = ("--data", "--max-samples", "--failed", "--calibrate", "--json")
_LISTED_FAILURES = 10
#: Work that has lasted so long is shown.
_SHOWN_AFTER_S = 5.0


def evaluate_run(words: Sequence[str]) -> int:
    """Evaluate a run, and print a table or JSON.

    Raises:
        BadInput: the call is wrong, or there is nothing to evaluate.
        OutOfMemory: a batch does not fit.
        SystemExit: with 0, after `--help`.
    """
    call = _parser().parse_args(words)
    from ci_llm.cli.answering import find_run, note_if_offline

    if is_url(call.run):
        call.output = call.output or Path("predictions.jsonl")  # not beside the local copy
    call.run = find_run(call.run, call.base_model)
    if call.data:
        note_if_offline(call.data)
    with importing():
        from ci_llm.data.sources import open_splits
        from ci_llm.evaluation.loading import Request, read_keys
        from ci_llm.evaluation.saved_crowd import evaluate

    named = {name: value for name, value in vars(call).items() if name not in ("keys", "failed", "json")}
    request = Request(**named, keys=read_keys(call.keys))
    if call.data and not os.path.exists(os.path.expanduser(call.data)):  # refused before a base is loaded
        open_splits(call.data, request.keys.get("dataset_subset"), "train", "--data")
    with whole_checkpoint(call.run):
        try:
            found = evaluate(request, None if call.json else _Tenths())
        except KeyboardInterrupt:
            print("stopped; the same call resumes after the last row that was answered", file=sys.stderr)
            raise
    print_result(call.json, _as_json(call, found), *_as_text(call, found))
    return 0


def _parser() -> argparse.ArgumentParser:
    from ci_llm.crowd.metrics import METRICS

    parser = parser_of("evaluate", _COMMON)
    option = parser.add_argument
    option("run", metavar="RUN", help="a run, a checkpoint, a saved crowd, a hub id, or a base alone")
    option("keys", nargs="*", default=[], metavar="key=value", help="of the configuration; --help all lists them")
    option("--data", metavar="F", help="a file, a folder, a hub id, or embedded; read as in training")
    option("--split", metavar="S", help="the split of the data set")
    option("--max-samples", type=at_least(1), metavar="N", help="at most N rows, evenly spread")
    option("--metric", choices=METRICS, metavar="M", help="exact_match (default; free text: NLL) or string_match")
    option("--batch-size", type=at_least(1), metavar="B", help="questions at a time; default: the run's batch_size")
    option("--output", type=Path, metavar="F", help="the predictions file; default: RUN/predictions.jsonl")
    option("--overwrite", action="store_true", help="begin the predictions file again")
    about = f"list rows that were answered wrong, at most N (default {_LISTED_FAILURES}), the surest first"
    option("--failed", type=at_least(1), nargs="?", const=_LISTED_FAILURES, metavar="N", help=about)
    option("--calibrate", action="store_true", help="fit on these rows how probably an answer is right")
    option("--abstain-below", type=probability, metavar="P", help="score the answers of at least probability P")
    option("--base-model", metavar="NAME", help="the base, if it is no longer where the run found it")
    add_json(parser)
    return parser


class _Tenths:
    """Prints a line on stderr for every tenth of work that takes long."""

    shown = 0

    def __call__(self, work: Work) -> None:
        tenth = 10 * work.done // max(1, work.total)
        if tenth > self.shown and not work.ended and time.monotonic() - work.began_at > _SHOWN_AFTER_S:
            print(f"{work.what}: {work.done} of {work.total} {work.parts}", file=sys.stderr)
        self.shown = tenth


def _as_text(call: argparse.Namespace, found: Evaluated) -> Iterator[str]:
    from ci_llm.evaluation.predictions import sureness_lines
    from ci_llm.evaluation.saved_crowd import failed_lines
    from ci_llm.report.scores import failed_rows, table

    yield from (f"data  {line}" for line in found.lines)
    yield ""
    figures = found.evaluation
    yield from table(figures, call.run)
    if figures.tokens is not None and figures.bytes is not None:
        yield f"{figures.tokens} tokens of {figures.bytes / max(1, figures.tokens):.2f} bytes on average"
    yield from sureness_lines(figures.sureness) if figures.sureness else ()
    if found.calibrated:
        yield f"calibrated on these rows, in {found.calibrated}: judge it on others"
    yield ""
    if found.resumed:
        yield f"resumed: {found.resumed} of {len(found.rows)} rows were answered by an earlier call"
    yield duration(found.seconds) + (f", every answer in {found.predictions}" if found.predictions else "")
    if failed := failed_rows(found.rows):
        yield f"failed: {len(failed)} of {len(found.rows)} rows" + ("" if call.failed else "; --failed lists them")
    if call.failed:
        yield from failed_lines(found, call.failed)


def _as_json(call: argparse.Namespace, found: Evaluated) -> object:
    from ci_llm.report.scores import failed_rows

    failed = failed_rows(found.rows)
    return {
        "run": call.run,
        **found.evaluation.to_dict(),
        "failed": len(failed),
        **({"failed_rows": failed[: call.failed]} if call.failed else {}),
        "calibration": str(found.calibrated) if found.calibrated else None,
        "predictions": str(found.predictions) if found.predictions else None,
        "resumed": found.resumed,
        "seconds": round(found.seconds, 3),
    }
