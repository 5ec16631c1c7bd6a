"""`ci-llm chat`: talk to the crowd of a run, at a terminal or through a pipe, where each line is a turn."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ci_llm.cli import asking
from ci_llm.cli.command import parser_of, print_error
from ci_llm.errors import BadInput, ConfigError, DataError

if TYPE_CHECKING:
    from ci_llm.crowd.asking import Stream
    from ci_llm.crowd.crowd import Crowd

_COMMON = ("--system", "--temperature", "--seed", "--aggregator", "--max-new-tokens")

_HELP: Final = """/agents      what each agent answers alone to the last message
/reset       forget the conversation
/help        this list
/quit        leave, as Ctrl-D does; Ctrl-C stops an answer"""
_QUIT: Final = "/quit"


def chat(words: Sequence[str]) -> int:
    """Run `ci-llm chat ARGUMENTS` and return the exit code.

    Raises:
        BadInput: the call is wrong, or there is no crowd; through a pipe also a message that cannot be answered.
        SystemExit: with 0, after `--help`.
    """
    parser = parser_of("chat", _COMMON)
    asking.add_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a message before the first turn: how to answer")
    call = parser.parse_args(words)
    call.run = asking.find_run(call.run, call.base_model)
    crowd, names = asking.open_run(call.run, call.base_model)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    choices = asking.choices_of(call)
    conversation = Conversation(crowd, choices, call.system, names=names, shows_sureness=at_terminal)
    who = f"{len(names)} agents answer together" if len(names) > 1 else "One agent answers"
    who = who if names else "The base answers alone"
    asking.note(f"{who}.\n{conversation.kind}")
    if at_terminal:
        asking.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.")
    lines = map(str.strip, _typed_lines() if at_terminal else asking.lines_of(sys.stdin))
    for line in itertools.takewhile(lambda line: line != _QUIT, lines):
        _take(conversation, line, at_terminal=at_terminal)
    return 0


def _take(conversation: Conversation, line: str, *, at_terminal: bool) -> None:
    """Take a line: a command or a message. At a terminal an error is shown, and the conversation continues."""
    try:
        if line.startswith("/"):
            conversation.command(line)
        elif line:
            conversation.say(line)
    except KeyboardInterrupt:
        if not at_terminal:
            raise
        print("\n[stopped]")
    except BadInput as error:
        if not at_terminal:
            raise
        print_error(error)


def _typed_lines() -> Iterator[str]:
    """The lines that are typed, with the history of readline; Ctrl-C drops a line, Ctrl-D ends."""
    with contextlib.suppress(ImportError):  # Windows does not have it
        import readline  # noqa: F401 - `input` uses it once it is loaded
    while True:
        try:
            yield input("you> ")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


class Conversation:
    """The turns so far, and how the crowd answers the next one.

    Args:
        choices: how tokens are chosen, as for `Crowd.generate`.
        system: a message before the first turn.
        names: the names of the agents, for people; by default those of their folders.
        shows_sureness: print a line after each answer.

    Raises:
        BadInput: the run has no place for a system message.
        ModelError: its agents have heads.
    """

    def __init__(
        self,
        crowd: Crowd,
        choices: dict[str, Any],
        system: str | None = None,
        *,
        names: Sequence[str] = (),
        shows_sureness: bool = True,
    ) -> None:
        from ci_llm.crowd.asking import require_writers

        require_writers(crowd)
        self._crowd, self._choices, self._shows_sureness = crowd, choices, shows_sureness
        self._prompter, self._names = crowd.prompter, names or crowd.names
        if system is not None and self._prompter.form == "text":
            what = "the crowd was trained on plain text, which has no place for a system message"
            raise ConfigError(what, where="--system", hint="leave it out")
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []
        self._asked: Any = None  # prompt and choices of the last answer, for /agents

    @property
    def kind(self) -> str:
        """A line for people: a message is a text, a single question, or a turn of a conversation."""
        if self._prompter.form == "text":
            return "Trained on plain text: each message is continued, and none is remembered."
        if not self._prompter.tells_turns_apart:
            return "Single questions: each message is one, and none is remembered."
        return "A conversation: earlier turns are remembered."

    def say(self, message: str) -> None:
        """Answer a message, piece by piece on standard output.

        If Ctrl-C stops the answer, the pieces so far are remembered.
        """
        prompt, choices = self._prompt(message), dict(self._choices)
        choices.setdefault("seed", secrets.randbits(32))  # /agents draws the same answer again
        self._asked = prompt, choices
        pieces: list[str] = []
        with self._stream(prompt, choices) as stream:
            try:
                for piece in stream:
                    pieces.append(piece)
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                self._remember(message, "".join(pieces))
                raise
        self._remember(message, "".join(pieces))
        print(flush=True)
        if self._shows_sureness:
            if stream.result.abstained:
                print(asking.given(stream.result))
            print(asking.how_sure(stream.result))

    def command(self, line: str) -> None:
        """Run the command in a line that begins with /.

        Raises:
            BadInput: there is no such command.
        """
        commands: dict[str, Callable[[], None]] = {
            "/agents": self._show_agents,
            "/reset": self._reset,
            "/help": lambda: print(_HELP),
        }
        if line not in commands:
            raise ConfigError(f"there is no command {line}", hint=f"one of: {', '.join([*commands, _QUIT])}")
        commands[line]()

    def _prompt(self, message: str) -> Any:
        if self._prompter.form == "text":
            return message
        return [*self._system, *self._turns, {"role": "user", "content": message}]

    def _remember(self, message: str, answer: str) -> None:
        if answer and self._prompter.tells_turns_apart:
            self._turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]

    def _stream(self, prompt: Any, choices: Mapping[str, Any]) -> Stream:
        try:
            return self._crowd.stream(prompt, **choices)
        except DataError as error:
            if not self._turns:
                raise
            hint = "/reset forgets the conversation"
            raise BadInput(error.what, where=f"a conversation of {len(prompt)} messages", hint=hint) from error

    def _show_agents(self) -> None:
        from ci_llm.crowd.asking import answers, options_of

        if self._asked is None:
            raise ConfigError("nothing was asked yet", hint="ask something first")
        prompt, choices = self._asked
        answer = next(answers(self._crowd, [prompt], options_of(self._crowd, **choices)))
        print(asking.beside(answer, self._names))
        print(asking.how_sure(answer))

    def _reset(self) -> None:
        self._turns, self._asked = [], None
        print("[the conversation is forgotten]")
