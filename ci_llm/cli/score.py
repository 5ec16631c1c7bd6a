"""`ci-llm score`: rewards, classes or numbers that the heads of a run give to texts."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ci_llm.cli import asking
from ci_llm.cli.command import make_parser
from ci_llm.errors import ConfigError

if TYPE_CHECKING:
    from ci_llm.crowd.text_scores import TextScore

_DESCRIPTION = """Score texts by the heads of a run, which objective reward, classification or regression has trained.
Of rewards only differences between answers to one prompt have a meaning."""
_COMMON = ("--file", "--json", "--abstain-below")
_EXAMPLES = """examples:
  ci-llm score ci_llm_output "Ann has 7 pens. She buys 5. How many pens are there?"
  ci-llm score ci_llm_output --file texts.jsonl --json > scores.jsonl

exit codes: 0 scored; 2 bad call; 130 Ctrl-C"""


def score(words: Sequence[str]) -> int:
    """Run `ci-llm score ARGUMENTS` and return the exit code.

    Raises:
        BadInput: the call is wrong, the run has no heads, or a text cannot be used.
        SystemExit: with 0, after `--help`.
    """
    call = _parser().parse_args(words)
    _check(call)
    call.run = asking.find_run(call.run, call.base_model, takes_base=False)
    texts, answers = _texts(call)
    crowd, _ = asking.open_run(call.run, call.base_model)
    how: dict[str, Any] = {"spreads": call.spreads, "abstain_below": call.abstain_below, "batch_size": call.batch_size}
    for text, answer, found in zip(texts, answers or texts, crowd.score(texts, answers, **how), strict=True):
        if call.json:
            named = {"text": text} if answers is None else {"prompt": text, "answer": answer}
            of_classes = () if found.label is not None else ("label", "probabilities", "abstained")
            print(json.dumps(named | {k: v for k, v in asdict(found).items() if k not in of_classes}), flush=True)
        else:
            print(f"{_shown(found)}  {textwrap.shorten(asking.words_of(answer), 60, placeholder=' ...')}", flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("ci-llm score", _DESCRIPTION, _EXAMPLES, _COMMON)
    option = parser.add_argument
    option("run", metavar="RUN", help="a run, a checkpoint, a saved crowd, or a hub id")
    option("texts", nargs="*", default=[], metavar="TEXT", help="a text; - alone reads them from standard input")
    option("--file", metavar="F", help="one text per line, or rows: text, or messages, or a prompt with its answer")
    option("--batch-size", type=int, default=16, metavar="N", help="texts scored at a time (16)")
    option("--spreads", type=float, default=1.0, metavar="C", help="lower is the mean minus C standard deviations (1)")
    option("--abstain-below", type=float, metavar="P", help="give no class that is less probable")
    option("--base-model", metavar="NAME", help="the base, if it is no longer where the run found it")
    option("--json", action="store_true", help="one JSON object per text, a line each")
    return parser


def _check(call: argparse.Namespace) -> None:
    problems = {
        "--batch-size must be at least 1": call.batch_size < 1,
        "--abstain-below is a probability, from 0 to 1": not 0 <= (call.abstain_below or 0) <= 1,
        "there is no text": not call.texts and call.file is None,
        "give texts or --file, and not both": bool(call.texts) and call.file is not None,
        "- stands beside another text": "-" in call.texts and len(call.texts) > 1,
        "a text is empty": not all(text.strip() for text in call.texts),
    }
    if broken := [problem for problem, holds in problems.items() if holds]:
        raise ConfigError("; ".join(broken), where="command line", hint='ci-llm score RUN "a text" | --file F | -')


def _texts(call: argparse.Namespace) -> tuple[list[Any], list[str] | None]:
    """(texts, None), or for rows with a prompt and its answer (prompts, answers)."""
    from ci_llm.data.prompts import prompts_of_file, prompts_of_lines, texts_of_rows

    if call.file in (None, "-") and call.texts not in ([], ["-"]):
        return call.texts, None
    if call.file in (None, "-"):
        found = prompts_of_lines(asking.lines_of(sys.stdin), "standard input", texts_of_rows)
    else:
        found = prompts_of_file(Path(call.file), texts_of_rows)
    if isinstance(found[0], tuple):
        prompts, answers = zip(*found, strict=True)
        return [*prompts], [*answers]
    return found, None


def _shown(found: TextScore) -> str:
    """The score in columns, for people."""
    if found.label is not None:
        label = "[unsure]" if found.abstained else found.label
        return f"{label:<16} {max((found.probabilities or {}).values()):.3f} ± {found.std:.3f}"
    agents = " ".join(f"{score:.3f}" for score in found.scores)
    return f"{found.mean:8.3f} ± {found.std:.3f} (lower {found.lower:.3f}; agents {agents})"
