"""A checkpoint of another processor: the run resumes, says how exactly and why, and never says bitwise of other bits.

Libraries pick their kernels when a process starts, and variables of the environment make them pick those of another
processor. So each emulation has a server of its own, from which its runs are forked.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.core.run_status import read_status
from tests.support.campaign import sampled, size
from tools.processors import EMULATIONS
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import train_watched

pytestmark = pytest.mark.slow

SETTINGS = (
    "mixed_precision=no",
    "mixed_precision=bf16 lora_dropout=0.1 dropconnect_p=0.05",
    "model_dtype=bf16 diversity=swd",
    "model_dtype=fp64 agent_layers=upper_half",
    "batch_size=1",
    'agents=[{},{"lora_rank":4,"max_train_samples":15}]',
)
WORDS = ["num_agents=2", "lora_rank=2", "batch_size=4", "max_train_samples=20", "max_seq_length=256", "num_workers=0"]
WORDS += ["eval_samples=1", "generation_eval_samples=0", "eval_steps=null", "report_to=none"]
WORDS += ["max_train_steps=12", "save_steps=6", "save_interval_seconds=null", "output_dir=run"]


@pytest.fixture(scope="module")
def whole(server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Undisturbed runs of 12 steps on this processor, by their settings; each is made once."""

    class Made(dict[str, Path]):
        def __missing__(self, settings: str) -> Path:
            folder = tmp_path_factory.mktemp("whole")
            train(server, folder, settings)
            self[settings] = folder
            return folder

    return Made()


def train(server: ForkServer, folder: Path, settings: str, *words: str) -> str:
    """A call of a run in `folder/run`; returns what it said."""
    log = folder / "log"
    arguments = [*WORDS, *settings.split(), *words]
    codes = server.run(train_watched, log, folder=str(folder), arguments=arguments, fate=None)
    assert codes == [0], log.read_text()
    return log.read_text()


def digests(checkpoint: Path) -> dict[str, str]:
    """Of the files of the agents and of their moments."""
    files = {name: each for name, each in read_manifest(checkpoint).files.items() if name.endswith(".safetensors")}
    return {name: each.digest for name, each in files.items() if name.startswith(("agent", "optimizer"))}


def layer_of(checkpoint: Path) -> Any:
    surroundings: Any = read_manifest(checkpoint).info["surroundings"]
    return surroundings["layer"]


@pytest.mark.parametrize("emulation", sampled(EMULATIONS, ("ATEN_CPU_CAPABILITY=default",)))
def test_the_digest_differs_where_another_processor_computes_other_bits(
    emulation: str, whole: dict[str, Path], tmp_path: Path
) -> None:
    """The log and the status name the difference, also where all bits are the same."""
    name, value = emulation.split("=")
    if os.environ.get(name) == value:
        pytest.skip("the tests run on this processor already; run them without the emulation")
    with ForkServer("tools.testbed.trials", environment={name: value}) as emulated:
        for number, settings in enumerate(SETTINGS[: size(1, len(SETTINGS))]):
            here, there = whole[settings] / "run", tmp_path / str(number)
            later = shutil.ignore_patterns("checkpoint_step_12", "final_checkpoint")
            shutil.copytree(here, there / "run", ignore=later)
            said = train(emulated, there, settings, "restart_from=6")
            assert layer_of(here / "checkpoint_step_6") == layer_of(here / "checkpoint_step_12")
            is_same = layer_of(there / "run/checkpoint_step_12") == layer_of(here / "checkpoint_step_12")
            differ = digests(there / "run/checkpoint_step_12") != digests(here / "checkpoint_step_12")
            assert not (differ and is_same), f"{settings}: other bits, and the digest does not show it"
            assert ("other bits in a layer" in said) == (not is_same)
            grade = str(read_status(there / "run").exactness)
            assert f"exactness: {grade}\n" in said
            assert grade.startswith("sample-exact (")
            assert f"{name} {os.environ.get(name, 'not set')} -> {value}" in grade


def test_on_the_same_processor_a_run_is_bitwise_and_a_layer_with_other_bits_is_seen(
    server: ForkServer, whole: dict[str, Path], tmp_path: Path
) -> None:
    settings = SETTINGS[0]
    later = shutil.ignore_patterns("checkpoint_step_12", "final_checkpoint")
    for name, trial, told in (
        ("same", train_watched, "exactness: bitwise\n"),
        ("other", train_on_a_faulty_unit, "exactness: sample-exact (the same names, and other bits in a layer)\n"),
    ):
        shutil.copytree(whole[settings] / "run", tmp_path / name / "run", ignore=later)
        arguments = [*WORDS, *settings.split(), "restart_from=6"]
        log = tmp_path / name / "log"
        codes = server.run(trial, log, folder=str(tmp_path / name), arguments=arguments, fate=None)
        assert (codes, told in log.read_text()) == ([0], True), log.read_text()


def train_on_a_faulty_unit(folder: str, arguments: list[str], fate: None) -> int:
    """A trial on a machine with the same names, whose softmax rounds otherwise."""
    import torch

    from ci_llm.lora import passes

    softmax = torch.softmax
    passes.torch.softmax = lambda *args, **kwargs: softmax(*args, **kwargs) * (1 + 2**-20)  # type: ignore[assignment]
    return train_watched(folder, arguments, fate)
