"""An answer as text for a terminal: the crowd's, the agents' beside it, and a line that says how sure the crowd is."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ci_llm.crowd.asking import Answer

_GAP = 3


def how_sure(answer: Answer) -> str:
    """One line: how probably the answer is right, its probability, how many agents give it, how much they disagree."""
    parts = [] if answer.probability_right is None else [f"right with probability {answer.probability_right:.2f}"]
    parts.append(f"confidence {answer.confidence:.2f} ({answer.probability_per_token:.2f} a token)")
    count = len(answer.agents)
    if answer.agreement is not None and count > 1:
        parts.append(f"{round(answer.agreement * count)} of {count} agents agree")
    parts.append("one agent asked" if answer.agents_asked == 1 else f"disagreement {answer.disagreement:.3f}")
    if not answer.complete:
        parts.append(f"cut after {len(answer.tokens)} tokens")
    return f"[{', '.join(parts)}]"


def given(answer: Answer) -> str:
    """The crowd's answer; a word in its place if the crowd abstains."""
    return "[no answer: it is too unsure]" if answer.abstained else answer.answer


def beside(answer: Answer, names: Sequence[str]) -> str:
    """The crowd's answer and those of the agents: side by side if the terminal is wide enough, else below.

    Args:
        names: of the agents, `Crowd.names`: a crowd that has changed has gaps.
    """
    named = {"crowd": answer.answer} | dict(zip(names, answer.agents, strict=True))
    columns = [[name, *text.splitlines()] for name, text in named.items()]
    widths = [max(map(len, column)) for column in columns]
    if sum(widths) + _GAP * (len(widths) - 1) <= width():
        rows = zip_longest(*columns, fillvalue="")
        lines = ((" " * _GAP).join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)
    return "\n".join(_named(name, text) for name, text in named.items())


def _named(name: str, text: str) -> str:
    """A text to the right of its name, wrapped to the terminal."""
    indent = max(8, len(name)) + 1
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width() - indent) or [""]] or [""]
    return "\n".join(f"{label:<{indent}}{line}".rstrip() for label, line in zip_longest([name], lines, fillvalue=""))


def width() -> int:
    """Columns of the terminal; 80 if there is none."""
    return max(20, shutil.get_terminal_size().columns)
