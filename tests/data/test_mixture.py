"""Several data sets as one, whose rows keep their names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset

from ci_llm.config import Config, load_config
from ci_llm.data.rows import Rows, question_of
from ci_llm.data.sources import join, load_rows, load_rows_of_each, recognised
from ci_llm.errors import ConfigError, DataError


def numbered(name: str, count: int) -> Dataset:
    return Dataset.from_list([{"question": f"{name}{n}", "answer": "a"} for n in range(count)])


def rows(name: str, count: int) -> Rows:
    return recognised(numbered(name, count), name)


def files(folder: Path, names: str, count: int) -> list[str]:
    """A file for each letter of `names`, with so many rows that begin with it."""
    for name in names:
        numbered(name, count).to_parquet(folder / f"{name}.parquet")
    return [str(folder / f"{name}.parquet") for name in names]


def questions(found: Rows) -> list[str]:
    return [str(question_of(row)) for row in found if row]


def by_source(found: Rows) -> Counter[str]:
    return Counter(question[0] for question in questions(found))


def test_every_row_is_there_once() -> None:
    found = join([rows("a", 3), rows("b", 2)])
    assert questions(found) == ["a0", "a1", "a2", "b0", "b1"]
    assert found.description[0] == "5 rows of 2 data sets, one after the other"


def test_a_row_is_named_by_its_own_data_set() -> None:
    found = join([rows("a", 3), rows("b", 2)])
    assert found.place(4) == "b, row 1 (counted from 0)"
    assert found.select([4]).place(0) == "b, row 1 (counted from 0)"


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (["text_column=a", "prompt_column=b"], "text_column and prompt_column name two ways to read a row"),
        (["val_set_size=0.1", "eval_split=test"], "val_set_size holds out training rows, and eval_split names others"),
        (["val_set_size=1.5"], "val_set_size 1.5 is neither a share below 1 nor a number of rows"),
    ],
)
def test_values_that_make_no_sense_are_refused(keys: list[str], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, keys)
    assert what in str(caught.value)


def test_a_list_of_data_sets_is_written_in_every_way(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("dataset_name:\n  - a.csv\n  - b.csv\n")
    config = load_config(file)
    assert config.dataset_names == ("a.csv", "b.csv")
    assert load_config(None, ["dataset_name=[a.csv, b.csv]"]).dataset_names == ("a.csv", "b.csv")
    file.write_text(config.dump())
    assert load_config(file) == config
    assert Config(dataset_name=["a.csv", "b.csv"]).dataset_names == ("a.csv", "b.csv")


def test_a_file_with_a_comma_in_its_name_means_itself(tmp_path: Path) -> None:
    (tmp_path / "a,b.csv").write_text("text\nx\n")
    assert Config(dataset_name=f"{tmp_path}/a,b.csv").dataset_names == (f"{tmp_path}/a,b.csv",)


@pytest.mark.slow
def test_data_sets_share_the_rows_of_an_evaluation(tmp_path: Path) -> None:
    config = Config(dataset_name=", ".join(files(tmp_path, "ab", 100)), eval_samples=6)
    assert by_source(load_rows(config, "eval")) == {"a": 3, "b": 3}
    assert by_source(load_rows(config, "train")) == {"a": 90, "b": 90}
    assert not {*questions(load_rows(config, "train"))} & {*questions(load_rows(config, "eval"))}


def test_agents_with_parts_of_one_data_set_are_evaluated_on_its_rows_once() -> None:
    config = Config(eval_samples=6, num_agents=2, agents=({"max_train_samples": 5}, {"max_train_samples": 7}))
    assert len(load_rows(config, "eval")) == 6
    assert len(load_rows(config, "train")) == 12


def test_commas_alone_name_a_data_set_that_does_not_exist() -> None:
    assert Config(dataset_name=",").dataset_names == (",",)
    with pytest.raises(DataError, match="does not exist"):
        load_rows(Config(dataset_name=","), "train")


def test_an_unknown_home_folder_is_one_message() -> None:
    assert Config(dataset_name="~no-such-user/a.csv").dataset_names == ("~no-such-user/a.csv",)


# Agents with data sets of their own


@pytest.mark.slow
def test_agents_have_their_own_rows_and_share_equal_data_sets(tmp_path: Path) -> None:
    a, b = files(tmp_path, "ab", 20)
    config = Config(dataset_name=a, agents=[{}, {"dataset_name": b}, {"max_train_samples": 5}, {"dataset_name": a}])
    each = load_rows_of_each(config, "train")
    assert [by_source(rows) for rows in each] == [{"a": 18}, {"b": 18}, {"a": 5}, {"a": 18}]
    assert each[0] is each[3]
    evaluated = load_rows_of_each(config, "eval")
    assert [by_source(rows) for rows in evaluated] == [{"a": 2}, {"b": 2}, {"a": 2}, {"a": 2}]
    assert not {*questions(each[0])} & {*questions(evaluated[0])}
    mixture = Config(agents=[{"dataset_name": [a, b]}, {"dataset_name": b}])
    assert [by_source(rows) for rows in load_rows_of_each(mixture, "train")] == [{"a": 18, "b": 18}, {"b": 18}]
    assert by_source(load_rows(Config(agents=[{"dataset_name": a}, {"dataset_name": b}]), "eval")) == {"a": 2, "b": 2}


def test_a_common_evaluation_set_knows_the_training_rows_of_every_agent(tmp_path: Path) -> None:
    [a] = files(tmp_path, "a", 20)
    config = Config(eval_dataset_name=a, agents=[{}, {"dataset_name": a, "max_train_samples": 7}])
    evaluated = load_rows_of_each(config, "eval")
    assert evaluated[0] is evaluated[1]
    assert evaluated[0].num_trained_on == 7
