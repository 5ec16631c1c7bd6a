"""`auto`: rates, ranks and lengths follow the base, evaluations the rows; a run keeps what it began with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ci_llm
from ci_llm import embedded
from ci_llm.checkpoints.checkpoint import compare, load_checkpoint
from ci_llm.config import Config, load_config, parse_config, read_call
from ci_llm.data.encoder import BUILT_IN_TEMPLATE
from ci_llm.run.start import loading
from ci_llm.run.start.agent_settings import lora_settings
from tests.run.test_call import StopAt

ROOT = Path(__file__).parents[2]
POSITIONS = 96
#: What configs.yaml said before it said auto.
NUMBERS: dict[str, Any] = {
    "lora_rank": 8,
    "lora_alpha": 16,
    "max_train_samples": 100,
    "max_seq_length": 256,
    "max_train_steps": 260,
    "learning_rate": 8e-3,
    "eval_samples": 400,
}
QUICK: dict[str, Any] = {"num_agents": 2, "report_to": "none", "generation_eval_samples": 0, "num_workers": 0}


@pytest.fixture(scope="module")
def own_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of few positions with the tokenizer of the embedded base."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = AutoTokenizer.from_pretrained(embedded.BASE_FOLDER)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=POSITIONS, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def questions(path: Path, count: int, words: int = 3) -> Path:
    rows = [{"question": f"Ann has {n % 9} pens" + " and 2" * words, "answer": f"{n % 9}"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def edited(path: Path, **lines: object) -> Path:
    """The shipped configuration with these lines edited."""
    text = (ROOT / "configs.yaml").read_text()
    for key, value in lines.items():
        text, found = re.subn(rf"^{key}: *\S+", f"{key}: {value}", text, flags=re.MULTILINE)
        assert found == 1
    path.write_text(text)
    return path


def recorded(checkpoint: Path) -> Config:
    return parse_config((checkpoint / "config.yaml").read_text(), "config.yaml")


def values(config: Config, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: getattr(config, key) for key in keys}


@pytest.mark.parametrize(("given", "holds"), [("auto", 7), (9, 9)])
def test_auto_keeps_the_length_of_answers_with_which_the_run_began(given: Any, holds: int) -> None:
    now, before = Config(max_new_tokens_eval=given), Config(max_new_tokens_eval=7)
    assert now.settled_as(before).max_new_tokens_eval == holds


def test_the_shipped_file_on_the_embedded_base_and_rows_gives_the_numbers_of_earlier_files() -> None:
    found = load_config(ROOT / "configs.yaml")
    assert values(found, NUMBERS) == NUMBERS
    assert not re.search(rf"^({'|'.join(NUMBERS)}): *[\d.]", (ROOT / "configs.yaml").read_text(), re.MULTILINE)


def test_rates_follow_the_base_and_rows_follow_the_data(own_base: Path, tmp_path: Path) -> None:
    file = edited(tmp_path / "my.yaml", dataset_name="my.jsonl")
    rows = {"max_train_samples": None, "max_train_steps": None}
    assert values(load_config(file), NUMBERS) == NUMBERS | rows
    usual = {"lora_rank": 16, "lora_alpha": 32, "learning_rate": 2e-4}
    file = edited(tmp_path / "my.yaml", model_name=own_base)
    assert values(load_config(file), usual) == usual
    rewarded = load_config(file, ["objective=grpo", "rewards=length"])
    assert (rewarded.learning_rate, rewarded.beta) == (1e-4, 0.0)
    assert load_config(file, ["objective=dpo"]).learning_rate == 1e-5
    assert values(load_config(file), rows) == rows
    config = load_config(file, ["dataset_name=my.jsonl", "lora_rank=[4,auto]", "agents=[{},{learning_rate: auto}]"])
    assert [own.lora_rank for own in config.each_agent] == [4, 16]
    assert [own.learning_rate for own in config.each_agent] == [2e-4, 2e-4]


AGENTS = [{"learning_rate": "auto", "lora_rank": "auto"}, {"learning_rate": 1e-4}]


def rates(config: Config) -> list[float]:
    return [own.learning_rate for own in config.each_agent]


def test_an_agent_that_says_auto_follows_the_objective_that_the_rows_decide() -> None:
    config = Config(model_name="my/base", agents=AGENTS)
    assert rates(config) == [2e-4, 1e-4]
    settled = config.with_settled(config.with_objective("dpo"))
    assert (settled.learning_rate, rates(settled)) == (1e-5, [1e-5, 1e-4])
    assert "auto" not in {value for own in settled.agents for value in own.values()}
    given = Config(model_name="my/base", agents=AGENTS, learning_rate=3e-3)
    assert rates(given.with_settled(given.with_objective("dpo"))) == [1e-5, 1e-4]
    assert rates(read_call(config, {"objective": "grpo", "rewards": "length"}).config) == [1e-4, 1e-4]


def test_an_agent_that_says_auto_has_the_rank_of_auto_before_anything_is_settled() -> None:
    """As in a dry run, which settles nothing. The name of an agent is no value of a key."""
    config = Config(agents=[{"name": "auto", "lora_rank": "auto"}, {"lora_rank": 4, "lora_alpha": "auto"}])
    usual = Config()
    found = [(each.rank, each.alpha) for each in lora_settings(config).each()]
    assert found == [(usual.lora_rank, usual.lora_alpha), (4, usual.lora_alpha)]
    assert config.with_settled({}).agent_names[0] == "auto"


def test_an_agent_that_says_auto_keeps_the_values_with_which_the_run_began(own_base: Path) -> None:
    agents = [{"learning_rate": 3e-5, "lora_rank": 4}, {"learning_rate": 1e-4}]
    kept = Config(model_name=str(own_base), agents=AGENTS).settled_as(Config(model_name=str(own_base), agents=agents))
    assert (rates(kept), kept.of_agent(0).lora_rank) == ([3e-5, 1e-4], 4)


@pytest.mark.slow
def test_an_agent_of_a_run_on_pairs_gets_the_rate_of_their_objective(own_base: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"Ann has {n}", "chosen": " pens", "rejected": " 7"} for n in range(12)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    keys = QUICK | {"model_name": str(own_base), "dataset_name": str(tmp_path / "pairs.jsonl"), "max_train_steps": 1}
    keys |= {"num_agents": 1, "output_dir": tmp_path / "run", "agents": [{"learning_rate": "auto"}]}
    assert rates(recorded(ci_llm.train(keys).folder / "final_checkpoint")) == [1e-5]


@pytest.mark.slow
def test_one_edited_line_gives_the_settings_of_an_own_base(own_base: Path, tmp_path: Path) -> None:
    rows = questions(tmp_path / "rows.jsonl", 31)
    file = edited(tmp_path / "my.yaml", model_name=own_base)
    result = ci_llm.train(file, dataset_name=str(rows), output_dir=tmp_path / "run", **QUICK)
    assert result.step == 21  # 3 epochs of 28 rows in steps of 4
    config = recorded(result.folder / "final_checkpoint")
    told = (result.folder / "training.log").read_text()
    [longest] = {int(found) for found in re.findall(r"the longest row has (\d+)", told)}
    assert values(config, NUMBERS) == {
        "lora_rank": 16,
        "lora_alpha": 32,
        "max_train_samples": None,
        "max_seq_length": longest,
        "max_train_steps": None,
        "learning_rate": 2e-4,
        "eval_samples": 50,
    }
    assert json.loads((result.folder / "final_checkpoint" / "agent1" / "adapter_config.json").read_text())["r"] == 16
    assert result.metrics["n"] == 3
    for line in (
        "auto      learning_rate 0.0002, lora_rank 16, lora_alpha 32: usual for LoRA",
        f"auto      max_seq_length {longest}: the longest row",
        "auto      eval_samples 50: at most, as far as there are rows: evaluations read a third",
        "3 rows are held out for it, drawn by seed 42",
    ):
        assert line in told


@pytest.mark.slow
def test_a_resumed_run_keeps_the_values_that_it_began_with(own_base: Path, tmp_path: Path) -> None:
    """The file had numbers and has auto now; or it had auto, which was resolved by the rows."""
    rows = str(questions(tmp_path / "rows.jsonl", 31))
    common = QUICK | {"model_name": str(own_base), "dataset_name": rows, "batch_size": 8, "num_workers": 0}
    old = {"learning_rate": 8e-3, "lora_rank": 8, "lora_alpha": 16, "max_seq_length": 23}
    for name, begun in {"numbers": old, "auto": {}}.items():
        whole = ci_llm.train(common | begun, output_dir=tmp_path / f"{name} whole")
        stopped = ci_llm.train(common | begun, output_dir=tmp_path / name, callbacks=[StopAt(3)])
        assert stopped.status == "interrupted"
        resumed = ci_llm.train(common, output_dir=tmp_path / name)
        assert (resumed.status, resumed.step) == ("completed", whole.step)
        parts = [load_checkpoint(each.folder / "final_checkpoint") for each in (whole, resumed)]
        assert compare(*parts).identical
        config = recorded(resumed.folder / "final_checkpoint")
        assert values(config, begun) == begun
    assert "as this run began" in (tmp_path / "auto" / "training.log").read_text()


@pytest.mark.slow
def test_a_run_keeps_the_date_that_its_chats_began_with(
    own_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = str(questions(tmp_path / "rows.jsonl", 31))
    (clock := tmp_path / "clock.jinja").write_text("{{ strftime_now('%d %b %Y') }}\n" + BUILT_IN_TEMPLATE)
    keys = QUICK | {"model_name": str(own_base), "dataset_name": rows, "chat_template": str(clock), "num_workers": 0}
    keys |= {"output_dir": tmp_path / "run"}

    def on(day: str) -> None:
        monkeypatch.setattr(loading, "date", SimpleNamespace(today=lambda: date.fromisoformat(day)))
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / day))  # on another disk, too

    on("2026-01-02")
    assert ci_llm.train(keys, callbacks=[StopAt(3)]).status == "interrupted"
    on("2026-01-03")
    result = ci_llm.train(keys)
    assert result.status == "completed"
    assert recorded(result.folder / "final_checkpoint").chat_date == "2026-01-02"
    log = (result.folder / "training.log").read_text()
    assert {*re.findall(r"first row.*?(\d\d Jan 2026)", log)} == {"02 Jan 2026"}
