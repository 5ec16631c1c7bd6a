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
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

from ci_llm.core.imports import importing, plugin_names
from ci_llm.core.quantities import count
from ci_llm.core.run_folder import SWEEP
from ci_llm.errors import BadInput, ConfigError, DamagedCheckpoint, ModelError

if TYPE_CHECKING:
    from ci_llm.core.run_status import Status
    from ci_llm.crowd.asking import Answer
    from ci_llm.crowd.crowd import Crowd


_GAP = 3
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
    """The crowd's answer and those of the agents: side by side if the terminal is wide enough, else below.

    Args:
        names: the names of the agents.
    """
    named = {"crowd": answer.answer} | dict(zip(names, answer.agents, strict=True))
    columns = [[name, *text.splitlines()] for name, text in named.items()]
    widths = [max(map(len, column)) for column in columns]
    if sum(widths) + _GAP * (len(widths) - 1) <= width():
        rows = zip_longest(*columns, fillvalue="")
        lines = ((" " * _GAP).join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)
    return "\n".join(_named(name, text) for name, text in named.items())


def _named(name: str, text: str) -> str:
    """A text to the right of its name, wrapped to the terminal."""
    indent = max(8, len(name)) + 1
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width() - indent) or [""]] or [""]
    return "\n".join(f"{label:<{indent}}{line}".rstrip() for label, line in zip_longest([name], lines, fillvalue=""))


def width() -> int:
    """Columns of the terminal; 80 if there is none."""
    return max(20, shutil.get_terminal_size().columns)


#: Options that say how tokens are drawn.
SAMPLING: Final = ("temperature", "top_p", "top_k", "seed")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the run, and for how tokens are chosen."""
    parser.add_argument("run", metavar="RUN", help="a run, a checkpoint, a saved crowd, a hub id, or a base alone")
    option = parser.add_argument
    option("--max-new-tokens", type=int, default=256, metavar="N", help="at most so many tokens per answer (256)")
    option("--temperature", type=float, metavar="T", help="draw tokens; below 1 sharper, 0 takes the most probable")
    option("--top-p", type=float, metavar="P", help="draw from the most probable tokens that sum up to P")
    option("--top-k", type=int, metavar="K", help="draw from the K most probable tokens")
    option("--seed", type=int, metavar="N", help="of drawing: the same seed draws the same answer")
    option("--stop", action="append", default=[], metavar="S", help=r"end an answer before S; \n is a line break")
    option("--aggregator", default="probability", metavar="A", help="how agents become one crowd (probability)")
    option("--abstain-below", type=float, metavar="P", help="give no answer that is right with a lower probability")
    option("--base-model", metavar="NAME", help="the base, if it is no longer where the run found it")


def choices_of(call: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `Crowd.generate`; tokens are drawn if an option says how.

    Raises:
        BadInput: a value is out of range.
    """
    sampling = {name: value for name in SAMPLING if (value := getattr(call, name)) is not None}
    if sampling.get("temperature") == 0:
        sampling = {}
    choices = {"max_new_tokens": call.max_new_tokens, "aggregator": call.aggregator}
    choices |= {"do_sample": bool(sampling), **sampling}
    _require_in_range(call)
    return choices if call.abstain_below is None else {**choices, "abstain_below": call.abstain_below}


def _require_in_range(call: argparse.Namespace) -> None:
    """Refuse values that `GenerationOptions` would refuse: before torch is imported, and by the names of options."""
    aggregators = plugin_names("ci_llm.crowd.aggregators", first="probability")
    given = {name: value for name, value in vars(call).items() if value is not None}
    requirements = {
        "--max-new-tokens must be at least 1": call.max_new_tokens >= 1,
        "--batch-size must be at least 1": given.get("batch_size", 1) >= 1,
        "--temperature must be at least 0; 0 takes the most probable token": given.get("temperature", 1) >= 0,
        "--top-p must be above 0 and at most 1": 0 < given.get("top_p", 1) <= 1,
        "--top-k must be at least 1": given.get("top_k", 1) >= 1,
        f"--aggregator must be {' or '.join(aggregators)}": call.aggregator in aggregators,
        "--stop: a stop string is empty": "" not in call.stop,
        "--abstain-below must be a probability, from 0 to 1": 0 <= given.get("abstain_below", 0) <= 1,
    }
    if broken := [text for text, holds in requirements.items() if not holds]:
        raise ConfigError("; ".join(broken), where="command line", hint="change the values named")


def stop_strings(call: argparse.Namespace) -> tuple[str, ...]:
    r"""The strings of `--stop`, in which \n and \t are typed as two characters."""
    return tuple(text.replace(r"\n", "\n").replace(r"\t", "\t") for text in call.stop)


def find_run(path: str, base_model: str | None, *, takes_base: bool = True) -> str:
    """The path or hub id of a RUN. A mirror's URL gives a local copy of its final checkpoint, or of the step named.

    Refuses what obviously holds no crowd, and sets libraries offline if the hub cannot be reached. Nothing heavy is
    loaded, so that a refusal is quick, and libraries are set offline before their import.

    Args:
        takes_base: whether a base alone will do.

    Raises:
        BadInput: there is no such folder, it holds no crowd, or its run has no checkpoint yet.
        CheckpointError: no checkpoint of the mirror verifies.
    """
    from ci_llm.checkpoints.layout import committed
    from ci_llm.core.remote import OFFLINE, go_offline_if_unreachable, is_url, may_be_on_hub, may_be_repository
    from ci_llm.core.run_status import last_status
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
        what = "this is not a folder" if place.exists() else "there is no such folder"
        raise BadInput(what, where=path, hint=hint)
    if not committed(place) and last_status(path) is not None and not (place / SWEEP).is_file():
        raise _no_checkpoint_yet(path)
    if not (takes_base and is_base(path)):
        require_checkpoint(place, path)
    go_offline_if_base_unreachable(path, base_model)
    return path


def _no_checkpoint_yet(run: str) -> BadInput:
    from ci_llm.core.run_status import read_status

    status = read_status(run)
    if status.status == "running":
        what = f"the run is still running, at step {status.step}: no checkpoint is committed yet"
        return BadInput(what, where=run, hint=f"wait for its first one; ci-llm checkpoints list {run} shows it")
    what = f"{_how_it_stands(status)}, and left no checkpoint"
    return BadInput(what, where=run, hint=status.next_command or "train it again")


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
    note(f"{folders[0]}: loading..." if sys.stderr.isatty() else None)
    with importing():
        from ci_llm.crowd.crowd import Crowd
        from ci_llm.crowd.pretrained import given_names, open_base, open_pretrained
    damage: DamagedCheckpoint | None = None
    for folder in folders:
        try:
            saved = open_base(path) if alone else open_pretrained(folder, base_model=base_model)
        except DamagedCheckpoint as error:
            damage = damage or error
            continue
        except ModelError as error:
            if alone:
                raise
            hint = "--base-model NAME: a folder with the base, or a hub id that can be reached"
            raise BadInput(error.what, where=f"{folder}, {error.where}", hint=hint) from error
        note(f"{damage.what}; {Path(folder).name} answers in its place" if damage else None)
        if isinstance(folder, Path):
            _note_if_unfinished(folder)
        return Crowd.of(saved), given_names(saved.meta)
    assert damage is not None
    hint = f"ci-llm checkpoints verify {folders[0]} checks it whole; ci-llm checkpoints list shows the others"
    raise BadInput(damage.what, where=str(folders[0]), hint=hint) from damage


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


def note(line: str | None) -> None:
    """Print a line about the call itself to stderr, where no reader of answers finds it."""
    if line is not None:
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


def words_of(prompt: Any) -> str:
    """A prompt as text: the last message of a chat."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))
