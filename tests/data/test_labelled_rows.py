"""Labels: which columns hold them, which classes there are, and what a labelled row is as tokens."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer, LlamaConfig

from ci_llm.config import Config
from ci_llm.data.batches import pack
from ci_llm.data.encoder import Example
from ci_llm.data.rows import Completion, Labelled
from ci_llm.data.units import Unit, are_numbers, class_names, number_of, without_end
from ci_llm.errors import ConfigError, DataError
from ci_llm.lora.heads import how_tokenized
from ci_llm.objectives import Needs
from ci_llm.run.start.loading import objective_by_rows
from tests.data.test_units import LABELLED as ROWS
from tests.data.test_units import TOKENIZER, rows_of, said, tokens_of


def settled(folder: Path, *rows: dict[str, Any], **keys: Any) -> dict[str, Any]:
    found = rows_of(folder, *rows, **keys)
    return objective_by_rows(Config(dataset_name=str(folder), **keys), [found], 8)


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        ((0, 2), ("0", "1", "2"), (0, 2)),
        ((0.0, 1.0), ("0", "1"), (0, 1)),  # of a column with a gap
        (("1", "0"), ("0", "1"), (1, 0)),
        (("spam", "ham"), ("ham", "spam"), (1, 0)),
        ((True, False), ("False", "True"), (1, 0)),
    ],
)
def test_classes_are_found(labels: tuple[Any, ...], names: tuple[str, ...], numbers: tuple[int, ...]) -> None:
    assert class_names(labels, None, "here") == names
    assert [number_of(label, names, "row") for label in labels] == list(numbers)


@pytest.mark.parametrize(
    ("labels", "num_labels", "message"),
    [
        ((1, 1), None, "all rows have the label 1"),
        (("a", "a"), None, "all rows have the label a"),
        ((), None, "no row is left"),
        ((0, 5), 3, "label 5 is out of range: 3 classes"),
        (("a", "b", "c"), 2, "3 different labels"),
        ([f"text {n}" for n in range(1001)], None, "1001 different labels"),
        ((0, 4000), None, "out of range"),
        ((-1, 1), 5, "2 different labels, such as '-1'"),
    ],
)
def test_labels_that_are_not_classes_are_refused(labels: Any, num_labels: int | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        class_names(labels, num_labels, "here")


@pytest.mark.parametrize(
    ("label", "classes", "message"),
    [
        ("c", ("a", "b"), "'c' is none of 2 classes: a, b"),
        (3, ("0", "1"), "'3' is none of 2 classes"),
        ("many", (), "'many' is not a finite number"),
        (math.inf, (), "not a finite number"),
    ],
)
def test_a_label_that_does_not_fit_names_its_row(label: Any, classes: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message) as found:
        number_of(label, classes, "file, row 7")
    assert found.value.where == "file, row 7, label"
    assert ("num_labels=" in str(found.value.hint)) is bool(classes)


def test_columns_say_whether_labels_are_classes_or_numbers(tmp_path: Path) -> None:
    assert settled(tmp_path, *ROWS)["objective"] == "classification"
    assert settled(tmp_path, *ROWS)["label_names"] == ("0", "1", "2")
    numbers = [{**row, "label": row["label"] + 0.5} for row in ROWS]
    found = settled(tmp_path, *numbers)
    assert found["objective"] == "regression"
    assert "label_names" not in found
    assert are_numbers([1, 0.5])
    assert not are_numbers([1, 2.0, "0.5"])
    assert settled(tmp_path, *ROWS, objective="regression") == {}
    with pytest.raises(DataError, match="all rows have the same label"):
        settled(tmp_path, ROWS[0], ROWS[0], objective="regression")


def test_named_columns(tmp_path: Path) -> None:
    rows = [{"body": row["text"], "section": name} for row, name in zip(ROWS, ("net", "web"), strict=True)]
    keys = {"text_column": "body", "answer_column": "section"}
    found = rows_of(tmp_path, *rows, **keys)
    assert [*found] == [Labelled(Completion(None, row["body"]), row["section"]) for row in rows]
    assert settled(tmp_path, *rows, **keys)["label_names"] == ("net", "web")
    with pytest.raises(DataError, match="takes text and label, and the data set has: body, section"):
        rows_of(tmp_path, *rows, objective="classification")
    with pytest.raises(DataError, match="takes text and label"):
        rows_of(tmp_path, {**ROWS[0], "image": "cat.png"}, objective="classification")
    with pytest.raises(DataError, match="objective=classification"):
        rows_of(tmp_path, *ROWS, objective="sft")


@pytest.mark.parametrize("objective", ["auto", "classification"])
def test_a_named_column_that_is_not_there_is_said_by_its_name(objective: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no column 'section'; it has: text, label") as refusal:
        rows_of(tmp_path, *ROWS, objective=objective, text_column="text", answer_column="section")
    assert "answer_column: section" in str(refusal.value.where)


def test_the_lines_about_labelled_rows_count_no_learned_tokens(tmp_path: Path) -> None:
    tokens = tokens_of(tmp_path, *ROWS, classes=("0", "1", "2"))
    [line] = [line for line in tokens.description if " tokens in 2 rows" in line]
    assert "learned" not in line


def test_the_hint_about_missing_columns_names_the_keys_of_the_objective(tmp_path: Path) -> None:
    row = {"subject": "A", "body": "Where is it?", "topic": "delivery"}
    for objective, keys in (
        ("classification", "text_column= and answer_column="),
        ("dpo", "prompt_column="),
    ):
        with pytest.raises(DataError, match="The objective takes") as refusal:
            rows_of(tmp_path, row, objective=objective)
        assert (refusal.value.hint or "").startswith(keys)
        assert "pictures" not in str(refusal.value)
    with pytest.raises(DataError, match="has no columns that can be used") as refusal:
        rows_of(tmp_path, row)
    assert "answer_column=" in str(refusal.value)
    assert "prompt, chosen, rejected" in str(refusal.value)


def test_a_text_has_the_tokens_of_the_tokenizer(tmp_path: Path) -> None:
    unusable = {"text": "", "label": 1}, {"text": "Zoe", "label": None}
    tokens = tokens_of(tmp_path, *ROWS, *unusable, classes=("0", "1", "2"))
    assert [row.label for row in tokens] == [0, 2]  # type: ignore[union-attr]
    assert tokens[0].input_ids.tolist() == TOKENIZER(ROWS[0]["text"])["input_ids"]
    assert not tokens[0].supervised.any()
    assert "left out: 2 of 4 rows: 2 without a text or a label" in tokens.description
    assert "rows of each class: 0 1, 1 0, 2 1" in tokens.description
    assert tokens.description[-1] == "first row, with its label: 0: Ann has 3 pens."
    batch = pack([tokens[0], tokens[1]], [0, 1])
    assert batch.labels is not None
    assert batch.labels.tolist() == [0, 2]
    assert batch.last_tokens.tolist() == [batch.bounds[1] - 1, batch.bounds[2] - 1]


def test_chats_and_numbers(tmp_path: Path) -> None:
    rows = {"messages": said("u hi", "a yes"), "label": 0.5}, {"messages": said("u hi"), "label": -1.25}
    tokens = tokens_of(tmp_path, *rows)
    assert [row.label for row in tokens] == [0.5, -1.25]  # type: ignore[union-attr]
    assert TOKENIZER.decode(tokens[1].input_ids) == "<bos>hi\n"


def test_rows_end_before_pads() -> None:
    row = Example(np.array([5, 0, 6, 0, 0], np.int32), np.array([False] * 5))
    assert without_end(row, 0).input_ids.tolist() == [5, 0, 6]
    assert without_end(row, None) is row
    assert without_end(row, 7).input_ids.tolist() == [5, 0, 6, 0, 0]
    only = Example(np.array([0, 0], np.int32), np.array([False] * 2))
    assert without_end(only, 0).input_ids.tolist() == [0]


def test_an_end_that_is_the_pad_token_is_left_out_of_pairs(tmp_path: Path) -> None:
    pair = {"prompt": "2 + 2?\n", "chosen": "4", "rejected": "five"}
    end = AutoTokenizer.from_pretrained(TOKENIZER.name_or_path).eos_token_id
    both = [tokens_of(tmp_path, pair, pad=pad)[0] for pad in (None, end)]
    assert all(isinstance(unit, Unit) for unit in both)
    whole, cut = ([branch.input_ids.tolist() for branch in unit.branches] for unit in both)  # type: ignore[union-attr]
    assert [ids[-1] for ids in whole] == [end, end]
    assert cut == [ids[:-1] for ids in whole]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"objective": "dpo", "metric_for_best_model": "f1"}, "objective dpo has no f1"),
        ({"objective": "sft", "metric_for_best_model": "mse"}, "objective sft has no mse"),
        ({"objective": "kto", "metric_for_best_model": "rewards/accuracies"}, "has no rewards/accuracies"),
        ({"objective": "reward", "num_labels": 2}, "num_labels is about classes, and this is reward"),
        (
            {"objective": "sft", "text_column": "text", "answer_column": "label"},
            "answer_column beside text_column names labels",
        ),
        ({"objective": "dpo", "reference": "start"}, "agents begin as the base"),
        ({"objective": "reward", "diversity": "swd"}, "diversity is for objective sft"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_keys_that_do_not_fit_the_objective_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(**keys)


def test_a_metric_that_the_objective_of_the_columns_lacks_is_refused(tmp_path: Path) -> None:
    assert settled(tmp_path, *ROWS, metric_for_best_model="nll")["num_labels"] == 3
    with pytest.raises(ConfigError, match="objective classification has no mse"):
        objective_by_rows(Config(metric_for_best_model="mse"), [rows_of(tmp_path, *ROWS)], 8)


def loss_of_ones_own(_: Any) -> Any:
    raise NotImplementedError


loss_of_ones_own.needs = Needs("labelled", head=True)  # type: ignore[attr-defined]


def test_a_loss_of_ones_own_gets_classes_by_name_or_numbers(tmp_path: Path) -> None:
    own = {"objective": f"{__name__}:loss_of_ones_own"}
    named = settled(tmp_path, {"text": "Ann", "label": "ham"}, {"text": "Ben", "label": "spam"}, **own)
    assert named["label_names"] == ("ham", "spam")
    assert not settled(tmp_path, {"text": "Ann", "label": 0.5}, {"text": "Ben", "label": 2.25}, **own)
    config = Config(num_labels=2, **own).model_copy(update={"label_names": ("ham", "spam")})
    assert how_tokenized(config, LlamaConfig(), TOKENIZER)["classes"] == ("ham", "spam")
