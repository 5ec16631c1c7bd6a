"""The parser of a command: its help has one example and the options that most people use, its numbers have bounds."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NoReturn

from ci_llm.errors import ConfigError

ALL: Final = "all"
REST: Final = "--help all: every option, more examples, exit codes"


def asked_help(words: Sequence[str]) -> str:
    """The help that the words of a command line ask for: "short", "all", or "" for none."""
    for place, word in enumerate(words):
        if word in ("-h", "--help"):
            return ALL if words[place + 1 : place + 2] == [ALL] else "short"
    return ""


def at_least(least: float, kind: type[int | float] = int, *, most: float = math.inf) -> Callable[[str], int | float]:
    """The type of an option that takes a finite number of at least `least`, and at most `most`."""

    def number(text: str) -> int | float:
        found = kind(text)
        if not (least <= found <= most and found != math.inf):
            told = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"must be {told}")
        return found

    number.__name__ = kind.__name__  # for argparse, about a word that is none
    return number


#: The type of an option that takes a probability.
probability: Final = at_least(0, float, most=1)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Descriptions as they were written; no word of an option is cut at a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class HelpfulParser(argparse.ArgumentParser):
    """A parser whose `--help` shows its common options, those that are required, and one example, as they were written.

    Args:
        common: the options that most people use; None for a help that shows all of them.
    """

    def __init__(self, *words: Any, common: Collection[str] | None = None, **more: Any) -> None:
        super().__init__(*words, **{"formatter_class": _Formatter, "allow_abbrev": False, **more})
        self.common = common

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.shorten_for(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where="command line", hint=f"{self.prog} --help all")

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's own hides that the output fails

    def shorten_for(self, words: Sequence[str]) -> None:
        """Hide the options that few people need, unless the words ask for all."""
        if asked_help(words) == ALL:
            return
        for action in self._actions if self.common is not None else ():
            shown = action.required or {"--help", *(self.common or ())} & {*action.option_strings}
            if action.option_strings and not shown:
                action.help = argparse.SUPPRESS
        example = re.search(r"^examples?:\s*(.+?)(?:   .*)?$", self.epilog or "", re.MULTILINE)
        self.epilog = f"example: {example[1]}\n\n{REST}" if example else REST
