"""The documents of a mirror: the head, which alone is replaced and says what counts; and a token on the run's disk.

    head.json                                     which steps and files count, whose run it is, and who writes
    <writer>/head.json                            the same once more, as that writer committed it last
    <writer>/<digest>/checkpoint_step_<N>/...     a committed folder, its manifest last; <digest> is the manifest's
    <writer>/<digest>/<name>                      another file of the run; <digest> is its own
    mirror.json                                   on the disk, in the run's folder: the run, and who wrote last

A writer is a claim of the mirror: its number, and some chance. It writes below its own name only, and every object but
a head once. So the one conditional put of `head.json` is the commit: before it nothing new counts, after it everything
does. A writer that has lost its claim finds another head than it knows, and commits nothing any more.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Final, TypeAlias

from pydantic import AfterValidator

from ci_llm.checkpoints.layout import FINAL, is_checkpoint_name
from ci_llm.checkpoints.manifest import check_name
from ci_llm.core.durable import make_folders, write_json
from ci_llm.core.run_folder import read_known
from ci_llm.core.typed_json import as_plain, as_type, seal, unseal
from ci_llm.errors import CheckpointError

HEAD: Final = "head.json"
VERSION: Final = 4
#: The head of a mirror to which nobody has written, and the writer that a disk names while it is being filled.
NOBODY: Final = ""

#: What reading a head raises that no mirror has written.
NOT_DUMPED: Final = (ValueError, TypeError, KeyError, RecursionError)

#: Whatever a writer sends has a key that begins so; the number counts the claims.
SENT: Final = re.compile(r"([0-9]{6})-[0-9a-f]{8}/")
COPY: Final = re.compile(SENT.pattern + re.escape(HEAD))
_PLACE: Final = re.compile(SENT.pattern + r"[0-9a-f]{32}")
_WRITER: Final = re.compile(SENT.pattern.removesuffix("/"))


def _require(valid: Callable[[str], object], text: str) -> str:
    if not valid(text):
        raise ValueError(f"{text!r} cannot be there")
    return text


@dataclass(frozen=True)
class Found:
    """What an attempt found in the mirror when it decided from which step it resumes.

    Attributes:
        writer: who wrote the mirror at that moment. Where somebody else has claimed it since, this attempt would put
            steps aside that it has never seen. None if the mirror did not answer and the disk does not say it.
        damage: what is wrong with steps that were passed over, by their places.
    """

    writer: str | None = None
    damage: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Token:
    """The run of a mirror, and who wrote when disk and mirror last had the same steps; NOBODY while it is filled."""

    run: str
    writer: str


TOKEN_FILE: Final = "mirror.json"


def write_token(folder: Path, token: Token) -> None:
    """Record to which run of a mirror a folder belongs."""
    make_folders(folder)
    write_json(folder / TOKEN_FILE, vars(token))


def read_token(folder: Path) -> Token | None:
    """The token of the run in a folder; None if it has no mirror yet. Raises CheckpointError: it cannot be read."""
    what = "the record of this run's mirror is damaged, or of another version of ci-llm"
    hint = "remove this file, and give the run another mirror"
    return read_known(Token, folder / TOKEN_FILE, what, hint)


Place: TypeAlias = Annotated[str, AfterValidator(partial(_require, _PLACE.fullmatch))]


@dataclass(frozen=True)
class Entry:
    """One committed step.

    Attributes:
        name: `checkpoint_step_<N>` or `final_checkpoint`.
        nbytes: the size of its files together.
        place: the writer that sent it, and the digest of its manifest.
    """

    name: Annotated[str, AfterValidator(partial(_require, is_checkpoint_name))]
    step: int
    nbytes: int
    place: Place

    def key(self, file: str) -> str:
        """The key of one of its files."""
        return f"{self.place}/{self.name}/{file}"


@dataclass(frozen=True)
class RunFile:
    """A file of the run that is not part of a checkpoint; `place`: the writer that sent it, and its digest."""

    size: int
    place: Place


@dataclass(frozen=True)
class Head:
    """The head of a mirror: which steps and files count, and whose they are.

    Attributes:
        run: a token of the run whose mirror this is.
        writer: the last one that claimed the mirror; it alone commits.
        attempt: the number of the run's attempt that writes.
        line: the steps that the run may resume from, the newest first.
        aside: steps that are kept, and from which no run resumes: newer than one that it went back to, or
            damaged and not sent again.
        files: the other files of the run, by path: logs, metrics, evaluation.
    """

    run: str = ""
    writer: Annotated[str, AfterValidator(partial(_require, _WRITER.fullmatch))] = NOBODY
    attempt: int = 0
    line: tuple[Entry, ...] = ()
    aside: tuple[Entry, ...] = ()
    files: Mapping[Annotated[str, AfterValidator(check_name)], RunFile] = field(default_factory=dict)

    @property
    def newest(self) -> Entry | None:
        return self.line[0] if self.line else None

    @property
    def places(self) -> set[str]:
        """The places of all objects that this head refers to."""
        return {entry.place for entry in self.line + self.aside} | {file.place for file in self.files.values()}

    def holds(self, name: str, known: str) -> bool:
        """True if the step of this name with this digest of its manifest is in the line."""
        return any(entry.name == name and digest_of(entry.place) == known for entry in self.line)

    def putting_aside(self, unwanted: Callable[[Entry], bool]) -> Head:
        """This head with the entries of its line that are unwanted put aside."""
        gone = tuple(filter(unwanted, self.line))
        line = tuple(entry for entry in self.line if entry not in gone)
        return replace(self, line=line, aside=(*self.aside, *gone))

    def with_step(self, entry: Entry) -> Head:
        """This head with `entry` in its line; another step of the same name is put aside, a final one replaced.

        What was put aside of this very checkpoint, because it was not whole, leaves.
        """
        head = self.putting_aside(lambda each: each.name == entry.name != FINAL and each != entry)
        others = [each for each in head.line if each.name != entry.name]
        known = entry.name, digest_of(entry.place)
        aside = tuple(each for each in head.aside if (each.name, digest_of(each.place)) != known)
        # The newest first; a numbered step before the final one of the same step.
        line = tuple(sorted([*others, entry], key=lambda each: (-each.step, each.name)))
        return replace(head, line=line, aside=aside)

    def dump(self) -> bytes:
        return seal({"format_version": VERSION, **as_plain(self)}, hashlib.sha256)

    @classmethod
    def parse(cls, data: bytes) -> Head:
        """Raises one of `NOT_DUMPED`: it is not what `dump` wrote. CheckpointError: it is of another version."""
        body = unseal(data, hashlib.sha256, "it")
        if body.pop("format_version") != VERSION:  # no damage: the steps of another program must not be lost
            hint = "read it with the one that wrote it, or give this run another prefix"
            raise CheckpointError("another version of ci-llm wrote this mirror", hint=hint)
        if body.keys() != {each.name for each in fields(cls)}:
            raise ValueError("the head lacks a field")
        return as_type(cls, body)


def digest_of(place: str) -> str:
    """The digest in the name of a place."""
    return place.partition("/")[2]
