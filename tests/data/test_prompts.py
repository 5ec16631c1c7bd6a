"""Prompts are read from lines, JSON lines and tables, with or without the answers that training would need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from ci_llm.data.prompts import prompts_of_file, prompts_of_lines, texts_of_rows
from ci_llm.errors import DataError

CHAT = [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}, {"role": "user", "content": "q2"}]
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "q", "answer": "a"}, "q"),
        ({"question": "q"}, "q"),
        ({"instruction": "do", "input": "it", "output": "done"}, "do\n\nit"),
        ({"instruction": "do", "input": ""}, "do"),
        ({"context": "c", "question": "q", "answers": {"text": ["a"]}}, "c\n\nq"),
        ({"text": "Once"}, "Once"),
        ({"text": "Once", "source": "a book"}, "Once"),
        ({"text": "do. done", "instruction": "do", "output": "done"}, "do"),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, "p"),
        ({"system": "s", "question": "q", "answer": "a"}, [SYSTEM, CHAT[0] | {"content": "q"}]),
        ({"messages": CHAT}, CHAT),
        ({"messages": CHAT[:2]}, "q1"),
        ({"conversations": [{"from": "human", "value": "q1"}, {"from": "gpt", "value": "a1"}]}, "q1"),
        ({"messages": json.dumps(CHAT)}, CHAT),
        ({"prompt": CHAT, "completion": [{"role": "assistant", "content": "a2"}]}, CHAT),
        ({"prompt": CHAT}, CHAT),
        ({"messages": CHAT, "tools": [{"name": "add"}]}, {"messages": CHAT, "tools": [{"name": "add"}]}),
        ({"messages": CHAT[:1], "tools": ""}, "q1"),
    ],
)
def test_a_row_gives_its_prompt_without_its_answer(row: dict[str, Any], prompt: Any, tmp_path: Path) -> None:
    line = json.dumps(row)
    assert prompts_of_lines([line + "\n", "\n"], "here") == [prompt]
    (tmp_path / "rows.jsonl").write_text(f"{line}\n{line}\n")
    assert prompts_of_file(tmp_path / "rows.jsonl") == [prompt, prompt]


def test_lines_are_prompts(tmp_path: Path) -> None:
    text = "\ufefffirst \n\n  {not json\nthird 🙂\r\n"
    for name in ("prompts", "prompts.txt", "prompts.md"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert prompts_of_file(tmp_path / name) == ["first ", "  {not json", "third 🙂"]


@pytest.mark.parametrize("texts", [["{a}", "{b}"], ['{"question": "q"}', "what is {}?"]])
def test_lines_that_are_not_rows_are_prompts(texts: list[str]) -> None:
    assert prompts_of_lines(texts, "here") == texts


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    odd = "one\u2028two\u0085three\x0cfour"
    (tmp_path / "prompts.txt").write_text(f"{odd}\r\nnext\n", encoding="utf-8", newline="")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": odd}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert prompts_of_file(tmp_path / "prompts.txt") == [odd, "next"]
    assert prompts_of_file(tmp_path / "rows.jsonl") == [odd]


def test_tables_are_read_as_training_reads_them(tmp_path: Path) -> None:
    data = Dataset.from_dict({"question": ["q1", "q2"], "answer": ["a1", "a2"]})
    data.to_csv(tmp_path / "rows.csv")
    data.to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(list(data)))
    for name in ("rows.csv", "rows.parquet", "rows.json"):
        assert prompts_of_file(tmp_path / name) == ["q1", "q2"]


TOOLS = [{"name": "add"}]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"text": "Once"}, "Once"),
        ({"text": 0}, "0"),
        ({"sentence": 2.5}, "2.5"),
        ({"messages": CHAT}, CHAT),
        ({"messages": CHAT[:1]}, CHAT[:1]),
        ({"messages": CHAT, "tools": TOOLS}, {"messages": CHAT, "tools": TOOLS}),
        ({"prompt": "p", "completion": "c"}, ("p", "c")),
        ({"prompt": 3, "completion": 0}, ("3", "0")),
        ({"question": "q", "answer": "a", "context": "c"}, ("c\n\nq", "a")),
        ({"prompt": "q1", "chosen": CHAT[1:2], "rejected": CHAT[1:2]}, ("q1", "a1")),
        ({"prompt": CHAT[:1], "completion": CHAT[1:2]}, ("q1", "a1")),
        ({"prompt": CHAT, "completion": CHAT[1]}, (CHAT, "a1")),
        ({"prompt": CHAT[:1], "completion": CHAT[1:2], "tools": TOOLS}, ({"messages": CHAT[:1], "tools": TOOLS}, "a1")),
        ({"system": "s", "prompt": "q", "completion": "a"}, ([SYSTEM, CHAT[0] | {"content": "q"}], "a")),
    ],
)
def test_a_row_to_be_scored_gives_its_text_or_its_prompt_and_its_answer(row: dict[str, Any], text: Any) -> None:
    assert prompts_of_lines([json.dumps(row)], "here", texts_of_rows) == [text]


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"text": " "}, "a row has no text"),
        ({"prompt": "p", "completion": None}, "a row has no text"),
        ({"chosen": "c", "rejected": "r"}, "No column holds a text; the columns are: chosen, rejected"),
        ({"prompt": "p", "completion": CHAT}, "the last message is something else"),
        ({"prompt": "p", "completion": {"a": 1}}, "a row cannot be read: expected text"),
        ({"height": 3}, "No column holds a text; the columns are: height"),
    ],
)
def test_a_row_that_cannot_be_scored_is_named(row: dict[str, Any], what: str) -> None:
    with pytest.raises(DataError, match=what):
        prompts_of_lines([json.dumps(row)], "here", texts_of_rows)


@pytest.mark.parametrize(
    ("name", "text", "what", "where"),
    [
        ("f", "\n", "there is no prompt", "f"),
        ("f.jsonl", '{"question": "q"}\n{"question": ', "a row is not a JSON object", "row 1 (counted from 0)"),
        ("f", '{"question": "q"}\n {"question": ', "a row is not a JSON object", "f, row 1 (counted from 0)"),
        ("f.jsonl", '{"question": "q"}\n{"question": " "}', "a row has no prompt", "row 1 (counted from 0)"),
        ("f.jsonl", '{"height": 3}', "No column holds a prompt; the columns are: height", "f.jsonl"),
        ("f.jsonl", '{"messages": [{"content": "q"}]}', "a message has no role", "row 0 (counted from 0)"),
        ("f.jsonl", '{"messages": []}', "a row has no prompt", "row 0 (counted from 0)"),
        ("f.jsonl", '{"input_ids": [1, 2]}', "No column holds a prompt; the columns are: input_ids", "f.jsonl"),
    ],
)
def test_rows_that_cannot_be_prompts_are_named(tmp_path: Path, name: str, text: str, what: str, where: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        prompts_of_file(tmp_path / name)
    assert what in caught.value.what
    assert str(caught.value.where).endswith(where)
