"""Settings of single agents: every way to write them, which source wins, and one message for each slip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ci_llm.config import Config, as_typed, load_config, parse_config
from ci_llm.config.load import read_config
from ci_llm.errors import ConfigError
from tests.support.messages import Messages


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return path


@pytest.mark.fast_cases(9)
@pytest.mark.parametrize(
    ("arguments", "agents"),
    [
        (["learning_rate=[1e-3,2e-3]"], ({"learning_rate": 1e-3}, {"learning_rate": 2e-3})),
        (["--lr", "[1e-3, 2e-3]"], ({"learning_rate": 1e-3}, {"learning_rate": 2e-3})),
        (["--r=[4,8]", "seed=[1,2]"], ({"lora_rank": 4, "seed": 1}, {"lora_rank": 8, "seed": 2})),
        (["max_grad_norm=[null,0.5]"], ({"max_grad_norm": None}, {"max_grad_norm": 0.5})),
        (
            ["lora_target_modules=[[q_proj],all-linear,[q_proj,v_proj]]"],
            (
                {"lora_target_modules": ("q_proj",)},
                {"lora_target_modules": "all-linear"},
                {"lora_target_modules": ("q_proj", "v_proj")},
            ),
        ),
        (["agent_layers=[all,upper_half]"], ({"agent_layers": "all"}, {"agent_layers": "upper_half"})),
        (["agent_layers=[[0,1],[2]]"], ({"agent_layers": (0, 1)}, {"agent_layers": (2,)})),
        (
            ["agents=[{lr: 1e-3, name: slow}, {row_weights: bootstrap}]"],
            ({"name": "slow", "learning_rate": 1e-3}, {"row_weights": "bootstrap"}),
        ),
        (["agents=[{lr: 1e-3}, {}]", "lora_rank=[2,4]"], ({"learning_rate": 1e-3, "lora_rank": 2}, {"lora_rank": 4})),
        (["learning_rate=[5e-3]"], ({"learning_rate": 5e-3},)),
        (
            ["dataset_name=[[a.jsonl],[b.jsonl,c.jsonl]]"],
            ({"dataset_name": "a.jsonl"}, {"dataset_name": "b.jsonl,c.jsonl"}),
        ),
        (
            ["max_train_samples=[10,null]", "dataset_split=[train,all]"],
            ({"max_train_samples": 10, "dataset_split": "train"}, {"max_train_samples": None, "dataset_split": "all"}),
        ),
        (
            ["seed=[1,2]", "dataset_subset=[main,socratic]"],
            ({"seed": 1, "dataset_subset": "main"}, {"seed": 2, "dataset_subset": "socratic"}),
        ),
    ],
)
def test_lists_and_mappings_give_agents_their_own_settings(arguments: list[str], agents: Any) -> None:
    config = load_config(None, arguments)
    assert config.agents == agents
    assert config.num_agents == len(agents)
    assert parse_config(config.dump(), "dumped") == config
    assert Config(agents=list(map(dict, agents))) == config


def test_a_list_of_names_is_still_one_value() -> None:
    config = load_config(None, ["lora_target_modules=[q_proj,v_proj]"])
    assert (config.lora_target_modules, config.agents, config.num_agents) == (("q_proj", "v_proj"), (), 4)


def test_the_file_takes_both_forms(tmp_path: Path) -> None:
    path = written(tmp_path, "agents:\n  - name: slow\n    lr: 1e-4\n  - {}\nlora_rank: [2, 4]\nweight_decay: 0.1\n")
    config = load_config(path)
    assert config.agents == ({"name": "slow", "learning_rate": 1e-4, "lora_rank": 2}, {"lora_rank": 4})
    assert config.agent_names == ["slow", "agent1"]
    assert [own.weight_decay for own in config.each_agent] == [0.1, 0.1]
    assert [own.learning_rate for own in config.each_agent] == [1e-4, 8e-3]  # that of the embedded base
    assert config.of_agent(1).num_agents == 1


def test_the_command_line_wins_key_by_key(tmp_path: Path) -> None:
    text = "num_agents: 2\nagents:\n  - {lr: 1e-4, seed: 5}\n  - {lr: 2e-4}\n"
    path = written(tmp_path, text)
    reading = read_config(path, ["learning_rate=3e-3"])
    assert reading.config.agents == ({"seed": 5}, {})
    assert any("learning_rate of an agent" in line and "is set aside" in line for line in reading.lines)
    assert load_config(path, ["learning_rate=[1e-3,2e-3]"]).agents == (
        {"learning_rate": 1e-3, "seed": 5},
        {"learning_rate": 2e-3},
    )
    assert load_config(path, ["agents=[{seed: 1}]"]).agents == ({"seed": 1},)
    assert load_config(path, ["agents=null"]).agents == ()


def test_a_list_on_the_command_line_sets_aside_the_number_of_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "num_agents: 4\n")
    assert load_config(path, ["learning_rate=[1e-3,2e-3]"]).num_agents == 2


def test_a_ratio_of_an_agent_sets_aside_the_common_number_of_steps() -> None:
    config = Config(num_warmup_steps=9, agents=[{"num_warmup_steps_ratio": 0.5}, {}])
    assert [own.num_warmup_steps for own in config.each_agent] == [None, 9]


@pytest.mark.parametrize(
    "text",
    [
        "agents: [{leraning_rate: 1e-3}]",
        "agents: [{batch_size: 4}]",
        "agents: [{model_name: x}]",
        "agents: [{max_seq_length: 9}]",
        "agents: [{save_steps: 9}]",
        "agents: [{eval_dataset_name: x}]",
        "max_train_samples: [4, 0]",
        "dataset_name: [[a], [b]]\ndiversity: swd",
        "agents: [{num_agents: 2}]",
        "agents: [{lr: -1}]",
        "agents: [{lr: 1, learning_rate: 2}]",
        "agents: [{name: a, name: b}]",
        "agents: [{name: a}, {name: a}]",
        "agents: [{name: agent1}, {}]",
        "agents: [{name: a/b}]",
        "agents: {lr: 1}",
        "agents: [1, 2]",
        "agents: [{lr: 1}, {}]\nnum_agents: 3",
        "lr: [1, 2]\nlora_rank: [1, 2, 3]",
        "agents: [{lr: 1}, {}]\nlr: [1, 2]",
        "batch_size: [2, 4]",
        "lr_scheduler_type: [cosine, greedy]",
    ],
)
def test_a_wrong_entry_is_one_message(tmp_path: Path, text: str, messages: Messages) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    assert "problems" not in str(caught.value), "one slip is one problem"
    assert caught.value.exit_code == 2
    assert caught.value.where
    messages.same(caught.value)


def test_all_wrong_entries_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    path = written(tmp_path, "num_agents: 3\nagents:\n  - lr: none\n    nonsense: 1\n  - batch_size: 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    message = str(caught.value)
    assert "4 problems" in message
    for line, what in (
        (1, "num_agents is"),
        (3, "learning_rate"),
        (4, "nonsense is not a key"),
        (5, "batch_size cannot"),
    ):
        assert f"own.yaml:{line}: {what}" in message


def test_agents_without_settings_of_their_own_are_so_many_agents() -> None:
    assert Config(agents=[{}, {}]) == Config(num_agents=2)


def test_a_difference_is_written_as_it_is_typed() -> None:
    change = Config(lora_target_modules=[["q_proj", "v_proj"], "all-linear"]).diff(Config(num_agents=2))[0]
    assert as_typed(change.old) == "[[q_proj,v_proj],all-linear]"
    assert load_config(None, [f"{change.key}={as_typed(change.old)}"]).num_agents == 2


def test_a_number_is_typed_with_all_the_digits_that_it_has() -> None:
    assert [as_typed(value) for value in (1e-3, 200.0, 1.23456789e-3, 123456789.5, 0.1 + 0.2)] == [
        *("0.001", "200", "0.00123456789", "123456789.5", "0.30000000000000004")
    ]


def test_differences_compare_the_meaning_of_entries_and_not_their_spelling() -> None:
    as_list, as_mappings = Config(learning_rate=[1e-3, 2e-3]), Config(agents=[{"lr": 1e-3}, {"lr": 2e-3}])
    assert not as_list.diff(as_mappings)
    (change,) = as_list.diff(Config(learning_rate=[1e-3, 4e-3]))
    assert (change.key, change.old, change.new) == ("learning_rate", [1e-3, 2e-3], [1e-3, 4e-3])
    assert change.kind == "sample-exact"
    assert {each.key for each in Config(num_agents=2).diff(as_list)} == {"learning_rate"}
    assert {each.key for each in Config(seed=[1, 2]).diff(Config(seed=[1, 2], experiment_name="x"))} == {
        "experiment_name"
    }
    (change,) = Config(seed=[42, 42]).diff(Config(num_agents=2))
    assert (change.key, change.old, change.new) == ("seed", [42, 42], [None, None])
    (change,) = Config(seed=[1, 2]).diff(Config(agents=[{"seed": 1}, {"seed": 2}], seed=7))
    assert (change.key, change.old, change.new) == ("seed", 42, 7)
    assert not as_list.diff(Config(learning_rate=[1e-3, 2e-3], agents=[{"name": "a"}, {"name": "b"}]))


def test_each_agent_has_the_rows_of_its_own_keys() -> None:
    config = Config(dataset_name="a,b", agents=[{"dataset_name": "c"}, {}, {"max_train_samples": 5, "seed": 1}], seed=9)
    assert [own.dataset_names for own in config.rows_of_each] == [("c",), ("a", "b"), ("a", "b")]
    assert [own.max_train_samples for own in config.rows_of_each] == [None, None, 5]
    assert {own.seed for own in config.rows_of_each} == {9}, "an agent's seed is not that of its rows"
    assert (config.task, config.all_dataset_names) == ("c,a,b", ("c", "a", "b"))
    assert config.has_own_rows
    for common in (Config(), Config(seed=[1, 2]), Config(agents=[{"dataset_name": "c"}] * 2)):
        assert not common.has_own_rows


def test_another_data_set_of_an_agent_is_a_difference() -> None:
    both = Config(dataset_name=[["a"], ["b"]]), Config(dataset_name=[["a"], ["c"]])
    (change,) = both[0].diff(both[1])
    assert (change.key, change.old, change.new, change.kind) == ("dataset_name", ["a", "b"], ["a", "c"], "free")
