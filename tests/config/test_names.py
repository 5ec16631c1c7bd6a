"""Names of other trainers: each is accepted where the thing exists here, and answered where it does not."""

from __future__ import annotations

from typing import Any

import pytest

from ci_llm.config import Config, groups, load_config, parse_config, read_call
from ci_llm.config.foreign import ALIASES, ALWAYS, NO_EFFECT, TRANSLATIONS, UNSUPPORTED, VALUE_ALIASES
from ci_llm.config.sweep import read_sweep
from ci_llm.errors import ConfigError
from tests.config.test_config import changed
from tests.support.messages import Messages, require_typable


def refusal(*arguments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(None, arguments)
    return caught.value


#: Standard names of Trainer, PEFT, TRL, LLaMA-Factory, axolotl, Lightning: what each one comes to.
ACCEPTED: list[tuple[str, dict[str, Any]]] = [
    ("model_name_or_path=owner/base", {"model_name": "owner/base"}),
    ("torch_dtype=bfloat16", {"model_dtype": "bf16"}),
    ("dtype=auto", {"model_dtype": "auto"}),
    ("bf16=true", {"mixed_precision": "bf16"}),
    ("bf16=auto", {"mixed_precision": "auto"}),
    ("fp16=true", {"mixed_precision": "fp16"}),
    ("bf16=false", {}),
    ("precision=bf16-mixed", {"mixed_precision": "bf16"}),
    ("gradient_checkpointing=true", {"use_gradient_checkpointing": True}),
    ("use_gradient_checkpointing=unsloth", {"use_gradient_checkpointing": True}),
    ("attn_implementation=sdpa", {}),
    ("load_in_4bit=false", {}),
    ("load_in_4bit=true", {"quantization": "nf4"}),
    ("load_in_8bit=true", {"quantization": "int8"}),
    ("quantization_bit=4", {"quantization": "nf4"}),
    ("trust_remote_code=false", {}),
    ("lora_r=16", {"lora_rank": 16}),
    ("lora_target=all", {}),
    ("target_modules=q_proj,v_proj", {"lora_target_modules": ("q_proj", "v_proj")}),
    ("layers_to_transform=[2,3]", {"agent_layers": (2, 3)}),
    ("layers_to_transform=null", {}),
    ("lora_target_linear=true", {}),
    ("use_peft=true", {}),
    ("finetuning_type=lora", {}),
    ("max_grad_norm=0", {"max_grad_norm": None}),
    ("max_grad_norm=0.0", {"max_grad_norm": None}),
    ("task_type=CAUSAL_LM", {}),
    ("bias=none", {}),
    ("adapter_name_or_path=crowd", {"init_from": "crowd"}),
    ("dataset_config=main", {"dataset_subset": "main"}),
    ("dataset_train_split=train_sft", {"dataset_split": "train_sft"}),
    ("dataset_test_split=validation", {"eval_split": "validation"}),
    ("cutoff_len=2048", {"max_seq_length": 2048}),
    ("max_length=2048", {"max_seq_length": 2048}),
    ("packing=true", {}),
    ("max_samples=100", {"max_train_samples": 100}),
    ("max_train_samples=-1", {}),
    ("max_eval_samples=50", {"eval_samples": 50}),
    ("dataloader_num_workers=2", {"num_workers": 2}),
    ("num_train_epochs=1.5", {"epochs": 1.5}),
    ("max_steps=-1", {}),
    ("max_steps=500", {"max_train_steps": 500}),
    ("per_device_train_batch_size=2", {"batch_size": 2}),
    ("accumulate_grad_batches=8", {"gradient_accumulation_steps": 8}),
    ("optim=adamw_torch_fused", {}),
    ("optim=adamw_torch", {}),
    ("optimizer=adamw", {}),
    ("optimizer=adamw_torch", {}),
    ("adam_beta1=0.95", {"adam_beta1": 0.95}),
    ("adam_beta2=0.95", {"adam_beta2": 0.95}),
    ("adam_epsilon=1e-6", {"adam_epsilon": 1e-6}),
    ("gradient_clip_val=0.3", {"max_grad_norm": 0.3}),
    ("warmup_ratio=0.03", {"num_warmup_steps_ratio": 0.03}),
    ("warmup_steps=10", {"num_warmup_steps": 10}),
    ("full_determinism=true", {"deterministic": True}),
    ("disable_tqdm=true", {"progress_bar": False}),
    ("enable_progress_bar=false", {"progress_bar": False}),
    ("random_state=3407", {"seed": 3407}),
    ("eval_strategy=steps", {}),
    ("eval_strategy=no", {"eval_steps": None}),
    ("save_strategy=steps", {}),
    ("logging_strategy=steps", {}),
    ("metric_for_best_model=eval_loss", {}),
    ("log_every_n_steps=1", {"logging_steps": 1}),
    ("default_root_dir=runs", {"output_dir": "runs"}),
    ("run_name=first", {"experiment_name": "first"}),
    ("ckpt_path=runs/one", {"resume_from_checkpoint": "runs/one"}),
    ("push_to_hub=false", {}),
    ("remove_unused_columns=false", {}),
    ("pad_to_sequence_len=false", {}),
    ("eval_sample_packing=true", {}),
    ("stage=sft", {}),
    ("stage=dpo", {"objective": "dpo"}),
    ("stage=kto", {"objective": "kto"}),
    ("stage=rm", {"objective": "reward"}),
    ("rl=dpo", {"objective": "dpo"}),
    ("rl=kto", {"objective": "kto"}),
    ("rl=orpo", {"objective": "orpo"}),
    ("rl=simpo", {"objective": "simpo"}),
    ("rlhf_type=rm", {"objective": "reward"}),
    ("reward_model=true", {"objective": "reward"}),
    ("pref_beta=0.2", {"beta": 0.2}),
    ("rl_beta=0.2", {"beta": 0.2}),
    ("orpo_alpha=0.2", {"beta": 0.2}),
    ("pref_loss=ipo", {"loss_type": ("ipo",)}),
    ("pref_loss=sigmoid", {"loss_type": ("sigmoid",)}),
    ("pref_ftx=0.0", {}),
    ("dpo_label_smoothing=0.1", {"label_smoothing": 0.1}),
    ("kto_chosen_weight=2", {"desirable_weight": 2.0}),
    ("kto_undesirable_weight=2", {"undesirable_weight": 2.0}),
    ("rl_adapter_ref_model=true", {}),
]

#: Standard names, or values of them, without a counterpart: the answer tells what to do instead.
ANSWERED: list[str] = [
    "bnb_4bit_quant_type=fp4",
    "attn_implementation=flash_attention_2",
    "optim=paged_adamw_8bit",
    "optim=adafactor",
    "packing=false",
    "per_device_eval_batch_size=8",
    "eval_strategy=epoch",
    "save_strategy=epoch",
    "save_strategy=no",
    "logging_strategy=epoch",
    "wandb_project=mine",
    "use_dora=true",
    "bias=all",
    "modules_to_save=lm_head",
    "neftune_noise_alpha=5",
    "label_smoothing_factor=0.1",
    "group_by_length=true",
    "deepspeed=ds.json",
    "fsdp=full_shard",
    "devices=4",
    "trust_remote_code=true",
    "flash_attention=true",
    "pad_to_sequence_len=true",
    "eval_sample_packing=false",
    "stage=ppo",
    "stage=pt",
    "rl=ipo",
    "rl=grpo",
    "rlhf_type=ppo",
    "reward_model=saves/rm",
    "pref_loss=orpo",
    "pref_ftx=0.5",
    "pref_bco_weight=1.0",
    "rpo_alpha=1.0",
    "dpo_use_weighting=true",
    "dpo_norm_loss=true",
    "rl_adapter_ref_model=false",
    "ref_model=base",
    "ref_model_adapters=saves/sft",
    "trl={beta: 0.1}",
]


def test_the_tables_are_of_a_size() -> None:
    assert len(ACCEPTED) + len(ANSWERED) >= 80
    assert len({name.partition("=")[0] for name in [*dict(ACCEPTED), *ANSWERED]}) >= 60


@pytest.mark.fast_cases(30)
@pytest.mark.parametrize(("word", "comes_to"), ACCEPTED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_standard_name_is_accepted_where_the_thing_exists(word: str, comes_to: dict[str, Any]) -> None:
    assert changed(load_config(None, [word])) == comes_to
    name, _, value = word.partition("=")
    assert changed(load_config(None, [f"--{name.replace('_', '-')}", value])) == comes_to


@pytest.mark.parametrize("word", ANSWERED)
def test_an_unsupported_name_is_answered_with_the_alternative(word: str, messages: Messages) -> None:
    error = refusal(word)
    messages.same(error)
    assert "did you mean" not in str(error)
    assert error.what.startswith(f"{word.partition('=')[0]} is not a key here")


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
    assert not {*Config.model_fields} & {*TRANSLATIONS, *UNSUPPORTED, *ALIASES, *NO_EFFECT}


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
            assert load_config(None, [f"{name}={value}"]) == load_config(None, [] if meaning == ALWAYS else [meaning])
    for key, words in VALUE_ALIASES.items():
        for value in words.values():
            load_config(None, [f"{key}={value}"])


# Options without effect

#: A value of each that asks for something.
ASKED = {
    "parallel_mode": True,
    "greater_is_better": False,
    "use_deepspeed": True,
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
        read_call({name: value}, {}).config,
        read_call(given, {"learning_rate": 8e-3}).config,
        read_call(None, {name: value}).config,
    ):
        assert config.notices() == [f"{name} has no effect: {NO_EFFECT[name]}"]
        assert (changed(config), config.dump()) == ({}, Config().dump())
    assert name not in {*given.model_dump(), *(key for keys in groups().values() for key in keys)}
    assert name not in given.dump()


def test_every_option_without_effect_is_asked_for_here() -> None:
    assert [*ASKED] == [*NO_EFFECT]


def test_a_value_that_asks_for_nothing_is_not_answered(tmp_path: Any) -> None:
    quiet = ["parallel_mode=no", "use_deepspeed=false", "deepspeed_config_file=null", "greater_is_better=none"]
    assert load_config(None, [*quiet, "--compile", "off"]).notices() == []
    assert Config(streaming=False, use_deepspeed=None, greater_is_better=None).notices() == []
    (tmp_path / "c.yaml").write_text("streaming: 'false'\nuse_deepspeed: true\n")
    assert load_config(tmp_path / "c.yaml", ["use_deepspeed=false"]).notices() == []


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
    assert load_config(None, ["--use_deepspeed", "--seed", "3"]).seed == 3
    assert load_config(None, ["--deepspeed_config_file", "ds.json", "seed=3"]).seed == 3
    assert refusal("--parallel_mode", "configs/x.yaml").hint == "write --config configs/x.yaml"


def test_an_option_without_effect_stands_once_and_for_all_agents(tmp_path: Any) -> None:
    assert refusal("compile=true", "torch_compile=true").what == "compile (as compile and torch_compile) is given twice"
    assert "compile cannot differ between agents" in refusal("agents=[{compile: true}, {}]").what
    (tmp_path / "c.yaml").write_text("sweep:\n  compile: [true, false]\n  lr: [1e-3, 2e-3]\n")
    with pytest.raises(ConfigError, match="compile cannot differ between trials"):
        read_sweep(tmp_path / "c.yaml", [])


def test_options_without_effect_are_not_recorded() -> None:
    recorded = parse_config(Config(seed=3, **ASKED).dump(), "config.yaml")
    assert recorded == Config(seed=3)
    assert recorded.notices() == recorded.diff(Config(seed=3, **ASKED)) == []


# Switches


def test_a_switch_may_stand_alone() -> None:
    config = load_config(None, ["--bf16", "--packing", "--full_determinism", "--K", "2"])
    assert changed(config) == {"mixed_precision": "bf16", "deterministic": True, "num_agents": 2}
    assert "is not a key here with the value 'true'" in refusal("--use_dora").what


def test_a_switch_that_is_off_says_nothing_against_one_that_is_on(tmp_path: Any) -> None:
    for first, second in (("bf16: true", "fp16: false"), ("bf16: false", "fp16: true"), ("fp16: false", "bf16: true")):
        (tmp_path / "c.yaml").write_text(f"{first}\n{second}\n")
        on = (first if first.endswith("true") else second).partition(":")[0]
        assert load_config(tmp_path / "c.yaml").mixed_precision == on
    assert refusal("bf16=true", "fp16=true").what == "mixed_precision (as bf16 and fp16) is given twice"
    assert "given twice" in refusal("bf16=true", "mixed_precision=no").what


def test_a_switch_that_is_off_on_the_command_line_switches_off_what_the_file_switches_on(tmp_path: Any) -> None:
    (tmp_path / "c.yaml").write_text("mixed_precision: bf16\n")
    assert load_config(tmp_path / "c.yaml", ["bf16=false"]).mixed_precision == "no"


def test_no_limit_of_steps_leaves_the_epochs_to_decide(tmp_path: Any) -> None:
    (tmp_path / "c.yaml").write_text("max_steps: -1\nnum_train_epochs: 2\n")
    assert changed(load_config(tmp_path / "c.yaml")) == {"epochs": 2}


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


# Mistakes

#: What is typed into a file.
MISTAKES: list[str] = [
    "learning_rte: 1e-3",
    "batchsize: 3",
    "Seed: 1",
    "lora_alfa: 16",
    "zzz: 1",
    "warmup_steps: 0.1",
    "warmup_steps: 10.5",
    "local_rank: -1",
    "revision: main",
    "agent_layers: 0-3",
    "no_async_save: true",
    "use_deepsped: true",
    "no_compile: true",
    "training.lr: 1",
    "training:\n  lr: 1e-3",
    "lora: {r: 8}",
    "seed: {a: 1}",
    "eval_file: x",
    "debug: true",
    "batch_size: four",
    "batch_size: 4.0",
    "batch_size: '4'",
    "batch_size:",
    "batch_size: 0x10",
    "K: 0",
    "K: -1",
    "lr: 0",
    "lr: -1e-4",
    "lr: 1e-4x",
    "lr: .nan",
    "lambda_sw: [1e-4]",
    "epochs: 0",
    "epochs: three",
    "adam_beta2: 1.0",
    "lora_dropout: 1",
    "warmup_ratio: 3",
    "mixed_precision: BF16",
    "mixed_precision: fp8",
    "bf16: maybe",
    "async_save: 1",
    "lr_scheduler_type: cosin",
    "lr_scheduler_type: reduce_lr_on_plateau",
    "max_runtime: 11:55",
    "save_steps: 0",
    "report_to: wand",
    "model_name: null",
    "experiment_name: a/b",
    "experiment_name: final_checkpoint",
    "model_dtype: fp64\nbf16: true",
    "eval_steps: null\nload_best_model_at_end: true",
    "seed: 1\nseed: 2",
    "lr: 1\nlearning-rate: 1",
]


@pytest.mark.fast_cases(32)
@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text.partition("\n")[0])
def test_a_mistake_is_one_message_with_its_place_and_what_to_write(
    text: str, tmp_path: Any, messages: Messages
) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(f"{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    messages.same(caught.value)
    assert caught.value.exit_code == 2
    assert f"{path}:1" in str(caught.value.where)
    assert len(MISTAKES) >= 40
