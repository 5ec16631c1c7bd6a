"""Programs on simulated GPUs: PyTorch asks for its device once, so that a fork server of its own has loaded it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_run import WORDS
from tools.testbed.accelerator import fork, library
from tools.testbed.forkserver import ForkServer


@dataclass
class Ran:
    """A process that has ended, and its trace; what two of them said is one text."""

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
def devices() -> Iterator[ForkServer]:
    """Forks processes with simulated GPUs; where those cannot be built the test is skipped, with the reason."""
    try:
        library.built()
    except library.CannotBuild as error:
        pytest.skip(f"the simulated GPU cannot be built: {error}; apt-get install g++ python3-dev")
    with ForkServer(*fork.LOADED) as started:
        yield started


@dataclass
class Simulated:
    """Forks programs on simulated GPUs, in a folder of their own."""

    devices: ForkServer
    folder: Path
    base: str
    environment: dict[str, str] = field(default_factory=dict)

    def __call__(self, *words: str, options: Sequence[str] = ()) -> Ran:
        """Run a command of ci_llm, or several with `then` between them."""
        said = self._run(fork.on_gpus, 1, words=self._words(*options, *words), environment=self.environment)
        return Ran(said, json.loads((self.folder / "trace.json").read_text()))

    def train(self, *keys: str, options: Sequence[str] = ()) -> Ran:
        """Train the toy base in `run`; a key given twice: the last wins."""
        return self(*self.training(*keys), options=options)

    def training(self, *keys: str) -> list[str]:
        """The words of a training run."""
        return ["train", *WORDS, f"model_name={self.base}", "output_dir=run", "logging_steps=1", *keys]

    def on_two(self, *words: str, options: Sequence[str] = ()) -> list[Ran]:
        """Run a training on two processes with a GPU each."""
        said = self._run(fork.on_gpus, 2, words=self._words("--devices", "2", *options, *words), environment={})
        return [Ran(said, json.loads((self.folder / f"trace.{rank}").read_text())) for rank in range(2)]

    def on_cpu(self, *words: str) -> None:
        """Run a command of ci_llm without a GPU."""
        self._run(fork.on_cpu, 1, words=[*words])

    def _words(self, *words: str) -> list[str]:
        return ["--trace", str(self.folder / "trace.json"), *words]

    def _run(self, trial: Callable[..., int], ranks: int, **arguments: Any) -> str:
        """What its processes said, which end well."""
        (log := self.folder / "log").unlink(missing_ok=True)
        codes = self.devices.run(trial, log, ranks=ranks, folder=str(self.folder), **arguments)
        said = log.read_text()
        assert codes == [0] * ranks, said[-8000:]
        return said


@pytest.fixture(scope="module")
def simulated_in(devices: ForkServer, tmp_path_factory: pytest.TempPathFactory, narrow_base: str) -> Simulated:
    """For what several tests of a file look at."""
    return Simulated(devices, tmp_path_factory.mktemp("simulated"), narrow_base)


@pytest.fixture
def simulated(devices: ForkServer, tmp_path: Path, narrow_base: str) -> Simulated:
    return Simulated(devices, tmp_path, narrow_base)
