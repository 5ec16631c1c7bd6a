"""Whose training a call means: ours, which tells how it stands and goes on by itself, or somebody else's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

_OUR_DOOR: Final = re.compile(r"^\s*(?:from|import) ci_llm\.(?:cli|entrance)\b", re.MULTILINE)


def is_ours(script: Path) -> bool:
    """Whether a file is a door to our trainer: it imports `ci_llm.entrance`, as train.py does, or `ci_llm.cli`."""
    try:
        return _OUR_DOOR.search(script.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False


def our_words(command: Sequence[str]) -> list[str] | None:
    """The keys that a command hands to our trainer, under whatever launcher; None if it starts something else."""
    for place, word in enumerate(command):
        rest = list(command[place + 1 :])
        if word.endswith(".py") and is_ours(Path(word)):
            return rest
        if (Path(word).name == "ci-llm" or list(command[place - 1 : place + 1]) == ["-m", "ci_llm"]) and rest[:1] == [
            "train"
        ]:
            return rest[1:]
    return None
