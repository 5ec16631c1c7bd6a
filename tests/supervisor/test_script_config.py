"""Configuration files of external scripts: read, changed in a copy, removed afterwards; values in Hydra's groups."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ci_llm.errors import ConfigError
from ci_llm.supervisor.script_settings import TemporaryConfigs, group_values, in_yaml, read_config

ODD = """\
%YAML 1.1
---
# before
training: &t
    learning_rate:    1e-3   # a comment that says learning_rate: 7
    'quoted key': "2e-4"
    list: [1, 2, {learning_rate: 9}]
    nested: {a: 1, constant_product: 500, b: [x]}
copy:
    <<: *t
    learning_rate: 5e-3
text: |
    learning_rate: 8
naïve: é

batch_size: 8
"""


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_values_are_found_by_dotted_key(tmp_path: Path) -> None:
    leaves = {key: leaf.text for key, leaf in read_config(write(tmp_path, ODD)).leaves.items()}
    assert leaves["training.learning_rate"] == "1e-3"
    assert leaves["training.quoted key"] == "2e-4"
    assert leaves["training.nested.constant_product"] == "500"
    assert leaves["copy.learning_rate"] == "5e-3"
    assert leaves["copy.nested.a"] == "1"
    assert leaves["batch_size"] == "8"
    assert "training.list" not in leaves


def test_only_the_value_changes(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, ODD))
    new = {"training.learning_rate": "0.5", "batch_size": "4", "training.quoted key": "1", "unknown": "3"}
    expected = (
        ODD.replace("    1e-3   # a", "    0.5   # a").replace("batch_size: 8", "batch_size: 4").replace('"2e-4"', "1")
    )
    assert config.replaced(new) == expected


@pytest.mark.slow
@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text("abcdefgh_", min_size=1, max_size=4),
        st.one_of(st.integers(), st.text(max_size=5), st.dictionaries(st.text("xyz", min_size=1), st.integers())),
        max_size=5,
    ),
    st.data(),
)
def test_a_changed_file_reads_as_the_same_but_for_the_value(tmp_path_factory: pytest.TempPathFactory, value, data):  # type: ignore[no-untyped-def]
    path = write(tmp_path_factory.mktemp("config"), yaml.safe_dump(value, default_flow_style=None, allow_unicode=True))
    config = read_config(path)
    if not config.leaves:
        return
    value = yaml.safe_load(path.read_text(encoding="utf-8"))  # PyYAML folds some line ends of its own
    key = data.draw(st.sampled_from(sorted(config.leaves)))
    outer, _, inner = key.partition(".")
    (value[outer] if inner else value).__setitem__(inner or outer, 0.25)
    assert yaml.safe_load(config.replaced({key: "0.25"})) == value


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [("a.yaml", "a: [", "not valid YAML"), ("a.yaml", None, "cannot be read"), ("a.yaml", b"\xff", "not UTF-8")],
)
def test_an_unreadable_configuration_is_a_bad_call(tmp_path: Path, name: str, text: object, told: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else str(text).encode())
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / name)
    assert told in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("a.toml", "lr = 3"), ("a.yaml", ""), ("a.yaml", "- 1"), ("a.yaml", "x")])
def test_a_file_that_is_not_a_mapping_has_no_values(tmp_path: Path, name: str, text: str) -> None:
    assert not read_config(write(tmp_path, text, name)).leaves


def test_line_ends_stay_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1  # one\r\nb: 2\r\n")
    assert read_config(path).replaced({"a": "9"}).encode() == b"\xef\xbb\xbfa: 9  # one\r\nb: 2\r\n"


def test_json_is_changed_like_yaml(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, '{"optim": {"lr": 1e-3, "n": 3}}', "c.json"))
    assert config.replaced({"optim.lr": "0.5"}) == '{"optim": {"lr": 0.5, "n": 3}}'


def test_an_anchor_stays_for_its_aliases(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, "optim: {lr: &lr 2e-4, n: 3}\nfinal: *lr\n"))
    assert config.replaced({"optim.lr": "0.5"}) == "optim: {lr: &lr 0.5, n: 3}\nfinal: *lr\n"


@pytest.mark.parametrize(
    ("number", "text"), [(2e-4 / 1.5, "0.00013333333"), (1e-5, "1.0e-05"), (1.5e-7, "1.5e-07"), (2.0, "2.0")]
)
def test_a_number_is_a_number_in_yaml(number: float, text: str) -> None:
    assert in_yaml(number) == text
    assert yaml.safe_load(text) == pytest.approx(number)


# Temporary copies


def test_a_copy_lives_until_the_next_one(tmp_path: Path) -> None:
    temporary = TemporaryConfigs(write(tmp_path, "a: 1"))
    first, second = temporary.create(1, "a: 2"), temporary.create(2, "a: 3")
    assert not first.exists()
    assert second.name.startswith("config_retry_2_")
    assert yaml.safe_load(second.read_text()) == {"a": 3}
    temporary.close()
    assert os.listdir(tmp_path) == ["config.yaml"]


def test_a_copy_has_the_permissions_of_the_original(tmp_path: Path) -> None:
    original = write(tmp_path, "token: secret\na: 1")
    original.chmod(0o600)
    assert TemporaryConfigs(original).create(1, "token: secret\na: 2").stat().st_mode & 0o777 == 0o600


def test_only_a_marked_copy_without_an_owner_is_removed(tmp_path: Path) -> None:
    original = write(tmp_path, "a: 1")
    temporary = TemporaryConfigs(original)
    held = temporary.create(1, "a: 2")
    abandoned = write(tmp_path, held.read_text(), "config_retry_3_00aa11bb.yaml")
    users = write(tmp_path, "a: 1\n", "config_retry_4_00aa11bb.yaml")
    others = write(tmp_path, held.read_text(), "other_retry_3_00aa11bb.yaml")
    assert TemporaryConfigs(original).remove_abandoned() == [abandoned]
    assert {path.name for path in tmp_path.iterdir()} == {original.name, held.name, users.name, others.name}


def test_a_json_file_of_the_user_with_such_a_name_is_left_alone(tmp_path: Path) -> None:
    """JSON has no comments, so that a copy has no mark and is recognised only by its name."""
    original = write(tmp_path, "{}", "config.json")
    abandoned = write(tmp_path, "{}", "config_retry_1_00aa11bb.json")
    users = write(tmp_path, "{}", "config_retry_1_2.json")
    assert TemporaryConfigs(original).remove_abandoned() == [abandoned]
    assert users.exists()


def test_a_folder_without_locks_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    temporary = TemporaryConfigs(write(tmp_path, "a: 1"))
    path = temporary.create(1, "a: 2")
    assert TemporaryConfigs(tmp_path / "config.yaml").remove_abandoned() == []
    temporary.close()
    assert not path.exists()


def test_a_folder_that_takes_no_file_is_explained(tmp_path: Path) -> None:
    temporary = TemporaryConfigs(tmp_path / "gone" / "config.yaml")
    with pytest.raises(ConfigError, match="no changed configuration can be written"):
        temporary.create(1, "a: 1")


# Hydra's groups


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    for name, text in {
        "config.yaml": "defaults:\n  - training: usual\n  - optional model: mlp\n  - override /opt: adam\n"
        "  - data/small\n  - logger@run.log: csv\n  - nothing: here\n  - _self_\nseed: 1\n",
        "training/usual.yaml": "learning_rate: 1\nschedule: {constant_product: 500}\n",
        "training/fast.yaml": "learning_rate: 2\n",
        "model/mlp.yaml": "width: 8\n",
        "opt/adam.yaml": "# @package training.optimizer\nbeta: 0.9\n",
        "data/small.yaml": "# @package _group_.x\nrows: 10\n",
        "logger/csv.yaml": "path: p\n",
        "experiment/big.yaml": "# @package _global_\ntraining:\n  learning_rate: 3\n",
    }.items():
        write(tmp_path, text, name)
    return tmp_path


def test_values_come_from_the_groups_that_are_chosen(conf: Path) -> None:
    config = read_config(conf / "config.yaml")
    assert group_values(conf, config, []) == {
        "training.learning_rate": "1",
        "training.schedule.constant_product": "500",
        "model.width": "8",
        "training.optimizer.beta": "0.9",
        "data.x.rows": "10",
    }
    assert group_values(conf, config, ["training=fast", "seed=3"])["training.learning_rate"] == "2"
    assert group_values(conf, config, ["training=fast", "+experiment=big"])["training.learning_rate"] == "3"
