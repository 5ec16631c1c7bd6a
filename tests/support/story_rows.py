"""Rows of the embedded task as files, for what takes a data set by its path."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

from ci_llm.config import Config
from ci_llm.data.rows import Chat
from ci_llm.data.sources import load_rows


def write_stories(folder: Path, rows: int) -> Path:
    """`train.jsonl` and `test.jsonl` with questions and answers, so many rows each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in (("train", "train"), ("test", "validation")):
        chats = islice(load_rows(Config(eval_split=split), "train" if split == "train" else "eval"), rows)
        lines = [
            json.dumps({"question": chat.messages[0].content, "answer": chat.messages[1].content})
            for chat in chats
            if isinstance(chat, Chat)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder
