"""A call that asks a run (`ci-llm generate`, `chat`, `score`): its options, the run, an answer as text.

The text is for a terminal: the crowd's answer, the agents' beside it, and a line that says how sure the crowd is.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from ci_llm.cli.command import whole_checkpoint
from ci_llm.core.help import at_least, probability
from ci_llm.core.imports import importing, plugin_names
from ci_llm.core.quantities import count
from ci_llm.errors import BadInput, ConfigError, ModelError

if TYPE_CHECKING:
    from ci_llm.crowd.answering import Answer
    from ci_llm.crowd.crowd import Crowd


#: Options that say how tokens are drawn.
_SAMPLING: Final = ("temperature", "top_p", "top_k", "seed")
_ALONE: Final = ("the base alone", "one agent asked")


def how_sure(answer: Answer) -> str:
    """A line about an answer: how probably it is right, its probability, and how far the agents agree."""
    parts = [] if answer.probability_right is None else [f"right with probability {answer.probability_right:.2f}"]
    parts.append(f"confidence {answer.confidence:.2f} ({answer.probability_per_token:.2f} a token)")
    agents = len(answer.agents)
    if answer.agreement is not None and agents > 1:
        parts.append(f"{round(answer.agreement * agents)} of {agents} agents agree")
    parts.append(f"disagreement {answer.disagreement:.3f}" if answer.agents_asked > 1 else _ALONE[answer.agents_asked])
    if not answer.complete:
        parts.append(f"cut after {count(len(answer.tokens), 'token')}")
    return f"[{', '.join(parts)}]"


def given(answer: Answer) -> str:
    """The crowd's answer, or a note in its place if the crowd abstains."""
    return "[no answer: it is too unsure]" if answer.abstained else answer.answer


def beside(answer: Answer, names: Sequence[str]) -> str:
    """The crowd's answer and those of the agents, each to the right of its name.

    Args:
        names: the names of the agents.
    """
    named = {"crowd": given(answer)} | dict(zip(names, answer.agents, strict=True))
    margin = max(map(len, named)) + 2
    wrapped = {name: textwrap.indent(_wrapped(text, margin), " " * margin) for name, text in named.items()}
    return "\n".join(f"{name:<{margin}}{text[margin:]}".rstrip() for name, text in wrapped.items())


def _wrapped(text: str, margin: int) -> str:
    return "\n".join(textwrap.fill(line, width() - margin) for line in text.splitlines())


def width() -> int:
    """Columns of the terminal; 80 if there is none."""
    return max(20, shutil.get_terminal_size().columns)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the run, and for how tokens are chosen."""
    parser.add_argument("run", metavar="RUN", help="a run, a checkpoint, a saved crowd, a hub id, or a base alone")
    option = parser.add_argument
    option("--max-new-tokens", type=at_least(1), default=256, metavar="N", help="most tokens of an answer (256)")
    option("--temperature", type=at_least(0, float), metavar="T", help="draw tokens; 0 takes the most probable")
    option("--top-p", type=probability, metavar="P", help="draw from the most probable tokens that sum up to P")
    option("--top-k", type=at_least(1), metavar="K", help="draw from the K most probable tokens")
    option("--seed", type=int, metavar="N", help="of drawing: the same seed draws the same answer")
    about = r"end an answer before S; \n is a line break"
    option("--stop", action="append", type=_stop_string, default=[], metavar="S", help=about)
    about = "how agents become one crowd (probability)"
    names = plugin_names("ci_llm.crowd.aggregators")
    option("--aggregator", choices=names, default="probability", metavar="A", help=about)
    option("--abstain-below", type=probability, metavar="P", help="give no answer that is less probably right")
    option("--base-model", metavar="NAME", help="the base, if it is no longer where the run found it")


def _stop_string(text: str) -> str:
    r"""A stop string, in which \n and \t are typed as two characters."""
    if not text:
        raise argparse.ArgumentTypeError("a stop string is empty")
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


def choices_of(call: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Crowd.generate`; tokens are drawn if an option says how."""
    drawing = {name: value for name in _SAMPLING if (value := getattr(call, name)) is not None}
    named = {name: getattr(call, name) for name in ("max_new_tokens", "aggregator", "abstain_below")}
    return {"stop_strings": tuple(call.stop), **named, "do_sample": bool(drawing), **drawing}


def texts_of(call: argparse.Namespace, texts: Sequence[str], what: str, of_rows: Any = None) -> list[Any]:
    """The texts of a call: its words, the lines of standard input for -, or what `--file` holds.

    Args:
        what: what a text is called: prompt.
        of_rows: as for `ci_llm.data.prompts.prompts_of_file`.

    Raises:
        BadInput: there is no text, there are two sources, or one cannot be read.
    """
    from ci_llm.data.prompts import prompts_of_file, prompts_of_lines

    problems = {
        f"there is no {what}": not texts and call.file is None,
        f"a {what} and --file were both given": bool(texts) and call.file is not None,
        f"- stands beside another {what}": "-" in texts and len(texts) > 1,
        f"a {what} is empty": not all(text.strip() for text in texts),
    }
    if problem := next((told for told, holds in problems.items() if holds), None):
        raise ConfigError(problem, where="command line", hint=f'give "a {what}", --file FILE, or - for standard input')
    if "-" in (call.file, *texts):
        return prompts_of_lines(lines_of(sys.stdin), "standard input", of_rows)
    return [*texts] if call.file is None else prompts_of_file(Path(call.file), of_rows)


def find_run(path: str, base_model: str | None, *, takes_base: bool = True) -> str:
    """The path or hub id of a RUN. A mirror's URL gives a local copy of its final checkpoint, or of the step named.

    Refuses what obviously holds no crowd, and sets libraries offline if the hub cannot be reached. Nothing heavy is
    loaded, so that a refusal is quick, and libraries are set offline before their import.

    Args:
        takes_base: a base alone is accepted.

    Raises:
        BadInput: there is no such folder, it holds no crowd, or its run has no checkpoint yet.
        CheckpointError: no checkpoint of the mirror verifies.
    """
    from ci_llm.core.remote import is_url, may_be_repository
    from ci_llm.crowd.given_path import is_base, require_checkpoint

    if is_url(path):
        from ci_llm.mirror.filling import local_copy

        path = str(local_copy(path, "RUN", final_first=True))
    note_if_offline(path)
    if may_be_repository(path) or (takes_base and is_base(path)):
        return path
    folder = require_checkpoint(Path(path), path, final_first=True)
    note_if_offline(base_model or _base_of(folder))
    return path


def open_run(path: str, base_model: str | None) -> tuple[Crowd, list[str]]:
    """The crowd of a run or a checkpoint, and its agents' names for people; notes go to stderr.

    A base alone is a crowd without names. Of a run the final checkpoint is taken, or the newest one.

    Raises:
        BadInput: there is no checkpoint, it is damaged, or the base is not found.
    """
    from ci_llm.core.remote import may_be_repository
    from ci_llm.crowd.given_path import is_base, require_checkpoint

    alone = is_base(path)
    is_name = alone or may_be_repository(path)
    folder: Path | str = path if is_name else require_checkpoint(Path(path), path, final_first=True)
    if sys.stderr.isatty():
        note(f"{folder}: loading...")
    with importing():
        from ci_llm.crowd.crowd import Crowd
        from ci_llm.crowd.pretrained import given_names, open_base, open_pretrained
    if alone:
        return Crowd.of(open_base(path)), []
    try:
        with whole_checkpoint(path):
            saved = open_pretrained(folder, base_model=base_model)
    except ModelError as error:
        hint = "--base-model NAME: a folder with the base, or a hub id that can be reached"
        raise BadInput(error.what, where=f"{folder}, {error.where}", hint=hint) from error
    if isinstance(folder, Path):
        _note_if_unfinished(folder)
    return Crowd.of(saved), given_names(saved.meta)


def lines_of(stream: TextIO) -> Iterator[str]:
    """The lines of a stream, as they come.

    Raises:
        BadInput: its bytes are not text.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="surrogateescape")  # else a whole block fails, and the line is not known
    for number, line in enumerate(stream, 1):
        try:
            line.encode()
        except UnicodeEncodeError as error:
            where = f"standard input, line {number}"
            raise BadInput("this is not UTF-8 text", where=where, hint="give lines of text") from error
        yield line


def note(line: str) -> None:
    """Print a line about the call itself to stderr, where no reader of answers finds it."""
    print(line, file=sys.stderr, flush=True)


def note_if_offline(name: str) -> None:
    """Use only the local cache if `name` may be on the hub and the hub is unreachable, and say so."""
    from ci_llm.core.remote import offline_note

    if told := offline_note([name]):
        note(f"the hub is {told}")


def _note_if_unfinished(folder: Path) -> None:
    """Print a note if the run of this checkpoint is not complete: the answers are those of an early crowd."""
    from ci_llm.core.run_status import last_status, read_status

    if last_status(folder.parent) is not None and (status := read_status(folder.parent)).status != "completed":
        verb = "has" if status.status == "vanished" else "is"
        note(f"the run {verb} {status.status} at step {status.step}; {folder.name} answers")


def _base_of(folder: Path) -> str:
    """The base that a checkpoint names; empty if it does not tell, and then opening it says what is wrong."""
    from ci_llm.crowd.given_path import META_FILE

    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return str(json.loads((folder / META_FILE).read_text(encoding="utf-8"))["base_model_name_or_path"])
    return ""


def shortened(prompt: Any, most: int) -> str:
    """The beginning of a prompt in one line; of a chat that of its last message."""
    turns = prompt["messages"] if isinstance(prompt, Mapping) else prompt
    text = turns if isinstance(turns, str) else str(turns[-1].get("content", ""))
    return textwrap.shorten(text, most, placeholder=" ...")
