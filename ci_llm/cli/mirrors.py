"""`ci-llm checkpoints` with URLs: list and verify a mirror, pull from it, push to it; a URL as the RUN of a verb."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ci_llm.errors import BadInput, DamagedCheckpoint

if TYPE_CHECKING:
    from ci_llm.checkpoints.catalog import CatalogEntry

PUSH_S = 24 * 3600.0


def path_or_url(text: str) -> Path | str:
    """The type of an argument that may be a folder or the URL of a mirror."""
    from ci_llm.core.urls import is_url

    return text if is_url(text) else Path(text)


def located(run: str) -> str:
    """The path of a RUN, or a copy on this disk of the checkpoint that a URL means: of a run the final one, if any.

    Raises:
        BadInput: it is no URL of a mirror. CheckpointError: there is no checkpoint that verifies.
    """
    from ci_llm.core.urls import is_url

    if not is_url(run):
        return run
    from ci_llm.checkpoints.mirror.local_copy import local_copy

    return str(local_copy(run, "RUN", final_first=True))


def entries_of(url: str, *, read_all: bool) -> list[CatalogEntry]:
    """The checkpoints of a mirror; of a URL that names one, that one."""
    from ci_llm.checkpoints.mirror.listing import list_mirror
    from ci_llm.checkpoints.mirror.local_copy import open_mirror

    reader, head, name = open_mirror(url, "URL")
    if name is not None:
        reader.entry(head, name)  # refuses a name that is not there
    found = list_mirror(reader, head, read_all=read_all)
    return [entry for entry in found if name in (None, entry.name)]


def verify(url: str) -> tuple[list[str], dict[str, str]]:
    """The checkpoints of a mirror's line that verify, and the damage of those that do not."""
    current = [entry for entry in entries_of(url, read_all=True) if entry.line == "current"]
    damage = {entry.name: entry.damage for entry in current if entry.damage is not None}
    return [entry.name for entry in current if entry.damage is None], damage


def pull(call: argparse.Namespace) -> dict[str, Any]:
    """Bring one checkpoint, or what a run needs to go on, onto this disk; the record of it."""
    from ci_llm.checkpoints.manager import CheckpointManager
    from ci_llm.checkpoints.mirror.filling import fill
    from ci_llm.checkpoints.mirror.local_copy import open_mirror, write_opened
    from ci_llm.run.mirroring import RUN_FILES

    reader, head, name = open_mirror(call.url, "URL")
    if name is not None:
        target = call.to / name
        if target.exists():
            raise BadInput("this folder exists", where=str(target), hint="give another one with --to")
        write_opened(reader.open(reader.entry(head, name)), target)
        return {"folder": str(target)}
    with CheckpointManager(call.to) as manager:
        manager.acquire_lease()
        fill(reader, manager, RUN_FILES)
        step = manager.latest_step()
    if step is None:
        raise DamagedCheckpoint("no checkpoint in this mirror verifies", where=reader.url)
    return {"folder": str(call.to), "step": step}


def push(call: argparse.Namespace) -> dict[str, Any]:
    """Send what a run's folder holds, and heal what is damaged there; the record of it."""
    from ci_llm.checkpoints.catalog import current_line
    from ci_llm.checkpoints.manager import CheckpointManager
    from ci_llm.checkpoints.mirror.found import Found, read_token
    from ci_llm.checkpoints.mirror.mirror import Mirror
    from ci_llm.run.mirroring import RUN_FILES

    if not current_line(call.run):
        raise BadInput("there is no checkpoint here", where=str(call.run), hint="give the output_dir of a run")
    with CheckpointManager(call.run) as manager:
        number = manager.acquire_lease()
        mirror = Mirror(call.url, call.run, files=RUN_FILES)
        head = mirror.reader.head()
        step = manager.latest_step() or 0
        token = read_token(call.run)
        found = Found(head.generation if head else 0)
        if head is not None and token is not None and token.run == head.run:
            if head.newest is not None and head.newest.step > step:
                what = f"the mirror holds step {head.newest.step}, and this folder step {step} as its newest"
                raise BadInput(what, where=mirror.reader.url, hint="pull it, or push to another prefix")
            found = Found(head.generation, mirror.reader.damage(head), same_run=True)
        mirror.begin(step, number, found)
        try:
            done = mirror.flush(PUSH_S)
        finally:
            mirror.close()
    if not done:
        raise BadInput(f"not everything was sent: {mirror.state.error}", where=mirror.state.url)
    return {"healed": sorted(found.damage.values()), **asdict(mirror.state)}
