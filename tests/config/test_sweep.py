"""Spaces: every way to write them, which source wins, and one message for each slip, all at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ci_llm.config.own_keys import OWN_KEYS
from ci_llm.config.sweep import SPACE_KEYS, Choices, Range, read_sweep, read_sweep_call
from ci_llm.errors import ConfigError
from tests.config.test_agents import written
from tests.support.messages import Messages

LOG = Range(5e-4, 1.6e-2, log=True, whole=False)


@pytest.mark.parametrize(
    ("word", "key", "space"),
    [
        ("learning_rate=[1e-3,2e-3]", "learning_rate", Choices((1e-3, 2e-3))),
        ("lr=log(5e-4,1.6e-2)", "learning_rate", LOG),
        ("--lr=log(5e-4, 1.6e-2)", "learning_rate", LOG),
        ("learning_rate={low: 5e-4, high: 1.6e-2, log: true}", "learning_rate", LOG),
        ("weight_decay={low: 0, high: 0.1}", "weight_decay", Range(0.0, 0.1, log=False, whole=False)),
        ("lora_rank=log(2,64)", "lora_rank", Range(2.0, 64.0, log=True, whole=True)),
        ("learning_rate=loguniform(1e-3,1e-2)", "learning_rate", Range(1e-3, 1e-2, log=True, whole=False)),
        ("lora_dropout=uniform(0,0.2)", "lora_dropout", Range(0.0, 0.2, log=False, whole=False)),
        ("max_grad_norm=[null,0.5]", "max_grad_norm", Choices((None, 0.5))),
        ("agent_layers=[all,upper_half,[3]]", "agent_layers", Choices(("all", "upper_half", (3,)))),
        (
            "lora_target_modules=[all-linear,[q_proj,v_proj]]",
            "lora_target_modules",
            Choices(("all-linear", ("q_proj", "v_proj"))),
        ),
    ],
)
def test_a_space_on_the_command_line(word: str, key: str, space: Any) -> None:
    reading = read_sweep(None, [word, "batch_size=3"])
    assert reading.spaces == {key: space}
    assert (reading.config.batch_size, reading.config.num_agents, reading.config.agents) == (3, 1, ())


def test_a_list_of_names_is_still_one_value() -> None:
    reading = read_sweep(None, ["lora_target_modules=[q_proj,v_proj]", "agent_layers=[2,3]", "lora_rank=[2,4]"])
    assert [*reading.spaces] == ["lora_rank"]
    assert reading.config.agent_layers == (2, 3)
    assert reading.config.lora_target_modules == ("q_proj", "v_proj")


def test_the_command_line_overrides_the_spaces_of_a_file(tmp_path: Path) -> None:
    text = (
        "num_agents: 4\nweight_decay: [0.0, 0.1]\nlora_rank: [4, 8]\ntrials: 7\nsampler: random\n"
        "lr: {low: 5e-4, high: 1.6e-2, log: true}\n"
    )
    path = written(tmp_path, text)
    reading = read_sweep(path, ["trials=9", "lora_rank=[2,4]"])
    assert reading.spaces == {"weight_decay": Choices((0.0, 0.1)), "learning_rate": LOG, "lora_rank": Choices((2, 4))}
    assert (reading.keys.trials, reading.keys.sampler) == (9, "random")
    fixed = read_sweep(path, ["learning_rate=2e-3"])
    assert "learning_rate" not in fixed.spaces
    assert fixed.config.learning_rate == 2e-3


def test_a_call_in_python_is_read_like_a_command_line() -> None:
    reading = read_sweep_call(
        {"batch_size": 3},
        {"learning_rate": {"low": 5e-4, "high": 1.6e-2, "log": True}, "lora_rank": [4, 8], "trials": 5},
    )
    assert reading.spaces == {"learning_rate": LOG, "lora_rank": Choices((4, 8))}
    assert (reading.keys.trials, reading.config.batch_size) == (5, 3)


@pytest.mark.parametrize(
    ("words", "sampler", "trials"),
    [
        (["lr=[1e-3,2e-3]", "lora_rank=[2,4,8]"], "grid", 6),
        (["lr=[1e-3,2e-3]", "lora_rank=[2,4,8]", "trials=4"], "random", 4),
        (["lr=[1e-3,2e-3]", "trials=4"], "grid", 2),
        (["lr=log(1e-4,1e-2)"], "random", 16),
        (["lr=log(1e-4,1e-2)", "sampler=tpe", "trials=5"], "tpe", 5),
        (["lr=[1e-3,2e-3]", "sampler=random"], "random", 2),
    ],
)
def test_the_sampler_and_the_number_of_trials_that_follow(words: list[str], sampler: str, trials: int) -> None:
    keys = read_sweep(None, words).keys
    assert (keys.sampler, keys.trials) == (sampler, trials)


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (["num_warmup_steps_ratio=0.1"], 20),
        (["num_warmup_steps_ratio=uniform(0,0.3)"], 60),
        (["num_warmup_steps=[5,40]"], 40),
        (["num_warmup_steps=[null,5]", "num_warmup_steps_ratio=0.1"], 20),
    ],
)
def test_the_longest_warm_up_of_any_trial(words: list[str], steps: int) -> None:
    assert read_sweep(None, ["lr=[1e-3,2e-3]", *words]).warmup_steps(200) == steps


@pytest.mark.fast_cases(19)
@pytest.mark.parametrize(
    "words",
    [
        [],
        ["lr=log(1e-4,1e-2)", "batch_size=[2,4]"],
        ["lr=log(1e-4,1e-2)", "max_train_steps=log(2,4)"],
        ["lr=log(1e-4,1e-2)", "eval_steps=[2,4]"],
        ["lr=log(1e-4,1e-2)", "max_train_samples=[1,2]"],
        ["learning_rat=[1,2]", "lr=[1e-3,2e-3]"],
        ["lr=[]"],
        ["lr=log(1e-2,1e-4)"],
        ["weight_decay=log(0,1)"],
        ["lr=log(a,b)"],
        ["use_rslora=uniform(0,1)"],
        ["lora_rank=[4,0]"],
        ["lora_rank=[4,many]"],
        ["lora_dropout=uniform(0,1.5)"],
        ["lr={low: 1e-3}"],
        ["lr=[1e-3,2e-3]", "trials=0"],
        ["lr=[1e-3,2e-3]", "keep=1"],
        ["lr=[1e-3,2e-3]", "metric=bleu"],
        ["lr=log(1e-4,1e-2)", "sampler=grid"],
        ["lr=[1e-3,2e-3]", "num_agents=4"],
        ["lr=[1e-3,2e-3]", "agents=[{seed: 1}]"],
        ["lr=[1e-3,2e-3]", "diversity=swd"],
        ["lr=[1e-3,2e-3]", "early_stopping_patience=3"],
        ["lr=[1e-3,2e-3]", "mirror=memory:///one"],
        ["lr=[1e-3,2e-3]", "resume_from_checkpoint=old"],
        ["lr=[1e-3,2e-3]", "push_to_hub=true"],
        ["lr=[1e-3,2e-3]", "overwrite_output_dir=true"],
    ],
    ids=" ".join,
)
def test_keys_that_cannot_be_swept_are_refused_in_one_message(words: list[str], messages: Messages) -> None:
    with pytest.raises(ConfigError) as error:
        read_sweep(None, words)
    messages.same(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize("space", ["log(1e-3)", "uniform(1,2,3)", "[1e-3,2e-3", "log(1e-3"])
def test_half_a_space_is_one_problem(space: str) -> None:
    with pytest.raises(ConfigError, match="learning_rate has a space that is not whole") as refused:
        read_sweep(None, [f"learning_rate={space}"])
    assert "log(low,high)" in str(refused.value.hint)


def test_all_problems_come_at_once_each_with_its_place(tmp_path: Path) -> None:
    text = "batch_size: [2, 4]\nblub: [1]\ntrials: x\nlora_rank: [4, -8]\nseed: {low: 1}\n"
    with pytest.raises(ConfigError) as error:
        read_sweep(written(tmp_path, text), ["num_worker=3", "weight_decay=[a]"])
    said = str(error.value)
    for line, part in ((1, "batch_size"), (2, "blub"), (3, "trials"), (4, "'-8'"), (5, "a range is written")):
        assert any(f"own.yaml:{line}" in row and part in row for row in said.splitlines()), (line, said)
    assert "num_worker is not a key" in said
    assert "weight_decay is 'a'" in said


def test_a_call_in_python_without_a_space_is_named() -> None:
    with pytest.raises(ConfigError, match="nothing to sweep") as refused:
        read_sweep_call(None, {"max_train_steps": 4})
    assert refused.value.where == "Sweep(...)"


def test_optuna_absent_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ci_llm.config.sweep.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'needs Optuna(.|\n)*pip install "ci-llm\[sweep\]"'):
        read_sweep(None, ["lr=[1e-3,2e-3]", "sampler=tpe"])
    assert read_sweep(None, ["lr=[1e-3,2e-3]"]).keys.sampler == "grid"


def test_a_trial_that_says_auto_follows_the_objective_that_the_rows_decide() -> None:
    reading = read_sweep(None, ["model_name=my/base", "learning_rate=[auto,1e-4]"])
    assert reading.spaces == {"learning_rate": Choices(("auto", 1e-4))}
    decided = reading.config.with_settled(reading.config.with_objective("dpo"))
    trials = decided.of_trials(9, {"agents": ({"learning_rate": "auto"}, {"learning_rate": 1e-4}), "num_agents": 2})
    assert [own["learning_rate"] for own in trials.with_settled({}).agents] == [1e-5, 1e-4]


def test_every_key_that_agents_may_have_of_their_own_may_have_a_space_but_which_rows_they_read() -> None:
    assert {"learning_rate", "lora_rank", "seed", "lora_target_modules"} <= {*SPACE_KEYS} <= {*OWN_KEYS}
    assert not {"dataset_name", "max_train_samples"} & {*SPACE_KEYS}


def test_values_of_a_range_can_be_typed() -> None:
    values = [LOG.at(share / 97) for share in range(98)]
    assert (values[0], values[-1]) == (5e-4, 1.6e-2)
    assert values == sorted(values)
    assert all(float(f"{value:g}") == value for value in values)
    assert {Range(2.0, 64.0, log=True, whole=True).at(share / 9) for share in range(10)} <= {*range(2, 65)}


@pytest.mark.parametrize(
    "lines",
    [
        "trials: 8\ntrials: 16\nlearning_rate: [1e-3, 2e-3]",
        "learning_rate: [1e-3, 2e-3]\nlr: [1e-4, 2e-4]",
        "lora_rank: [4, 8]\nlora_rank: 8\nlearning_rate: [1e-3, 2e-3]",
        "lora_rank: 8\nlora_rank: [4, 8]",
        "seed: 1\nseed: 2\nlearning_rate: [1e-3, 2e-3]",
    ],
)
def test_a_file_gives_a_key_once(lines: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is given twice") as refusal:
        read_sweep(written(tmp_path, lines), [])
    assert str(refusal.value).count("given twice") == 1
