"""`ci-llm evaluate`: agents, vote and crowd on the rows of a run or on other ones; every answer kept in a file."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ci_llm.cli.command import add_json, make_parser, print_json, whole_checkpoint
from ci_llm.core.imports import importing
from ci_llm.core.quantities import duration
from ci_llm.core.remote import is_url
from ci_llm.errors import ConfigError

if TYPE_CHECKING:
    from ci_llm.evaluation.evaluate import Evaluation, Progress
    from ci_llm.evaluation.loading import Request

_DOES = """Ask agents and crowd the rows of a data set, score their answers, and keep every answer in a file.
Without --data these are the rows of the run's own evaluation, and the figures those of its evaluation.json."""
_COMMON = ("--data", "--max-samples", "--failed", "--calibrate", "--json")
_EXAMPLES = """objective=module:name, if the run has this objective, takes the loss from your module.
key=value changes a key of the run for this evaluation: aggregator, max_new_tokens_eval, max_seq_length,
prompt_column, answer_column, text_column, label_column, dataset_subset.

A call that was killed resumes after its last row when it is called again.

examples: ci-llm evaluate ci_llm_output
          ci-llm evaluate ci_llm_output --data my_test.jsonl --failed

exit codes: 0 done; 1 out of memory; 2 bad call, no rows, no whole checkpoint, predictions of other rows or that cannot
be written"""
_LISTED_FAILURES = 10


def evaluate_run(words: Sequence[str]) -> int:
    """Evaluate a run, and print a table or JSON.

    Raises:
        BadInput: the call is wrong, or there is nothing to evaluate.
        OutOfMemory: a batch does not fit.
        SystemExit: with 0, after `--help`.
    """
    call = _parser().parse_args(words)
    _check(call)
    from ci_llm.cli.asking import find_run
    from ci_llm.core.remote import go_offline_if_unreachable

    if is_url(call.run):
        call.output = call.output or Path("predictions.jsonl")  # not beside the local copy
    call.run = find_run(call.run, call.base_model)
    if call.data:
        go_offline_if_unreachable(call.data)
    with importing():
        from ci_llm.evaluation.evaluate import evaluate

    request = _request(call)
    with _progress(quiet=call.json) as progress, whole_checkpoint(call.run):
        try:
            found = evaluate(request, progress)
        except KeyboardInterrupt:
            print("stopped; the same call resumes after the last row that was answered", file=sys.stderr)
            raise
    if call.json:
        print_json(_as_json(call, found))
    else:
        print(*_as_text(call, found), sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ci-llm evaluate", _DOES, _EXAMPLES, _COMMON)
    option = parser.add_argument
    option("run", metavar="RUN", help="a run, a checkpoint, a saved crowd, a hub id, or a base alone")
    about = "a key of the configuration; --help all lists them"
    option("keys", nargs="*", default=[], metavar="key=value", help=about)
    option("--data", metavar="F", help="a file, a folder, a hub id, or embedded; read as in training")
    option("--split", metavar="S", help="the split of the data set")
    option("--max-samples", type=int, metavar="N", help="at most N rows, evenly spread")
    option("--metric", metavar="M", help="exact_match (default; free text: NLL alone) or string_match")
    option("--batch-size", type=int, metavar="B", help="questions at a time; default: the run's batch_size")
    option("--output", type=Path, metavar="F", help="the predictions file; default: RUN/predictions.jsonl")
    option("--overwrite", action="store_true", help="begin the predictions file again")
    about = f"list rows that were answered wrong, at most N (default {_LISTED_FAILURES}), the surest first"
    option("--failed", type=int, nargs="?", const=_LISTED_FAILURES, metavar="N", help=about)
    option("--calibrate", action="store_true", help="fit on these rows how probably an answer is right")
    option("--abstain-below", type=float, metavar="P", help="score the answers of at least probability P")
    option("--base-model", metavar="NAME", help="the base, if it is no longer where the run found it")
    add_json(parser)
    return parser


def _check(call: argparse.Namespace) -> None:
    """Refuse a wrong call before any library is loaded."""
    from ci_llm.crowd.metrics import METRICS

    problems = [
        f"--{name.replace('_', '-')} must be at least 1"
        for name in ("max_samples", "batch_size", "failed")
        if getattr(call, name) is not None and getattr(call, name) < 1
    ]
    if call.metric not in (None, *METRICS):
        problems.append(f"there is no metric {call.metric!r}: take {' or '.join(METRICS)}")
    if call.abstain_below is not None and not 0 <= call.abstain_below <= 1:
        problems.append("--abstain-below is a probability, from 0 to 1")
    problems += [f"{word!r} is neither an option nor key=value" for word in call.keys if "=" not in word]
    if problems:
        raise ConfigError("; ".join(problems), where="command line", hint="ci-llm evaluate --help")


def _request(call: argparse.Namespace) -> Request:
    from ci_llm.evaluation.loading import Choice, Request, read_keys

    return Request(
        run=call.run,
        choice=Choice(call.data, call.split, call.max_samples, read_keys(call.keys)),
        metric=call.metric,
        batch_size=call.batch_size,
        output=call.output,
        overwrite=call.overwrite,
        base_model=call.base_model,
        calibrate=call.calibrate,
        abstain_below=call.abstain_below,
    )


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Progress]:
    """Show the progress on stderr: by a bar on a terminal, else by a line for every tenth."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    is_terminal = sys.stderr.isatty()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True, disable=quiet or not is_terminal) as bar:
        task = bar.add_task("loading", total=None)
        shown = ("loading", 0)

        def show(phase: str, done: int, total: int) -> None:
            nonlocal shown
            bar.update(task, description=phase, completed=done, total=total or None)
            tenth = (phase, 10 * done // max(total, 1))
            if done and tenth != shown and not (quiet or is_terminal):
                print(f"{phase} row {done} of {total}", file=sys.stderr)
            shown = tenth

        yield show


def _as_text(call: argparse.Namespace, found: Evaluation) -> Iterator[str]:
    from ci_llm.evaluation.evaluate import failed_lines, failed_rows, sureness_lines, table

    yield from (f"data  {line}" for line in found.lines)
    yield ""
    yield from table(found, call.run)
    yield from sureness_lines(found)
    yield ""
    if found.resumed:
        yield f"resumed: {found.resumed} of {len(found.rows)} rows were answered by an earlier call"
    yield duration(found.seconds) + (f", every answer in {found.predictions}" if found.predictions else "")
    if failed := failed_rows(found.rows):
        yield f"failed: {len(failed)} of {len(found.rows)} rows" + ("" if call.failed else _where_failed(call, found))
    if call.failed:
        yield from failed_lines(found, call.failed)


def _where_failed(call: argparse.Namespace, found: Evaluation) -> str:
    grep = shlex.join(["grep", '"correct": false', str(found.predictions)])
    report = ", ci-llm report shows some" if call.output is None and found.record["nll"]["agents"] else ""
    return f"; --failed lists them{report}, and this prints all: {grep}"


def _as_json(call: argparse.Namespace, found: Evaluation) -> dict[str, Any]:
    from ci_llm.evaluation.evaluate import failed_rows

    failed = failed_rows(found.rows)
    return {
        "run": call.run,
        **found.record,
        "failed": len(failed),
        **({"failed_rows": failed[: call.failed]} if call.failed else {}),
        "calibration": str(found.calibrated) if found.calibrated else None,
        "predictions": str(found.predictions) if found.predictions else None,
        "resumed": found.resumed,
        "seconds": round(found.seconds, 3),
    }
