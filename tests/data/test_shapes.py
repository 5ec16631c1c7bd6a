"""Shapes of data that people have: each is trained on with the right loss mask, or refused with the reason."""

from __future__ import annotations

import gzip
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import zstandard
from datasets import Dataset

from ci_llm.config import Config, load_config
from ci_llm.data import sources
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import tokenize
from ci_llm.errors import DataError
from tests.data.test_encoder import PROMPT, byte_tokenizer, learned
from tests.support.messages import Messages

#: A template with tools, in the manner of Qwen.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
    "<|im_end|>\n{% endfor %}" + PROMPT
)
TOKENIZER = byte_tokenizer(TEMPLATE)
END, EOS = "<|im_end|>", "</s>"

Json = dict[str, Any]
Write = Callable[[Path], str]


@dataclass(frozen=True)
class Shape:
    """A data set, the keys it needs, and what is learned of its first training row."""

    write: Write
    learned: list[str]
    given: str
    keys: Json = field(default_factory=dict)
    num_rows: int = 2


def turn(role: str, content: Any) -> Json:
    return {"role": role, "content": content}


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


def asked(write: Write, question: str = "hi", answer: str = "yes", num_rows: int = 2, **keys: Any) -> Shape:
    """A shape of which a question is given, and the answer learned."""
    return Shape(write, [f"{answer}{END}"], user(question), keys, num_rows)


def jsonl(*rows: Json) -> Write:
    """A file with the rows twice, so that one copy can be held out of training."""

    def write(folder: Path) -> str:
        text = "".join(json.dumps(row) + "\n" for row in [*rows, *rows, *rows])
        (folder / "rows.jsonl").write_text(text)
        return str(folder / "rows.jsonl")

    return write


PACKERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}


def text(name: str, content: str) -> Write:
    def write(folder: Path) -> str:
        path = folder / name
        packed = PACKERS.get(path.suffix, bytes)(content.encode())
        path.write_bytes(packed)
        return str(path)

    return write


def mixed_turns(folder: Path) -> str:
    """Arrow gives every turn all keys that any turn has."""
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    full = [{"role": None, "content": None, **turn} for turn in turns]
    Dataset.from_list([{"messages": full}] * 3).to_parquet(folder / "rows.parquet")
    return str(folder / "rows.parquet")


def several(folder: Path) -> str:
    Dataset.from_list([{"question": f"q{n}", "answer": f"a{n}"} for n in range(3)]).to_parquet(folder / "one.parquet")
    (folder / "two.csv").write_text("prompt;response\np0;r0\np1;r1\np2;r2\n")
    return f"{folder}/one.parquet,{folder}/two.csv"


CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TOOL_TALK = [turn("user", "1+?"), {**turn("assistant", None), "tool_calls": [CALL]}, turn("tool", "2")]
CALLED = '<call>{"name": "add", "arguments": {"a": 1}}</call>'
ROW, TALK = {"question": "q", "answer": "a"}, [turn("user", "hi"), turn("assistant", "yes")]
ALPACA = {"instruction": "say", "output": "yes"}
IDS = TOKENIZER("q a</s>")["input_ids"]

SHAPES: dict[str, Shape] = {
    "alpaca": asked(jsonl(ALPACA), "say", "yes"),
    "alpaca with input": asked(jsonl({**ALPACA, "input": "it"}), "say\n\nit", "yes"),
    "alpaca with an empty input": asked(jsonl({**ALPACA, "input": ""}), "say", "yes"),
    "dolly": asked(
        jsonl({"instruction": "who", "context": "Ann ran", "response": "Ann", "category": "qa"}),
        "who\n\nAnn ran",
        "Ann",
    ),
    "sharegpt": asked(jsonl({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]})),
    "sharegpt with system and tools": Shape(
        jsonl(
            {
                "conversations": [
                    {"from": "human", "value": "1+?"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "2"},
                    {"from": "gpt", "value": "two"},
                ],
                "system": "count",
                "tools": json.dumps(TOOLS),
            }
        ),
        [CALLED + END, f"two{END}"],
        f"<|im_start|>tools\n{json.dumps(TOOLS)}{END}\n<|im_start|>system\ncount{END}\n{user('1+?')}",
    ),
    "messages": asked(jsonl({"messages": TALK})),
    "messages with tools": Shape(
        jsonl({"messages": [*TOOL_TALK, turn("assistant", "two")], "tools": TOOLS}),
        [CALLED + END, f"two{END}"],
        f"<|im_start|>tools\n{json.dumps(TOOLS)}{END}\n{user('1+?')}",
    ),
    "messages as JSON": asked(jsonl({"messages": json.dumps(TALK)})),
    "several turns": Shape(
        jsonl({"conversation": [turn(r, c) for r, c in zip(["User", "Assistant"] * 2, "abcd", strict=True)]}),
        [f"b{END}", f"d{END}"],
        user("a"),
    ),
    "prompt, completion": Shape(jsonl({"prompt": "2+2=", "completion": "4"}), [f"4{EOS}"], "<s>2+2="),
    "prompt, response": asked(jsonl({"prompt": "hi", "response": "yes"})),
    "input, output": asked(jsonl({"input": "hi", "output": "yes"})),
    "problem, solution": asked(jsonl({"problem": "hi", "solution": "yes"})),
    "SQuAD": asked(
        jsonl({"context": "c", "question": "q", "answers": {"text": ["a"], "answer_start": [0]}}), "c\n\nq", "a"
    ),
    "columns of any name": asked(
        jsonl({"id": 1, "frage": "hi", "Antwort": "yes"}), prompt_column="frage", answer_column="antwort"
    ),
    "better answers of preference pairs": asked(
        jsonl({"prompt": "hi", "chosen": "yes", "rejected": "no"}), prompt_column="prompt", answer_column="chosen"
    ),
    "completion only": Shape(jsonl({"completion": "once"}), [f"once{EOS}"], "<s>"),
    "text": Shape(jsonl({"text": "once"}), [f"once{EOS}"], "<s>"),
    "text of any name": Shape(jsonl({"body": "once", "id": "3"}), [f"once{EOS}"], "<s>", {"text_column": "body"}),
    "lines of text": Shape(text("rows.txt", "once\nupon\na\n"), [f"upon{EOS}"], "<s>"),
    "csv with spaces": asked(
        text("rows.csv", 'question, answer\n"q;1,2", a\n"q;1,2", "a"\n"q;1,2", a\n'), "q;1,2", "a"
    ),
    "csv with semicolons": asked(text("rows.csv", '\ufeffQuestion;Answer\n"q;1,2";a\nq;a\n"q;1,2";a\n'), "q", "a"),
    "tsv": asked(text("rows.tsv", "question\tanswer\nq\ta\nq\ta\nq\ta\n"), "q", "a"),
    "tsv.gz": asked(text("rows.tsv.gz", "question\tanswer\nq\ta\nq\ta\nq\ta\n"), "q", "a"),
    "csv.gz": asked(text("rows.csv.gz", "question|answer\nq|a\nq|a\nq|a\n"), "q", "a"),
    "jsonl.zst": asked(text("rows.jsonl.zst", f"{json.dumps(ROW)}\n" * 3), "q", "a"),
    "jsonl of lists of messages": asked(
        text("rows.jsonl", f"{json.dumps([turn('user', 'q'), turn('assistant', 'a')])}\n" * 3), "q", "a"
    ),
    "json of lists of messages": asked(
        text("rows.json", json.dumps([[turn("user", "q"), turn("assistant", "a")]] * 3)), "q", "a"
    ),
    "messages of a human and an ai": asked(
        jsonl({"conversations": [{"from": "human", "value": "q"}, {"from": "ai", "value": "a"}]}), "q", "a"
    ),
    "labelled answers whose columns are named": asked(
        jsonl({"prompt": "hi", "completion": "yes", "label": True}), prompt_column="prompt", answer_column="completion"
    ),
    "json below data": asked(text("rows.json", json.dumps({"data": [ROW] * 3})), "q", "a"),
    "json of splits": asked(
        text("rows.json", json.dumps({"train": [ROW] * 2, "test": [{"question": "v", "answer": "b"}]})), "q", "a"
    ),
    "parquet of turns with the keys of both styles": asked(mixed_turns),
    "list of files": asked(several, "q1", "a1", num_rows=4),
    "tokens": Shape(jsonl({"input_ids": IDS}), [" a</s>"], "q"),
    "tokens in a csv file": Shape(
        text("rows.csv", "input_ids,attention_mask\n" + f'"{[*IDS, 0]}","[1, 1, 1, 1, 0]"\n' * 3), [" a</s>"], "q"
    ),
    "tokens with labels": Shape(
        jsonl({"input_ids": [*IDS, 0], "labels": [-100, -100, *IDS[2:], -100], "attention_mask": [1] * 4 + [0]}),
        ["a</s>"],
        "q ",
    ),
}
REFUSED: dict[str, Json] = {
    "preference pairs without a prompt": {"Chosen": "Human: hi Assistant: yes", "Rejected": "Human: hi Assistant: no"},
    "pictures": {"messages": [turn("user", [{"type": "image"}]), turn("assistant", "cat")]},
    "pictures beside messages": {"messages": [turn("user", "what?"), turn("assistant", "cat")], "images": ["cat.png"]},
    "ratings that are no labels": {"prompt": "2 + 2?", "completion": "5", "label": 4},
    "multiple choice": {"question": "2 + 2?", "choices": ["3", "4"], "answer": 1},
    "a line that is a list of numbers": [1, 2],
    "numbers only": {"x": 1, "y": 2},
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_trained_on_with_the_right_loss_mask(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources._DataSet, "_evenly", True)  # the first row is held out, of every shape
    shape = SHAPES[name]
    (tmp_path / "data").mkdir()
    config = Config(dataset_name=shape.write(tmp_path / "data"), **shape.keys)
    rows, evaluated = load_rows(config, "train"), load_rows(config, "eval")
    found = tokenize(rows, TOKENIZER, max_seq_length=400, cache_folder=tmp_path / "tokens")
    assert len(found) == shape.num_rows
    assert learned(found[0], TOKENIZER) == shape.learned
    whole = TOKENIZER.decode(found[0].input_ids)
    assert whole.startswith(shape.given + shape.learned[0])
    assert len(tokenize(evaluated, TOKENIZER, max_seq_length=400, cache_folder=tmp_path / "tokens")) >= 1


#: What next-token prediction cannot be trained on, and other objectives can.
REFUSED_BY_SFT: dict[str, Json] = {
    "preference pairs": {"prompt": "hi", "chosen": "yes", "rejected": "no"},
    "labelled answers of KTO": {"prompt": "2 + 2?", "completion": "5", "label": False},
}


@pytest.mark.parametrize("name", REFUSED_BY_SFT)
def test_keys_of_other_objectives_are_refused_with_the_objectives_that_take_them(
    name: str, tmp_path: Path, messages: Messages
) -> None:
    with pytest.raises(DataError) as caught:
        load_rows(Config(dataset_name=jsonl(REFUSED_BY_SFT[name])(tmp_path), objective="sft"), "train")
    messages.same(caught.value)


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_cannot_be_trained_on_are_refused_with_the_reason(
    name: str, tmp_path: Path, messages: Messages
) -> None:
    with pytest.raises(DataError) as caught:
        list(load_rows(Config(dataset_name=jsonl(REFUSED[name])(tmp_path)), "train"))
    messages.same(caught.value)
    assert str(tmp_path) in str(caught.value.where)


def test_the_hint_about_a_column_with_a_comma_can_be_typed(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text('"Frage, lang",Antwort\nq,a\nq,a\n')
    name = f"dataset_name={tmp_path / 'rows.csv'}"
    with pytest.raises(DataError) as caught:
        load_rows(load_config(None, [name]), "train")
    typed = str(caught.value.hint).removeprefix("say ").partition(", or text_column=")[0]
    words = [word for word in shlex.split(typed) if word != "and"]
    assert words == ["prompt_column=Frage, lang", "answer_column=Antwort"]
    assert len(load_rows(load_config(None, [name, *words]), "train")) == 1
