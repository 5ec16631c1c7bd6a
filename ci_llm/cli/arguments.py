"""The words of a command line: a parser whose errors are the project's own, and what several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from ci_llm.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """As argparse's, for the words behind `ci-llm COMMAND`; `--debug` is of all commands.

    Options may stand anywhere among the other words, also between two of a list (argparse by itself takes a list in one
    piece). They may be typed with underscores, as those of Transformers are; help shows hyphens alone.

    Raises:
        ConfigError: from `parse_args`, for a wrong call.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._subparsers is not None:  # which cannot be mixed: the words after a verb are those of its own parser
            return super().parse_args(args, namespace)
        return self.parse_intermixed_args(self._respelt(args or ()), namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._respelt(args or ()), namespace)

    def _respelt(self, args: Sequence[str]) -> list[str]:
        """The words in the spelling of this parser, without `--debug`."""
        words = [word for word in args if word != "--debug"]
        end = words.index("--") if "--" in words else len(words)
        return [*map(self._with_hyphens, words[:end]), *words[end:]]

    def _with_hyphens(self, word: str) -> str:
        """An option of this parser in its own spelling; any other word as it was typed."""
        typed, equals, value = word.partition("=")
        name = typed.replace("_", "-")
        is_known = any(name in action.option_strings for action in self._actions)
        return f"{name}{equals}{value}" if is_known else word

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where="command line", hint=f"{self.prog} --help")

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's own hides that the output fails


def take_dry_run(words: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether the words ask for a dry run, and the words without that one."""
    keys = [word for word in words if word not in ("--dry-run", "--dry_run")]
    return len(keys) < len(words), keys


def agent_number(word: str) -> int:
    """The number of an agent, as 2 or agent2."""
    try:
        return int(word.removeprefix("agent"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is no agent, such as 2 or agent2") from None


def make_parser(command: str, description: str, examples: str) -> Parser:
    """A parser that prints its description and examples as they are."""
    layout = argparse.RawDescriptionHelpFormatter
    return Parser(command, description=description, epilog=examples, formatter_class=layout, allow_abbrev=False)
