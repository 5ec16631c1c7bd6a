"""What a first run needs without a network: a tiny base model, and stories in arithmetic to learn from.

    BASE_FOLDER           a Llama of 877,696 parameters and its tokenizer; `from_pretrained` opens it
    rows("train")         question and answer rows as in GSM8K: 1500; "validation" 320, "test" 1000

Importing this loads neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from ci_llm.embedded.stories import rows

__all__ = ["BASE_FOLDER", "rows"]

BASE_FOLDER = Path(__file__).parent / "base"
