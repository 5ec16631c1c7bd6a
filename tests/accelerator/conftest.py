"""Programs on simulated GPUs, each in a process of its own: PyTorch asks for its device once, when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_run import WORDS
from tools.testbed.accelerator import library
from tools.testbed.events import DEADLINE_S


@dataclass
class Ran:
    """A process that has ended, and its trace."""

    code: int
    said: str
    trace: dict[str, Any]

    def waits(self, phase: str) -> list[str]:
        """The places at which the host waited for the device in a phase, each as often as it did."""
        return [place for name, _, place, count in self.trace["waits"] if name == phase for _ in range(count)]

    def launches(self, phase: str) -> Counter[str]:
        """By operation."""
        return Counter({what: count for name, what, count in self.trace["launches"] if name == phase})

    def require_order(self) -> None:
        """No operation had tensors of two devices, and none read what another stream may still write."""
        assert not self.trace["mixes"]
        assert not self.trace["races"]

    def kernels(self) -> set[tuple[str, str]]:
        """(kernel, dtype) of all attention in steps."""
        return {(kernel, dtype) for phase, kernel, dtype, *_ in self.trace["attention"] if "step" in phase}


@pytest.fixture(scope="session")
def device() -> Path:
    """The compiled device; without it the test is skipped, with the reason."""
    try:
        return library.built()
    except library.CannotBuild as error:
        pytest.skip(f"the simulated GPU cannot be built: {error}; apt-get install g++ python3-dev")


@dataclass
class Simulated:
    """Starts programs on simulated GPUs, in a folder of their own."""

    folder: Path
    base: str
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, *words: str, options: Sequence[str] = (), fails: bool = False) -> Ran:
        """Run a command of ci_llm, or several with `then` between them."""
        trace = self.folder / "trace.json"
        ended = self._start(["-m", "tools.testbed.accelerator", "--trace", str(trace), *options, *words])
        if not fails:
            assert ended.returncode == 0, ended.stdout[-8000:]
        return Ran(ended.returncode, ended.stdout, json.loads(trace.read_text()))

    def train(self, *keys: str, options: Sequence[str] = (), fails: bool = False) -> Ran:
        """Train the toy base in `run`; a key given twice: the last wins."""
        return self(*self.training(*keys), options=options, fails=fails)

    def training(self, *keys: str) -> list[str]:
        """The words of a training run."""
        return ["train", *WORDS, f"model_name={self.base}", "output_dir=run", "logging_steps=1", *keys]

    def on_two(self, *words: str, options: Sequence[str] = ()) -> list[Ran]:
        """Run a training on two processes with a GPU each."""
        trace = self.folder / "trace.json"
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone"]
        own = ["-m", "tools.testbed.accelerator", "--trace", str(trace), "--devices", "2", *options, *words]
        ended = self._start([*launcher, *own])
        assert ended.returncode == 0, ended.stdout[-8000:]
        return [Ran(0, ended.stdout, json.loads(trace.with_suffix(f".{rank}").read_text())) for rank in range(2)]

    def on_cpu(self, *words: str) -> None:
        """Run a command of ci_llm without a GPU."""
        ended = self._start(["-m", "ci_llm", *words])
        assert ended.returncode == 0, ended.stdout[-8000:]

    def _start(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        root = str(Path(__file__).parents[2])
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": root, "OMP_NUM_THREADS": "1"} | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


@pytest.fixture(scope="module")
def simulated_in(device: Path, tmp_path_factory: pytest.TempPathFactory, narrow_base: str) -> Simulated:
    """For what several tests of a file look at."""
    return Simulated(tmp_path_factory.mktemp("simulated"), narrow_base)


@pytest.fixture
def simulated(device: Path, tmp_path: Path, narrow_base: str) -> Simulated:
    return Simulated(tmp_path, narrow_base)
