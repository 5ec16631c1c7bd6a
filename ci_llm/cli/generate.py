"""Commands that ask the crowd of a run: `ci-llm generate`, `chat`, and `score`, which asks heads about texts.

A chat is at a terminal or through a pipe, where each line is a turn.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from ci_llm.cli import answering
from ci_llm.cli.command import parser_of, print_error, to_json
from ci_llm.core.help import at_least, probability
from ci_llm.core.imports import importing
from ci_llm.errors import BadInput, ConfigError, DataError

if TYPE_CHECKING:
    from ci_llm.crowd.answering import Answer, Stream
    from ci_llm.crowd.crowd import Crowd
    from ci_llm.crowd.judging import TextScore

_GENERATE_COMMON = ("--file", "--json", "--agents", "--temperature", "--max-new-tokens")

#: These come first in a JSON object, in this order.
_FIRST = ("prompt", "answer", "agents", "confidence", "disagreement", "agreement", "probability_right")


def generate(words: Sequence[str]) -> int:
    """Run `ci-llm generate ARGUMENTS` and return the exit code.

    Raises:
        BadInput: the call is wrong, there is no crowd, or a prompt cannot be used.
        SystemExit: with 0, after `--help`.
    """
    parser = parser_of("generate", _GENERATE_COMMON)
    answering.add_options(parser)
    option = parser.add_argument
    option("prompts", nargs="*", default=[], metavar="PROMPT", help="a prompt; - alone reads them from standard input")
    option("--file", metavar="F", help="one prompt per line, or rows with the columns of training")
    option("--batch-size", type=at_least(1), default=16, metavar="N", help="prompts answered at a time (16)")
    option("--agents", action="store_true", help="also show what each agent answers alone")
    option("--json", action="store_true", help="one JSON object per prompt, a line each")
    call = parser.parse_args(words)
    call.run = answering.find_run(call.run, call.base_model)
    prompts = answering.texts_of(call, call.prompts, "prompt")
    with importing():
        from ci_llm.crowd.answering import answers, options_of
    is_shown = call.json or call.agents or sys.stdout.isatty()
    crowd, names = answering.open_run(call.run, call.base_model)
    options = options_of(crowd, **answering.choices_of(call))
    found = answers(crowd, prompts, options, call.batch_size, include_agents=is_shown)
    for number, answer in enumerate(found):
        if call.json:
            print(_as_json(answer), flush=True)
        elif not is_shown:
            print("" if answer.abstained else answer.answer, flush=True)
        else:
            if len(prompts) > 1:
                print("\n" * (number > 0) + f"> {answering.shortened(answer.prompt, answering.width() - 2)}")
            print(answering.beside(answer, names) if answer.agents and call.agents else answering.given(answer))
            print(answering.how_sure(answer), flush=True)
    return 0


def _as_json(answer: Answer) -> str:
    fields = asdict(answer)
    del fields["tokens"]  # many, and for programs that ask in Python
    return to_json({name: fields.pop(name) for name in _FIRST} | fields)


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
    call.run = answering.find_run(call.run, call.base_model, takes_base=False)
    from ci_llm.data.prompts import texts_of_rows

    texts, answers = answering.texts_of(call, call.texts, "text", texts_of_rows), None
    if isinstance(texts[0], tuple):
        texts, answers = map(list, zip(*texts, strict=True))
    crowd, _ = answering.open_run(call.run, call.base_model)
    scores = crowd.score(texts, answers, abstain_below=call.abstain_below, batch_size=call.batch_size)
    for text, answer, found in zip(texts, answers or texts, scores, strict=True):
        if call.json:
            named = {"text": text} if answers is None else {"prompt": text, "answer": answer}
            of_classes = () if found.label is not None else ("label", "probabilities", "abstained")
            shown = {key: value for key, value in asdict(found).items() if key not in of_classes}
            print(to_json(named | shown), flush=True)
        else:
            print(f"{_shown(found)}  {answering.shortened(answer, 60)}", flush=True)
    return 0


def _shown(found: TextScore) -> str:
    """The score in columns, for people."""
    if found.label is not None:
        label = "[unsure]" if found.abstained else found.label
        return f"{label:<16} {max((found.probabilities or {}).values()):.3f} ± {found.std:.3f}"
    agents = " ".join(f"{score:.3f}" for score in found.scores)
    return f"{found.mean:8.3f} ± {found.std:.3f} (lower {found.lower:.3f}; agents {agents})"


_CHAT_COMMON = ("--system", "--temperature", "--seed", "--aggregator", "--max-new-tokens")
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
    parser = parser_of("chat", _CHAT_COMMON)
    answering.add_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a message before the first turn: how to answer")
    call = parser.parse_args(words)
    call.run = answering.find_run(call.run, call.base_model)
    crowd, names = answering.open_run(call.run, call.base_model)
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    choices = answering.choices_of(call)
    conversation = Conversation(crowd, choices, call.system, names=names, shows_sureness=at_terminal)
    who = f"{len(names)} agents answer together" if len(names) > 1 else "One agent answers"
    who = who if names else "The base answers alone"
    answering.note(f"{who}.\n{conversation.kind}")
    if at_terminal:
        answering.note("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves.")
    lines = map(str.strip, _typed_lines() if at_terminal else answering.lines_of(sys.stdin))
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
        from ci_llm.crowd.answering import require_writers

        require_writers(crowd)
        self._crowd = crowd
        self._choices = choices
        self._shows_sureness = shows_sureness
        self._names = names or crowd.names
        if system is not None and self._crowd.prompter.form == "text":
            what = "the crowd was trained on plain text, which has no place for a system message"
            raise ConfigError(what, where="--system", hint="leave it out")
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []
        self._asked: Any = None  # prompt and choices of the last answer, for /agents

    @property
    def kind(self) -> str:
        """A line for people: a message is a text, a single question, or a turn of a conversation."""
        if self._crowd.prompter.form == "text":
            return "Trained on plain text: each message is continued, and none is remembered."
        if not self._crowd.prompter.tells_turns_apart:
            return "Single questions: each message is one, and none is remembered."
        return "A conversation: earlier turns are remembered."

    def say(self, message: str) -> None:
        """Answer a message, piece by piece on standard output. If Ctrl-C stops it, its pieces are remembered."""
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
                print(answering.given(stream.result))
            print(answering.how_sure(stream.result))

    def _remember(self, message: str, answer: str) -> None:
        if answer and self._crowd.prompter.tells_turns_apart:
            self._turns += [{"role": "user", "content": message}, {"role": "assistant", "content": answer}]

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
        if self._crowd.prompter.form == "text":
            return message
        return [*self._system, *self._turns, {"role": "user", "content": message}]

    def _stream(self, prompt: Any, choices: Mapping[str, Any]) -> Stream:
        try:
            return self._crowd.stream(prompt, **choices)
        except DataError as error:
            if not self._turns:
                raise
            hint = "/reset forgets the conversation"
            raise BadInput(error.what, where=f"a conversation of {len(prompt)} messages", hint=hint) from error

    def _show_agents(self) -> None:
        from ci_llm.crowd.answering import answers, options_of

        if self._asked is None:
            raise ConfigError("nothing was asked yet", hint="ask something first")
        prompt, choices = self._asked
        answer = next(answers(self._crowd, [prompt], options_of(self._crowd, **choices)))
        print(answering.beside(answer, self._names))
        print(answering.how_sure(answer))

    def _reset(self) -> None:
        self._turns = []
        self._asked = None
        print("[the conversation is forgotten]")
