"""The frame of every command: the parser, one message and an exit code for every error, failing standard files."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn

from ci_llm.core.help import HelpfulParser
from ci_llm.core.imports import set_library_defaults
from ci_llm.core.typed_json import with_nulls
from ci_llm.errors import BadInput, CiLlmError, ConfigError, DamagedCheckpoint, first_line
from ci_llm.interrupts import ABORTED_EXIT_CODE, BROKEN_PIPE_EXIT_CODE

#: Words that commands took, as argparse names them in its errors, and what to use instead.
_REMOVED: Final = {
    "--agents-per-prompt": "leave it out: all agents answer; --abstain-below P withholds an answer that is unsure",
    "'clone'": "ci-llm agents stop RUN K; trials with settings of their own are a list: agents=[...] (docs/agents.md)",
}


class Parser(HelpfulParser):
    """Argparse's parser for the words after `ci-llm COMMAND`; every command takes `--debug`.

    Options may stand anywhere among the other words, also between two words of a list, which argparse by itself takes
    in one piece. They may be typed with underscores, like those of Transformers; help shows hyphens only.

    Raises:
        ConfigError: from `parse_args`, for a wrong call.
    """

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self._subparsers is not None:  # argparse cannot intermix them; the parser of the verb takes the words
            return super().parse_args(args, namespace)
        self.shorten_for(args or ())  # before argparse keeps the line of usage
        # Newer versions of Python do not come to `parse_known_args` from here.
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
        instead = next((told for word, told in _REMOVED.items() if word in message.replace("_", "-")), None)
        if instead:
            raise ConfigError(message, where="command line", hint=instead)
        super().error(message)


_HELP: Final = Path(__file__).with_name("help")


def help_of(command: str) -> str:
    """The text of a command's help, which is a file."""
    return (_HELP / f"{command}.txt").read_text(encoding="utf-8").rstrip("\n")


def parser_of(command: str, common: Collection[str] | None = None) -> Parser:
    """The parser of a command. Its help says what it does, and below an empty line examples and exit codes.

    Args:
        common: see `HelpfulParser`.
    """
    does, _, examples = help_of(command).partition("\n\n")
    return Parser(f"ci-llm {command}", description=does, epilog=examples, common=common)


def take_dry_run(words: Sequence[str]) -> tuple[bool, list[str]]:
    """(True if the words ask for a dry run, the other words)."""
    keys = [word for word in words if word not in ("--dry-run", "--dry_run")]
    return len(keys) < len(words), keys


def agent_number(word: str) -> int:
    """The number of an agent, as 2 or agent2."""
    try:
        return int(word.removeprefix("agent"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not an agent, such as 2 or agent2") from None


def add_json(parser: argparse.ArgumentParser, more: str = "") -> None:
    """Add `--json`, which every command with a result has."""
    parser.add_argument("--json", action="store_true", help=f"one JSON object, for scripts{more}")


def to_json(record: object, indent: int | None = None) -> str:
    """A record as JSON that every reader takes: a number that is not finite is null there."""
    return json.dumps(with_nulls(record), indent=indent, allow_nan=False)


def print_result(as_json: bool, record: object, *lines: str) -> None:
    """Print the result of a command: the record with `--json`, else the lines."""
    if as_json:
        print(to_json(record, indent=2))
    else:
        print(*lines, sep="\n")


@contextlib.contextmanager
def whole_checkpoint(run: str) -> Iterator[None]:
    """Turn DamagedCheckpoint into BadInput within the block: the caller can give another checkpoint."""
    try:
        yield
    except DamagedCheckpoint as damage:
        hint = f"ci-llm checkpoints list {shlex.quote(run)} shows which checkpoints are whole: give one of them"
        raise BadInput(damage.what, where=damage.where, hint=hint) from damage


_LOGGER = logging.getLogger(__name__)

_STARTED: Final = "CI_LLM_STARTED"  # as in cluster/launch.py, which is not imported for help alone


def run_guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command; an error with a hint becomes a short explanation on stderr and its exit code.

    Args:
        debug: show the traceback of such an error, and the log lines for developers.
    """
    code = _run_guarded(command, debug=debug)
    if _STARTED in os.environ:
        from ci_llm.cluster.starter import exit_code_told

        return exit_code_told(code)
    return code


def _run_guarded(command: Callable[[], int], *, debug: bool) -> int:
    _prepare_standard_files()
    set_library_defaults()  # before a command imports what reads them
    if debug:
        _enable_debug_log()
    try:
        code = _exit_code_of(command)
        sys.stdout.flush()  # here its failure can still be distinguished from another one
        return code
    except KeyboardInterrupt:  # the second Ctrl-C: no explanation is needed
        return ABORTED_EXIT_CODE
    except OSError as error:
        if not _stdout_fails():
            raise
        _discard_output()
        if isinstance(error, BrokenPipeError):  # the reader has left, as `| head` does
            return BROKEN_PIPE_EXIT_CODE
        refusal = BadInput(
            f"the output could not be written: {error.strerror}",
            where="standard output",
            hint="redirect it to a terminal, a pipe, or a file on a disk that has space",
        )
        print_error(refusal)
        return refusal.exit_code
    except CiLlmError as error:
        if debug:
            traceback.print_exc()
        print_error(error)
        return error.exit_code


def _exit_code_of(command: Callable[[], int]) -> int:
    """The exit code of a command, also if it raises SystemExit, as argparse does after `--help`."""
    try:
        return command()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0


def _enable_debug_log() -> None:
    """Send the package's records to stderr, with the milliseconds since the start, until a run's log takes them."""
    shown = logging.StreamHandler()
    shown.name = "ci_llm"  # by which the log of a run knows it
    shown.setFormatter(logging.Formatter("debug %(relativeCreated)7.0f ms  %(name)s: %(message)s"))
    package = logging.getLogger("ci_llm")
    package.setLevel(logging.DEBUG)
    package.handlers[:] = [shown]
    package.propagate = False
    _LOGGER.debug("Python %s, %s, in %s", sys.version.split()[0], sys.argv, Path.cwd())


def _prepare_standard_files() -> None:
    """Open what is closed of stdin, stdout and stderr, and write characters that the locale lacks as escapes.

    Otherwise the next file that is opened takes the number of a closed one, and prints go into it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _stdout_fails() -> bool:
    """True if standard output cannot be written, as on a full disk or a closed pipe."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")  # an unbuffered stream has nothing to flush
    except OSError:
        return True
    return False


def print_line(line: str) -> None:
    """Print a line at once. A terminal that is gone raises nothing, because it must not end a run."""
    try:
        print(line, flush=True)
    except OSError:
        _discard_output()


def _discard_output() -> None:
    """Redirect standard output to /dev/null, so that the flush at the exit of the interpreter cannot fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_error(error: CiLlmError) -> None:
    """Print an error to stderr: in full on the main process, in one line on the others, which may have another one."""
    from ci_llm.cluster.launch import own_process_index

    number = own_process_index()
    told = f"error: {error}" if number == 0 else f"process {number}: error: {first_line(error)}"
    with contextlib.suppress(OSError):  # the exit code remains
        print(told, file=sys.stderr, flush=True)
