"""Names of other trainers: each is accepted where the thing exists here, and answered where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from ci_llm.config import Config, groups, load_config, parse_config, read_call
from ci_llm.config.foreign import ALIASES, ALWAYS, NO_EFFECT, TRANSLATIONS, UNSUPPORTED, VALUE_ALIASES
from ci_llm.config.schema import FOUND
from ci_llm.errors import ConfigError
from tests.config.test_config import changed, refusal
from tests.support.messages import Messages, require_typable

#: Names of Trainer, PEFT, LLaMA-Factory, axolotl and Lightning, of each kind a few, and what they come to.
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("torch_dtype=bfloat16", {"model_dtype": "bf16"}),
    ("bf16=false", {}),
    ("load_in_4bit=true", {"quantization": "nf4"}),
    ("lora_target=all", {}),
    ("target_modules=q_proj,v_proj", {"lora_target_modules": ("q_proj", "v_proj")}),
    ("layers_to_transform=[2,3]", {"agent_layers": (2, 3)}),
    ("max_grad_norm=0.0", {"max_grad_norm": None}),
    ("max_steps=-1", {}),
    ("eval_strategy=no", {"eval_steps": None}),
    ("pref_loss=ipo", {"loss_type": ("ipo",)}),
]


@pytest.mark.parametrize(("word", "comes_to"), ACCEPTED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_standard_name_is_accepted_where_the_thing_exists(word: str, comes_to: dict[str, Any]) -> None:
    assert changed(load_config(None, [word])) == comes_to
    name, _, value = word.partition("=")
    assert changed(load_config(None, [f"--{name.replace('_', '-')}", value])) == comes_to


@pytest.mark.parametrize(
    "written",
    [
        "datasets:\n  - path: a.jsonl\n    type: alpaca\n",
        "test_datasets:\n  - path: a.jsonl\n",
        "dataset:\n  - path: a.jsonl\n    type: alpaca\n",
        "special_tokens:\n  pad_token: x\n",
    ],
)
def test_a_group_of_axolotl_is_answered_with_the_keys_to_write(written: str, tmp_path: Any, messages: Messages) -> None:
    (tmp_path / "c.yaml").write_text(written)
    with pytest.raises(ConfigError) as refused:
        load_config(tmp_path / "c.yaml")
    messages.same(refused.value)
    assert "without indentation" not in str(refused.value)


def test_the_tables_of_names_do_not_overlap() -> None:
    assert not {*ALIASES} & {*TRANSLATIONS} | {*ALIASES} & {*UNSUPPORTED}
    assert not {*NO_EFFECT} & {*TRANSLATIONS, *UNSUPPORTED, *ALIASES}
    assert not {*Config.model_fields} - {*FOUND} & {*TRANSLATIONS, *UNSUPPORTED, *ALIASES, *NO_EFFECT}


def test_every_name_means_what_it_has_always_meant(messages: Messages) -> None:
    """Every name of other trainers is read with every value that has a meaning."""
    names = [f"{name} is {key}" for name, key in ALIASES.items()]
    values = [f"{key}={word} is {value}" for key, words in VALUE_ALIASES.items() for word, value in words.items()]
    meant = [f"{name}={word} is {means}" for name, words in TRANSLATIONS.items() for word, means in words.items()]
    answers = [f"{name} is {what}; {way}" for name, (what, way) in UNSUPPORTED.items()]
    ignored = [f"{name} has no effect: {why}" for name, why in NO_EFFECT.items()]
    for lines in (names, values, meant, answers, ignored):
        messages.same("\n".join(sorted(lines)))
    for _, way in UNSUPPORTED.values():
        require_typable(way)


def test_every_translation_is_a_valid_key_and_value() -> None:
    for name, values in TRANSLATIONS.items():
        for value, meaning in values.items():
            more = ["rewards=length"] * meaning.endswith("grpo")
            meant = load_config(None, [*([] if meaning == ALWAYS else [meaning]), *more])
            assert load_config(None, [f"{name}={value}", *more]) == meant
    for key, words in VALUE_ALIASES.items():
        for value in words.values():
            load_config(None, [f"{key}={value}"])


# Options without effect

#: A value of each that asks for something.
ASKED = {
    "steps_per_generation": 4,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "importance_sampling_level": "sequence",
    "num_generations_eval": 4,
    "loss_csv": True,
    "disable_tqdm": True,
    "enable_progress_bar": False,
    "profile_steps": 5,
    "tf32": True,
    "swd_num_projections": 50,
    "dirichlet_alpha_aggregator": 4.0,
    "parallel_mode": True,
    "greater_is_better": False,
    "deepspeed_config_file": "ds.json",
    "streaming": True,
    "compile": True,
}


def written(value: object) -> str:
    return str(value).lower()


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(("name", "value"), ASKED.items())
def test_an_option_without_effect_is_not_a_key_and_is_answered_once_with_the_reason(
    name: str, value: object, tmp_path: Any
) -> None:
    (tmp_path / "c.yaml").write_text(f"{name}: {written(value)}\n")
    given = Config(**{name: value})
    for config in (
        load_config(None, [f"{name}={written(value)}"]),
        load_config(None, [f"--{name.replace('_', '-')}", written(value), "lr=8e-3"]),
        load_config(tmp_path / "c.yaml"),
        given,
        given.model_copy(update={"seed": 42}),
        read_call(given, {"learning_rate": 8e-3}).config,
        read_call(None, {name: value}).config,
    ):
        assert config.notices() == [f"{name} has no effect: {NO_EFFECT[name]}"]
        assert (changed(config), config.dump()) == ({}, Config().dump())
    assert name not in {*given.model_dump(), *(key for keys in groups().values() for key in keys)}
    assert f"\n{name}:" not in given.dump()


def test_every_option_without_effect_is_asked_for_here() -> None:
    assert [*ASKED] == [*NO_EFFECT]


def test_a_value_that_asks_for_nothing_is_not_answered(tmp_path: Any) -> None:
    quiet = ["parallel_mode=no", "use_deepspeed=false", "deepspeed_config_file=null", "greater_is_better=none"]
    assert load_config(None, [*quiet, "--compile", "off"]).notices() == []
    assert Config(streaming=False, use_deepspeed=False, greater_is_better=None).notices() == []
    (tmp_path / "c.yaml").write_text("streaming: 'false'\nparallel_mode: true\n")
    assert load_config(tmp_path / "c.yaml", ["parallel_mode=false"]).notices() == []


@pytest.mark.parametrize(
    "line", ["compile: max-autotune", "torch_compile: 1", "compile: 'true'", "compile: {mode: default}", "compile: [a]"]
)
def test_an_option_without_effect_takes_values_of_any_type(line: str, tmp_path: Any) -> None:
    (tmp_path / "c.yaml").write_text(f"{line}\n")
    config = load_config(tmp_path / "c.yaml")
    for same in (config, read_call(config, {}).config):
        assert [said.partition(":")[0] for said in same.notices()] == ["compile has no effect"]
        assert changed(same) == {}


def test_a_word_behind_a_switch_without_effect_is_not_lost() -> None:
    assert load_config(None, ["--use_deepspeed=false", "--seed", "3"]).seed == 3
    assert load_config(None, ["--deepspeed_config_file", "ds.json", "seed=3"]).seed == 3
    assert refusal(None, "--parallel_mode", "configs/x.yaml").hint == "write --config configs/x.yaml"


def test_an_option_without_effect_stands_once_and_for_all_agents() -> None:
    assert (
        refusal(None, "compile=true", "torch_compile=true").what
        == "compile (as compile and torch_compile) is given twice"
    )
    assert "compile cannot differ between agents" in refusal(None, "agents=[{compile: true}, {}]").what


def test_options_without_effect_are_not_recorded() -> None:
    recorded = parse_config(Config(seed=3, **ASKED).dump(), "config.yaml")
    assert recorded == Config(seed=3)
    assert recorded.notices() == recorded.diff(Config(seed=3, **ASKED)) == []


# Switches


def test_a_switch_may_stand_alone() -> None:
    config = load_config(None, ["--bf16", "--packing", "--full_determinism", "--K", "2"])
    assert changed(config) == {"mixed_precision": "bf16", "deterministic": True, "num_agents": 2}
    assert "is not a key here with the value 'true'" in refusal(None, "--use_dora").what


def test_a_switch_that_is_off_says_nothing_against_one_that_is_on(tmp_path: Any) -> None:
    for first, second in (("bf16: true", "fp16: false"), ("bf16: false", "fp16: true"), ("fp16: false", "bf16: true")):
        (tmp_path / "c.yaml").write_text(f"{first}\n{second}\n")
        on = (first if first.endswith("true") else second).partition(":")[0]
        assert load_config(tmp_path / "c.yaml").mixed_precision == on
    assert refusal(None, "bf16=true", "fp16=true").what == "mixed_precision (as bf16 and fp16) is given twice"
    assert "given twice" in refusal(None, "bf16=true", "mixed_precision=no").what


def test_a_switch_that_is_off_on_the_command_line_switches_off_what_the_file_switches_on(tmp_path: Any) -> None:
    (tmp_path / "c.yaml").write_text("mixed_precision: bf16\n")
    assert load_config(tmp_path / "c.yaml", ["bf16=false"]).mixed_precision == "no"


# In Python


def test_names_of_others_work_in_python_too() -> None:
    config = Config(lr=1e-3, K=2, bf16=True, optim="adamw_torch", max_steps=-1, torch_dtype="bfloat16", resume=True)
    assert config == Config(learning_rate=1e-3, num_agents=2, mixed_precision="bf16", model_dtype="bf16")
    assert Config(target_modules=["q_proj"]).lora_target_modules == ("q_proj",)
    assert Config.model_validate({"lr": 1e-3}).learning_rate == 1e-3


@pytest.mark.parametrize(
    "values",
    [
        {"batch_size": "04"},
        {"batch_size": 0},
        {"num_agents": True},
        {"lr": float("nan")},
        {"seed": object()},
        {"sed": 1},
        {"lr": 1e-3, "learning_rate": 1e-3},
        {"use_dora": True},
        {"model_dtype": "fp64", "mixed_precision": "bf16"},
    ],
    ids=lambda values: ",".join(values),
)
def test_a_mistake_in_python_gives_the_same_message(values: dict[str, Any], messages: Messages) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**values)
    messages.same(caught.value)
    assert (caught.value.where, caught.value.exit_code) == ("Config(...)", 2)


def test_a_configuration_is_read_only_and_says_how_to_change_it() -> None:
    with pytest.raises(ConfigError, match="read-only") as caught:
        Config().seed = 1
    assert "model_copy" in str(caught.value.hint)
