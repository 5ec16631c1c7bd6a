"""Blocks of code in Markdown, with the comments before them that tell the tests what to do.

<!-- not run: needs a GPU -->      the block is not run, for this reason
<!-- file: shop.yaml -->           the block is the content of this file
<!-- given: a loop -->             the block runs with names that the tests provide under this title
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r"(?P<marks>(?:^ *<!--[^\n]*-->\n)*)^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_PROGRAM = re.compile(r"(ci-llm|python|make|pip|accelerate|torchrun|sbatch|vllm|hf|tensorboard|source|export) ")
_MARK = re.compile(r"<!-- *([\w ]+?)(?:: *(.*?))? *-->")


@dataclass(frozen=True)
class Block:
    """One block of a page.

    Attributes:
        line: of its first line of code.
        marks: title -> value of the comments before it.
    """

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The command lines of a block for a shell, without comments; in a transcript those after `$ `."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks_of(page: Path) -> Iterator[Block]:
    """The blocks of a page, in their order."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(text):
        line = text.count("\n", 0, found.start("text")) + 1
        marks = {title: value or "" for title, value in _MARK.findall(found["marks"])}
        name = str(page.relative_to(ROOT))
        code = textwrap.dedent(found["text"])
        yield Block(name, line, found["language"] or _language_of(code), code, marks)


def _language_of(code: str) -> str:
    """Of a block that does not say it: a transcript, commands, or no code."""
    if code.startswith("$ "):
        return "console"
    return "bash" if _PROGRAM.match(code) else "text"
