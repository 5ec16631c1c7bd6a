"""Disks for tests: one that dies before its n-th change, one that remembers what a crash could undo."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci_llm.core.durable import Filesystem

CHANGES = ("create", "write", "sync", "close", "sync_folder", "mkdir", "rename", "exchange", "unlink", "rmdir")


class Crash(BaseException):
    """The machine is gone: no handler of the program may run, and none can change the disk."""


class MortalDisk(Filesystem):
    """Raises `Crash` before change number `lives` (counted from 0), and from then on at every change.

    Attributes:
        changes: how many changes were asked for.
    """

    def __init__(self, lives: int | None = None) -> None:
        self.lives, self.changes = lives, 0

    def spend(self) -> None:
        self.changes += 1
        if self.lives is not None and self.changes > self.lives:
            raise Crash


class FailingDisk(MortalDisk):
    """Fails change number `lives` with an errno, once."""

    def __init__(self, lives: int, code: int) -> None:
        super().__init__(lives)
        self.code = code

    def spend(self) -> None:
        self.changes += 1
        if self.changes - 1 == self.lives:
            raise OSError(self.code, os.strerror(self.code))


class CachedDisk(Filesystem):
    """Syncs nothing: for crashes that are played, where the kernel lives on, and waiting would be in vain."""

    def sync(self, handle: int) -> None: ...

    def sync_folder(self, path: Path) -> None: ...


def _guarded(name: str) -> Any:
    real = getattr(CachedDisk, name)

    def method(self: MortalDisk, *arguments: Any) -> Any:
        self.spend()
        return real(self, *arguments)

    return method


for _name in CHANGES:
    setattr(MortalDisk, _name, _guarded(_name))


class StutteringDisk(Filesystem):
    """Every write takes at most seven bytes, as a full pipe or an interrupted call may."""

    def write(self, handle: int, data: Any) -> int:
        return super().write(handle, data[:7])


class MuteDisk(Filesystem):
    """Takes nothing and reports no error."""

    def write(self, handle: int, data: Any) -> int:
        return 0


class FullDisk(Filesystem):
    """Has no room for anything until `full` is set to False."""

    full = True

    def free_bytes(self, path: Path) -> int:
        return 0 if self.full else super().free_bytes(path)


# ALICE (Pillai et al., OSDI 2014): which states may a crash leave, if only what was synced is certain?


@dataclass
class File:
    """Contents as the program sees them, and as they are certain to survive."""

    now: bytearray = field(default_factory=bytearray)
    safe: bytes = b""

    def after_crash(self, draw: random.Random) -> bytes:
        """The bytes after a crash: what is safe, everything, a torn part, or the full length with nothing in it."""
        now = bytes(self.now)
        torn = now[: draw.randint(0, len(now))]
        return draw.choice([self.safe, now, torn, bytes(len(now))]) if now != self.safe else now


class Folder(dict[str, "File | Folder"]):
    """Entries that are certain to survive."""

    __hash__ = object.__hash__


Change = tuple[Folder, str, "File | Folder | None"]


class Log(CachedDisk):
    """Executes every change below `root` and models it: a folder's entries are safe once it was synced.

    A rename is one indivisible change of two folders. Changes that were not synced may survive in any subset,
    in any order, with or without the contents of the files that they name.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.safe = Folder()
        self.pending: list[list[Change]] = []
        self.open: dict[int, File] = {}
        self.names: dict[Path, File | Folder] = {root: self.safe}

    # The changes, executed and modelled

    def create(self, path: Path) -> int:
        handle = super().create(path)
        self.open[handle] = self.names[path] = File()
        self._change((path, self.names[path]))
        return handle

    def write(self, handle: int, data: Any) -> int:
        written = super().write(handle, data)
        self.open[handle].now += bytes(data[:written])
        self._took_place()
        return written

    def sync(self, handle: int) -> None:
        super().sync(handle)
        self.open[handle].safe = bytes(self.open[handle].now)
        self._took_place()

    def close(self, handle: int) -> None:
        super().close(handle)
        del self.open[handle]

    def mkdir(self, path: Path) -> None:
        super().mkdir(path)
        self.names[path] = Folder()
        self._change((path, self.names[path]))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        moved = {path: node for path, node in self.names.items() if path == source or source in path.parents}
        for path in moved:
            del self.names[path]
        for path, node in moved.items():
            self.names[target / path.relative_to(source)] = node
        self._change((source, None), (target, self.names[target]))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        del self.names[path]
        self._change((path, None))

    def rmdir(self, path: Path) -> None:
        super().rmdir(path)
        del self.names[path]
        self._change((path, None))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        folder = self.names[path]
        for changes in [changes for changes in self.pending if any(each[0] is folder for each in changes)]:
            self.pending.remove(changes)
            _apply(changes)
        self._took_place()

    def _change(self, *changes: tuple[Path, File | Folder | None]) -> None:
        self.pending.append([(self._folder(path.parent), path.name, node) for path, node in changes])
        self._took_place()

    def _folder(self, path: Path) -> Folder:
        folder = self.names[path]
        assert isinstance(folder, Folder)
        return folder

    def _took_place(self) -> None:
        """For subclasses: one more point at which the machine may die."""

    # The states that a crash may leave now

    def crashes(self, draw: random.Random, at_most: int) -> Iterator[dict[str, bytes | None]]:
        """Possible trees, path -> contents (None: a folder): all subsets of what is pending, or a sample."""
        count = len(self.pending)
        every = itertools.product((False, True), repeat=count)
        some = ([draw.random() < 0.5 for _ in range(count)] for _ in range(at_most - 2))
        ends = ([False] * count, [True] * count)
        for kept in every if 2**count <= at_most else itertools.chain(ends, some):
            yield dict(self._tree(list(kept), draw))

    def _tree(self, kept: list[bool], draw: random.Random) -> Iterator[tuple[str, bytes | None]]:
        view: dict[int, dict[str, File | Folder]] = {}
        for survives, changes in zip(kept, self.pending, strict=True):
            for folder, name, node in changes if survives else []:
                entries = view.setdefault(id(folder), dict(folder))
                if node is None:
                    entries.pop(name, None)
                else:
                    entries[name] = node
        yield from _walk(self.safe, "", view, draw)


def _apply(changes: list[Change]) -> None:
    for folder, name, node in changes:
        if node is None:
            folder.pop(name, None)
        else:
            folder[name] = node


def _walk(
    folder: Folder, prefix: str, view: dict[int, dict[str, File | Folder]], draw: random.Random
) -> Iterator[tuple[str, bytes | None]]:
    for name, node in view.get(id(folder), folder).items():
        if isinstance(node, Folder):
            yield prefix + name, None
            yield from _walk(node, f"{prefix}{name}/", view, draw)
        else:
            yield prefix + name, node.after_crash(draw)


def build(root: Path, tree: dict[str, bytes | None]) -> None:
    """Make the tree of a crash real."""
    root.mkdir()
    for name, contents in tree.items():
        if contents is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(contents)
