"""Rows are tokenised once and cached by their content, whichever file they come from."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow  # type: ignore[import-untyped]
import pytest
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ci_llm import embedded
from ci_llm.core import durable
from ci_llm.data import tally, tokens
from ci_llm.data.encoder import BUILT_IN_TEMPLATE, Encoder, Example
from ci_llm.data.prompts import Prompter
from ci_llm.data.rows import Rows
from ci_llm.data.sources import recognised
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.errors import DataError
from tests.data.test_encoder import CHATML, PROMPT, byte_tokenizer
from tests.support.messages import Messages
from tools.testbed.events import DEADLINE_S

Tokenised: TypeAlias = Callable[..., TokenizedRows]
ROWS = [
    {"question": "Ann has 3 pens and buys 4. How many?", "answer": "3+4=7\n#### 7"},
    {"question": "Ben has 12 rolls.", "answer": None},
    {"question": "Cleo has 5 cakes. " * 20, "answer": "#### 5"},
    {"question": "Dan has 2 hats.", "answer": "2=2\n" * 30},
    {"question": "Eva has 9 cups.", "answer": "#### 9"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(embedded.BASE_FOLDER)


def rows(raw: list[dict[str, Any]] = ROWS) -> Rows:
    return recognised(Dataset.from_list(raw), "here")


@pytest.fixture
def tokenised(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Tokenised:
    """Tokenises rows, into a cache of the test's own."""

    def tokens_of(raw: list[dict[str, Any]] = ROWS, limit: int = 500, **how: Any) -> TokenizedRows:
        return tokenize(rows(raw), tokenizer, max_seq_length=limit, cache_folder=tmp_path, **how)

    return tokens_of


def assert_same(ours: TokenizedRows, theirs: TokenizedRows) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert np.array_equal(one.input_ids, other.input_ids)
        assert np.array_equal(one.supervised, other.supervised)
    assert ours.fingerprint == theirs.fingerprint


def test_examples_are_the_encoded_rows_in_order(tokenizer: PreTrainedTokenizerBase, tokenised: Tokenised) -> None:
    found = tokenised()
    encoder = Encoder(tokenizer)
    expected = [encoder.encode(row) for row in rows() if row is not None]
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert one.input_ids.dtype == np.int32
        assert one.supervised.dtype == bool
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.supervised.tolist() == other.supervised.tolist()
    with pytest.raises(IndexError):
        found[4]


def test_a_file_that_is_not_whole_is_made_again(tokenised: Tokenised, caplog: pytest.LogCaptureFixture) -> None:
    path = tokenised().path
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[:-1], b"\0" * len(content)):
        path.write_bytes(damaged)
        caplog.clear()
        assert len(tokenised()) == 4
        assert path.read_bytes() == content
        assert str(path) in caplog.text


def test_a_file_with_other_columns_is_made_again(tokenised: Tokenised) -> None:
    path = tokenised().path
    content = path.read_bytes()
    file = pyarrow.ipc.open_file(pyarrow.BufferReader(content))
    batches = [file.get_batch_with_custom_metadata(number) for number in range(file.num_record_batches)]
    fewer = pyarrow.schema([*file.schema][:3])
    with pyarrow.ipc.new_file(str(path), fewer) as writer:
        for batch, metadata in batches:
            writer.write_batch(batch.select(fewer.names), custom_metadata=metadata)
    assert tokenised()[0] is not None
    assert path.read_bytes() == content


def test_a_flipped_bit_is_never_trained_on(tokenised: Tokenised) -> None:
    found = tokenised()
    expected = [(each.input_ids.copy(), each.supervised.copy()) for each in found]
    content = found.path.read_bytes()
    ids = content.index(np.concatenate([one for one, _ in expected]).tobytes())
    mask = content.index(np.concatenate([one for _, one in expected]).tobytes())
    for at, row in ((ids, 0), (ids + 4 * len(expected[0][0]), 1), (mask, 0)):
        found.path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        read = tokenised()
        for number in range(len(read)):
            if number == row:
                with pytest.raises(DataError, match=f"row {row} of the tokens is damaged"):
                    read[number]
                assert not read.path.exists()  # the next attempt makes it again
            else:
                assert np.array_equal(read[number].input_ids, expected[number][0])


def test_copies_of_other_rows_are_counted(tokenised: Tokenised, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "ROWS_PER_CHUNK", 20)

    many = [{"question": f"What is {n}?", "answer": f"#### {n}"} for n in range(23)]
    some = [*many[-2:], many[7], many[7], {"question": "What is 7?", "answer": "#### 8"}]
    assert tokenised(some).num_in(tokenised(many)) == 4
    assert tokenised(many).num_in(tokenised(some)) == 3


def test_rows_are_cut_left_out_and_counted(tokenised: Tokenised) -> None:
    found = tokenised(limit=40)
    assert [len(example.input_ids) for example in found][1] == 40
    assert found.row_numbers == [0, 3, 4]
    lines = "\n".join(found.description)
    assert "5 rows of question + answer from here" in lines
    assert "1 rows cut at max_seq_length 40: 89 of 168 tokens are never seen; the longest row has 226" in "\n".join(
        found.facts.warnings
    )
    assert "left out: 2 of 5 rows: 1 without an answer to learn, 1 whose answer begins after max_seq_length 40" in lines
    count = sum(len(example.input_ids) for example in found)
    targets = sum(int(example.supervised.sum()) for example in found)
    assert f"{count} tokens in 3 rows, {targets} of them learned" in lines


def test_one_row_is_shown_with_its_loss_mask(tokenised: Tokenised) -> None:
    found = tokenised()
    assert found.description[1] == "chat template: built in, as the tokenizer has none"
    shown = "first row, learned in ⟦ ⟧: <bos>Ann has 3 pens and buys 4. How many?⏎⟦3+4=7⏎#### 7<eos>⟧"
    assert found.description[-1] == shown


def test_the_second_time_nothing_is_tokenised(
    tokenizer: PreTrainedTokenizerBase, tokenised: Tokenised, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tokenize(rows(), tokenizer, max_seq_length=40, cache_folder=tmp_path / "new" / "folder")
    monkeypatch.setattr(Encoder, "encode", lambda *_: pytest.fail("tokenised again"))
    again = tokenize(rows(), tokenizer, max_seq_length=40, cache_folder=tmp_path / "new" / "folder")
    assert_same(again, first)
    assert again.description == first.description
    assert [file.suffix for file in (tmp_path / "new" / "folder").iterdir()] == [".arrow"]


def test_other_tokens_have_another_path_and_fingerprint(tokenised: Tokenised, tmp_path: Path) -> None:
    other = AutoTokenizer.from_pretrained(embedded.BASE_FOLDER)
    other.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    special = AutoTokenizer.from_pretrained(embedded.BASE_FOLDER, eos_token="<pad>")
    made = [
        tokenised(limit=40),
        tokenised(limit=41),
        tokenised(ROWS[::-1], limit=40),
        tokenised(limit=40, train_on_prompt=True),
        tokenize(rows(), other, max_seq_length=40, cache_folder=tmp_path),
        tokenize(rows(), special, max_seq_length=40, cache_folder=tmp_path),
    ]
    assert len({found.path for found in made}) == len({found.fingerprint for found in made}) == 6


def test_tokens_go_to_the_disk_while_rows_are_read(
    tokenizer: PreTrainedTokenizerBase, tokenised: Tokenised, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory then holds one chunk, however many rows there are."""
    encoded = 0
    at_writes: list[int] = []
    encode, write = Encoder.encode, durable.DISK.write

    def counted(encoder: Encoder, row: Any) -> Any:
        nonlocal encoded
        encoded += 1
        return encode(encoder, row)

    def noted(handle: int, data: Any) -> int:
        at_writes.append(encoded)
        return write(handle, data)

    monkeypatch.setattr(tokens, "ROWS_PER_CHUNK", 10)
    monkeypatch.setattr(Encoder, "encode", counted)
    monkeypatch.setattr(durable.DISK, "write", noted)
    many = [{"text": f"text number {number}"} for number in range(95)]
    found = tokenised(many, limit=50)
    assert sorted({*at_writes}) == [*range(10, 95, 10), 95]
    assert len(found) == 95
    for number in (0, 9, 10, 94):
        assert tokenizer.decode(found[number].input_ids) == f"<bos>text number {number}<eos>"
    assert found.description[-1].startswith("first row, learned in")


def test_a_spawned_worker_opens_the_file_itself(tokenised: Tokenised) -> None:
    found = tokenised(limit=40)
    assert len(found) == 3  # the table is open before it is sent
    assert_same(pickle.loads(pickle.dumps(found)), found)  # noqa: S301


NOTHING_LEFT: dict[str, tuple[list[dict[str, Any]], int]] = {
    "too long": ([ROWS[2]], 20),
    "no answer": ([ROWS[1]], 20),
}


@pytest.mark.parametrize("name", NOTHING_LEFT)
def test_nothing_left_to_learn(name: str, tokenised: Tokenised, tmp_path: Path, messages: Messages) -> None:
    raw, limit = NOTHING_LEFT[name]
    with pytest.raises(DataError, match="No row is left to learn from") as caught:
        tokenised(raw, limit=limit)
    messages.same(caught.value)
    assert caught.value.where == "here"
    assert list(tmp_path.iterdir()) == []


def test_messages_distinguish_no_row_to_evaluate_from_no_row_to_learn_from(tokenised: Tokenised) -> None:
    with pytest.raises(DataError, match="No row is left to evaluate: 1 of 1 rows: 1 without an answer") as caught:
        tokenised([ROWS[1]], limit=20, evaluated=True)
    assert "other rows to evaluate on: val_set_size= or eval_dataset_name=" in str(caught.value.hint)


def test_a_failing_template_names_the_row(tmp_path: Path) -> None:
    strict = AutoTokenizer.from_pretrained(embedded.BASE_FOLDER)
    strict.chat_template = (
        "{% for m in messages %}{% if 'Dan' in m.content %}{{ raise_exception('not Dan') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    with pytest.raises(DataError, match="The chat template cannot be used for this row: it fails: not Dan") as caught:
        tokenize(rows(), strict, max_seq_length=40, cache_folder=tmp_path)
    assert caught.value.where == "here, row 3 (counted from 0)"
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="The tokenised rows cannot be kept") as caught:
        tokenize(rows(), tokenizer, max_seq_length=40, cache_folder=tmp_path / "file" / "folder")
    assert caught.value.where == str(tmp_path / "file" / "folder")


def test_marked_answers_are_counted(tokenised: Tokenised) -> None:
    asked, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    chats = [[asked, answer | {"weight": 0}, asked, answer | {"weight": 1}], [asked, answer | {"weight": 0}]]
    found = tokenised([{"messages": chat} for chat in chats])
    assert (
        "1 answers are not learned: they are marked by weight or loss_weight 0, or by train, training or loss false"
        in found.description
    )
    assert "left out: 1 of 2 rows: 1 without an answer to learn" in found.description


TOOLS = [
    {"messages": [{"role": "user", "content": "1+?"}, {"role": "assistant", "tool_calls": [{"name": "add"}]}]},
    {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]},
]


def test_calls_of_tools_that_the_template_hides_are_counted(tokenised: Tokenised) -> None:
    found = tokenised(TOOLS)
    assert found.row_numbers == [1]
    assert any(
        "left out: 1 of 2 rows: 1 that the chat template cannot show (1: it leaves out" in line
        for line in found.description
    )
    with pytest.raises(
        DataError, match=r"1 that the chat template cannot show \(1: it leaves out the calls of tools"
    ) as caught:
        tokenised(TOOLS[:1])
    assert "chat_template that shows such chats" in str(caught.value.hint)


def with_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally, "MANY", 2)
    monkeypatch.setattr(tally, "SENT", 1)
    monkeypatch.setattr(tally.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})


def test_several_processes_write_the_same_file(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = rows([*TOOLS, *ROWS_OF_CHATS])
    alone = tokenize(data, tokenizer, max_seq_length=500, cache_folder=tmp_path / "alone")
    with_several_processes(monkeypatch)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    together = tokenize(data, tokenizer, max_seq_length=500, cache_folder=tmp_path / "together")
    assert (together.path.name, together.path.read_bytes()) == (alone.path.name, alone.path.read_bytes())
    assert (multiprocessing.active_children(), os.environ["TOKENIZERS_PARALLELISM"]) == ([], "true")


def test_a_process_that_is_ended_from_outside_is_an_error(
    tokenised: Tokenised, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_several_processes(monkeypatch)
    monkeypatch.setattr(tally, "_begin", lambda _: os._exit(9))
    with pytest.raises(DataError, match="a process that tokenised rows was ended from outside"):
        tokenised(ROWS_OF_CHATS)


ROWS_OF_CHATS = [
    {"messages": [{"role": "user", "content": f"{n} + 1?"}, {"role": "assistant", "content": f"{n + 1}."}]}
    for n in range(20)
]


def test_the_date_of_chats_is_part_of_their_tokens_where_a_template_shows_it(tmp_path: Path) -> None:
    dated = AutoTokenizer.from_pretrained(embedded.BASE_FOLDER)
    plain = str(dated.chat_template or BUILT_IN_TEMPLATE)

    def tokens(date: str) -> TokenizedRows:
        data = rows(ROWS_OF_CHATS)
        return tokenize(data, dated, max_seq_length=500, cache_folder=tmp_path, chat_date=date)

    dated.chat_template = "{{ strftime_now('%d %b %Y') }}\n" + plain
    first, later = tokens("2026-01-02"), tokens("2026-01-03")
    assert dated.decode(first[0].input_ids).startswith("02 Jan 2026")
    assert first.fingerprint != later.fingerprint
    assert (first.path != later.path, tokens("2026-01-02").path) == (True, first.path)
    dated.chat_template = plain
    assert tokens("2026-01-02").path == tokens("2026-01-03").path, "a template without a clock"


def test_what_a_template_leaves_out_is_told(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHATML.replace(PROMPT, PROMPT.replace("assistant\n", "assistant\n<think>\n")))
    thinking = {"role": "assistant", "content": "2.", "reasoning_content": "one more"}
    chats = [{"messages": [{"role": "user", "content": "1 + 1?"}, thinking]}]
    found = tokenize(rows(chats), tokenizer, max_seq_length=500, cache_folder=tmp_path)
    assert "the chat template leaves out the thoughts of 1 chats" in found.facts.warnings
    assert any(
        line.startswith("the prompt of the chat template opens a thought, and 1 answers") for line in found.description
    )
    assert found.facts.prompts == "chat without thoughts"
    ids = Prompter(tokenizer, "chat without thoughts").ids("1 + 1?")
    assert ids == found[0].input_ids[: len(ids)].tolist()


def test_empty_answers_name_their_column(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    empty = [{"Frage": "a", "answer": ""}, {"Frage": "b", "answer": " "}]
    data = recognised(Dataset.from_list(empty), "here", named={"prompt": "Frage"})
    with pytest.raises(DataError, match="2 of 2 rows: 2 without an answer") as caught:
        tokenize(data, tokenizer, max_seq_length=500, cache_folder=tmp_path)
    assert "read are: Frage, answer" in str(caught.value.hint)


def test_blank_lines_of_plain_text_are_called_empty(tokenised: Tokenised) -> None:
    texts = [{"text": text} for text in ("once upon a time", "", " ")]
    found = tokenised(texts)
    assert "left out: 2 of 3 rows: 2 empty" in found.description
    with pytest.raises(DataError, match="No row is left to learn from: 2 of 2 rows: 2 empty"):
        tokenised(texts[1:])


def test_doubtful_templates_are_warned_about(tmp_path: Path) -> None:
    words = AutoTokenizer.from_pretrained(embedded.BASE_FOLDER)
    turns = [{"role": role, "content": role} for role in ("user", "assistant") * 2]
    long = tokenize(rows([{"messages": turns}]), words, max_seq_length=500, cache_folder=tmp_path)
    assert any(line.startswith("1 chats have several turns") for line in long.facts.warnings)
    words.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    endless = tokenize(rows(), words, max_seq_length=500, cache_folder=tmp_path)
    assert any("the end of turn is not learned in 4 chats: '<|end|>" in line for line in endless.facts.warnings)
    usual = tokenize(
        rows(), AutoTokenizer.from_pretrained(embedded.BASE_FOLDER), max_seq_length=500, cache_folder=tmp_path
    )
    assert usual.facts.warnings == []


def test_a_row_of_foreign_tokens_is_named(tokenised: Tokenised) -> None:
    with pytest.raises(DataError, match="This row cannot be used: token id 70000 is none of the tokenizer's") as caught:
        tokenised([{"input_ids": [1, 70000]}], limit=40)
    assert caught.value.where == "here, row 0 (counted from 0)"


@pytest.mark.slow
def test_tokens_are_read_without_pandas(tokenised: Tokenised) -> None:
    found = tokenised()
    code = f"""
import sys
from ci_llm.data.tokens import TokenizedRows
row = TokenizedRows(None, {str(found.path)!r})[1]
print(row.input_ids.tolist(), row.supervised.tolist(), "pandas" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.strip() == f"{found[1].input_ids.tolist()} {found[1].supervised.tolist()} False"


TEXTS = [{"text": "once upon a time " * 12}, {"text": "two"}, {"text": "Ann has 3 pens and buys 4. " * 7}]


def test_a_long_text_is_cut_into_blocks_that_together_teach_all_of_it_once(
    tokenizer: PreTrainedTokenizerBase, tokenised: Tokenised
) -> None:
    whole = tokenised(TEXTS)
    found = tokenised(TEXTS, limit=16)
    for number in range(len(TEXTS)):
        blocks = [found[at] for at, row in enumerate(found.row_numbers) if row == number]
        joined = [*blocks[0].input_ids, *(token for block in blocks[1:] for token in block.input_ids[1:])]
        assert joined == whole[number].input_ids.tolist()  # a block begins with the token that the last one ended with
        assert all(2 <= len(block.input_ids) <= 16 for block in blocks)
        assert all(block.supervised.tolist() == [False] + [True] * (len(block.input_ids) - 1) for block in blocks)
        assert [tokenizer.eos_token_id in block.input_ids for block in blocks] == [False] * (len(blocks) - 1) + [True]
    assert found.facts.targets == whole.facts.targets
    assert (found.facts.cut, found.facts.longest, found.whole_below(16)) == (0, 16, 16)
    assert (whole.facts.longest, whole.whole_below(500), whole.facts.tokens) == (
        max(map(length, whole)),
        501,
        sum(map(length, whole)),
    )
    blocks = len(found) - 1
    assert f"2 texts of more than max_seq_length 16 tokens are cut into {blocks} blocks" in "\n".join(found.description)
    assert found.num_in(found) == 3
    other = tokenised(TEXTS[1:], limit=16)
    assert (found.num_in(other), other.num_in(found)) == (2, 2)


def length(example: Example) -> int:
    return len(example.input_ids)


@pytest.mark.parametrize("extra", [0, 1, 15, 16])
def test_the_last_block_is_never_a_token_alone(extra: int, tokenised: Tokenised) -> None:
    text = [{"text": " ".join(["two"] * (29 + extra))}]
    whole = tokenised(text)
    found = tokenised(text, limit=16)
    assert len(found) == -(-(length(whole[0]) - 1) // 15)
    assert found.facts.targets == whole.facts.targets
