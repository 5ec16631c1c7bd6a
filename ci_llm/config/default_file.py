"""The file that is taken where none is named: that of the current folder, else that of this project's checkout."""

from __future__ import annotations

from pathlib import Path


def default_file(name: str = "configs.yaml") -> Path | None:
    """The same for every command, from whatever folder it is called; None if neither folder has it."""
    checkout = Path(__file__).parents[2]
    is_one = (checkout / "pyproject.toml").is_file()  # and not the folder of somebody's installed packages
    folders = [Path(), *([checkout] if is_one else [])]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)
