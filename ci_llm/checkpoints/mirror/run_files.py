"""The files of a run beside its checkpoints, with which a fresh disk goes on: logs, metrics, scores."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Final

from ci_llm.checkpoints.manifest import check_name
from ci_llm.checkpoints.mirror.head import Block, Head
from ci_llm.checkpoints.mirror.reader import MirrorReader
from ci_llm.checkpoints.mirror.writer import MirrorWriter
from ci_llm.core.durable import make_folders, write_bytes
from ci_llm.errors import DamagedCheckpoint

logger = logging.getLogger(__name__)

#: Small, because logs grow at their end: whole blocks are not sent again.
BLOCK_BYTES: Final = 1 << 18
#: A log that outgrows this does not follow.
MAX_BYTES: Final = 256 << 20


def send_files(writer: MirrorWriter, folder: Path, patterns: Collection[str]) -> dict[str, tuple[Block, ...]]:
    """Send the files of `folder` that match; what the head is to say of them. Raises MirrorUnreachable."""
    return {name: writer.send_blocks(_cut(data)) for name, data in _files(folder, patterns)}


def _files(folder: Path, patterns: Collection[str]) -> Iterator[tuple[str, bytes]]:
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    for path in sorted(paths):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            name = check_name(path.relative_to(folder).as_posix())
            if path.stat().st_size <= MAX_BYTES:
                yield name, path.read_bytes()
        except (OSError, ValueError):  # gone meanwhile, or no file of ours
            continue


def _cut(data: bytes) -> Iterator[bytes]:
    return (data[start : start + BLOCK_BYTES] for start in range(0, len(data), BLOCK_BYTES))


def restore_files(reader: MirrorReader, head: Head, folder: Path, patterns: Collection[str]) -> None:
    """Write the files of a run as the mirror has them, in the place of what is there.

    Only names that match are written, whatever the head says. A file that is damaged there is named and left out.

    Raises:
        MirrorUnreachable, OSError.
    """
    for name, blocks in head.files.items():
        if not _is(name, patterns):
            continue
        try:
            data = reader.file(blocks)
        except DamagedCheckpoint as damage:
            logger.warning(f"{name} does not come back from the mirror: {damage.what}")
            continue
        path = folder / name
        make_folders(path.parent)
        write_bytes(path, data)


def _is(name: str, patterns: Collection[str]) -> bool:
    path = PurePosixPath(name)
    return any(path.match(pattern) and len(path.parts) == len(PurePosixPath(pattern).parts) for pattern in patterns)
