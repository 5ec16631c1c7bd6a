"""The way from a mirror to this disk: for one checkpoint as a folder, or for all that a run needs to resume.

A single checkpoint is a copy for whatever takes a path (`local_copy`): it is kept, and verified at each use. A run
resumes from the newest step that verifies, whether the disk or the mirror has it (`fill`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from ci_llm.checkpoints.catalog import pinned_steps
from ci_llm.checkpoints.checkpoint import write_files_as
from ci_llm.checkpoints.layout import FINAL, committed, is_checkpoint_name, numbered_steps
from ci_llm.checkpoints.lease import count_on_from
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import Opened, verify_folder
from ci_llm.core.durable import make_folders, write_bytes
from ci_llm.core.remote import cache_folder
from ci_llm.errors import BadInput, CheckpointError, DamagedCheckpoint, MirrorUnreachable
from ci_llm.mirror.head import NOBODY, Entry, Found, Head, Token, digest_of, read_token, write_token
from ci_llm.mirror.objects import open_objects, require_writable
from ci_llm.mirror.reader import MirrorReader
from ci_llm.mirror.writer import another_run

logger = logging.getLogger(__name__)


def open_mirror(url: str, where: str) -> tuple[MirrorReader, Head, str | None]:
    """The mirror of a URL, what it holds, and the name of the step in the URL.

    Raises:
        BadInput: it is not the URL of a mirror. CheckpointError: no run has written there. MirrorUnreachable.
    """
    base, _, last = url.rstrip("/").rpartition("/")
    name = last if is_checkpoint_name(last) else None
    reader = MirrorReader(open_objects(url.rstrip("/") if name is None else base, where))
    head = reader.head()
    if head is None or not head.line + head.aside:
        raise CheckpointError("there is no mirror of a run here", where=reader.url, hint="mirror=URL makes one")
    return reader, head, name


def local_copy(url: str, where: str, *, final_first: bool = False) -> Path:
    """The folder with the checkpoint that a URL means: the step it names, or the newest of a run that verifies.

    Args:
        where: how the URL was given, for errors.
        final_first: take the `final_checkpoint` of a run if it verifies.

    Raises:
        DamagedCheckpoint: the named step does not verify. CheckpointError: nothing verifies. MirrorUnreachable.
    """
    reader, head, name = open_mirror(url, where)
    if name is not None:
        return _download(reader, reader.entry(head, name))
    line = sorted(head.line, key=lambda entry: entry.name != FINAL) if final_first else head.line
    for entry in line:
        with contextlib.suppress(DamagedCheckpoint):
            return _download(reader, entry)
    raise CheckpointError("no checkpoint in this mirror verifies", where=reader.url)


def _download(reader: MirrorReader, entry: Entry) -> Path:
    folder = cache_folder("mirrors") / digest_of(entry.place) / entry.name
    with contextlib.suppress(DamagedCheckpoint):
        verify_folder(folder)
        return folder
    write_opened(reader.open(entry), folder)
    return folder


def write_opened(opened: Opened, folder: Path) -> None:
    """Commit a checkpoint that was read as a folder of its own. Raises CheckpointError: the disk refuses it."""
    write_files_as(folder, opened.manifest, opened.images)


def fill(reader: MirrorReader, manager: CheckpointManager, files: Collection[str] = ()) -> Found:
    """Bring the newest step that verifies onto the disk, if the mirror has it and the disk does not. For process 0.

    Args:
        files: patterns of the files that come with it.

    Raises:
        WriterBusy: the mirror holds another run. MirrorUnreachable: and the disk holds nothing to resume from; or the
            mirror is empty and takes nothing.
        CheckpointError: the disk refuses it.
    """
    try:
        return _fill(reader, manager, files)
    except OSError as error:
        what = f"what the mirror has cannot be written here: {error}"
        hint = "give this folder space and the right to write, and start again"
        raise CheckpointError(what, where=str(manager.directory), hint=hint) from error


def _fill(reader: MirrorReader, manager: CheckpointManager, files: Collection[str]) -> Found:
    folder = manager.directory
    token = read_token(folder)
    try:
        head = reader.head()
    except MirrorUnreachable as error:
        if not committed(folder) or (token is not None and token.writer == NOBODY):
            error.hint = f"{error.hint}; without the mirror nobody knows from which step this run resumes"
            raise
        logger.warning(f"mirror    {error.what}; the run resumes from what this disk holds")
        return Found(token.writer if token else None)
    if head is None:
        require_writable(reader.objects)
    if head is None or not head.line:
        return Found(head.writer if head else NOBODY)
    if (token.run != head.run) if token else committed(folder):
        raise another_run(reader.url)
    count_on_from(folder, head.attempt)
    own = manager.latest_step()
    found, damage = reader.newest(head, after=-1 if own is None else own)
    if found is not None:
        manager.store.acquire_lease()
        if token is None:  # a disk with steps and without a token belongs to another run
            write_token(folder, Token(head.run, NOBODY))
        wrote_last = token is not None and token.writer == head.writer
        _download_files(reader, head, folder, files, wrote_last=wrote_last)
        _pull(reader, head, found, manager)
    elif own is None:
        logger.warning(f"mirror    no step in {reader.url} verifies")
    now = Token(head.run, head.writer)
    if token != now:
        write_token(folder, now)
    return Found(head.writer, damage)


def _pull(reader: MirrorReader, head: Head, newest: Opened, manager: CheckpointManager) -> None:
    """Bring a step, after everything that belongs to it: until that step is here, the next start fills again."""
    for entry in _wanted(head, newest, manager.directory):
        try:
            manager.store.adopt(reader.open(entry))
        except DamagedCheckpoint as damage:
            logger.warning(f"mirror    {entry.name} does not come back: {damage.what}")
    manager.store.adopt(newest)
    logger.info(f"mirror    step {newest.manifest.step} came from {reader.url}: the disk had no newer one")


def _download_files(
    reader: MirrorReader, head: Head, folder: Path, patterns: Collection[str], *, wrote_last: bool
) -> None:
    """Write the files of a run as the mirror has them, in the place of what is there.

    Only names that match are written, whatever the head says. A file that is damaged there is named and left out.

    Args:
        wrote_last: nobody has written to the mirror since this disk did. It keeps its own files, which may tell of
            decisions that the mirror has not got.
    """
    for name, file in head.files.items():
        if not any(PurePosixPath(f"/{name}").match(f"/{pattern}") for pattern in patterns):
            continue
        if wrote_last and (folder / name).exists():
            continue
        try:
            data = reader.file(name, file)
        except DamagedCheckpoint as damage:
            logger.warning(f"{name} does not come back from the mirror: {damage.what}")
            continue
        make_folders((folder / name).parent)
        write_bytes(folder / name, data)


def _wanted(head: Head, newest: Opened, folder: Path) -> Iterator[Entry]:
    """The steps that a run needs beside its newest, the oldest first: the best one, and the final one if complete."""
    try:
        wanted = pinned_steps(folder)
    except BadInput:  # nobody knows which is the best: all of them
        wanted = frozenset(entry.step for entry in head.line)
    here = {f"checkpoint_step_{step}" for step in numbered_steps(folder)}
    for entry in reversed(head.line):
        is_end = entry.name == FINAL and entry.step == newest.manifest.step
        if entry.name not in here | {newest.folder.name} and (entry.step in wanted or is_end):
            yield entry
