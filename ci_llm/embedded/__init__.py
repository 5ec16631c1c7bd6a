"""A tiny base model with a task for it, so that a first run needs no network.

    BASE_FOLDER           a Llama of 877,696 parameters and its tokenizer; `from_pretrained` opens it
    rows("train")         1,500 rows of question and answer, as in GSM8K; "validation" has 320, "test" 1,000

Importing this package loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from ci_llm.embedded.stories import rows

__all__ = ["BASE_FOLDER", "rows"]

BASE_FOLDER = Path(__file__).parent / "base"
