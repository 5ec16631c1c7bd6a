"""Show what a base answers before a training and what the crowd answers after it.

`python -m tools.before_after BASE RUN ROWS [COUNT]`: BASE is a folder or a GGUF file, RUN the output folder of a
training, ROWS a file of lines {"question": ..., "answer": ...}, of which the first COUNT are asked (4).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import shorten

from ci_llm import Crowd
from ci_llm.crowd.pretrained import open_base

WIDTH = 110
MAX_NEW_TOKENS = 40


def main(base: str, run: str, rows: Path, count: int = 4) -> None:
    """Print question, answer before, answer after and the right one for each row."""
    asked = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()[:count]]
    questions = [row["question"] for row in asked]
    before = Crowd.of(open_base(base)).generate(questions, max_new_tokens=MAX_NEW_TOKENS)
    after = Crowd.from_pretrained(run).generate(questions, max_new_tokens=MAX_NEW_TOKENS)
    for row, *answers in zip(asked, before, after, strict=True):
        print(f"\nquestion  {row['question']}")
        for name, answer in zip(("before", "after"), answers, strict=True):
            print(f"{name:<9} {shorten(answer, WIDTH)}")
        print(f"right     {row['answer']}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *map(int, sys.argv[4:]))
