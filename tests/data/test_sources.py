"""Data people have: every form and file format gives the same rows, and every bad input one clear message."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from datasets.exceptions import DatasetGenerationError
from pyarrow import parquet

from ci_llm.config import Config
from ci_llm.data import sources
from ci_llm.data.columns import find_form
from ci_llm.data.prompts import texts_of_rows
from ci_llm.data.rows import Chat, Completion, ListedRows, Message, Pair, question_of
from ci_llm.data.sources import EVAL_SPLITS, load_rows, recognised
from ci_llm.errors import DataError
from tests.data.test_encoder import talk as chat
from tests.support.messages import Messages

ROWS = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3+4=<<3+4=7>>7\n#### 7"},
    {"question": "Ben bakes 12 rolls, and eats 2. How many?", "answer": "12-2=<<12-2=10>>10\n#### 10"},
    {"question": "Café “Zum Löwen” sells 5 cakes at 3 € each.", "answer": "5*3=15\n#### 15"},
]


@pytest.fixture(autouse=True)
def _no_network_and_an_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


EXPECTED = [chat(row["question"], row["answer"]) for row in ROWS]
TURNS = USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}

FORMS: dict[str, tuple[dict[str, Any], Chat | Completion | None]] = {
    "messages without an answer": ({"messages": [USER]}, None),
    "prompt + completion after a talk": (
        {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
        chat("hi", "yes", "hi", "yes", trained_from=3),
    ),
    "messages of a role of the template": ({"messages": [USER, {"role": "critic", "content": "no"}]}, None),
    "messages of it beside an answer": (
        {"messages": [{"role": "assistant1", "content": "hi"}, ASSISTANT]},
        Chat((Message("assistant1", "hi"), Message("assistant", "yes"))),
    ),
    "question + number": ({"question": "2+2?", "answer": 4}, chat("2+2?", "4")),
    "question + nothing": ({"question": "hi", "answer": None}, None),
    "nothing + answer": ({"question": " ", "answer": "yes"}, None),
    "SQuAD without an answer": (
        {"context": "c", "question": "q", "answers": {"text": [], "answer_start": []}},
        None,
    ),
}


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("name", FORMS)
def test_a_form_of_row_is_recognised(name: str) -> None:
    raw, expected = FORMS[name]
    rows = recognised(Dataset.from_list([raw, raw]), "here")
    assert list(rows) == [expected, expected]
    assert rows[1] == expected


def test_the_question_of_a_row_is_the_turn_before_the_last_learned_answer() -> None:
    """Answers that are not learned do not count."""
    assert question_of(chat("a", "b", "c", "d")) == "c"
    assert question_of(chat("a", "b", "c")) == "a"
    marked = Message("assistant", "d", learned=False)
    assert question_of(Chat((*chat("a", "b", "c").messages, marked))) == "a"
    assert question_of(Chat((Message("assistant", "b"), Message("user", "c")))) is None
    assert [question_of(Completion("p", "c")), question_of(Completion(None, "c"))] == ["p", None]


BAD_ROWS: dict[str, tuple[dict[str, Any], str]] = {
    "no role": ({"messages": [{"content": "hi"}]}, "a message has no role; its keys are content"),
    "misspelt role": (
        {"messages": [USER, {"role": "asistant", "content": "yes"}]},
        "no turn is of the assistant, and the role 'asistant' may be a misspelt 'assistant'",
    ),
    "not messages": ({"messages": ["hi"]}, "expected a message with role and content, found 'hi'"),
    "not a list": ({"messages": "hi"}, "expected a list of messages, found str"),
    "a list as Python prints it": ({"messages": "[{'role': 'user'}]"}, "found a text that is not JSON"),
    "text for content": ({"messages": [{"role": "user", "text": "hi"}]}, "a message has text in place of content"),
    "tools": (
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"f": 1}]}]},
        "expected a call of a tool with a name, found",
    ),
    "not text": ({"text": {"a": 1}}, "expected text, found dict"),
    "answers": ({"context": "c", "question": "q", "answers": {"text": "a"}}, "answers.text to be a list"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_malformed_row_is_named(name: str) -> None:
    raw, reason = BAD_ROWS[name]
    rows = recognised(Dataset.from_list([raw]), "here")
    with pytest.raises(DataError, match="A row of the data set cannot be read as") as caught:
        list(rows)
    assert reason in caught.value.what
    assert caught.value.where == "here, row 0 (counted from 0)"


def test_columns_are_looked_for_in_order() -> None:
    columns = ["text", "output", "instruction", "answer", "question", "completion", "prompt", "messages"]
    found = []
    while form := find_form(columns):
        found.append(form.name)
        columns = [column for column in columns if column not in form.columns.values()]
    assert found == ["messages", "prompt + completion", "question + answer", "instruction + output", "text"]


def _folder(data: Dataset, at: Path) -> None:
    DatasetDict({"train": data, "test": data}).save_to_disk(at)


def _jsonl(data: Dataset, at: Path) -> None:
    data.to_json(at, force_ascii=False)


def _parts(data: Dataset, at: Path) -> None:
    data.select(range(2)).to_parquet(at.with_name("part-0.parquet"))
    data.select(range(2, len(data))).to_parquet(at.with_name("part-1.parquet"))


def _plain_folder(data: Dataset, at: Path) -> None:
    at.mkdir()
    data.to_parquet(at / "train-00000-of-00001.parquet")
    data.select([0]).to_parquet(at / "test.parquet")
    (at / "README.md").write_text("# not data")


#: By the name of the data set, how it is written.
WAYS: dict[str, Callable[[Dataset, Path], object]] = {
    "saved": _folder,
    "single": Dataset.save_to_disk,
    "single/data-00000-of-00001.arrow": lambda data, at: data.save_to_disk(at.parent),
    "rows.jsonl": _jsonl,
    "rows.json": lambda data, at: at.write_text(json.dumps(list(data))),
    "rows.jsonl.gz": _jsonl,  # which packs it
    "rows.csv": Dataset.to_csv,
    "rows.parquet": Dataset.to_parquet,
    "part-*.parquet": _parts,
    "plain": _plain_folder,
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("name", WAYS)
def test_every_file_format_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    data = Dataset.from_list(ROWS)
    WAYS[name](data, tmp_path / name)
    # Naming a split to evaluate on keeps every row for training.
    rows = load_rows(Config(dataset_name=str(tmp_path / name), eval_split="train"), "train")
    assert list(rows) == EXPECTED
    assert rows.fingerprint == recognised(data, "memory").fingerprint
    assert rows.description[0].startswith("3 rows of question + answer from ")


def test_a_name_like_a_pattern_means_itself(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("one\n")
    (tmp_path / "a1.txt").write_text("other\n")
    rows = load_rows(Config(dataset_name=str(tmp_path / "a[1].txt"), eval_split="train"), "train")
    assert list(rows) == [Completion(None, "one")]


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "values",
    [
        ["007", "1.50", "12345678901234567890"],
        ["4", "", "5"],
        ["None", "NA", "null", "nan", "yes"],
        ["true", "TRUE"],
        [*map(str, range(10_000)), "four"],  # the next block of the reader has another type
        ["a" * 140_000, "short"],  # Python's own reader of CSV refuses it by default
    ],
    ids=lambda values: ",".join(values[-3:])[-40:],
)
def test_a_value_of_a_csv_file_is_its_text(values: list[str], tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer\n" + "".join(f"q,{value}\n" for value in values))
    rows = load_rows(Config(dataset_name=str(tmp_path / "a.csv"), eval_split="train"), "train")
    assert [row.messages[-1].content if isinstance(row, Chat) else "" for row in rows] == values


def _answers(name: Path) -> list[Any]:
    rows = load_rows(Config(dataset_name=str(name), val_set_size=0), "train")
    return [row.messages[-1].content if isinstance(row, Chat) else None for row in rows]


#: Values in JSON, and the texts that they are.
VALUES = {
    '"yes"': "yes",
    "7": "7",
    "0.3": "0.3",
    "12345678901234567890123": "12345678901234567890123",
    '"2024-01-01"': "2024-01-01",
    '"true"': "true",
    '"1.50"': "1.50",
    '"[1]"': "[1]",
    '[{"type": "text", "text": "part"}]': "part",
    "null": None,
    "NaN": None,
}


@pytest.mark.parametrize("kind", ["lines", "one file each", "list", "splits"])
def test_a_value_of_a_json_file_keeps_its_own_type(kind: str, tmp_path: Path) -> None:
    """An earlier file, or an earlier row, may hold a value of another type."""
    rows = [f'{{"question": "q", "answer": {value}}}' for value in VALUES for _ in range(3)]
    name = "*.jsonl" if kind == "one file each" else "rows.json"
    if kind == "one file each":
        for number, row in enumerate(rows):
            (tmp_path / f"{number:02}.jsonl").write_text(f"{row}\n")
    else:
        text = {
            "lines": "\n".join(rows),
            "list": f"[{', '.join(rows)}]",
            "splits": f'{{"version": 0.5, "data": [{", ".join(rows)}]}}',
        }
        (tmp_path / name).write_text(text[kind])
    assert _answers(tmp_path / name) == [text for text in VALUES.values() for _ in range(3)]


def test_a_column_may_begin_late(tmp_path: Path) -> None:
    lines = ['{"id": 1}', '{"id": 2, "note": null}', '{"question": "q", "answer": "a", "note": [1]}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows = load_rows(Config(dataset_name=str(tmp_path / "a.jsonl"), val_set_size=0), "train")
    assert list(rows) == [None, None, chat("q", "a")]
    assert "columns that are not used: id, note" in rows.description


def test_columns_like_those_of_agent_traces_are_columns(tmp_path: Path) -> None:
    row = {"id": "1", "source": "x", "model": "m", "system_prompt": "be kind", "messages": TURNS}
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    rows = load_rows(Config(dataset_name=str(tmp_path / "a.jsonl"), val_set_size=0), "train")
    assert list(rows) == [Chat((Message("system", "be kind"), *chat("hi", "yes").messages))] * 2


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for number, answer in enumerate("ab"):
        path.write_text(f'{{"question": "q", "answer": "{answer}"}}\n')
        os.utime(path, ns=(number, number))
        assert _answers(path) == [answer]


def test_no_bars_in_a_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _jsonl(Dataset.from_list(ROWS), tmp_path / "rows.jsonl")
    load_rows(Config(dataset_name=str(tmp_path / "rows.jsonl")), "train")
    assert "it/s" not in capfd.readouterr().err
    assert not datasets.are_progress_bars_disabled()


def test_the_fingerprint_of_a_chat_without_marks_is_that_of_older_versions() -> None:
    called = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    answers = [{"role": "assistant", "content": None, "tool_calls": [called]}, {"role": "assistant", "content": "two"}]
    result = {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"}
    chats = [[{"role": "user", "content": "1+?"}, answers[0], result, answers[1]], [{"role": "user", "content": "hi"}]]
    raw = ListedRows([{"messages": chat} for chat in chats])
    assert recognised(raw, "x").fingerprint == "f94254f67658fb0c2cfd7553505918be"
    weighed = ListedRows([{"messages": [*chats[0][:-1], answers[1] | {"weight": 0}]}, {"messages": chats[1]}])
    assert recognised(weighed, "x").fingerprint != recognised(raw, "x").fingerprint


def test_the_fingerprint_is_of_the_content() -> None:
    changed = [*ROWS[:2], {**ROWS[2], "answer": "5*3=15\n#### 16"}]
    prints = {recognised(Dataset.from_list(rows), "x").fingerprint for rows in (ROWS, changed, ROWS[::-1])}
    assert len(prints) == 3


def test_the_embedded_rows_need_no_network() -> None:
    config = Config(dataset_name="embedded")
    assert len(load_rows(config, "train")) == 1500
    evaluated = load_rows(config, "eval")
    assert len(evaluated) == config.eval_samples
    assert "split test" in evaluated.where
    assert "split validation" in load_rows(Config(dataset_name="embedded", eval_split="validation"), "eval").where


def _numbered(count: int, path: Path) -> str:
    data = Dataset.from_list([{"question": f"q{number}", "answer": f"a{number}"} for number in range(count)])
    data.to_parquet(path / "rows.parquet")
    return str(path / "rows.parquet")


@pytest.fixture
def evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of every data set are taken as those of the embedded one."""
    monkeypatch.setattr(sources._DataSet, "_evenly", True)


def _questions(config: Config, split: Any) -> list[str | None]:
    return [question_of(row) for row in load_rows(config, split) if row]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (9, 1), (57, 5), (5000, 400)])
def test_without_a_split_to_evaluate_on_rows_are_held_out(count: int, held_out: int, tmp_path: Path) -> None:
    config = Config(dataset_name=_numbered(count, tmp_path))
    training, evaluated = _questions(config, "train"), _questions(config, "eval")
    assert len(evaluated) == held_out
    assert {*training, *evaluated} == {f"q{number}" for number in range(count)}
    assert len(training) + len(evaluated) == count
    assert training == sorted(training, key=lambda question: int(str(question)[1:]))
    assert any(f"{held_out} rows are held out" in line for line in load_rows(config, "train").description)


@pytest.mark.slow
def test_the_held_out_rows_do_not_depend_on_limits(tmp_path: Path) -> None:
    name = _numbered(50, tmp_path)
    usual = _questions(Config(dataset_name=name), "train")
    assert _questions(Config(dataset_name=name, eval_samples=2), "train") == usual
    limited = Config(dataset_name=name, max_train_samples=3)
    assert _questions(limited, "train") == usual[:3]
    assert _questions(limited, "eval") == _questions(Config(dataset_name=name), "eval")
    assert "training on the first 3 of 50 rows" in load_rows(limited, "train").description


def test_a_data_set_without_an_answer_is_left_to_the_training_to_refuse(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("question,answer\n" + "q,\n" * 20)
    assert list(load_rows(Config(dataset_name=str(tmp_path / "rows.csv")), "train")) == [None] * 18


def test_a_single_row_is_evaluated_on_itself(tmp_path: Path) -> None:
    config = Config(dataset_name=_numbered(1, tmp_path))
    assert _questions(config, "train") == _questions(config, "eval") == ["q0"]
    judged = load_rows(config, "eval")
    assert (judged.trained_on, judged.description[-1].partition(":")[0]) == (
        "all",
        "1 of the 1 rows to evaluate on are rows to train on",
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("settings", "count", "word"),
    [
        ({}, 0, "none"),
        ({"eval_split": "train"}, 40, "all"),
        ({"eval_split": "train", "eval_samples": 10}, 10, "all"),
        ({"eval_split": "train", "eval_samples": 10, "max_train_samples": 9}, 2, "some"),
        ({"dataset_split": "other", "eval_split": "other"}, 40, "all"),
    ],
)
def test_rows_that_are_trained_on_are_distinguished_from_held_out_rows(
    settings: dict[str, Any], count: int, word: str, tmp_path: Path
) -> None:
    config = Config(**{"dataset_name": _numbered(40, tmp_path), **settings})
    judged = load_rows(config, "eval")
    assert (judged.num_trained_on, judged.trained_on) == (count, word)
    assert len({*_questions(config, "train")} & {*_questions(config, "eval")}) == count
    assert any("scores show what is remembered" in line for line in judged.description) is (count > 0)


@pytest.mark.usefixtures("evenly")
def test_evaluation_rows_are_spread_over_the_split(tmp_path: Path) -> None:
    config = Config(dataset_name=_numbered(40, tmp_path), eval_split="train", eval_samples=4)
    assert _questions(config, "eval") == ["q0", "q10", "q20", "q30"]
    assert len(_questions(config, "train")) == 40


@pytest.mark.slow
def test_rows_to_evaluate_on_are_drawn_by_the_seed(tmp_path: Path) -> None:
    """Every tenth row is of another kind, so that evenly spread rows would be all of that kind or none."""
    name = _numbered(400, tmp_path)
    for keys in ({}, {"eval_split": "train", "eval_samples": 40}):
        drawn = [_questions(Config(dataset_name=name, seed=seed, **keys), "eval") for seed in (1, 2, 1)]
        assert drawn[0] == drawn[2] != drawn[1]
        for questions in drawn:
            numbers = [int(str(question)[1:]) for question in questions]
            assert len({*numbers}) == 40
            assert numbers == sorted(numbers)
            assert 0 < sum(number % 10 == 0 for number in numbers) < 20
    fewer = Config(dataset_name=name, seed=1, eval_split="train", eval_samples=20)
    assert {*_questions(fewer, "eval")} < {*drawn[0]}
    assert (
        "40 rows are held out for it, drawn by seed 1"
        in load_rows(Config(dataset_name=name, seed=1), "train").description[-1]
    )


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", EVAL_SPLITS)
def test_the_split_to_evaluate_on_is_found(name: str, tmp_path: Path) -> None:
    DatasetDict({"train": Dataset.from_list(ROWS), name: Dataset.from_list(ROWS[:1])}).save_to_disk(tmp_path / "d")
    config = Config(dataset_name=str(tmp_path / "d"))
    assert list(load_rows(config, "train")) == EXPECTED
    assert list(load_rows(config, "eval")) == EXPECTED[:1]


@pytest.mark.slow
def test_test_rows_are_left_for_a_last_evaluation_where_there_are_others(tmp_path: Path) -> None:
    for number, name in enumerate(EVAL_SPLITS[:-1]):
        splits = {"train": ROWS, "test": ROWS[1:], name: ROWS[:1]}
        folder = tmp_path / str(number)
        DatasetDict({split: Dataset.from_list(rows) for split, rows in splits.items()}).save_to_disk(folder)
        for keys in ({"dataset_name": str(folder)}, {"eval_dataset_name": str(folder)}):
            assert list(load_rows(Config(**keys), "eval")) == EXPECTED[:1]
    assert "split validation" in load_rows(Config(dataset_name="embedded", dataset_split="test"), "eval").where


def _write(text: str, name: str, encoding: str = "utf-8") -> Callable[[Path], dict[str, Any]]:
    def write(path: Path) -> dict[str, Any]:
        (path / name).write_text(text, encoding=encoding)
        return {"dataset_name": str(path / name)}

    return write


def _cut_short(path: Path) -> dict[str, Any]:
    _jsonl(Dataset.from_list(ROWS), name := path / "rows.jsonl.gz")
    name.write_bytes(name.read_bytes()[:-12])
    return {"dataset_name": str(name)}


def _saved_badly(path: Path) -> dict[str, Any]:
    _folder(Dataset.from_list(ROWS), path / "saved")
    shutil.rmtree(path / "saved" / "train")
    return {"dataset_name": str(path / "saved")}


def _two_kinds(path: Path) -> dict[str, Any]:
    (path / "b.csv").write_text("text\nx\n")
    for name in ("a.jsonl", "c.jsonl"):
        (path / name).write_text('{"text": "x"}\n')
    return {"dataset_name": str(path)}


BAD_INPUT: dict[str, Callable[[Path], dict[str, Any]]] = {
    "missing file": lambda path: {"dataset_name": f"{path}/no.jsonl"},
    "missing folder": lambda path: {"dataset_name": f"{path}/no"},
    "glob of nothing": lambda path: {"dataset_name": f"{path}/*.csv"},
    "empty folder": lambda path: {"dataset_name": str(path)},
    "folder of two kinds": _two_kinds,
    "unknown kind": _write("x", "rows.zip"),
    "broken json": _write('{"text": "x"}\n\n{oops\n{"text": "y"}\n', "a.jsonl"),
    "broken json beyond the first block of Arrow": _write(
        '{"text": "%s"}\n' % ("x" * 2_000_000) * 7 + '{"text": "x\n', "a.jsonl"
    ),
    "broken list of rows": _write('[\n  {"text": "x"},\n]\n', "a.json"),
    "broken lines in .json": _write('{"text": "x"}\n{"text": "y"}\n{"text": z}\n', "a.json"),
    "csv with a value too many": _write("question,answer\na,b,c\nd,e\n", "a.csv"),
    "csv that is not UTF-8": _write("question,answer\nStraße?,ß\n", "a.csv", "latin-1"),
    "lines of json that are not UTF-8": _write('{"question": "Straße?", "answer": "ß"}\n', "a.jsonl", "latin-1"),
    "json that is not UTF-8": _write('[{"messages": [{"role": "user", "content": "ß"}]}]', "a.json", "latin-1"),
    "half a character": _write('{"text": "x"}\n{"text": "\\ud83d\\ude00"}\n{"text": "\\uD83d"}\n', "a.jsonl"),
    "lines that are no rows": _write('{"text": "x"}\n"y"\n', "a.jsonl"),
    "half a download": _cut_short,
    "broken parquet": _write("PAR1", "a.parquet"),
    "broken folder": _saved_badly,
    "empty file": _write("", "a.jsonl"),
    "blank file": _write("\n\n", "a.jsonl"),
    "header only": _write("question,answer\n", "a.csv"),
    "json of splits and something else": _write(
        '{"train": [{"question": "q", "answer": "a"}], "meta": {"a": 1}}', "a.json"
    ),
    "no usable column": _write('{"a": 1, "b": 2}\n', "a.jsonl"),
    "hub id offline": lambda _: {"dataset_name": "openai/gsm8k"},
    "word": lambda _: {"dataset_name": "gsm8kk"},
    "unknown split": lambda _: {"dataset_name": "embedded", "dataset_split": "training"},
}


def test_a_later_row_that_is_not_utf8_is_one_message_too(tmp_path: Path) -> None:
    texts = pa.array([b"a", "ß".encode("latin-1")]).view(pa.string())  # Arrow takes any bytes
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"the text is not UTF-8: 'utf-8' codec(.|\n)*save it as UTF-8"):
        [*load_rows(Config(dataset_name=str(tmp_path / "a.parquet"), val_set_size=0), "train")]


#: What `datasets`, Arrow, the hub's client and Python's codecs say of their own.
WORDS_OF_OTHERS = r"(be opened: |as parquet: |from the hub: |'utf-8' codec |Compressed file ).*"


@pytest.mark.fast_cases(9)
@pytest.mark.parametrize("name", BAD_INPUT)
def test_bad_input_is_one_clear_message(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], messages: Messages
) -> None:
    settings = BAD_INPUT[name](tmp_path)
    with pytest.raises(DataError) as caught:
        load_rows(Config(**settings), "train")
    messages.same(caught.value, theirs=WORDS_OF_OTHERS)
    assert settings["dataset_name"] in str(caught.value.where)
    assert caught.value.hint
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.what
    assert "Failed to" not in capfd.readouterr().err, "`datasets` tells it in its own words"


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_a_cache_that_cannot_be_made_is_not_blamed_on_the_data(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text('{"text": "a"}\n' if name == "a.jsonl" else "text\na\n")
    (tmp_path / "no folder").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "no folder" / "hf")
    with pytest.raises(DataError, match="cannot be kept in the cache of datasets: ") as caught:
        load_rows(Config(dataset_name=str(tmp_path / name)), "train")
    assert caught.value.where == f"HF_DATASETS_CACHE: {tmp_path / 'no folder' / 'hf'}"
    assert "or set HF_DATASETS_CACHE to another folder" in str(caught.value.hint)


class DroppedError(Exception):
    """An error like that of the hub's client, which is neither an OSError nor one of this package."""


FULL = DatasetGenerationError("An error occurred while generating the dataset")
FULL.__cause__ = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("name", "error", "told", "where", "hint"),
    [
        ("openai/gsm8k", DroppedError("Server disconnected"), "loaded from the hub: Server disconnected", "", ""),
        ("openai/gsm8k", FULL, "No space left on device", "HF_HOME: ", "free some space"),
        ("a.csv", FULL, "No space left on device", "HF_DATASETS_CACHE: ", "free some space"),
        ("a.csv", PermissionError(errno.EACCES, "no", "a.csv"), r"cannot be read as csv: .*no: 'a\.csv'", "a.csv", ""),
    ],
    ids=["a line that drops", "a full disk at home", "a full disk of the cache", "a file that may not be read"],
)
def test_an_error_of_the_machine_is_not_blamed_on_the_data(
    name: str, error: Exception, told: str, where: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", fails)
    Path("a.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=told) as caught:
        load_rows(Config(dataset_name=name), "train")
    assert str(caught.value.where).startswith(where)
    assert hint in str(caught.value.hint)


def test_an_unknown_split_to_evaluate_on_is_named() -> None:
    with pytest.raises(DataError, match="no split 'exam'") as caught:
        load_rows(Config(dataset_name="embedded", eval_split="exam"), "eval")
    assert "eval_split" in str(caught.value.where)


def test_a_subset_is_not_used_for_a_local_data_set_and_noted(tmp_path: Path) -> None:
    rows = load_rows(Config(**_write("text\nx\ny\n", "a.csv")(tmp_path), dataset_subset="main"), "train")
    assert any("dataset_subset main" in line for line in rows.description)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("size", "held_out"), [(0.25, 10), (7, 7), (0.001, 1)])
def test_val_set_size_is_a_share_or_a_number_of_rows(size: float, held_out: int, tmp_path: Path) -> None:
    config = Config(dataset_name=_numbered(40, tmp_path), val_set_size=size)
    training, evaluated = _questions(config, "train"), _questions(config, "eval")
    assert len(evaluated) == held_out
    assert sorted([*training, *evaluated], key=str) == sorted((f"q{n}" for n in range(40)), key=str)
    assert any(f"val_set_size: {held_out} rows" in line for line in load_rows(config, "train").description)


def test_val_set_size_holds_out_rows_although_there_is_a_split() -> None:
    config = Config(dataset_name="embedded", val_set_size=20)
    assert len(load_rows(config, "train")) == 1480
    assert "split train, held out" in load_rows(config, "eval").where


def test_nothing_is_held_out_at_size_0(tmp_path: Path) -> None:
    config = Config(dataset_name=_numbered(40, tmp_path), val_set_size=0)
    assert _questions(config, "train") == _questions(config, "eval") == [f"q{n}" for n in range(40)]
    assert load_rows(config, "eval").trained_on == "all"


def test_a_path_that_is_written_in_another_way_names_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = _numbered(40, tmp_path)
    monkeypatch.chdir(tmp_path)
    for other in (Path(name).name, f"../{tmp_path.name}/{Path(name).name}"):
        assert load_rows(Config(dataset_name=name, eval_dataset_name=other), "eval").trained_on == "all"
        assert load_rows(Config(dataset_name=other, eval_dataset_name=name), "eval").trained_on == "all"


def test_a_val_set_size_that_leaves_no_row_is_refused(tmp_path: Path) -> None:
    config = Config(dataset_name=_numbered(40, tmp_path), val_set_size=40)
    with pytest.raises(DataError, match="val_set_size 40 leaves no row to train on: there are 40"):
        load_rows(config, "train")


def test_a_file_to_evaluate_on_keeps_every_row_for_training(tmp_path: Path) -> None:
    evaluated = _write("question,answer\nv,1\n", "val.csv")(tmp_path)["dataset_name"]
    config = Config(dataset_name=_numbered(40, tmp_path), eval_dataset_name=evaluated)
    assert len(load_rows(config, "train")) == 40
    assert _questions(config, "eval") == ["v"]
    with pytest.raises(DataError, match="does not exist") as caught:
        load_rows(Config(dataset_name="embedded", eval_dataset_name=f"{tmp_path}/no.csv"), "eval")
    assert str(caught.value.where).startswith("eval_dataset_name: ")
    held = load_rows(Config(dataset_name=config.dataset_name, eval_dataset_name="embedded"), "eval")
    assert "split test" in held.where


@pytest.mark.usefixtures("evenly")
def test_a_bad_row_keeps_its_number_when_others_are_held_out(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"messages": list(TURNS)} for _ in range(30)]
    rows[17] = {"messages": [{"content": "hi"}]}
    name = str(tmp_path / "rows.jsonl")
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="has no role") as caught:
        list(load_rows(Config(dataset_name=name), "train"))
    assert caught.value.where == f"{name}, split train, row 17 (counted from 0)"


@pytest.mark.parametrize(
    "keys",
    [
        {"prompt_column": "frage", "answer_column": "answer"},
        {"text_column": "body"},
    ],
    ids=",".join,
)
def test_a_named_column_that_is_absent(keys: dict[str, Any], tmp_path: Path, messages: Messages) -> None:
    with pytest.raises(DataError) as caught:
        load_rows(Config(dataset_name=_numbered(3, tmp_path), **keys), "train")
    messages.same(caught.value)


def test_one_of_two_columns_is_found_by_its_name() -> None:
    data = Dataset.from_list([{"q": "hi", "Response": "yes", "other": "x"}])
    rows = recognised(data, "here", named={"prompt": "q"})
    assert list(rows) == [chat("hi", "yes")]
    assert rows.description[0] == "1 row of q + Response from here"
    with pytest.raises(DataError, match="No column goes with other; the data set has: other, q") as caught:
        recognised(data.remove_columns("Response"), "here", named={"answer": "other"})
    assert caught.value.hint == "name it by prompt_column="
    with pytest.raises(DataError, match="prompt_column and answer_column are the same column, 'q'"):
        recognised(data, "here", named={"prompt": "q", "answer": "q"})


def test_names_count_in_any_case_and_forms_in_their_order() -> None:
    for columns, name in {
        ("Question", "Answer", "text"): "Question + Answer",
        ("prompt", "response", "text"): "text",
        ("prompt", "chosen", "rejected", "messages"): "messages",
        ("query", "response", "label"): "query + response",
        ("text", "input_ids", "attention_mask", "labels"): "tokens",
        ("messages", "prompt", "completion", "input_ids"): "tokens",
    }.items():
        form = find_form(columns)
        assert form is not None
        assert form.name == name
    data = Dataset.from_list([{"Text": "no", "text": "yes"}])
    assert list(recognised(data, "here", named={"text": "text"})) == [Completion(None, "yes")]
    assert list(recognised(data, "here", named={"text": "Text"})) == [Completion(None, "no")]


def test_spaces_around_the_names_of_columns_count_no_more_than_their_case() -> None:
    row = {"Prompt ": "2 + 2?", " completion": "4", "id": "7"}
    data, wanted = Dataset.from_list([row]), [Completion("2 + 2?", "4")]
    assert list(recognised(data, "here")) == wanted
    named = recognised(Dataset.from_list([{"ask ": "2 + 2?", " reply": "4"}]), "here", named={"prompt": "ask"})
    assert [chat.messages[-1].content for chat in named] == ["4"]
    exact = Dataset.from_list([{"text ": "no", "text": "yes"}])
    assert list(recognised(exact, "here", named={"text": "text"})) == [Completion(None, "yes")]
    assert list(recognised(exact, "here", named={"text": "text "})) == [Completion(None, "no")]
    with pytest.raises(DataError, match="Label  would not be read"):
        recognised(Dataset.from_list([{**row, "Label ": "1"}]), "here")
    pairs = Dataset.from_list([{"Prompt ": "2 + 2?", "chosen ": "4", " rejected": "5"}])
    assert [type(one) for one in recognised(pairs, "here", wanted="pairs")] == [Pair]
    assert texts_of_rows([{"Prompt ": "2 + 2?", " answer": "4"}], ["Prompt ", " answer"], "here") == [("2 + 2?", "4")]


def test_a_question_is_asked_with_its_context_history_and_system_text() -> None:
    shared = {"context": "Ann ran.", "system": "Be brief.", "history": [["hi", "hello"]]}
    expected = Chat(
        (
            Message("system", "Be brief."),
            Message("user", "hi"),
            Message("assistant", "hello"),
            Message("user", "Ann ran.\n\nWho?"),
            Message("assistant", "Ann"),
        )
    )
    for question, answer in (("question", "answer"), ("Question", "Answer"), ("query", "response")):
        data = ListedRows([{**shared, question: "Who?", answer: "Ann"}])
        assert list(recognised(data, "here")) == [expected]
        (row,) = recognised(data, "here", named={"prompt": question, "answer": answer})
        assert isinstance(row, Chat)
        assert question_of(row) == "Who?"


TOKEN_ROWS: dict[str, dict[str, Any]] = {
    "other labels": {"input_ids": [1, 2], "labels": [-100, 3]},
    "nested": {"input_ids": [[1, 2], [3]]},
    "floats": {"input_ids": [1.0, 2.0]},
    "numbers without brackets": {"input_ids": "1 2"},
    "fewer labels": {"input_ids": [1, 2], "labels": [1]},
}


@pytest.mark.parametrize("name", TOKEN_ROWS)
def test_tokens_that_do_not_fit_are_named(name: str, messages: Messages) -> None:
    with pytest.raises(DataError) as caught:
        list(recognised(Dataset.from_list([TOKEN_ROWS[name]]), "here"))
    messages.same(caught.value)
    assert caught.value.where == "here, row 0 (counted from 0)"


def test_a_word_inside_a_name_is_a_split_only_beside_rows_to_train_on(tmp_path: Path) -> None:
    for name in ("contest_test.csv", "more.csv"):
        (tmp_path / name).write_text("text\nx\ny\n")
    assert len(load_rows(Config(dataset_name=str(tmp_path), val_set_size=0), "train")) == 4


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train.jsonl", "testing.jsonl"),
        ("training.jsonl", "Test_v2.jsonl"),
        ("my-Training.jsonl", "my-evaluation.jsonl"),
        ("deep/data/Train/a.jsonl", "deep/data/TEST/a.jsonl"),
        ("train1.jsonl", "test2.jsonl"),
        ("data.jsonl", "Testing.jsonl"),
    ],
)
def test_a_split_has_the_names_that_datasets_knows(train: str, test: str, tmp_path: Path) -> None:
    for name, rows in ((train, ROWS), (test, ROWS[:1])):
        (tmp_path / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "own" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Config(dataset_name=str(tmp_path / "own"))
    assert list(load_rows(config, "train")) == EXPECTED
    assert list(load_rows(config, "eval")) == EXPECTED[:1]
    assert "split test" in load_rows(config, "eval").where


def test_a_split_of_an_own_name_keeps_its_files(tmp_path: Path) -> None:
    for name in ("training.csv", "train.csv"):
        (tmp_path / name).write_text("text\nx\ny\n")
    for split, count in (("training", 2), ("train", 4)):
        config = Config(dataset_name=str(tmp_path), dataset_split=split, eval_split=split)
        assert len(load_rows(config, "train")) == count


def test_a_copy_of_a_data_set_of_the_hub_is_opened_as_the_hub_opens_it(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for subset, rows in (("main", ROWS), ("socratic", ROWS[:1])):
        (copy / subset).mkdir(parents=True)
        for split in ("train", "test"):
            Dataset.from_list(rows).to_parquet(str(copy / subset / f"{split}-00000-of-00001.parquet"))
    (copy / "dataset_infos.json").write_text('{"main": {}}')
    (copy / "main" / ".train.jsonl").write_text("being written")
    (copy / ".cache").mkdir()
    (copy / ".cache" / "train.jsonl").write_text("{}")
    found = load_rows(Config(dataset_name=str(copy), dataset_subset="main"), "train")
    assert list(found) == EXPECTED
    assert not any("dataset_subset" in line for line in found.description)
    assert len(load_rows(Config(dataset_name=str(copy)), "train")) == len(ROWS) + 1
