"""What an attempt knows of its mirror: what it found there at its start, and what `mirror.json` on the disk says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ci_llm.core.durable import make_folders, read_json, write_json
from ci_llm.errors import CheckpointError

TOKEN_FILE: Final = "mirror.json"
#: The generation of a disk that is being filled for the first time; heads count from 1 on.
UNFILLED: Final = 0


@dataclass(frozen=True)
class Found:
    """What an attempt found in the mirror when it decided from which step it goes on.

    Attributes:
        generation: of the head at that moment. Who claims a later one puts steps aside that it has never seen. None:
            the mirror did not answer, and the disk does not say it.
        damage: what is wrong with steps that were passed over, by the keys of their records.
        same_run: whether the run on the disk is the one in the mirror, as far as can be told.
    """

    generation: int | None = None
    damage: Mapping[str, str] = field(default_factory=dict)
    same_run: bool = False


@dataclass(frozen=True)
class Token:
    """What the disk says of the mirror.

    Attributes:
        run: the run that both belong to.
        generation: of the head when the two had the same steps last; None: an earlier version did not record it.
    """

    run: str
    generation: int | None = None


def write_token(folder: Path, token: Token) -> None:
    """Record to which run of a mirror a folder belongs."""
    make_folders(folder)
    write_json(folder / TOKEN_FILE, {"run": token.run, "generation": token.generation})


def read_token(folder: Path) -> Token | None:
    """The token of the run in a folder; None: it has no mirror yet. Raises CheckpointError: it cannot be read."""
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
