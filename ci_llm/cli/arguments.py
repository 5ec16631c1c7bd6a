"""An argument parser whose errors are the project's own: one short explanation and exit code 2."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ci_llm.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """As argparse's, for the words behind `ci-llm COMMAND`; `--debug` is of all commands.

    Options may be typed with underscores, as those of Transformers are; help shows hyphens alone.

    Raises:
        ConfigError: from `parse_args`, for a wrong call.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = [word for word in args or () if word != "--debug"]
        end = words.index("--") if "--" in words else len(words)
        return super().parse_known_args([*map(self._with_hyphens, words[:end]), *words[end:]], namespace)

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
