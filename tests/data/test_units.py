"""Pairs and rated rows: how columns are read, what is kept of them as tokens, and how they lie in a batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from ci_llm.config import Config
from ci_llm.data.agent_rows import Lengths
from ci_llm.data.batches import pack
from ci_llm.data.encoder import Example
from ci_llm.data.rows import Chat, Completion, Message, Pair
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.data.units import Unit, unit_of
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import ConfigError, DataError
from ci_llm.run.start.loading import objective_by_rows, require_both_classes

TOKENIZER = AutoTokenizer.from_pretrained(BASE_FOLDER)
TEXTS = {"prompt": "2 + 2?\n", "chosen": "4", "rejected": "five"}
RATED = {"prompt": "2 + 2?\n", "completion": "4", "label": True}
LABELLED = [{"text": "Ann has 3 pens.", "label": 0}, {"text": "Ben has 9 hats.", "label": 2}]


def said(*turns: str) -> list[dict[str, str]]:
    """Turns of user and assistant, by the first letter of each."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


def rows_of(folder: Path, *rows: dict[str, Any], split: str = "train", **keys: Any) -> Any:
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_rows(Config(dataset_name=str(folder), **keys), split)  # type: ignore[arg-type]


def tokens_of(folder: Path, *rows: dict[str, Any], max_seq_length: int = 64, **how: Any) -> TokenizedRows:
    found = rows_of(folder, *rows)
    return tokenize(found, TOKENIZER, max_seq_length=max_seq_length, cache_folder=folder / "cache", **how)


def chats_of(pair: Any) -> tuple[Chat, Chat]:
    assert isinstance(pair.chosen, Chat)
    assert isinstance(pair.rejected, Chat)
    return pair.chosen, pair.rejected


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"chosen": said("u hi", "a yes"), "rejected": said("u hi", "a no")}, ("hi",)),
        ({"prompt": "hi", "chosen": said("u hi", "a yes"), "rejected": said("u hi", "a no")}, ("hi",)),
        ({"prompt": said("u hi"), "chosen": said("a yes"), "rejected": said("a no")}, ("hi",)),
        ({"prompt": "hi", "chosen": said("a yes"), "rejected": said("a no")}, ("hi",)),
        ({"prompt": said("u hi"), "chosen": "yes", "rejected": "no"}, ("hi",)),
        ({"prompt": said("s be", "u hi"), "chosen": said("a yes"), "rejected": said("a no")}, ("be", "hi")),
        ({"chosen": said("u hi", "a ho", "u so", "a yes"), "rejected": said("u hi", "a ho", "u so", "a no")}, ()),
    ],
    ids=["turns of both", "and a column", "messages", "text before", "text after", "a system", "several turns"],
)
def test_a_prompt_may_be_turns_that_both_answers_begin_with(
    row: dict[str, Any], prompt: tuple[str, ...], tmp_path: Path
) -> None:
    (pair,) = rows_of(tmp_path, row)
    for chat, answer in zip(chats_of(pair), ("yes", "no"), strict=True):
        given = prompt or ("hi", "ho", "so")
        assert tuple(message.content for message in chat.messages) == (*given, answer)
        assert chat.trained_from == len(given)
        assert chat.messages[-1] == Message("assistant", answer)


def test_a_column_of_the_system_stands_before_messages_that_have_none(tmp_path: Path) -> None:
    row = {"system": "be", "chosen": said("u hi", "a yes"), "rejected": said("u hi", "a no")}
    for chat in chats_of(rows_of(tmp_path, row)[0]):
        assert [message.role for message in chat.messages] == ["system", "user", "assistant"]
        assert chat.trained_from == 2
    own = {key: [*said("s own"), *row[key]] for key in ("chosen", "rejected")}  # type: ignore[misc]
    for chat in chats_of(rows_of(tmp_path, row | own)[0]):
        assert [message.content for message in chat.messages[:2]] == ["own", "hi"]


def test_rows_to_evaluate_on_are_the_preferred_answers(tmp_path: Path) -> None:
    assert [*rows_of(tmp_path, TEXTS, split="eval")] == [Completion("2 + 2?\n", "4")]
    assert [*rows_of(tmp_path, RATED, RATED | {"label": False}, split="eval")] == [Completion("2 + 2?\n", "4"), None]
    assert [*rows_of(tmp_path, TEXTS, split="preferences")] == [*rows_of(tmp_path, TEXTS)]


def test_a_margin_is_a_number_that_a_row_may_have(tmp_path: Path) -> None:
    found = tokens_of(tmp_path, TEXTS | {"margin": 0.5}, TEXTS | {"margin": -1}, TEXTS | {"margin": None})
    assert [found[number].label for number in range(3)] == [0.5, -1, 0]
    prints = [tokens_of(tmp_path, TEXTS | {"margin": margin}).fingerprint for margin in (0.5, -1, None)]
    assert len({*prints}) == 3
    assert prints[2] == "2087ba188caaeda6170c5efa3b6110e5", "as before there were margins"
    plain, zero = rows_of(tmp_path, TEXTS).fingerprint, rows_of(tmp_path, TEXTS | {"margin": 0}).fingerprint
    assert plain == rows_of(tmp_path, TEXTS | {"margin": None}).fingerprint != zero
    with pytest.raises(DataError, match="a margin that is a finite number, found 'much'"):
        list(rows_of(tmp_path, TEXTS | {"margin": "much"}))


def test_columns_of_single_rows_stay_single_rows(tmp_path: Path) -> None:
    """A data set of pairs may also have the chat of the better answer."""
    row = {"messages": said("u hi", "a yes"), "chosen": said("u hi", "a yes"), "rejected": said("u hi", "a no")}
    assert isinstance(rows_of(tmp_path, row)[0], Chat)
    assert isinstance(rows_of(tmp_path, row, objective="dpo")[0], Pair)


def test_named_columns(tmp_path: Path) -> None:
    row = {"ask": "2 + 2?\n", "prompt": "other", "chosen": "4", "rejected": "5"}
    assert rows_of(tmp_path, row, objective="dpo", prompt_column="ask")[0].chosen.prompt == "2 + 2?\n"
    with pytest.raises(DataError, match="The objective takes prompt, chosen and rejected"):
        rows_of(tmp_path, row, objective="dpo", answer_column="chosen")
    with pytest.raises(DataError, match="which the data set has") as refusal:
        rows_of(tmp_path, TEXTS, objective="dpo", prompt_column="prompt", answer_column="chosen")
    assert refusal.value.hint == "leave prompt_column and answer_column out"


@pytest.mark.parametrize("row", [{"prompt": "a", "chosen": "b"}, TEXTS | {"images": ["cat.png"]}])
def test_rows_that_are_not_pairs_are_refused(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="The objective takes prompt, chosen and rejected, and the data set has"):
        rows_of(tmp_path, row, objective="dpo")


def test_a_bad_answer_alone_leaves_nothing_to_evaluate(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, RATED | {"label": False}, split="eval", objective="kto")
    with pytest.raises(DataError, match="1 of 1 rows: 1 without a good answer"):
        tokenize(rows, TOKENIZER, max_seq_length=64, cache_folder=tmp_path, evaluated=True)


def test_a_pair_is_one_row_of_tokens_whose_branches_are_known(tmp_path: Path) -> None:
    unit = tokens_of(tmp_path, TEXTS)[0]
    assert isinstance(unit, Unit)
    texts = [TOKENIZER.decode(branch.input_ids) for branch in unit.branches]
    assert texts == [f"{TOKENIZER.bos_token}2 + 2?\n{answer}{TOKENIZER.eos_token}" for answer in ("4", "five")]
    learned = [TOKENIZER.decode(branch.input_ids[branch.supervised]) for branch in unit.branches]
    assert learned == [f"4{TOKENIZER.eos_token}", f"five{TOKENIZER.eos_token}"]


def test_orpo_learns_the_whole_preferred_row_and_knows_its_answer(tmp_path: Path) -> None:
    rows = tokens_of(tmp_path, TEXTS, learn_preferred=True)
    batch = pack([rows[0]], [0])
    assert batch.answered is not None
    answers = batch.targets[batch.answered].tolist()
    assert TOKENIZER.decode(answers) == f"4{TOKENIZER.eos_token}five{TOKENIZER.eos_token}"
    first, second = rows[0].branches  # type: ignore[attr-defined]
    assert batch.target_counts == (len(first.input_ids) - 1, int(second.supervised.sum()))
    assert rows.path != tokens_of(tmp_path, TEXTS).path


def test_pairs_lie_in_a_batch_as_two_rows_each(tmp_path: Path) -> None:
    rows = tokens_of(tmp_path, TEXTS, TEXTS | {"chosen": "it is 4"})
    batch = pack([rows[1], rows[0]], [1, 0])
    assert (batch.num_units, batch.num_rows, batch.sample_ids) == (2, 4, (1, 0))
    parts = [batch.input_ids[a:b].tolist() for a, b in zip(batch.bounds, batch.bounds[1:], strict=False)]
    assert parts == [branch.input_ids.tolist() for n in (1, 0) for branch in rows[n].branches]  # type: ignore[attr-defined]
    assert sum(batch.target_counts) == batch.num_targets


def test_the_answer_of_another_row_takes_the_place_of_a_rows_own(tmp_path: Path) -> None:
    rows = tokens_of(tmp_path, RATED, {"prompt": "1 + 1 = ?\n", "completion": "two", "label": False})
    one, other = rows[0], rows[1]
    assert isinstance(one, Unit)
    assert isinstance(other, Unit)
    mixed = one.with_answer_of(other, 64)
    assert TOKENIZER.decode(mixed.input_ids).endswith(f"2 + 2?\ntwo{TOKENIZER.eos_token}")
    assert TOKENIZER.decode(mixed.input_ids[mixed.supervised]) == f"two{TOKENIZER.eos_token}"
    assert len(one.with_answer_of(other, mixed.prompts[0] + 1).input_ids) == mixed.prompts[0] + 1
    assert (one.label, other.label) == (1, 0)


def test_pairs_that_teach_nothing_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = tokens_of(tmp_path, TEXTS, TEXTS | {"chosen": "five"}, TEXTS | {"rejected": ""})
    assert len(rows) == 1
    assert "left out: 2 of 3 rows: 2 without two different answers" in rows.description
    with pytest.raises(DataError, match="No row is left to learn from: 1 of 1 rows: 1 without two different answers"):
        tokens_of(tmp_path, TEXTS | {"chosen": "five"})


def test_both_answers_of_a_long_pair_are_cut_or_it_is_left_out(tmp_path: Path) -> None:
    long = {"prompt": "What?\n", "chosen": "good " * 9, "rejected": "bad"}
    whole = tokens_of(tmp_path, long)
    limit = whole.facts.longest - 3
    cut = tokens_of(tmp_path, TEXTS, long, max_seq_length=limit)
    assert max(len(branch.input_ids) for branch in cut[1].branches) == limit  # type: ignore[attr-defined]
    assert cut.facts.cut == 1
    # A prompt that leaves no place for an answer: the pair goes, and nothing is divided by the length of nothing.
    far = {"prompt": "What then? " * 9, "chosen": "a", "rejected": "b"}
    assert len(tokens_of(tmp_path, TEXTS, far, max_seq_length=20)) == 1
    # Answers that differ behind the limit only.
    alike = {"prompt": "What?\n", "chosen": "good " * 9 + "a", "rejected": "good " * 9 + "b"}
    assert len(tokens_of(tmp_path, TEXTS, alike, max_seq_length=20)) == 1


def test_rows_of_one_class_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all 2 rows are good"):
        require_both_classes(tokens_of(tmp_path, RATED, RATED | {"completion": "four"}))
    require_both_classes(tokens_of(tmp_path, RATED, RATED | {"label": False}))


def test_auto_goes_by_the_columns(tmp_path: Path) -> None:
    config = Config(dataset_name=str(tmp_path))
    for row, objective in ((TEXTS, "dpo"), (RATED, "kto"), ({"text": "once"}, "sft")):
        found = objective_by_rows(config, [rows_of(tmp_path, row)], 4)
        assert found["objective"] == objective
    assert objective_by_rows(config, [rows_of(tmp_path, TEXTS)], 4)["learning_rate"] < config.learning_rate
    assert "learning_rate" not in objective_by_rows(Config(learning_rate=0.1), [rows_of(tmp_path, TEXTS)], 4)


@pytest.mark.parametrize(
    ("rows", "keys", "unread"),
    [
        ([{"text": "once"}], {"beta": 0.3}, "beta has no effect: objective is sft"),
        ([TEXTS], {"simpo_gamma": 1.0}, "simpo_gamma has no effect: objective is dpo"),
        ([TEXTS], {"beta": 0.3, "loss_type": "ipo", "reference": "start", "init_from": "x"}, None),
        ([RATED], {"beta": 0.3}, None),
        (
            [TEXTS],
            {"agents": ({"beta": 0.3}, {}), "num_agents": 2, "objective": "reward"},
            "beta has no effect: objective is reward",
        ),
        (
            LABELLED,
            {"objective": "regression", "beta": 0.3, "reference": "start", "init_from": "x"},
            "beta, reference has no effect: objective is regression",
        ),
        (LABELLED, {"beta": 0.3}, "beta has no effect: objective is classification"),
        (LABELLED, {"num_labels": 3}, None),
    ],
    ids=str,
)
def test_keys_that_the_objective_does_not_read_are_named(
    rows: list[dict[str, Any]],
    keys: dict[str, Any],
    unread: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "ci_llm")
    objective_by_rows(Config(**keys), [rows_of(tmp_path, *rows)], 4)
    assert [line for line in caplog.messages if "has no effect" in line] == ([] if unread is None else [unread])


def test_keys_that_do_not_fit_the_objective_are_refused_once_it_is_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="diversity is for objective sft, and this is dpo"):
        objective_by_rows(Config(diversity="swd"), [rows_of(tmp_path, TEXTS)], 4)
    with pytest.raises(ConfigError, match="a step has one row"):
        objective_by_rows(Config(), [rows_of(tmp_path, RATED)], 1)


def test_rows_of_two_kinds_are_refused(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_text(json.dumps(TEXTS) + "\n")
    other.write_text(json.dumps(RATED) + "\n")
    with pytest.raises(DataError, match="an objective takes one kind"):
        load_rows(Config(dataset_name=f"{one},{other}", eval_dataset_name=str(one)), "train")


def test_a_unit_from_the_cache_equals_the_tokenised_one(tmp_path: Path) -> None:
    first, again = tokens_of(tmp_path, TEXTS), tokens_of(tmp_path, TEXTS)
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint != tokens_of(tmp_path, TEXTS | {"rejected": "six"}).fingerprint
    one, other = (rows[0] for rows in (first, again))
    assert np.array_equal(one.input_ids, other.input_ids)
    good, bad = tokens_of(tmp_path, RATED), tokens_of(tmp_path, RATED | {"label": False})
    assert good.fingerprint != bad.fingerprint


def test_the_branches_of_a_pair_are_rows_of_a_pass() -> None:
    def branch(length: int) -> Example:
        return Example(np.arange(length, dtype=np.int32), np.arange(length) > 1)

    lengths = Lengths.of([unit_of([branch(4), branch(6)]), unit_of([branch(5), branch(9)])])
    assert (lengths.mean, lengths.longest, lengths.branches) == (6, 9, 2)
    assert lengths.learned == 16 / 24
    assert Lengths.of([branch(4)]).branches == 1
