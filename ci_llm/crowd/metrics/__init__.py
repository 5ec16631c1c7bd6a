"""The metrics, one per module of this package: each finds the answer in a text, so that equal answers are right.

To add one, add a file `metrics/<name>.py` that defines

    def reader(references: Sequence[str]) -> Callable[[str], str]

It is called once with the reference answers of all rows, because only all of them show how answers are written. It
returns a function that finds the normalised answer in a text, "" if there is none. A row is right if the answers of its
text and of its reference are equal and not "". `ci-llm evaluate RUN --metric <name>` selects it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ci_llm.core.imports import load_plugin, plugin_names

Reader: TypeAlias = Callable[[str], str]

METRICS = plugin_names(__name__, first="exact_match")


def answer_reader(references: Sequence[str], metric: str = "exact_match") -> Reader:
    """A function that finds the answer in a text, for rows with these references.

    Raises:
        BadInput: no module of this package has that name.
    """
    make: Callable[[Sequence[str]], Reader] = load_plugin(__name__, metric, "reader")
    return make(references)
