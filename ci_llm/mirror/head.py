"""The documents of a mirror: one head, which alone is replaced, a record for each step, and a token on the run's disk.

    head.json                       which steps count, whose run it is, the generation of its writer
    records/g<G>/<digest>.json      one step: its manifest, and the blocks of each of its files
    blocks/g<G>/<digest>-<size>     bytes; <G> is the generation of the writer that sent them
    blocks/g<G>/<digest>-<size>.<stored>.zst    the same, compressed to <stored> bytes
    mirror.json                     on the disk, in the run's folder: the run and the generation that it has in common

Everything in the store but the head is written once, under a name made of its content. So the one conditional put of
the head is the commit: before it nothing new counts, after it everything does. A writer that has lost its claim finds
another head than it knows, and commits nothing any more. A key that no head refers to comes back only from the
generation in its name: that is why others may be removed at any time.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import zstandard

from ci_llm.checkpoints.layout import FINAL
from ci_llm.checkpoints.manifest import Manifest, check_name
from ci_llm.core.durable import PARTIAL, make_folders, read_json, write_json
from ci_llm.core.typed_json import seal, unseal
from ci_llm.errors import CheckpointError

TOKEN_FILE: Final = "mirror.json"
#: The generation of a disk that is being filled for the first time; heads count from 1 on.
UNFILLED: Final = 0


@dataclass(frozen=True)
class Found:
    """What an attempt found in the mirror when it decided from which step it resumes.

    Attributes:
        generation: the generation of the head at that moment. Who claims a later one puts steps aside that it has never
            seen. None if the mirror did not answer and the disk does not say it.
        damage: what is wrong with steps that were passed over, by the keys of their records.
        same_run: whether the run on the disk is the one in the mirror, as far as can be told.
    """

    generation: int | None = None
    damage: Mapping[str, str] = field(default_factory=dict)
    same_run: bool = False


@dataclass(frozen=True)
class Token:
    """The run and the generation of a mirror, as the disk records them.

    Attributes:
        run: the run that both belong to.
        generation: the generation of the head when disk and mirror last had the same steps; None if an earlier version
            did not record it.
    """

    run: str
    generation: int | None = None


def write_token(folder: Path, token: Token) -> None:
    """Record to which run of a mirror a folder belongs."""
    make_folders(folder)
    write_json(folder / TOKEN_FILE, {"run": token.run, "generation": token.generation})


def read_token(folder: Path) -> Token | None:
    """The token of the run in a folder; None if it has no mirror yet. Raises CheckpointError: it cannot be read."""
    path = folder / TOKEN_FILE
    try:
        match read_json(path):
            case {"run": str(run), "generation": int(generation)}:
                return Token(run, generation)
            case {"run": str(run)}:
                return Token(run)
    except FileNotFoundError:
        return None
    except ValueError:
        pass
    raise CheckpointError(
        "the record of this run's mirror cannot be read", where=str(path), hint="give the run another mirror"
    )


HEAD: Final = "head.json"
RECORDS: Final = "records/"
BLOCKS: Final = "blocks/"
#: The version that is written; the one before is read as well.
VERSION: Final = 2
#: The `run` of a head that was rebuilt from its records.
UNKNOWN_RUN: Final = ""

#: What reading a document raises that no mirror has written.
NOT_DUMPED: Final = (ValueError, TypeError, KeyError, RecursionError)

_BLOCK = re.compile(r"blocks/g(\d{1,9})/([0-9a-f]{32})-(\d{1,12})(?:\.(\d{1,12})\.zst)?")
_RECORD = re.compile(r"records/g(\d{1,9})/[0-9a-f]{64}\.json")
_UNFINISHED = re.compile(r"(?:blocks|records)/g(\d{1,9})/\.[^/]+" + re.escape(PARTIAL))
_STEP = re.compile(r"checkpoint_step_(0|[1-9]\d{0,15})")


@dataclass(frozen=True)
class Block:
    """Some bytes in the store.

    Attributes:
        generation: the generation of the writer that sent them.
        digest, size: digest and number of the bytes before any compression.
        compressed: size of the object if it is a frame of zstd; None if the object holds the bytes themselves.
    """

    generation: int
    digest: str
    size: int
    compressed: int | None = None

    @property
    def key(self) -> str:
        ending = "" if self.compressed is None else f".{self.compressed}.zst"
        return f"{BLOCKS}g{self.generation}/{self.digest}-{self.size}{ending}"

    @property
    def stored(self) -> int:
        """Bytes of the object."""
        return self.size if self.compressed is None else self.compressed

    @classmethod
    def parse(cls, key: object) -> Block:
        found = _BLOCK.fullmatch(key) if isinstance(key, str) else None
        if found is None:
            raise ValueError(f"{key!r} is not the key of a block")
        return cls(int(found[1]), found[2], int(found[3]), None if found[4] is None else int(found[4]))


Compression: TypeAlias = Literal["auto", "zstd", "none"]
#: A block is compressed to at most this share of its size, or not at all.
_WORTHWHILE: Final[dict[Compression, float]] = {"auto": 0.95, "zstd": 1.0, "none": 0.0}


def compressed(data: bytes, compression: Compression) -> bytes | None:
    """`data` as one frame of zstd; None where that saves too little: such bytes are stored as they are."""
    if compression == "none":
        return None
    frame = zstandard.ZstdCompressor().compress(data)
    return frame if len(frame) < _WORTHWHILE[compression] * len(data) else None


def restored(frame: bytes, size: int) -> bytes:
    """The bytes of a frame. Raises ValueError: it is damaged, or does not hold `size` bytes."""
    try:
        if zstandard.frame_content_size(frame) != size:  # first: a frame may claim any size
            raise ValueError("the frame is of another size")
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise ValueError(f"the frame cannot be read: {error}") from error


@dataclass(frozen=True)
class Record:
    """One step as the mirror holds it.

    Attributes:
        manifest: the very bytes of `manifest.json`.
        blocks: the blocks of every file that the manifest lists, in order.
    """

    generation: int
    name: str
    manifest: bytes
    blocks: Mapping[str, tuple[Block, ...]]

    @property
    def all_blocks(self) -> set[Block]:
        return set(blocks_of(self.blocks))

    def dump(self) -> tuple[str, bytes]:
        """Its key and its bytes."""
        body = {"generation": self.generation, "name": self.name, "manifest": self.manifest.decode()}
        data = _sealed({**body, "blocks": _dump_files(self.blocks)})
        return f"{RECORDS}g{self.generation}/{hashlib.sha256(data).hexdigest()}.json", data

    @classmethod
    def parse(cls, data: bytes) -> tuple[Record, Manifest]:
        """Raises one of `NOT_DUMPED`: it is not what `dump` wrote. CheckpointError: it is of another version."""
        match _unsealed(data):
            case {"generation": int(generation), "name": str(name), "manifest": str(text), "blocks": dict(files)}:
                manifest = Manifest.parse(text.encode())
                blocks = _parse_files(files)
                sizes = {name: sum(block.size for block in each) for name, each in blocks.items()}
                if sizes != {name: file.size for name, file in manifest.files.items()} or not is_checkpoint(name):
                    raise ValueError("the record does not fit its manifest")
                return cls(generation, name, text.encode(), blocks), manifest
        raise ValueError("the record lacks a field")


@dataclass(frozen=True)
class Entry:
    """One committed step.

    Attributes:
        name: `checkpoint_step_<N>` or `final_checkpoint`.
        record: the key of its record.
        nbytes: the size of its files together.
    """

    name: str
    step: int
    record: str
    nbytes: int


@dataclass(frozen=True)
class Head:
    """The head of a mirror: which steps and files count, and whose they are.

    Attributes:
        run: a token of the run whose mirror this is.
        generation: how often the mirror was claimed; the last one that claimed it writes.
        attempt: the number of the run's attempt that writes.
        stamp: new in every head, so that a writer knows its own.
        line: the steps that the run may resume from, the newest first.
        superseded: newer steps than one that the run went back to.
        quarantine: steps that did not verify, and why.
        files: the other files of the run, by path: logs, metrics, evaluation.
    """

    run: str
    generation: int = 0
    attempt: int = 0
    stamp: str = ""
    line: tuple[Entry, ...] = ()
    superseded: tuple[Entry, ...] = ()
    quarantine: tuple[tuple[Entry, str], ...] = ()
    files: Mapping[str, tuple[Block, ...]] = field(default_factory=dict)

    @property
    def newest(self) -> Entry | None:
        return self.line[0] if self.line else None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every step of which the mirror keeps the bytes."""
        return (*self.line, *self.superseded, *(entry for entry, _ in self.quarantine))

    def with_step(self, entry: Entry) -> Head:
        """With one more step in the line, in the place of another one of its name."""
        others = [each for each in self.line if each.name != entry.name]
        old = [each for each in self.line if each.name == entry.name != FINAL and each.record != entry.record]
        # The newest first; a numbered step before the final one of the same step.
        line = sorted([*others, entry], key=lambda each: (-each.step, each.name))
        return replace(self, line=tuple(line), superseded=(*self.superseded, *old))

    def without(self, names: Iterable[str]) -> Head:
        """Without some steps of the line."""
        gone = {*names}
        return replace(self, line=tuple(entry for entry in self.line if entry.name not in gone))

    def going_back(self, step: int) -> Head:
        """With every step after `step` out of the line."""
        newer = tuple(entry for entry in self.line if entry.step > step)
        return replace(self.without(entry.name for entry in newer), superseded=(*self.superseded, *newer))

    def quarantined(self, damage: Mapping[str, str]) -> Head:
        """With steps out of the line that did not verify, by the keys of their records, and why."""
        hurt = tuple((entry, damage[entry.record]) for entry in self.line if entry.record in damage)
        return replace(self.without(entry.name for entry, _ in hurt), quarantine=(*self.quarantine, *hurt))

    def stamped(self) -> Head:
        """A copy that a writer can tell from every other head, by its stamp."""
        return replace(self, stamp=secrets.token_hex(8))

    def dump(self) -> bytes:
        body: dict[str, Any] = {name: getattr(self, name) for name in ("run", "generation", "attempt", "stamp")}
        body |= {"line": [vars(each) for each in self.line], "superseded": [vars(each) for each in self.superseded]}
        body |= {"quarantine": [{**vars(each), "damage": why} for each, why in self.quarantine]}
        # "story" is their key since version 1 of the format.
        return _sealed({**body, "story": _dump_files(self.files)})

    @classmethod
    def parse(cls, data: bytes) -> Head:
        """Raises one of `NOT_DUMPED`: it is not what `dump` wrote. CheckpointError: it is of another version."""
        match _unsealed(data):
            case {
                "run": str(run),
                "generation": int(generation),
                "attempt": int(attempt),
                "stamp": str(stamp),
                "line": list(line),
                "superseded": list(superseded),
                "quarantine": list(quarantine),
                "story": dict(files),
            }:
                hurt = tuple((_entry(each), str(each["damage"])) for each in quarantine)
                lines = tuple(map(_entry, line)), tuple(map(_entry, superseded))
                return cls(run, generation, attempt, stamp, *lines, hurt, _parse_files(files))
        raise ValueError("the head lacks a field")


def rebuilt(records: Sequence[tuple[str, Record, Manifest]]) -> Head:
    """A head made of the records alone, where the head itself is damaged; it belongs to any run.

    Of two generations the later one counts: what the earlier one has from its first step on is superseded.

    Args:
        records: key, record, manifest.
    """
    head, first = Head(run=UNKNOWN_RUN), None
    for key, record, manifest in sorted(records, key=lambda each: (-each[1].generation, each[2].step)):
        entry = Entry(record.name, manifest.step, key, manifest.nbytes)
        older = head.generation > record.generation
        if older and first is not None and manifest.step >= first:
            head = replace(head, superseded=(*head.superseded, entry))
            continue
        head = head.with_step(entry)
        head = replace(head, generation=max(head.generation, record.generation))
        head = replace(head, attempt=max(head.attempt, manifest.attempt))
        first = manifest.step if first is None else min(first, manifest.step)
    return head


def generation_of(key: str) -> int | None:
    """The generation of the writer that sent an object, or a part of one; None if no writer of a mirror has sent it."""
    found = _BLOCK.fullmatch(key) or _RECORD.fullmatch(key) or _UNFINISHED.fullmatch(key)
    return None if found is None else int(found[1])


def is_checkpoint(name: str) -> bool:
    """Whether a mirror may hold a checkpoint of this name."""
    return name == FINAL or _STEP.fullmatch(name) is not None


def _entry(value: Any) -> Entry:
    match value:
        case {"name": str(name), "step": int(step), "record": str(record), "nbytes": int(nbytes)}:
            if is_checkpoint(name) and _RECORD.fullmatch(record):
                return Entry(name, step, record, nbytes)
    raise ValueError("the head names a step that cannot be")


def _dump_files(files: Mapping[str, Sequence[Block]]) -> dict[str, list[str]]:
    return {name: [block.key for block in blocks] for name, blocks in files.items()}


def _parse_files(files: Mapping[str, Any]) -> dict[str, tuple[Block, ...]]:
    return {check_name(name): tuple(map(Block.parse, blocks)) for name, blocks in files.items()}


def _sealed(body: Mapping[str, Any]) -> bytes:
    return seal({"format_version": VERSION, **body}, hashlib.sha256)


def _unsealed(data: bytes) -> dict[str, Any]:
    body = unseal(data, hashlib.sha256, "it")
    if body.pop("format_version") not in (VERSION - 1, VERSION):
        # No damage: what is taken for damaged is rebuilt, and the steps of a newer program would be lost.
        raise CheckpointError("another version of ci-llm wrote this mirror", hint="use the newest ci-llm")
    return body


def blocks_of(files: Mapping[str, Sequence[Block]]) -> Iterator[Block]:
    """Every block of some files."""
    return (block for blocks in files.values() for block in blocks)
