"""`ci-llm generate` and `ci-llm score`: what the crowd of a run answers to prompts, and what its heads say of texts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ci_llm.cli import asking
from ci_llm.cli.command import parser_of
from ci_llm.core.help import at_least, probability
from ci_llm.core.imports import importing

if TYPE_CHECKING:
    from ci_llm.crowd.asking import Answer
    from ci_llm.crowd.judging import TextScore

_COMMON = ("--file", "--json", "--agents", "--temperature", "--max-new-tokens")

#: These come first in a JSON object, in this order.
_FIRST = ("prompt", "answer", "agents", "confidence", "disagreement", "agreement", "probability_right")


def generate(words: Sequence[str]) -> int:
    """Run `ci-llm generate ARGUMENTS` and return the exit code.

    Raises:
        BadInput: the call is wrong, there is no crowd, or a prompt cannot be used.
        SystemExit: with 0, after `--help`.
    """
    parser = parser_of("generate", _COMMON)
    asking.add_options(parser)
    option = parser.add_argument
    option("prompts", nargs="*", default=[], metavar="PROMPT", help="a prompt; - alone reads them from standard input")
    option("--file", metavar="F", help="one prompt per line, or rows with the columns of training")
    option("--batch-size", type=at_least(1), default=16, metavar="N", help="prompts answered at a time (16)")
    option("--agents", action="store_true", help="also show what each agent answers alone")
    option("--json", action="store_true", help="one JSON object per prompt, a line each")
    call = parser.parse_args(words)
    call.run = asking.find_run(call.run, call.base_model)
    prompts = asking.texts_of(call, call.prompts, "prompt")
    with importing():
        from ci_llm.crowd.asking import answers, options_of
    is_shown = call.json or call.agents or sys.stdout.isatty()
    crowd, names = asking.open_run(call.run, call.base_model)
    options = options_of(crowd, **asking.choices_of(call))
    found = answers(crowd, prompts, options, call.batch_size, include_agents=is_shown)
    for number, answer in enumerate(found):
        if call.json:
            print(_as_json(answer), flush=True)
        elif not is_shown:
            print("" if answer.abstained else answer.answer, flush=True)
        else:
            if len(prompts) > 1:
                print("\n" * (number > 0) + f"> {asking.shortened(answer.prompt, asking.width() - 2)}")
            print(asking.beside(answer, names) if answer.agents and call.agents else asking.given(answer))
            print(asking.how_sure(answer), flush=True)
    return 0


def _as_json(answer: Answer) -> str:
    fields = asdict(answer)
    del fields["tokens"]  # many, and for programs that ask in Python
    return json.dumps({name: fields.pop(name) for name in _FIRST} | fields)


_SCORE_COMMON = ("--file", "--json", "--abstain-below")


def score(words: Sequence[str]) -> int:
    """Run `ci-llm score ARGUMENTS` and return the exit code.

    Raises:
        BadInput: the call is wrong, the run has no heads, or a text cannot be used.
        SystemExit: with 0, after `--help`.
    """
    parser = parser_of("score", _SCORE_COMMON)
    option = parser.add_argument
    option("run", metavar="RUN", help="a run, a checkpoint, a saved crowd, or a hub id")
    option("texts", nargs="*", default=[], metavar="TEXT", help="a text; - alone reads them from standard input")
    option("--file", metavar="F", help="one text per line, or rows: text, or messages, or a prompt with its answer")
    option("--batch-size", type=at_least(1), default=16, metavar="N", help="texts scored at a time (16)")
    option("--abstain-below", type=probability, metavar="P", help="give no class that is less probable")
    option("--base-model", metavar="NAME", help="the base, if it is no longer where the run found it")
    option("--json", action="store_true", help="one JSON object per text, a line each")
    call = parser.parse_args(words)
    call.run = asking.find_run(call.run, call.base_model, takes_base=False)
    from ci_llm.data.prompts import texts_of_rows

    texts, answers = asking.texts_of(call, call.texts, "text", texts_of_rows), None
    if isinstance(texts[0], tuple):
        texts, answers = map(list, zip(*texts, strict=True))
    crowd, _ = asking.open_run(call.run, call.base_model)
    how: dict[str, Any] = {"abstain_below": call.abstain_below, "batch_size": call.batch_size}
    for text, answer, found in zip(texts, answers or texts, crowd.score(texts, answers, **how), strict=True):
        if call.json:
            named = {"text": text} if answers is None else {"prompt": text, "answer": answer}
            of_classes = () if found.label is not None else ("label", "probabilities", "abstained")
            print(json.dumps(named | {k: v for k, v in asdict(found).items() if k not in of_classes}), flush=True)
        else:
            print(f"{_shown(found)}  {asking.shortened(answer, 60)}", flush=True)
    return 0


def _shown(found: TextScore) -> str:
    """The score in columns, for people."""
    if found.label is not None:
        label = "[unsure]" if found.abstained else found.label
        return f"{label:<16} {max((found.probabilities or {}).values()):.3f} ± {found.std:.3f}"
    agents = " ".join(f"{score:.3f}" for score in found.scores)
    return f"{found.mean:8.3f} ± {found.std:.3f} (lower {found.lower:.3f}; agents {agents})"
