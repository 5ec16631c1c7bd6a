"""The configuration: every form is understood; every mistake is answered with key, place and hint."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ci_llm.config import (
    Config,
    arguments_without,
    default_file,
    describe_keys,
    groups,
    load_config,
    parse_config,
    read_call,
    read_config,
)
from ci_llm.config.foreign import ALIASES, REMOVED, UNSUPPORTED
from ci_llm.config.parsing import NULL_WORDS, UNREADABLE, Scalar, kinds_of, read_value
from ci_llm.config.schema import FOUND
from ci_llm.config.sweep import read_sweep
from ci_llm.errors import ConfigError
from ci_llm.lora.settings import FIELD_OF_KEY
from tests.config.fuzz import fuzz
from tests.support.campaign import size
from tests.support.messages import Messages
from tools import keys_table

ROOT = Path(__file__).parents[2]
PRESETS = [ROOT / "configs.yaml", *sorted((ROOT / "configs").glob("*.yaml"))]

# The contract: these keys exist under exactly these names; a value where one is fixed.
FIXED_DEFAULTS: dict[str, Any] = {
    "save_steps": 100,
    "save_interval_seconds": 300,
    "save_total_limit": 3,
    "logging_steps": 10,
    "eval_steps": 100,
    "max_train_steps": None,
    "global_batch_size": None,
    "gradient_accumulation_steps": 1,
    "num_workers": 4,
    "weight_decay": 0.01,
    "mixed_precision": "no",
    "seed": 42,
    "num_agents": 4,
    "max_grad_norm": 1.0,
    "experiment_name": None,
    "resume_from_checkpoint": "latest",
    "restart_from": None,
    "overwrite_output_dir": False,
    "deterministic": "auto",
    "allow_inexact_resume": False,
    "requeue": "auto",
    "interrupted_exit_code": 0,
    "eval_samples": 400,
    "generation_eval_samples": 100,
    "output_dir": "ci_llm_output",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "my.yaml"


def refusal(path: Path | None, *arguments: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(path, arguments)
    assert caught.value.exit_code == 2
    return caught.value


def complaint(path: Path | None, *arguments: str) -> str:
    return str(refusal(path, *arguments))


def changed(config: Config) -> dict[str, Any]:
    """The keys that were given, without those that auto resolved."""
    return {change.key: change.new for change in Config().diff(config) if change.key not in config._reasons}


# The contract


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("regex:[0-9]{1,3}", ("regex:[0-9]{1,3}",)),
        ("[regex:[0-9]{1,3},length]", ("regex:[0-9]{1,3}", "length")),
        ("length,regex:(yes,|no) [.,]", ("length", "regex:(yes,|no) [.,]")),
        ("length, regex:[0-4]", ("length", "regex:[0-4]")),
        ("regex:[(],length", ("regex:[(]", "length")),  # brackets that do not match
    ],
)
def test_a_comma_in_brackets_separates_no_rewards(typed: str, names: tuple[str, ...]) -> None:
    assert load_config(None, ["objective=grpo", f"rewards={typed}"]).rewards == names


def test_the_contract_of_names_and_defaults() -> None:
    defaults = Config().model_dump()
    assert {key: defaults[key] for key in FIXED_DEFAULTS} == FIXED_DEFAULTS


def test_every_key_is_in_one_group_and_described() -> None:
    assert [key for keys in groups().values() for key in keys] == list(Config.model_fields)
    text = describe_keys()
    for key, field in Config.model_fields.items():
        assert field.description
        assert (f"  {key}=" in text) is (key not in FOUND)
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_presets_are_valid_say_what_they_are_for_and_are_read_back(path: Path, file: Path) -> None:
    config = load_config(path)
    file.write_text(config.dump(), encoding="utf-8")
    assert load_config(file) == config
    assert path.name == "configs.yaml" or "Meant for:" in path.read_text(encoding="utf-8")


def test_numbers_of_numpy_are_numbers() -> None:
    values: dict[str, Any] = {
        "learning_rate": np.float32(0.5),
        "max_train_steps": np.int64(3),
        "monitor_gpu": np.bool_(True),
        "agent_layers": [np.int32(1)],
    }
    plain = Config(learning_rate=0.5, max_train_steps=3, monitor_gpu=True, agent_layers=[1])
    assert Config(**values) == read_call(values, {}).config == read_call(None, values).config == plain
    with pytest.raises(ConfigError, match=r"num_agents is '0\.5'"):
        Config(num_agents=np.float32(0.5))


def test_python_reads_values_by_one_rule() -> None:
    values: dict[str, Any] = {
        "output_dir": Path("x"),
        "dataset_name": [Path("a.jsonl"), Path("b.jsonl")],
        "loss_weights": "1,2",
        "agent_layers": "0,1",
        "max_runtime": "1h",
        "batch_size": "4",
    }
    config = Config(**values)
    assert config == read_call(None, values).config == read_call(values, {}).config == parse_config(config.dump(), "")
    assert (config.output_dir, config.dataset_name, config.max_runtime) == ("x", "a.jsonl,b.jsonl", 3600)
    assert copy.deepcopy(config) == config
    assert config.model_fields_set == {*values}


@pytest.mark.parametrize("value", [[{"text": "a"}, {"text": "b"}], {"train": []}, object(), iter("ab")])
def test_data_in_memory_is_refused_with_the_way_to_a_path(value: object) -> None:
    for read in (lambda: Config(dataset_name=value), lambda: read_call(None, {"dataset_name": value})):
        with pytest.raises(ConfigError, match=r"save_to_disk\(FOLDER\), or as a .jsonl file"):
            read()


@pytest.mark.parametrize("value", [[1], object(), 1.5])
def test_a_file_that_is_not_a_configuration_is_refused_by_name(value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"a {type(value).__name__} is not a configuration\n.*train(.|\n)*a mapping of keys"
    ):
        read_call(value, {})


# Forms


@pytest.mark.fast_cases(36)
@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        (["num_agents=2"], {"num_agents": 2}),
        (["--num-agents", "2"], {"num_agents": 2}),
        (["--K", "2", "lr=1e-3"], {"num_agents": 2, "learning_rate": 1e-3}),
        (["--monitor-gpu"], {"monitor_gpu": True}),
        (["--monitor_gpu", "false"], {}),
        (["--debug", "--seed", "3"], {"seed": 3}),
        (["--deterministic"], {"deterministic": True}),
        (["--deterministic", "auto"], {}),
        (["seed=1", "--seed", "2", "seed=3"], {"seed": 3}),
        (["max_runtime=11:55:00"], {"max_runtime": 42900.0}),
        (["max_runtime=1-00:00:30"], {"max_runtime": 86430.0}),
        (["max_runtime=1h30m"], {"max_runtime": 5400.0}),
        (["max_runtime=90"], {"max_runtime": 90.0}),
        (["experiment_name=null"], {}),
        (["experiment_name=0123"], {"experiment_name": "0123"}),
        (["save_steps=none"], {"save_steps": None}),
        (["learning_rate=1"], {"learning_rate": 1.0}),
        (["lora_target_modules=q_proj,v_proj"], {"lora_target_modules": ("q_proj", "v_proj")}),
        (["lora_target_modules=[q_proj, 'v_proj']"], {"lora_target_modules": ("q_proj", "v_proj")}),
        (["agent_layers=upper_half"], {"agent_layers": "upper_half"}),
        (["agent_layers=[3, 5]"], {"agent_layers": (3, 5)}),
        (["agent_layers=3"], {"agent_layers": (3,)}),
        (["report_to=none"], {"report_to": ()}),
        (["report_to=wandb,tensorboard"], {"report_to": ("wandb", "tensorboard")}),
        (["--auto_resume"], {}),
        (
            ["--resume-from-checkpoint", "runs/checkpoint_step_20"],
            {"resume_from_checkpoint": "runs/checkpoint_step_20"},
        ),
        (["--resume_from_checkpoint=false"], {"resume_from_checkpoint": None}),
        (["--use_torch_distributed_ckpt", "--seed=1"], {"checkpoint_backend": "distributed", "seed": 1}),
        (["--timeaware-checkpointing"], {}),
        (["--train_on_inputs"], {"train_on_prompt": True}),
        (["save_dir=a b", "exp_name=c"], {"output_dir": "a b", "experiment_name": "c"}),
        (["model_name=a=b"], {"model_name": "a=b"}),
    ],
    ids=" ".join,
)
def test_forms_of_the_command_line(arguments: list[str], values: dict[str, Any]) -> None:
    assert changed(load_config(None, arguments)) == values


@pytest.mark.parametrize("none", ['"none"', "[none]", '["none"]', "[]", "none", "null"])
def test_none_is_an_empty_list_of_choices_however_it_is_written(none: str, file: Path) -> None:
    key = "report_to"
    for text in (f"{key}: {none}\n", f'{{"{key}": {none}}}'):
        file.write_text(text)
        assert getattr(load_config(file), key) == ()
    value: Any = yaml.safe_load(none)
    assert getattr(Config(**{key: value}), key) == getattr(read_call({key: value}, {}).config, key) == ()


def test_values_in_a_file_mean_what_their_key_makes_of_them(file: Path) -> None:
    file.write_text(
        "mixed_precision: no\nlr: 1e-4\nmax_runtime: 11:55:00\nexperiment_name: 2024-01-01\nsave_steps:\n"
        "deterministic: yes\nreport_to: [wandb]\nmodel-name: 'null'\nlora_dropout: .1\n"
        "max_train_steps: 1_000\n",
        encoding="utf-8",
    )
    assert changed(load_config(file)) == {
        "learning_rate": 1e-4,
        "max_runtime": 42900.0,
        "experiment_name": "2024-01-01",
        "save_steps": None,
        "deterministic": True,
        "report_to": ("wandb",),
        "model_name": "null",
        "lora_dropout": 0.1,
        "max_train_steps": 1000,
    }


@pytest.mark.fast_cases(28)
@pytest.mark.parametrize("name", sorted(ALIASES))
def test_an_alias_is_its_key(name: str) -> None:
    assert f"{name} is not a key" not in complaint(None, f"{name}={{}}", "nonsense")


def test_command_line_over_file_over_defaults(file: Path) -> None:
    file.write_text("seed: 1\nK: 2\n", encoding="utf-8")
    config = load_config(file, ["num_agents=3"])
    assert (config.seed, config.num_agents, config.batch_size) == (1, 3, Config().batch_size)


def test_config_on_the_command_line_names_the_file(file: Path, tmp_path: Path) -> None:
    file.write_text("seed: 7\n", encoding="utf-8")
    for words in (["--config", str(file)], [f"--config={file}"], [f"config={file}"]):
        assert load_config(tmp_path / "not_there.yaml", words).seed == 7


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "~\n"])
def test_an_empty_file_is_all_defaults(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    assert load_config(file) == Config()


def test_the_folder_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for words, folder in (
        (["output_dir=runs"], "runs"),
        (["output_dir=runs", "experiment_name=one"], "runs/one"),
        (["output_dir=~/runs"], "/home/me/runs"),
    ):
        assert load_config(None, words).run_folder == Path(folder)


def test_variables_of_the_environment_are_taken_from_a_file_and_a_command_line(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WHERE", "/data")
    monkeypatch.setenv("HOW_MANY", "2")
    monkeypatch.setenv("BUCKET", "s3://bucket")
    file.write_text(
        "output_dir: ${WHERE}/run\n"
        'dataset_name: ["${WHERE}/a.jsonl", "${WHERE}/b.jsonl"]\n'
        "num_workers: ${HOW_MANY}\n"
        "mirror: ${BUCKET}/run\n"
        "chat_template: \"{% for m in messages %}${{ m['content'] }} ${HOME}{% endfor %}\"\n"
        "agents: [{dataset_name: '${WHERE}/c.jsonl'}, {seed: 3}]\n"
        "experiment_name: $HOME-$5\n"
    )
    config = load_config(file, ["--eval_dataset_name=${WHERE}/e.jsonl", "seed=${HOW_MANY}"])
    assert config.output_dir == "/data/run"
    assert config.dataset_name == "/data/a.jsonl,/data/b.jsonl"
    assert (config.num_workers, config.seed, config.mirror) == (2, 2, "s3://bucket/run")
    assert config.chat_template == "{% for m in messages %}${{ m['content'] }} ${HOME}{% endfor %}", "it is free text"
    assert config.agents[0]["dataset_name"] == "/data/c.jsonl"
    assert config.experiment_name == "$HOME-$5"
    assert config.eval_dataset_name == "/data/e.jsonl"
    assert read_call(file, {}).config.output_dir == "/data/run"
    assert parse_config(config.dump(), "config.yaml").output_dir == "/data/run", "it is written as it was taken"
    monkeypatch.setenv("CONFIG", str(file))
    assert load_config(None, ["--config", "${CONFIG}"]).output_dir == "/data/run"


def test_a_checkpoint_reads_no_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    assert parse_config('output_dir: "${WHERE}"\n', "config.yaml").output_dir == "${WHERE}"


@pytest.mark.parametrize(
    ("written", "reference"),
    [
        ("a/${NOWHERE}/b", "${NOWHERE}"),
        ("${training.lr}", "${training.lr}"),
        ("${oc.env:HOME,/x}", "${oc.env:HOME,/x}"),
        ("${HOME:-/x}", "${HOME:-/x}"),
        ("${}", "${}"),
        ("${HOME", "${HOME"),
    ],
)
def test_any_other_reference_is_refused_by_name_with_its_place(
    written: str, reference: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NOWHERE", raising=False)
    file.write_text(f"seed: 1\noutput_dir: '{written}'\n")
    found = refusal(file)
    reference = f"{reference}, which is no variable of the environment"
    assert (found.where, found.what) == (f"{file}:2", f"output_dir has {reference}")
    assert "${NAME}" in str(found.hint)
    assert refusal(None, f"output_dir={written}").where == "command line"
    with pytest.raises(ConfigError, match=re.escape(reference)):
        read_call(file, {})
    file.write_text(f"agents:\n  - {{seed: 1}}\n  - {{dataset_name: '{written}'}}\nlearning_rate: '{written}'\n")
    text = complaint(file)
    assert f"my.yaml:3: dataset_name has {reference}" in text
    assert f"my.yaml:4: learning_rate has {reference}" in text
    assert "2 problems" in text


@pytest.mark.parametrize("key", ["model_name", "init_from", "resume_from_checkpoint", "dataset_name"])
def test_home_is_home_where_no_shell_has_read_it(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert getattr(load_config(None, [f"{key}=~/it"]), key) == "/home/me/it"
    assert getattr(load_config(None, [f"{key}=owner/it"]), key) == "owner/it"


# Which source decides


@pytest.mark.parametrize(
    ("strong", "weak"),
    [
        ("max_train_steps: 260", "epochs=7"),
        ("max_train_steps: 260", "--num-train-epochs=7"),
        ("global_batch_size: 32", "gradient_accumulation_steps=7"),
        ("num_warmup_steps: 9", "num_warmup_steps_ratio=0.5"),
        ("val_set_size: 0.1", "eval_dataset_name=mine.jsonl"),
    ],
)
def test_the_command_line_overrides_keys_of_the_file_that_mean_the_same(strong: str, weak: str, file: Path) -> None:
    """`--epochs 7` had no effect, because the shipped file has `max_train_steps`."""
    file.write_text(f"seed: 1\n{strong}\n", encoding="utf-8")
    read = read_config(file, [weak])
    key, value = strong.split(": ")
    assert set(changed(read.config)) == {"seed", *changed(load_config(None, [weak]))}
    assert getattr(read.config, key) is None
    _, line = read.lines
    assert line.startswith(f"{key}={value} ({file}:2) is set aside: command line says ")


def test_a_null_on_the_command_line_sets_nothing_aside(file: Path) -> None:
    file.write_text("val_set_size: 0.1\n", encoding="utf-8")
    assert load_config(file, ["eval_dataset_name=null"]).val_set_size == 0.1


def test_the_configuration_as_shipped_takes_epochs() -> None:
    config = load_config(PRESETS[0], ["--epochs", "7"])
    assert (config.epochs, config.max_train_steps) == (7, None)


TOY = {"max_train_steps": 260, "batch_size": 12, "num_workers": 0, "generation_eval_samples": 400}


@pytest.mark.parametrize(
    "other", ["model_name=Qwen/Qwen2.5-0.5B", "dataset_name=my.jsonl", "agents=[{dataset_name: my.jsonl},{}]"]
)
def test_the_values_of_the_toy_do_not_reach_a_run_of_your_own(other: str) -> None:
    assert changed(load_config(PRESETS[0], [other])) == changed(load_config(None, [other]))


def test_the_toy_of_a_file_counts_below_every_other_source(file: Path) -> None:
    read = read_config(PRESETS[0], ["batch_size=3"], {"gradient_accumulation_steps": "2"})
    assert changed(read.config).items() >= (TOY | {"batch_size": 3, "gradient_accumulation_steps": 2}).items()
    file.write_text("num_workers: 1\nepochs: 2\ntoy:\n  num_workers: 0\n  max_train_steps: 9\n  seed: 7\n")
    assert changed(load_config(file)) == {"num_workers": 1, "epochs": 2, "seed": 7}
    swept = read_sweep(PRESETS[0], ["learning_rate=[1e-3,2e-3]"]).config
    assert swept.batch_size == TOY["batch_size"]


@pytest.mark.parametrize("text", ["toy: 3\n", "toy:\n  batchsize: 3\n", "toy:\n  seed: 1\n  seed: 2\n"])
def test_a_wrong_toy_is_one_message_on_any_base(text: str, file: Path, messages: Messages) -> None:
    file.write_text(text, encoding="utf-8")
    messages.same(refusal(file, "model_name=Qwen/Qwen2.5-0.5B"))


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("max_train_steps: 5\nepochs: 2\n", [], "epochs has no effect: max_train_steps decides (my.yaml:1)"),
        ("", ["epochs=2", "max_train_steps=5"], "epochs has no effect: max_train_steps decides (command line)"),
        (
            "",
            ["global_batch_size=2", "gradient_accumulation_steps=2"],
            "gradient_accumulation_steps has no effect: global_batch_size decides (command line)",
        ),
        ("epochs: 2\n", ["max_train_steps=5"], None),
        ("max_train_steps: null\nepochs: 2\n", [], None),
        ("max_train_steps: null\n", ["epochs=2"], None),
        ("max_train_steps: 5\n", ["max_train_steps=null", "epochs=2"], None),
        ("epochs: 2\n", ["epochs=3"], None),
    ],
)
def test_within_one_source_the_stronger_key_decides_and_that_is_said(
    text: str, words: list[str], said: str | None, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    file.write_text(text, encoding="utf-8")
    assert read_config("my.yaml", words).lines[1:] == ((said,) if said else ())


def test_where_the_values_come_from_is_one_line(file: Path) -> None:
    assert read_config(None).lines == ("no file: there is no configs.yaml here; defaults for all other keys",)
    file.write_text("seed: 1\n", encoding="utf-8")
    (line,) = read_config(None, ["--config", str(file), "--lr", "1e-3", "K=2", "--monitor_gpu"], {"seed": "1"}).lines
    given = "command line: learning_rate=1e-3 num_agents=2 monitor_gpu=true"
    assert line == f"{file}; {given}; defaults for all other keys"


BF16 = {"mixed_precision": "bf16", "gradient_accumulation_steps": "4"}


@pytest.mark.parametrize(
    ("text", "words", "decides"),
    [
        ("mixed_precision: no\n", [], "mixed_precision=no decides (my.yaml:1)"),
        ("", ["mixed_precision=fp16"], "mixed_precision=fp16 decides (command line)"),
        ("global_batch_size: 8\n", [], "global_batch_size=8 decides (my.yaml:1)"),
        ("", ["gradient_accumulation_steps=2"], "gradient_accumulation_steps=2 decides (command line)"),
    ],
)
def test_a_setting_of_the_launcher_without_effect_is_reported(
    text: str, words: list[str], decides: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    file.write_text(text, encoding="utf-8")
    read = read_config("my.yaml", words, BF16)
    (line,) = read.lines[1:]
    assert line.endswith(f" (accelerate launch) has no effect: {decides}")
    key = decides.partition("=")[0]
    assert getattr(read.config, key) == getattr(load_config("my.yaml", words), key)


def test_a_precision_of_the_launcher_that_is_none_of_ours_is_an_error() -> None:
    with pytest.raises(ConfigError, match="mixed_precision is 'fp8'") as caught:
        read_config(None, [], {"mixed_precision": "fp8"})
    assert caught.value.where == "accelerate launch"


def test_drawn_completions_exclude_layers_in_parts_also_where_the_launcher_asks_for_them() -> None:
    """Processes that draw completions of different lengths would take different numbers of passes."""
    words, of_launcher = ["objective=grpo", "rewards=length"], {"base_sharding": "layers"}
    for asked, launcher in (([*words, "base_sharding=layers"], {}), (words, of_launcher)):
        with pytest.raises(ConfigError, match="base_sharding layers") as refused:
            read_config(None, asked, launcher)
        assert refused.value.exit_code == 2
        assert "base_sharding=none" in str(refused.value.hint)
    assert read_config(None, [*words, "base_sharding=none"], of_launcher).config.base_sharding == "none"


def test_the_configuration_as_shipped_leaves_the_word_to_the_launcher() -> None:
    read = read_config(PRESETS[0], [], BF16)
    assert (read.config.mixed_precision, read.config.gradient_accumulation_steps) == ("bf16", 4)
    assert f"{PRESETS[0]}; accelerate launch: mixed_precision=bf16 gradient_accumulation_steps=4; " in read.lines[0]
    assert load_config(PRESETS[0]).mixed_precision == "no"


def test_where_no_file_is_named_it_is_that_of_this_folder_else_that_of_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert default_file() == ROOT / "configs.yaml"
    assert default_file("nowhere.yaml") is None
    (tmp_path / "configs.yaml").touch()
    assert default_file() == Path("configs.yaml")


def test_a_command_line_without_some_keys() -> None:
    words = ["--lr", "1", "K=2", "--monitor_gpu", "--samples=3", "--monitor-gpu", "false", "stray"]
    assert arguments_without(words, ("monitor_gpu", "max_train_samples")) == ["--lr", "1", "K=2", "stray"]
    assert arguments_without(words, ()) == words


# Bad input


@pytest.mark.fast_cases(23)
@pytest.mark.parametrize(
    "line",
    [
        "learning_rte: 1e-3",
        "batchsize: 3",
        "debug: true",
        "zzz: 1",
        "no_push_to_hub: true",
        "training.lr: 1",
        "? [a, b]\n: 1",
        "<<: {seed: 1}",
        "seed: {a: 1}",
        "seed: !!python/name:os.system x",
        "seed: 0123",
        "seed: true",
        "batch_size: four",
        "batch_size: 4.0",
        "batch_size:",
        "batch_size: 1__0",
        "batch_size: 0x10",
        "K: 0",
        "learning_rate: .nan",
        "learning_rate: 1e999",
        "lora_dropout: 1.0",
        "num_warmup_steps_ratio: 1.1",
        "mixed_precision: BF16",
        "mixed_precision: fp8",
        "lr_scheduler_type: cosin",
        "lr_scheduler_type: reduce_lr_on_plateau",
        "push_to_hub: 1",
        "max_runtime: 11:55",
        "max_runtime: 1e12",
        "save_steps: 0",
        "checkpoint_backend: dcp",
        "lora_target_modules: []",
        "agent_layers: [-1]",
        "agent_layers: upper_hal",
        "report_to: [[wandb]]",
        "report_to: wand",
        "model_name: null",
        'model_name: "a\\u0007b"',
        "experiment_name: a/b",
        "interrupted_exit_code: 256",
        "model_dtype: fp64\nmixed_precision: bf16",
        "early_stopping_patience: 2\neval_steps: null",
        "warmup_steps: 0.1",
        "warmup_steps: 10.5",
        "local_rank: -1",
        "agent_layers: 0-3",
        "no_compile: true",
        "training:\n  lr: 1e-3",
        "eval_file: x",
        "lr: 1e-4x",
        "lambda_sw: [1e-4]",
        "bf16: maybe",
        "experiment_name: final_checkpoint",
        "seed: 1\nseed: 2",
        "lr: 1\nlearning-rate: 1",
    ],
)
def test_bad_lines(file: Path, line: str, messages: Messages) -> None:
    file.write_text(f"# a comment\n{line}\n", encoding="utf-8")
    error = refusal(file)
    assert f"{file}:2" in str(error)
    assert error.hint
    messages.same(error)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("learning_rate: 1e\u22124", "write 1e-4"),
        ("lora_dropout: 10%", "write 0.1"),
        ("seed:\n\t1", "write spaces in place of the tab"),
    ],
)
def test_signs_that_look_right_are_replaced_by_those_that_are(file: Path, line: str, hint: str) -> None:
    file.write_text(line, encoding="utf-8")
    assert refusal(file).hint == hint


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch-sise", "3"],
        ["nope.py"],
        ["rows.jsonl"],
        ["base.gguf"],
        ["num_agents", "=", "4"],
        ["learning_rate=1,5e-4"],
        ["..."],
        ["device=cuda"],
        ["foo"],
        ["\u2014num_agents"],
        ["num_agents\uff1d3"],
        ["configs/x.yaml"],
        ["-h"],
        ["--config"],
        ["--seed"],
        ["--output_dir", "--seed=1"],
        ["--output_dir", "seed=1"],
        ["max_train_steps="],
        ["K=2", "num_agents=2"],
        ["lr=1", "--learning-rate=2"],
        ["learning_rate=0123"],
        ["no_compile=true"],
        ["output_dir=\udcff"],
        ["diversity=joint"],
        ["crowd=auto"],
    ],
    ids=lambda value: ascii(" ".join(value)),
)
def test_bad_command_lines(arguments: list[str], messages: Messages) -> None:
    error = refusal(None, *arguments)
    assert "command line" in str(error)
    assert error.hint
    messages.same(error)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"a: [", 1),
        (b"seed: 1\n\tlr: 2\n", 2),
        (b"seed: 1\nlr 2\nK: 3\n", 3),
        (b"seed: 1\n  lr: 2\n", 2),
        (b"lr=1\n", 1),
        (b"seed: 1\n---\nseed: 2\n", 2),
        (b"seed: 1\nlr: *x\n", 2),
        (b"seed: 1\nlr: \x07\n", 2),
        (b"seed: '\n", 2),
    ],
)
def test_broken_yaml_names_the_line(file: Path, content: bytes, line: int) -> None:
    file.write_bytes(content)
    assert f"{file}:{line}\n" in complaint(file)


@pytest.mark.slow
def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in complaint(tmp_path / "none.yaml")
    assert "directory" in complaint(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model_name: \xe9\n")
    assert "UTF-8" in complaint(tmp_path / "latin.yaml")
    (tmp_path / "deep.yaml").write_text("[" * 1000, encoding="utf-8")
    assert "too deeply" in complaint(tmp_path / "deep.yaml")
    assert "null byte" in complaint(None, "--config", "a\0b")


def test_a_file_that_is_not_there_is_answered_with_the_name_beside_it(file: Path) -> None:
    file.write_text("seed: 1\n")
    with pytest.raises(ConfigError, match=f"did you mean {file}\\?"):
        load_config(file.with_name(f"{file.stem}s.yaml"))
    with pytest.raises(ConfigError, match="name an existing YAML file"):
        load_config(file.with_name("other.json"))


#: What pydantic would convert by itself: text, and whether quotes stand around it.
LOOSE: dict[type, list[tuple[str, bool]]] = {
    bool: [("1", False), ("0", False), ("t", False), ("y", False), ("true", True), ("no", True)],
    int: [("4.0", False), ("0123", False), (" 4 ", False), ("1e3", False), ("4", True)],
    float: [("0123", False), (" 4 ", False), ("nan", False), ("inf", False), ("1.0", True)],
}


def test_no_key_converts_values_of_another_type() -> None:
    """A converted switch or number would silently change a run."""
    seen = set()
    for field in Config.model_fields.values():
        kinds = {kind.type for kind in kinds_of(field)}
        if not kinds & LOOSE.keys() or kinds & {str, tuple}:
            continue
        [kind] = kinds & LOOSE.keys()
        seen.add(kind)
        for text, quoted in LOOSE[kind]:
            assert read_value(field, Scalar(text, quoted)) is UNREADABLE
    assert seen == LOOSE.keys()


def test_all_problems_at_once(file: Path) -> None:
    file.write_text("bach_size: 1\nseed: x\nK: 0\nmodel_dtype: fp64\nmixed_precision: bf16\n", encoding="utf-8")
    said = complaint(file, "epochs=-1", "stray")
    assert said.startswith("6 problems in the configuration")
    for word in (":1: bach_size", ":2: seed", ":3: num_agents", ":4 and ", "command line: epochs", "'stray'"):
        assert word in said


def test_no_clash_is_made_up_from_a_value_that_is_wrong_itself(file: Path) -> None:
    file.write_text("num_labels: -1\nobjective: reward\n", encoding="utf-8")
    said = complaint(file)
    assert "num_labels is '-1'" in said
    assert "is about classes" not in said
    with pytest.raises(ConfigError, match=r"^rewards is \[\]"):  # and not that grpo has no rewards
        Config(objective="grpo", rewards=[])


@pytest.mark.parametrize("said", ['"lora_alpha": NaN', '"lora_alpha": 8, "target_modules": ["q_proj", 1]'])
def test_an_adapter_to_start_from_that_says_nonsense_is_left_to_who_loads_it(said: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(f'{{"r": 4, {said}}}')
    assert Config(init_from=tmp_path).lora_alpha == 16


def test_a_call_in_python_is_told_what_the_launcher_gives_in_vain() -> None:
    _, line = read_call(None, {"mixed_precision": "no"}, BF16 | {"gradient_accumulation_steps": "1"}).lines
    assert line.endswith("(accelerate launch) has no effect: mixed_precision=no decides (train(...))")


def test_one_name_alone_is_a_list_of_one_in_python_too() -> None:
    config = Config(report_to="tensorboard", lora_target_modules="q_proj")
    assert config == load_config(None, ["report_to=tensorboard", "lora_target_modules=q_proj"])
    words = ["report_to=wandb,tensorboard", "lora_target_modules=[q_proj, v_proj]"]
    assert Config(report_to="wandb,tensorboard", lora_target_modules="[q_proj, v_proj]") == load_config(None, words)
    with pytest.raises(ConfigError, match="report_to is 'tensorbord', but takes a list of"):
        Config(report_to="tensorbord")


# Notices, dumps, differences


def test_notices() -> None:
    assert Config().notices() == []
    said = load_config(None, ["parallel_mode=true", "deepspeed_config_file=ds.json"]).notices()
    assert [line.split(" has no effect: ")[0] for line in said] == ["parallel_mode", "deepspeed_config_file"]
    assert load_config(None, ["max_train_steps=5", "num_warmup_steps=5"]).notices() != []


@pytest.mark.parametrize("name", [*REMOVED, "optimizer"])
def test_a_removed_key_is_refused_but_for_the_values_that_mean_what_every_run_does(name: str, file: Path) -> None:
    usual, _, instead = REMOVED.get(name, (["adamw"], "", UNSUPPORTED[name][1]))
    for value in usual:
        file.write_text(f"{name}: {value}\n")
        assert load_config(file) == load_config(None, [f"{name}={value}"]) == Config()
    error = refusal(None, f"{name}=another")
    assert error.what.startswith(f"{name} is not a key here")
    assert error.hint == instead


@pytest.mark.parametrize(
    ("words", "is_told"),
    [
        (["lambda_sw=0.5"], True),
        (["lambda_sw=0.1"], True),
        (["lambda_sw=0"], False),
        (["lambda_sw=0.5", "diversity=swd"], False),
        ([], False),
        (["--config", str(ROOT / "configs.yaml"), "lambda_sw=0.5"], True),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else str(value),
)
def test_a_weight_without_its_term_is_reported(words: list[str], is_told: bool) -> None:
    said = [line for line in load_config(None, words).notices() if line.startswith("lambda_sw")]
    assert bool(said) == is_told
    for way in ("lambda_sw=0 ", "docs/crowd.md") if is_told else ():
        assert way in said[0]


@pytest.mark.slow
@settings(max_examples=size(40, 200))
@given(
    name=st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), min_size=1).filter(
        lambda s: "/" not in s and s.lower() not in NULL_WORDS
    ),
    rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    modules=st.lists(st.text("abc_.\"' :#", min_size=1), min_size=1).map(tuple),
)
def test_any_dump_reads_back_and_is_plain_yaml(
    tmp_path_factory: pytest.TempPathFactory, name: str, rate: float, modules: tuple[str, ...]
) -> None:
    config = Config(model_name=name, learning_rate=rate, lora_target_modules=modules, diversity="none")
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(config.dump(), encoding="utf-8")
    assert load_config(path) == config
    values = yaml.safe_load(config.dump())
    assert {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()} == config.model_dump()


@pytest.mark.parametrize(
    ("word", "kind", "keeps_bits"),
    [
        ("save_steps=7", "free", True),
        ("early_stopping_patience=7", "schedule", True),
        ("max_train_steps=7", "schedule", False),
        ("batch_size=7", "free", False),
        ("learning_rate=7", "sample-exact", False),
    ],
)
def test_each_change_has_its_kind_for_a_resume(word: str, kind: str, keeps_bits: bool) -> None:
    """The table of docs/keys.md has that of every key."""
    (change,) = Config().diff(load_config(None, [word]))
    assert (change.key, change.kind, change.keeps_bits) == (word.partition("=")[0], kind, keeps_bits)
    assert change.old != change.new


def test_scheduler_names_are_those_of_transformers() -> None:
    from transformers import SchedulerType

    field = Config.model_fields["lr_scheduler_type"]
    assert set(field.annotation.__args__) == {name.value for name in SchedulerType}  # type: ignore[union-attr]


@pytest.mark.slow
def test_mutated_configurations_are_valid_or_refused_in_words() -> None:
    cases = size(100, 1000)
    outcome = fuzz(cases, seed=1)
    assert outcome.valid + outcome.refused == cases
    assert min(outcome.valid, outcome.refused) > cases // 10


def test_every_key_is_read_by_someone() -> None:
    readers = [path for path in (ROOT / "ci_llm").rglob("*.py") if "config" not in path.parent.name]
    own = [ROOT / "ci_llm/config" / name for name in ("config.py", "own_keys.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in [*readers, *own])
    read = re.findall(r"\b(?:config|self|own|objective|grpo)\.(?=(\w+))", code)
    assert set(Config.model_fields) - set(read) - set(FIELD_OF_KEY) == set()


def test_the_docs_list_every_key_as_it_is() -> None:
    """`python -m tools.keys_table` writes the table of docs/keys.md."""
    assert keys_table.PAGE.read_text(encoding="utf-8").endswith(f"\n\n{keys_table.table()}")
