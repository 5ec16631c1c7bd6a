"""Configuration files of external scripts: read, changed in a copy, removed afterwards; values that Hydra composes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ci_llm.errors import ConfigError
from ci_llm.supervisor.script_settings import ConfigFile, composed, in_yaml

ODD = """\
# @package _global_
# before
training: &t
  learning_rate: 1e-3  # a comment that says learning_rate: 7
  'quoted key': "2e-4"
  list: [1, 2, {learning_rate: 9}]
  nested: {a: 1, constant_product: 500, b: [x]}
copy:
  <<: *t
  learning_rate: 5e-3
text: |
  learning_rate: 8
naïve: é
time: 11:55:00
off: no

batch_size: 8
limit: .inf
"""


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_values_are_found_by_dotted_key(tmp_path: Path) -> None:
    values = ConfigFile(write(tmp_path, ODD)).values
    assert float(values["training.learning_rate"]) == 1e-3
    assert values["training.quoted key"] == "2e-4"
    assert values["training.nested.constant_product"] == "500"
    assert float(values["copy.learning_rate"]) == 5e-3
    assert values["copy.nested.a"] == "1"
    assert values["batch_size"] == "8"
    assert "training.list" not in values


def test_only_the_value_changes(tmp_path: Path) -> None:
    new = {"training.learning_rate": 0.5, "batch_size": 4, "training.quoted key": 1e-5, "unknown": 3}
    changed = ConfigFile(write(tmp_path, ODD)).changed(new)
    assert [line.partition("#")[2] for line in changed.splitlines()] == [
        line.partition("#")[2] for line in ODD.splitlines()
    ]
    wanted = yaml.safe_load(ODD)
    wanted["training"] |= {"learning_rate": 0.5, "quoted key": 1e-5}
    wanted["copy"]["quoted key"] = 1e-5
    assert yaml.safe_load(changed) == wanted | {"batch_size": 4}


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
    config = ConfigFile(path)
    if not config.values:
        return
    value = yaml.safe_load(path.read_text(encoding="utf-8"))  # PyYAML folds some line ends of its own
    key = data.draw(st.sampled_from(sorted(config.values)))
    outer, _, inner = key.partition(".")
    (value[outer] if inner else value).__setitem__(inner or outer, 0.25)
    assert yaml.safe_load(config.changed({key: 0.25})) == value


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.yaml", "a: [", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.yaml", None, "cannot be read"),
        ("a.yaml", b"\xff", "not UTF-8"),
    ],
)
def test_an_unreadable_configuration_is_a_bad_call(tmp_path: Path, name: str, text: object, told: str) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else str(text).encode())
    with pytest.raises(ConfigError) as caught:
        ConfigFile(tmp_path / name)
    assert told in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("a.toml", "lr = 3"), ("a.yaml", ""), ("a.yaml", "- 1"), ("a.yaml", "x")])
def test_a_file_that_is_not_a_mapping_has_no_values(tmp_path: Path, name: str, text: str) -> None:
    assert not ConfigFile(write(tmp_path, text, name)).values


@pytest.mark.parametrize(
    ("number", "text"),
    [(2e-4 / 1.5, "0.00013333333"), (1e-5, "1.0e-05"), (1.5e-7, "1.5e-07"), (2.0, "2.0"), (21, "21")],
)
def test_a_number_is_a_number_in_yaml(number: float, text: str) -> None:
    assert in_yaml(number) == text
    assert yaml.safe_load(text) == pytest.approx(number)


# Temporary copies


def test_a_copy_lives_until_the_next_one_with_the_permissions_of_the_original(tmp_path: Path) -> None:
    config = ConfigFile(write(tmp_path, "a: 1"))
    config.path.chmod(0o640)
    first, second = config.copy(1, {"a": 2}), config.copy(2, {"a": 3})
    assert not first.exists()
    assert second.name.startswith("config_retry_2_")
    assert yaml.safe_load(second.read_text()) == {"a": 3}
    assert second.stat().st_mode & 0o777 == 0o640
    config.remove_copy()
    assert os.listdir(tmp_path) == ["config.yaml"]


# What Hydra composes


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    for name, text in {
        "config.yaml": "defaults:\n  - training: usual\n  - optional model: mlp\n  - optional nothing: here\n"
        "  - data: small\n  - _self_\nseed: 1\n",
        "training/usual.yaml": "learning_rate: 1\nschedule: {constant_product: 500}\n",
        "training/fast.yaml": "defaults: [usual]\nlearning_rate: 2\n",
        "model/mlp.yaml": "width: 8\n",
        "data/small.yaml": "# @package rows.of\nnumber: 10\n",
        "experiment/big.yaml": "# @package _global_\ntraining:\n  learning_rate: 3\n",
    }.items():
        write(tmp_path, text, name)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ([], "1"),
        (["-x", "training=fast"], "2"),
        (["python", "fit.py", "training=fast", "+experiment=big"], "3"),
    ],
)
def test_values_come_from_the_groups_that_are_chosen(conf: Path, words: list[str], rate: str) -> None:
    values = composed(conf, "config", words)
    assert values == {
        "training.learning_rate": rate,
        "training.schedule.constant_product": "500",
        "model.width": "8",
        "rows.of.number": "10",
        "seed": "1",
    }


def test_what_hydra_cannot_compose_here_has_no_values(conf: Path) -> None:
    """Parts of the configuration may be classes of the script; that they are missing here is no failure of it."""
    write(conf, "defaults: [registered_by_the_script]\n")
    assert composed(conf, "config", []) == {}
