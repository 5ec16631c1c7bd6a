"""A checkpoint of a mirror as a folder on this disk, for whatever takes a path: kept, and verified at each use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ci_llm.checkpoints.checkpoint import write_files_as
from ci_llm.checkpoints.folders import FINAL, Opened
from ci_llm.checkpoints.manifest import FileImage, verify_folder
from ci_llm.checkpoints.mirror.head import Entry, Head, is_checkpoint
from ci_llm.checkpoints.mirror.objects import open_objects
from ci_llm.checkpoints.mirror.reader import MirrorReader
from ci_llm.errors import CheckpointError, DamagedCheckpoint


def split_url(url: str) -> tuple[str, str | None]:
    """The URL of the mirror, and the name of the step that stands behind it, if one does."""
    base, _, name = url.rstrip("/").rpartition("/")
    return (base, name) if is_checkpoint(name) else (url.rstrip("/"), None)


def open_mirror(url: str, where: str) -> tuple[MirrorReader, Head, str | None]:
    """The mirror of a URL, what it holds, and the name of the step in the URL.

    Raises:
        BadInput: it is no URL of a mirror. CheckpointError: no run has written there. MirrorUnreachable.
    """
    base, name = split_url(url)
    reader = MirrorReader(open_objects(base, where))
    head = reader.head()
    if head is None or not head.entries:
        raise CheckpointError("there is no mirror of a run here", where=reader.url, hint="mirror=URL makes one")
    return reader, head, name


def local_copy(url: str, where: str, *, final_first: bool = False) -> Path:
    """The folder with the checkpoint that a URL means: the step it names, or the newest of a run that verifies.

    Args:
        where: how the URL was given, for errors.
        final_first: of a run the `final_checkpoint`, if there is one that verifies.

    Raises:
        DamagedCheckpoint: the named step does not verify. CheckpointError: there is none. MirrorUnreachable.
    """
    reader, head, name = open_mirror(url, where)
    if name is not None:
        return _bring(reader, reader.entry(head, name))
    line = sorted(head.line, key=lambda entry: entry.name != FINAL) if final_first else head.line
    for entry in line:
        with contextlib.suppress(DamagedCheckpoint):
            return _bring(reader, entry)
    raise CheckpointError("no checkpoint in this mirror verifies", where=reader.url)


def _bring(reader: MirrorReader, entry: Entry) -> Path:
    folder = cache_folder() / Path(entry.record).stem / entry.name
    with contextlib.suppress(DamagedCheckpoint):
        verify_folder(folder)
        return folder
    write_opened(reader.open(entry), folder)
    return folder


def write_opened(opened: Opened, folder: Path) -> None:
    """Commit a checkpoint that was read as a folder of its own. Raises CheckpointError: the disk refuses it."""
    write_files_as(folder, opened.manifest, {name: FileImage((data,)) for name, data in opened.files.items()})


def cache_folder() -> Path:
    """Where copies of mirrors lie: `CI_LLM_CACHE`, or below `XDG_CACHE_HOME`, or `~/.cache`."""
    if given := os.environ.get("CI_LLM_CACHE"):
        return Path(given, "mirrors")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ci_llm", "mirrors")
