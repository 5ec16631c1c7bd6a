"""Rows as other trainers write them: read right, or refused by the name of the field, and never half."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest

from ci_llm.cli.answering import lines_of
from ci_llm.cli.main import main
from ci_llm.config import Config
from ci_llm.data.prompts import prompts_of_file, prompts_of_lines
from ci_llm.data.rows import Chat, Completion, Labelled, ListedRows, Message, Pair, Rated, Row, Rows
from ci_llm.data.sources import load_rows, recognised
from ci_llm.data.units import are_numbers
from ci_llm.errors import BadInput, DataError
from ci_llm.run.start.loading import objective_by_rows
from tests.data.test_units import said

Json = dict[str, Any]


def chat(*turns: str, begin: int = 0) -> Chat:
    return Chat(tuple(Message(turn["role"], turn["content"]) for turn in said(*turns)), begin)


def pair(*given: str) -> Pair:
    return Pair(chat(*given, "a yes", begin=len(given)), chat(*given, "a no", begin=len(given)))


def read(row: Json, wanted: Any = "single", named: Any = None) -> Row | None:
    (found,) = rows(row, wanted=wanted, named=named)
    return found


def rows(*given: Json, wanted: Any = "single", named: Any = None) -> Rows:
    return recognised(ListedRows(given), "here", wanted=wanted, named=named)


def answered(**fields: Any) -> Json:
    return {"messages": [*said("u a"), {"role": "assistant", "content": "b", **fields}, *said("u c", "a d")]}


TEXT = {"type": "text"}
SAID = {"chosen": {"from": "gpt", "value": "yes"}, "rejected": {"from": "gpt", "value": "no"}}
OPENAI = {"input": {"messages": said("u hi")}, "preferred_output": said("a yes"), "non_preferred_output": said("a no")}
TALK = {"conversations": [{"from": "human", "value": "hi"}]}
RATED = Rated(chat("u hi", "a yes", begin=1), good=False)

#: name -> row, what the objective takes (None: what the columns say), the canonical row
READ: dict[str, tuple[Json, Any, Row]] = {
    "parts of LLaMA-Factory": (
        {"messages": [{"role": "user", "content": [TEXT | {"value": "h"}, TEXT | {"text": "i"}]}, *said("a yes")]},
        "single",
        chat("u hi", "a yes"),
    ),
    "an empty part": (
        {"messages": [{"role": "user", "content": [TEXT | {"text": ""}, TEXT | {"text": "hi"}]}, *said("a yes")]},
        "single",
        chat("u hi", "a yes"),
    ),
    "system beside prompt and completion": (
        {"system": "be", "prompt": "hi", "completion": "yes"},
        "single",
        chat("s be", "u hi", "a yes"),
    ),
    "an input beside a pair": (
        {"instruction": "say", "input": "hi", "chosen": "yes", "rejected": "no"},
        None,
        pair("u say\n\nhi"),
    ),
    "a system and a question beside a pair": (
        {"system": "be", "question": "hi", "chosen": "yes", "rejected": "no"},
        None,
        pair("s be", "u hi"),
    ),
    "history beside a pair": (
        {"question": "hi", "history": [["one", "two"]], "chosen": "yes", "rejected": "no"},
        "pairs",
        pair("u one", "a two", "u hi"),
    ),
    "a prompt alone stays text": (
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        None,
        Pair(Completion("hi", "yes"), Completion("hi", "no")),
    ),
    "pairs of LLaMA-Factory": (TALK | SAID, None, pair("u hi")),
    "pairs of LLaMA-Factory with a system": (TALK | SAID | {"system": "be"}, None, pair("s be", "u hi")),
    "pairs of Axolotl": ({"messages": said("u hi")} | SAID, "pairs", pair("u hi")),
    "ratings of LLaMA-Factory": (
        {"conversations": [*TALK["conversations"], {"from": "gpt", "value": "yes"}], "kto_tag": False},
        None,
        RATED,
    ),
    "ratings of LLaMA-Factory's Alpaca": (
        {"instruction": "say", "input": "hi", "output": "yes", "kto_tag": "true"},
        None,
        Rated(chat("u say\n\nhi", "a yes", begin=1), good=True),
    ),
    "a label beside messages": ({"messages": said("u hi", "a yes"), "label": 0}, "rated", RATED),
    "the last of several answers is rated": (
        {"messages": said("u a", "a b", "u c", "a d"), "label": True},
        "rated",
        Rated(chat("u a", "a b", "u c", "a d", begin=3), good=True),
    ),
    "a label beside messages is a class by itself": (
        {"messages": said("u hi", "a yes"), "label": 0},
        None,
        Labelled(chat("u hi", "a yes"), 0),
    ),
    "a prompt that the messages hold": (
        {"prompt": "hi", "messages": said("u hi", "a yes")},
        None,
        chat("u hi", "a yes"),
    ),
    "a prompt that is the whole row in other words": (
        {"instruction": "say it", "output": "yes sir", "prompt": "### Task: say it ### Answer: yes sir"},
        None,
        chat("u say it", "a yes sir"),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_rows_of_other_trainers_are_read(name: str) -> None:
    row, wanted, expected = READ[name]
    assert read(row, wanted) == expected
    form = rows(row, wanted=wanted).form
    unread = {*row} - {*form.columns.values()}
    assert unread <= {"prompt"}, "a column that belongs to the prompt is read, or its text is in one that is"


#: name -> row, what the objective takes, what the message says
REFUSED: dict[str, tuple[Json, Any, tuple[str, ...]]] = {
    "a part without text": (
        {"messages": [{"role": "user", "content": [TEXT]}, *said("a yes")]},
        "single",
        ("one text in a part", "text"),
    ),
    "a part with two texts": (
        {"messages": [{"role": "user", "content": [TEXT | {"text": "a", "value": "b"}]}, *said("a yes")]},
        "single",
        ("one text in a part",),
    ),
    "an unknown mark": (answered(keep=False), "single", ("keep 'False'", "weight, train, training, loss, loss_weight")),
    "marks of parts": (answered(train_detail=[{"train": False}]), "single", ("train_detail",)),
    "a mask": (answered(mask=1), "single", ("mask '1'",)),
    "half a mark": (answered(weight=0.5), "single", ("weight '0.5'", "1 or 0, true or false")),
    "pictures of a message": (
        {"messages": [{"role": "user", "content": "hi", "images": ["cat.png"]}, *said("a yes")]},
        "single",
        ("images",),
    ),
    "pairs of LLaMA-Factory as answers": (TALK | SAID, "single", ("preference pairs", "objective=dpo")),
    "pairs of OpenAI as answers": (OPENAI, None, ("preference pairs", "objective=dpo")),
    "pairs of ms-swift": (
        {"messages": said("u hi", "a yes"), "rejected_response": "no"},
        None,
        ("rejected_response", "chosen and rejected"),
    ),
    "ratings as answers": ({"messages": said("u hi", "a yes"), "label": 0}, "single", ("label", "objective=kto")),
    "tagged rows as answers": ({"instruction": "a", "output": "b", "kto_tag": False}, "single", ("kto_tag",)),
    "a prompt that ends with an answer": (
        {"messages": said("u hi", "a ho")} | SAID,
        "pairs",
        ("the prompt ends with an answer",),
    ),
    "a context beside messages": (
        {"prompt": said("u hi"), "response": "yes", "context": "Ann"},
        None,
        ("context", "messages"),
    ),
    "tools beside text": (
        {"prompt": "hi", "completion": "yes", "tools": [{"name": "add"}]},
        None,
        ("tools", "as messages"),
    ),
    **{
        f"a label of {label!r}": (
            {"prompt": "hi", "completion": "yes", "label": label},
            "rated",
            ("true or false", str(label)[:9]),
        )
        for label in ([True], {"a": 1}, 2, 0.5, "good")
    },
    "a rating of no answer": ({"messages": said("u a", "a b", "u c"), "label": 1}, "rated", ("the last message",)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_would_be_read_half_are_refused(name: str) -> None:
    row, wanted, words = REFUSED[name]
    with pytest.raises(DataError) as caught:
        read(row, wanted)
    assert all(word in f"{caught.value.what} {caught.value.hint}" for word in words)
    assert "here" in str(caught.value.where)


#: For every form that is recognised by its columns, a row of it.
FORMS: dict[str, Json] = {
    "messages": {"messages": said("u hi", "a yes")},
    "conversations": {"conversations": said("u hi", "a yes")},
    "prompt + completion": {"prompt": "hi", "completion": "yes"},
    "question + answer": {"question": "hi", "answer": "yes"},
    "instruction + output": {"instruction": "hi", "output": "yes"},
    "others": {"query": "hi", "response": "yes"},
    "SQuAD": {"context": "c", "question": "hi", "answers": {"text": ["yes"]}},
    "text": {"text": "hi"},
    "pairs": {"prompt": "hi", "chosen": "yes", "rejected": "no"},
    "pairs of messages": {"chosen": said("u hi", "a yes"), "rejected": said("u hi", "a no")},
    "pairs of LLaMA-Factory": TALK | SAID,
    "ratings": {"prompt": "hi", "completion": "yes", "label": True},
    "tagged chats": {"messages": said("u hi", "a yes"), "kto_tag": True},
    "labels": {"text": "hi", "label": 1},
}
BESIDE = ("prompt", "question", "instruction", "input", "context", "system", "system_prompt", "history", "tools")


@pytest.mark.parametrize("column", BESIDE)
@pytest.mark.parametrize("name", FORMS)
def test_text_that_belongs_to_a_prompt_is_read_or_refused(name: str, column: str) -> None:
    if column in FORMS[name]:
        return
    secret = {"history": [["xyzzy", "plugh"]], "tools": [{"name": "xyzzy"}]}.get(column, "xyzzy")
    try:
        told, word = repr(read(FORMS[name] | {column: secret}, None)), "xyzzy"
    except DataError as refused:
        told, word = str(refused), column
    assert word in told


@pytest.mark.parametrize("name", FORMS)
def test_other_columns_are_at_least_a_line(name: str) -> None:
    found = rows(FORMS[name] | {"notes": "xyzzy"}, wanted=None)
    assert "columns that are not used: notes" in found.description


def test_named_columns_leave_others_out_with_a_line() -> None:
    row = {"text": "hi", "prompt": "xyzzy"}
    with pytest.raises(DataError, match="prompt holds 'xyzzy', which belongs to the prompt"):
        read(row)
    found = rows(row, named={"text": "text"})
    assert [*found] == [Completion(None, "hi")]
    assert "columns that are not used: prompt" in found.description


@pytest.mark.parametrize(
    ("mark", "learned"),
    [
        ({"loss": False}, False),
        ({"loss": True}, True),
        ({"loss_weight": 0}, False),
        ({"loss_weight": 1.0}, True),
        ({"loss": "false"}, False),
        ({"weight": 0}, False),
        ({"weight": "0"}, False),
        ({"train": False}, False),
        ({"training": False}, False),
        ({"loss": None, "keep": None}, True),
        ({"prefix": False}, True),
    ],
)
def test_marks_of_other_trainers(mark: Json, learned: bool) -> None:
    found = read(answered(**mark))
    assert isinstance(found, Chat)
    assert found.messages[1].learned is learned


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"unit": None}, {"unit": None}),
        ('{"unit": null}', {"unit": None}),
        ("", {}),
        ("null", {}),
        (None, {}),
        ({}, {}),
        ("plain", "plain"),
    ],
)
def test_arguments_of_tools_are_kept(given: Any, kept: Any) -> None:
    call = {"function": {"name": "add", "arguments": given}}
    found = read({"messages": [*said("u hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert isinstance(found, Chat)
    assert found.messages[1].tool_calls[0]["function"]["arguments"] == kept


def test_nan_in_parquet_is_missing(tmp_path: Path) -> None:
    columns = {"instruction": ["hi"] * 2, "input": [float("nan")] * 2, "output": ["yes"] * 2}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = load_rows(Config(dataset_name=str(tmp_path / "a.parquet"), val_set_size=0), "train")
    assert [*found] == [chat("u hi", "a yes")] * 2


def test_arrow_adds_no_argument(tmp_path: Path) -> None:
    calls = [[{"name": "add", "arguments": {key: 1}}] for key in ("a", "b")]
    turns = [[*said("u hi"), {"role": "assistant", "content": "", "tool_calls": call}] for call in calls]
    pq.write_table(pa.table({"messages": turns}), tmp_path / "a.parquet")
    found = load_rows(Config(dataset_name=str(tmp_path / "a.parquet"), val_set_size=0), "train")
    assert [row.messages[1].tool_calls[0]["function"]["arguments"] for row in found] == [{"a": 1}, {"b": 1}]  # type: ignore[union-attr]


def test_numbers_of_csv_with_a_fraction_are_to_be_predicted() -> None:
    assert are_numbers(["1", "0.5"])
    assert not are_numbers(["1", "2", "3.0"])
    assert not are_numbers(["1.5", "red"])
    assert not are_numbers(["nan", "inf"])
    assert not are_numbers([])


def test_a_line_of_standard_input_that_is_no_text_is_named() -> None:
    stream = io.TextIOWrapper(io.BytesIO(b"one\ntwo\nthr\xff\n"), encoding="utf-8")
    lines = lines_of(stream)
    assert [next(lines), next(lines)] == ["one\n", "two\n"]
    with pytest.raises(BadInput, match="this is not UTF-8 text") as caught:
        next(lines)
    assert caught.value.where == "standard input, line 3"


@pytest.mark.parametrize(("count", "is_said"), [(101, True), (100, False)])
def test_many_whole_numbers_propose_regression(count: int, is_said: bool, caplog: pytest.LogCaptureFixture) -> None:
    given = rows(*({"text": "hi", "label": number} for number in range(count)), wanted=None)
    settled = objective_by_rows(Config(), [given], 8)
    assert settled["objective"] == "classification"
    assert ("objective=regression predicts them" in caplog.text) is is_said


def test_bytes_that_are_no_text_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "run", "ab\udcff"]) == 2
    assert "word 3 is not UTF-8 text: 'ab\\udcff'" in capfd.readouterr().err
    with pytest.raises(DataError, match="half a character") as caught:
        prompts_of_lines(['{"prompt": "hi"}', '{"prompt": "\\ud800"}'], "standard input")
    assert caught.value.where == "standard input, row 1 (counted from 0)"
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\xff\n")
    with pytest.raises(DataError, match="it is not UTF-8 text in line 2"):
        prompts_of_file(tmp_path / "a.txt")
