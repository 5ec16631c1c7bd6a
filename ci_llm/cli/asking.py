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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from ci_llm.cli.command import at_least, probability
from ci_llm.core.imports import importing, plugin_names
from ci_llm.core.quantities import count
from ci_llm.core.run_folder import SWEEP
from ci_llm.errors import BadInput, ConfigError, DamagedCheckpoint, ModelError

if TYPE_CHECKING:
    from ci_llm.core.run_status import Status
    from ci_llm.crowd.asking import Answer
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
    named = {"crowd": answer.answer} | dict(zip(names, answer.agents, strict=True))
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
    aggregators, option = plugin_names("ci_llm.crowd.aggregators"), parser.add_argument
    about = "at most so many tokens per answer (256)"
    option("--max-new-tokens", type=at_least(1), default=256, metavar="N", help=about)
    about = "draw tokens; below 1 sharper, 0 takes the most probable"
    option("--temperature", type=at_least(0, float), metavar="T", help=about)
    option("--top-p", type=probability, metavar="P", help="draw from the most probable tokens that sum up to P")
    option("--top-k", type=at_least(1), metavar="K", help="draw from the K most probable tokens")
    option("--seed", type=int, metavar="N", help="of drawing: the same seed draws the same answer")
    about = r"end an answer before S; \n is a line break"
    option("--stop", action="append", type=_stop_string, default=[], metavar="S", help=about)
    about = "how agents become one crowd (probability)"
    option("--aggregator", choices=aggregators, default="probability", metavar="A", help=about)
    about = "give no answer that is right with a lower probability"
    option("--abstain-below", type=probability, metavar="P", help=about)
    option("--base-model", metavar="NAME", help="the base, if it is no longer where the run found it")


def _stop_string(text: str) -> str:
    r"""A stop string, in which \n and \t are typed as two characters."""
    if not text:
        raise argparse.ArgumentTypeError("a stop string is empty")
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


def choices_of(call: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Crowd.generate`; tokens are drawn if an option says how."""
    drawing = {name: value for name in _SAMPLING if (value := getattr(call, name)) is not None}
    if drawing.get("temperature") == 0:
        drawing = {}
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
    from ci_llm.checkpoints.layout import committed
    from ci_llm.core.remote import OFFLINE, go_offline_if_unreachable, is_url, may_be_on_hub, may_be_repository
    from ci_llm.core.run_status import last_status, read_status
    from ci_llm.crowd.given_path import is_base, require_checkpoint

    if is_url(path):
        from ci_llm.mirror.filling import local_copy

        path = str(local_copy(path, "RUN", final_first=True))
    if reason := go_offline_if_unreachable(path):
        note(f"the hub is unreachable: {OFFLINE} is set, and only its local cache is used ({reason})")
    if may_be_repository(path):
        return path
    place = Path(path)
    if not place.is_dir():
        named = may_be_on_hub(path) or path == "embedded" or path.lower().endswith(".gguf")
        if takes_base and named and is_base(path):
            return path
        hint = "give the output_dir of a run, a checkpoint such as RUN/final_checkpoint, or a hub id"
        hint += "; or a base: its folder, hub id or GGUF file" if takes_base else ""
        raise BadInput("there is no such folder", where=path, hint=hint)
    if not committed(place) and last_status(path) is not None and not (place / SWEEP).is_file():
        status = read_status(path)
        hint = "wait for its first one" if status.status == "running" else status.next_command or "train it again"
        raise BadInput(f"{_how_it_stands(status)}, and has no checkpoint", where=path, hint=hint)
    if not (takes_base and is_base(path)):
        require_checkpoint(place, path)
    go_offline_if_base_unreachable(path, base_model)
    return path


def open_run(path: str, base_model: str | None) -> tuple[Crowd, list[str]]:
    """The crowd of a run or a checkpoint, and its agents' names for people; notes go to stderr.

    A base alone is a crowd without names. A run has several checkpoints: the final one is taken, or the newest one that
    is whole, as by a resume. Nothing is moved.

    Raises:
        BadInput: there is no checkpoint, all are damaged, or the base is not found.
    """
    from ci_llm.checkpoints.layout import committed
    from ci_llm.core.remote import may_be_repository
    from ci_llm.crowd.given_path import is_base, require_checkpoint

    folders: list[Path | str] = [path]
    alone = is_base(path)
    if not alone and not may_be_repository(path):
        first = require_checkpoint(Path(path), path, final_first=True)
        folders = [first, *(folder for _, folder in committed(Path(path)) if folder != first)]
    if sys.stderr.isatty():
        note(f"{folders[0]}: loading...")
    with importing():
        from ci_llm.crowd.crowd import Crowd
        from ci_llm.crowd.pretrained import given_names, open_base, open_pretrained
    if alone:
        return Crowd.of(open_base(path)), []
    damages: list[DamagedCheckpoint] = []
    for folder in folders:
        try:
            saved = open_pretrained(folder, base_model=base_model)
        except DamagedCheckpoint as error:
            damages.append(error)
            continue
        except ModelError as error:
            hint = "--base-model NAME: a folder with the base, or a hub id that can be reached"
            raise BadInput(error.what, where=f"{folder}, {error.where}", hint=hint) from error
        if damages:
            note(f"{damages[0].what}; {Path(folder).name} answers in its place")
        if isinstance(folder, Path):
            _note_if_unfinished(folder)
        return Crowd.of(saved), given_names(saved.meta)
    hint = f"ci-llm checkpoints verify {folders[0]} checks it whole; ci-llm checkpoints list shows the others"
    raise BadInput(damages[0].what, where=str(folders[0]), hint=hint) from damages[0]


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


def _note_if_unfinished(folder: Path) -> None:
    """Print a note if the run of this checkpoint is not complete: the answers are those of an early crowd."""
    from ci_llm.core.run_status import last_status, read_status

    if last_status(folder.parent) is not None:
        status = read_status(folder.parent)
        if status.status != "completed":
            note(f"{_how_it_stands(status)}; {folder.name} answers")


def _how_it_stands(status: Status) -> str:
    return f"the run {'has' if status.status == 'vanished' else 'is'} {status.status} at step {status.step}"


def go_offline_if_base_unreachable(run: str, base_model: str | None) -> None:
    """Use only the local cache if the hub is unreachable and the base of this run may be there; says so on stderr."""
    from ci_llm.checkpoints.layout import FINAL, committed
    from ci_llm.core.remote import go_offline_if_unreachable

    path = Path(run)
    for folder in (path, path / FINAL, *(folder for _, folder in committed(path))):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # opening it will say what is wrong
            meta = json.loads((folder / "ci_llm_meta_config.json").read_text(encoding="utf-8"))
            if reason := go_offline_if_unreachable(base_model or str(meta["base_model_name_or_path"])):
                note(f"the hub is unreachable, only its local cache is used ({reason})")
            return


def shortened(prompt: Any, most: int) -> str:
    """The beginning of a prompt in one line; of a chat that of its last message."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
    return textwrap.shorten(text, most, placeholder=" ...")
