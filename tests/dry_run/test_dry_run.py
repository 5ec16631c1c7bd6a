"""The dry run passes where a run will work; where it will not, the right check fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from ci_llm.cli.main import main
from ci_llm.config import load_config
from ci_llm.core import durable
from ci_llm.core.memory import cgroup_limits
from ci_llm.core.remote import OFFLINE
from ci_llm.dry_run import toy_run
from ci_llm.dry_run.context import CheckContext
from ci_llm.dry_run.plan import CHECKS, Check, run_checks
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import ConfigError, ModelError
from ci_llm.run.start.cost_model import trace
from tests.support.campaign import sampled
from tests.support.children import Child
from tests.support.presets import gigabytes
from tools.testbed.forkserver import ROOT, ForkServer

pytestmark = pytest.mark.slow

Tell = Callable[..., "Told"]
NAMES = [check.name for check in CHECKS]
PRESETS = ROOT / "configs"
NF4 = ["llama3.1_8b_nf4_gsm8k.yaml"]
SHARDED = "llama3.1_70b_nf4_sharded_gsm8k.yaml"


def dry_run(folder: str, words: list[str], flipping: bool = False) -> int:
    """A trial for the fork server: `ci-llm check` in `folder`, without the network."""
    os.environ[OFFLINE] = "1"
    huggingface_hub.constants.HF_HUB_OFFLINE = True  # it was read at the import
    os.chdir(folder)
    if flipping:
        flip_a_bit_of_whatever_is_large()
    return main(["check", *words])


def dry_run_with_a_bad_disk_on_one(folder: str, words: list[str]) -> int:
    """A dry run on several processes, of which only process 1 cannot write."""
    if os.environ["RANK"] == "1":
        words = [*words, "output_dir=/proc/nothing"]
    return dry_run(folder, words)


def flip_a_bit_of_whatever_is_large() -> None:
    """A disk that stores other bytes than were written, and reports no error."""
    write = durable.DISK.write

    def faulty(handle: int, data: Any) -> int:
        changed = bytearray(data)
        if len(changed) > 100_000:
            changed[50_000] ^= 1
        return write(handle, changed)

    durable.DISK.write = faulty  # type: ignore[method-assign]


class Told:
    """What a dry run said: the verdict and the lines of each check by name, and its exit codes."""

    def __init__(self, text: str, codes: list[int]) -> None:
        self.text, self.codes = text, codes
        self.verdicts: dict[str, str] = {}
        self.lines: dict[str, str] = {}
        width, name = max(map(len, NAMES)), ""
        for line in text.splitlines():
            mark, words = line[:8].strip(), line[8 + width + 8 :].strip()
            if mark in ("ok", "FAILED", "skipped"):
                name = line[8 : 8 + width].strip()
                self.verdicts[name], self.lines[name] = mark, words
            elif name and not mark:
                self.lines[name] += f"\n{words}"

    def of(self, verdict: str) -> list[str]:
        return [name for name in NAMES if self.verdicts.get(name) == verdict]


@pytest.fixture
def told(server: ForkServer, narrow_base: str, tmp_path: Path) -> Tell:
    """A dry run for the embedded default, changed by words, and small: each agent and layer takes time to trace."""
    small = (f"model_name={narrow_base}", "num_agents=2", "batch_size=2")

    def tell(*words: str, ranks: int = 1, is_small: bool = True, **how: Any) -> Told:
        shutil.copy(ROOT / "configs.yaml", tmp_path)
        before = sorted(tmp_path.rglob("*"))
        log = tmp_path.parent / f"{tmp_path.name}.log"
        given = [*(small if is_small else ()), *words]
        codes = server.run(dry_run, log, ranks=ranks, folder=str(tmp_path), words=given, **how)
        assert sorted(tmp_path.rglob("*")) == before, "the dry run left something behind"
        return Told(log.read_text(), codes)

    return tell


def test_the_embedded_default_passes(told: Tell) -> None:
    found = told(is_small=False)
    assert found.codes == [0], found.text
    assert found.of("ok") == NAMES
    assert f"all {len(NAMES)} checks passed" in found.text
    assert "bit for bit" in found.lines["checkpoint"]
    assert "SIGTERM in step 3: finished, saved and read back" in found.lines["interruption"]
    assert "⟦" in found.lines["template"]
    assert "260 steps" in found.lines["time"]


def test_agents_with_data_of_their_own_pass(told: Tell, tmp_path: Path) -> None:
    texts = tmp_path.parent / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{number} is a number. " * 3}) + "\n" for number in range(40)))
    agents = f"agents=[{{}}, {{dataset_name: {texts}}}, {{max_train_samples: 9}}]"
    words = ["max_train_samples=100", "max_train_steps=null", "epochs=1", "global_batch_size=4", "batch_size=2"]
    found = told(agents, "num_agents=3", *words)
    assert found.codes == [0], found.text
    assert found.of("ok") == NAMES
    assert "rows of text from" in found.lines["data"]
    assert found.lines["template"].count("first row, learned in") == 3
    assert "25 steps" in found.lines["time"]


@pytest.mark.parametrize("sharding", sampled(["none", "layers"], ["layers"]))
def test_two_processes_pass_together(sharding: str, told: Tell) -> None:
    found = told(f"base_sharding={sharding}", ranks=2)
    assert found.codes == [0, 0], found.text
    assert found.of("ok") == NAMES
    assert "2 processes met" in found.lines["port"]
    assert "nobody" not in found.text


def test_a_check_that_fails_on_one_process_ends_all_and_is_named(server: ForkServer, tmp_path: Path) -> None:
    log = tmp_path / "log"
    codes = server.run(dry_run_with_a_bad_disk_on_one, log, ranks=2, folder=str(tmp_path), words=[])
    text = log.read_text()
    assert codes == [1, 1]
    assert "process 1: disk failed: nothing can be written here" in text
    assert Told(text, codes).of("FAILED") == ["accelerate"]
    assert list(tmp_path.iterdir()) == [log]


def test_a_folder_that_cannot_be_made_fails_the_check_of_the_disk(told: Tell, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = told("output_dir=file/run")
    assert found.codes == [1]
    assert found.of("FAILED") == ["disk"]
    assert "output_dir: file/run" in found.lines["disk"]
    assert "hint:" in found.lines["disk"]
    assert found.lines["model"] == "needs template"
    assert {"data", "estimate", "batch", "time"} <= set(found.of("ok"))


def test_a_disk_that_changes_bits_fails_the_check_of_the_checkpoint(told: Tell) -> None:
    found = told("model_name=embedded", flipping=True)
    assert found.codes == [1]
    assert found.of("FAILED") == ["checkpoint"], found.text
    assert found.of("skipped") == ["interruption", "conclusion"]


def test_a_template_that_fails_fails_the_check_of_the_template(told: Tell, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(BASE_FOLDER, base)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ raise_exception('no such role') }}"
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    found = told("model_name=base")
    assert found.codes == [1]
    assert found.of("FAILED") == ["template"], found.text
    assert "no such role" in found.lines["template"]
    assert {"model", "two steps", "conclusion"} <= set(found.of("skipped"))


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("batch_size=1000000000",), r"batch_size=\d+ or use_gradient_checkpointing=true"),
        (("max_seq_length=513",), "max_seq_length=512"),
    ],
)
def test_a_batch_that_cannot_be_fails_the_check_of_the_batch(told: Tell, words: tuple[str, ...], hint: str) -> None:
    found = told(*words)
    assert found.codes == [1]
    assert found.of("FAILED") == ["batch"], found.text
    assert re.search(hint, found.lines["batch"])
    assert words[0].replace("=", ": ") in found.lines["batch"]
    assert {"storage", "time"} <= set(found.of("ok")), "estimates need no batch that fits"


def test_a_folder_without_weights_fails_the_check_of_the_model_and_estimates_are_still_printed(
    told: Tell, tmp_path: Path
) -> None:
    shutil.copytree(BASE_FOLDER, tmp_path / "base", ignore=shutil.ignore_patterns("*.safetensors"))
    found = told("model_name=base")
    assert found.codes == [1]
    assert found.of("FAILED") == ["model"], found.text
    assert "model.safetensors" in found.lines["model"]
    assert re.search(r"\dk parameters", found.lines["estimate"])
    assert "GB" in found.lines["batch"]
    assert "about" in found.lines["time"]
    assert "of" in found.lines["storage"]


def test_a_base_that_cannot_be_traced_is_rehearsed_all_the_same(told: Tell, tmp_path: Path) -> None:
    shape = AutoConfig.from_pretrained(BASE_FOLDER)
    sizes = {"vocab_size": shape.vocab_size, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    experts = MixtralConfig(**sizes, max_position_embeddings=512)
    MixtralForCausalLM(experts).save_pretrained(tmp_path / "base")
    for file in BASE_FOLDER.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "base")
    found = told("model_name=base")
    assert found.codes == [0], found.text
    assert "cannot be traced without weights: " in found.lines["estimate"]
    assert "memory is not estimated" in found.lines["batch"]
    assert "measured" in found.lines["time"]
    assert "Traceback" not in found.text


@pytest.mark.parametrize(
    "preset",
    sampled(["qwen2.5_0.5b_gsm8k.yaml", "gemma2_2b_gsm8k.yaml", "llama3.1_8b_gsm8k.yaml", *NF4, SHARDED], NF4),
)
def test_the_estimate_of_a_preset_fits_the_hardware_that_it_names(preset: str) -> None:
    text = (PRESETS / preset).read_text()
    named = re.search(r"Meant for: .*?(\d+) GB", text)
    told = re.search(r"dry run estimates ([\d.]+) GB", text)
    assert named is not None
    assert told is not None
    needed = gigabytes(preset, torch.device("cpu"))
    assert needed < int(named[1])
    assert needed == pytest.approx(float(told[1]), abs=1)


def test_the_estimate_counts_nothing_kept_of_the_layers_below_all_adapters() -> None:
    shape, sizes = AutoConfig.from_pretrained(BASE_FOLDER), {"rows": 1, "tokens": 64, "targets": 4}
    every, upper = (
        trace(load_config(None, [f"agent_layers={layers}"]), shape, torch.device("cpu"), **sizes)
        for layers in ("all", "upper_half")
    )
    assert upper.agent_parameters * 2 == every.agent_parameters
    assert upper.base_bytes == every.base_bytes
    assert upper.activation_bytes < 0.6 * every.activation_bytes
    assert upper.flops < 0.8 * every.flops  # no backward pass there


@pytest.mark.parametrize(("quantization", "bits"), [("null", 32), ("nf4", 4), ("int8", 8)])
def test_the_estimate_counts_the_part_of_the_layers_that_a_process_stores(quantization: str, bits: int) -> None:
    config = load_config(None, ["base_sharding=layers", f"quantization={quantization}"])
    shape, sizes = AutoConfig.from_pretrained(BASE_FOLDER), {"rows": 1, "tokens": 8, "targets": 4}
    alone, shared = (trace(config, shape, torch.device("cpu"), **sizes, processes=n) for n in (1, 4))
    model = AutoModelForCausalLM.from_pretrained(BASE_FOLDER)
    numbers = [sum(each.numel() for each in layer.parameters() if each.dim() > 1) for layer in model.model.layers]
    assert alone.base_bytes - shared.base_bytes == sum(numbers) * bits // 8 * 3 // 4
    gathered = 2 * max(numbers) * bits // 8
    assert shared.activation_bytes - alone.activation_bytes == pytest.approx(1.1 * gathered, abs=1)
    assert shared.base_parameters == alone.base_parameters


def test_ctrl_c_ends_it_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with Child(sys.executable, ROOT / "dry_run_sanity_check.py", f"output_dir={tmp_path / 'run'}") as child:
        child.read_until("disk")
        child.signal(signal.SIGINT)
        assert child.wait() == 1
        child.read_until("checks skipped")
    assert any(line.split()[:2] == ["skipped", "time"] for line in child.seen)
    assert list(tmp_path.iterdir()) == []


# Without a run


@pytest.mark.parametrize(("deterministic", "says"), [("auto", "state-exact here, and not bitwise"), ("false", "")])
def test_a_machine_that_repeats_no_bits_is_told_or_fails_where_it_has_to(
    deterministic: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mock(config=load_config(None, [f"deterministic={deterministic}"]))
    attempt = Mock(bits={"layer": 1})
    monkeypatch.setattr(toy_run, "record_bits", lambda _, attempt: attempt.bits.update(layer=2))
    assert says in toy_run._repeated(run, attempt)
    run.config, attempt.bits = load_config(None, ["deterministic=true"]), {"layer": 1}
    with pytest.raises(ModelError, match="other bits"):
        toy_run._repeated(run, attempt)


def test_checks_that_depend_on_a_failed_one_are_reported_as_skipped() -> None:
    def wrong(_: object) -> str:
        raise ConfigError("what", where="where", hint="hint")

    def broken(_: object) -> str:
        raise ZeroDivisionError

    checks: list[Any] = [
        Check("a", (), lambda _: "found\nmore"),
        Check("b", (), wrong),
        Check("c", ("a", "b"), lambda _: "never"),
        Check("d", ("c",), lambda _: "never"),
        Check("e", (), broken),
        Check("f", ("a",), lambda _: ""),
    ]
    outcomes = {
        outcome.name: outcome for outcome in run_checks(checks, cast("CheckContext", None), stopped=lambda: None)
    }
    assert [outcomes[name].verdict for name in "abcdef"] == [
        "passed",
        "failed",
        "skipped",
        "skipped",
        "failed",
        "passed",
    ]
    assert outcomes["a"].lines == ["found", "more"]
    assert outcomes["b"].lines == ["what", "  where: where", "  hint:  hint"]
    assert outcomes["c"].lines == ["needs b"]
    assert outcomes["d"].lines == ["needs c"]
    assert "ZeroDivisionError" in outcomes["e"].lines[0]


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_of_a_job_is_that_of_its_group_without_the_cache_of_files(tmp_path: Path, version: int) -> None:
    line, mount, limit, used, prefix = {
        1: (
            "4:memory:/slurm/job_7",
            "sys/fs/cgroup/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_",
        ),
        2: ("0::/slurm/job_7", "sys/fs/cgroup", "memory.max", "memory.current", ""),
    }[version]
    group = tmp_path / mount / "slurm/job_7"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:name=systemd:/\n{line}\n")
    for folder, bound in ((group, "4000"), (group.parent, "max")):
        (folder / limit).write_text(f"{bound}\n")
        (folder / used).write_text("3000\n")
        (folder / "memory.stat").write_text(f"anon 500\n{prefix}active_file 1500\n{prefix}inactive_file 1000\n")
    assert list(cgroup_limits(tmp_path)) == [(3500, 4000)]
