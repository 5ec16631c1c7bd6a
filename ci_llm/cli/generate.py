"""`ci-llm generate`: the answers of a run's crowd to prompts, for a terminal, a pipe or as JSON lines."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ci_llm.cli import asking
from ci_llm.cli.command import make_parser
from ci_llm.core.imports import importing
from ci_llm.errors import ConfigError

if TYPE_CHECKING:
    from ci_llm.crowd.asking import Answer

_DESCRIPTION = """Ask the crowd of a run. A terminal shows the answer and how sure the crowd is; a pipe gets the
answer alone; --json gives one object per prompt."""
_COMMON = ("--file", "--json", "--agents", "--temperature", "--max-new-tokens")
_EXAMPLES = """examples:
  ci-llm generate ci_llm_output "Ann has 7 pens. She buys 5. How many pens are there?"
  ci-llm generate ci_llm_output --file questions.jsonl --json > answers.jsonl
  echo "Ann has 7 pens." | ci-llm generate ci_llm_output -

exit codes: 0 answered; 2 bad call; 130 Ctrl-C"""

#: These come first in a JSON object, in this order.
_FIRST = ("prompt", "answer", "agents", "confidence", "disagreement", "agreement", "probability_right")


def generate(words: Sequence[str]) -> int:
    """Run `ci-llm generate ARGUMENTS` and return the exit code.

    Raises:
        BadInput: the call is wrong, there is no crowd, or a prompt cannot be used.
        SystemExit: with 0, after `--help`.
    """
    parser = make_parser("ci-llm generate", _DESCRIPTION, _EXAMPLES, _COMMON)
    asking.add_options(parser)
    about = "a prompt; - alone reads them from standard input"
    parser.add_argument("prompts", nargs="*", default=[], metavar="PROMPT", help=about)
    parser.add_argument("--file", metavar="F", help="one prompt per line, or rows with the columns of training")
    parser.add_argument("--batch-size", type=int, default=16, metavar="N", help="prompts answered at a time (16)")
    parser.add_argument("--best-of", type=int, metavar="N", help="draw N answers, and give the one of the best reward")
    parser.add_argument("--reward", metavar="RUN2", help="the run whose rewards choose, with --best-of")
    parser.add_argument("--agents", action="store_true", help="also show what each agent answers alone")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt, a line each")
    parser.add_argument("--tokens", action="store_true", help="with --json: how sure the crowd is of every token")
    call = parser.parse_args(words)
    if call.tokens and not call.json:
        raise ConfigError("--tokens shows nothing without --json", where="command line", hint="add --json")
    choices = asking.choices_of(call)
    call.run = asking.find_run(call.run, call.base_model)
    prompts = list(_prompts(call))
    if call.best_of is not None or call.reward is not None:
        return _best_of(call, prompts, choices)
    whole = call.json or call.agents or sys.stdout.isatty()
    names, found = _asked(call, prompts, choices, include_agents=whole)
    for number, answer in enumerate(found):
        if call.json:
            print(_as_json(answer, tokens=call.tokens), flush=True)
        elif not whole:
            print("" if answer.abstained else answer.answer, flush=True)
        else:
            if len(prompts) > 1:
                print("\n" * (number > 0) + textwrap.shorten(f"> {asking.words_of(answer.prompt)}", asking.width()))
            print(asking.beside(answer, names) if answer.agents and call.agents else asking.given(answer))
            print(asking.how_sure(answer), flush=True)
    return 0


def _prompts(call: argparse.Namespace) -> Iterator[Any]:
    """The prompts of the call; each is text or a chat.

    Raises:
        BadInput: there is no prompt, or there are two sources.
    """
    prompts: list[str] = call.prompts
    if bool(prompts) == (call.file is not None):
        what = "a prompt and --file were both given" if prompts else "there is no prompt"
        raise ConfigError(what, where="command line", hint='ci-llm generate RUN "a prompt" | --file F | -')
    if "-" in prompts and len(prompts) > 1:
        raise ConfigError("- stands beside another prompt", where="command line", hint="- reads all of them")
    from ci_llm.data.prompts import prompts_of_file, prompts_of_lines

    if call.file == "-" or prompts == ["-"]:
        yield from prompts_of_lines(asking.lines_of(sys.stdin), "standard input")
    elif call.file is not None:
        yield from prompts_of_file(Path(call.file))
    elif all(prompt.strip() for prompt in prompts):
        yield from prompts
    else:
        raise ConfigError("a prompt is empty", where="command line", hint="write one, or give --file F")


def _asked(
    call: argparse.Namespace, prompts: Sequence[Any], choices: dict[str, Any], *, include_agents: bool
) -> tuple[list[str], Iterator[Answer]]:
    """The names of the agents, and the answers of their crowd, which come one by one."""
    with importing():
        from ci_llm.crowd.asking import answers, options_of
        from ci_llm.crowd.generation import stop_strings_of

    stops = stop_strings_of(asking.stop_strings(call))
    crowd, names = asking.open_run(call.run, call.base_model)
    options = options_of(crowd, stops, **choices)
    return names, answers(crowd, prompts, options, call.batch_size, include_agents=include_agents)


def _best_of(call: argparse.Namespace, prompts: Sequence[Any], choices: dict[str, Any]) -> int:
    """Draw several answers to each prompt, and print the one with the best reward by another run."""
    if call.best_of is None or call.reward is None or call.best_of < 2:
        what, hint = "--best-of N, at least 2, and --reward RUN2 go together", "--best-of 4 --reward RUN2"
        raise ConfigError(what, where="command line", hint=hint)
    if odd := [name for name in ("--agents", "--tokens") if _is_given(call, name)]:
        raise ConfigError(f"{odd[0]} is about one answer", where="command line", hint="leave it out with --best-of")
    call.reward = asking.find_run(call.reward, None, takes_base=False)
    choices = {"temperature": 1.0, "seed": 0, **choices, "do_sample": True}
    crowd, _ = asking.open_run(call.run, call.base_model)
    judge, _ = asking.open_run(call.reward, None)
    if not judge.reads_pairs:
        what, hint = "these agents give no rewards for answers", "take a run of objective=reward"
        raise ConfigError(what, where=f"--reward {call.reward}", hint=hint)
    asked, size = [prompt for prompt in prompts for _ in range(call.best_of)], call.batch_size
    answers = crowd.generate(asked, stop_strings=asking.stop_strings(call), batch_size=size, **choices)
    rewards = [score.mean for score in judge.score(asked, answers, batch_size=size)]
    for at, prompt in enumerate(prompts):
        own = slice(at * call.best_of, (at + 1) * call.best_of)
        found = [{"answer": text, "reward": each} for text, each in zip(answers[own], rewards[own], strict=True)]
        best = max(found, key=lambda one: one["reward"])
        print(json.dumps({"prompt": prompt, **best, "answers": found}) if call.json else best["answer"], flush=True)
    return 0


def _is_given(call: argparse.Namespace, option: str) -> bool:
    return getattr(call, option.removeprefix("--").replace("-", "_")) not in (None, False)


def _as_json(answer: Answer, *, tokens: bool) -> str:
    fields = asdict(answer)
    if not tokens:
        del fields["tokens"]
    return json.dumps({name: fields.pop(name) for name in _FIRST} | fields)
