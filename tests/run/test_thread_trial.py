"""cpu_threads: a trial finds the number that is fastest here, leaves no trace, and a later start takes the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.cli.main import main
from ci_llm.cluster import launch
from ci_llm.run import autotune
from ci_llm.run.autotune import set_fastest_threads
from tests.run.test_other_processor import digests
from tests.support import small_run
from tests.support.campaign import sampled
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import train_watched

pytestmark = pytest.mark.usefixtures("threads_as_they_were")

CALM: Any = SimpleNamespace(stop_reason=None)
LIKE = {"processor": "one", "base": "a"}


def alone(cores: int, *, peers: Callable[[Any], list[Any]] = lambda own: [own], chooses: bool = True) -> Any:
    """The processes of a run, of which this one has so many cores; `peers` adds what others say to a gather."""
    return SimpleNamespace(
        launch=SimpleNamespace(threads_per_process=cores),
        chooses_threads=chooses,
        is_main_process=True,
        follow=lambda: None,
        gather_object=peers,
        broadcast_object=lambda value: value,
    )


class Machine:
    """A clock, and rows that take as long on it as their number of threads says, besides what disturbs a pass.

    Attributes:
        tried: the numbers of threads of all passes.
    """

    def __init__(self, seconds: dict[int, float], disturbed: dict[int, float] | None = None) -> None:
        self._seconds, self._disturbed, self._now, self.tried = seconds, disturbed or {}, 0.0, list[int]()

    def perf_counter(self) -> float:
        return self._now

    def once(self) -> None:
        threads = torch.get_num_threads()
        self._now += self._seconds[threads] + self._disturbed.get(len(self.tried), 0.0)
        self.tried.append(threads)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CI_LLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "threads"


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a choice on such a machine; returns the machine, the line and the number of threads after it."""

    def choose(seconds: dict[int, float], disturbed: Any = None, processes: Any = None, like: Any = None) -> Any:
        machine = Machine(seconds, disturbed)
        monkeypatch.setattr(autotune, "time", machine)
        line = set_fastest_threads(machine.once, like or LIKE, processes or alone(max(seconds)), CALM)
        return machine, line, torch.get_num_threads()

    return choose


@pytest.mark.parametrize(
    ("seconds", "taken", "counts"),
    [
        ({1: 1.0, 2: 1.3}, 1, [2, 1]),
        ({1: 1.0, 2: 0.5}, 2, [2, 1]),
        ({1: 1.04, 2: 1.0}, 1, [2, 1]),  # within 5 %: the smaller one
        ({1: 1.06, 2: 1.0}, 2, [2, 1]),
        ({1: 2.0, 2: 1.0, 4: 0.7, 6: 0.68}, 4, [6, 4, 2, 1]),
        ({1: 8.0, 2: 4.0, 4: 2.0, 8: 1.0}, 8, [8, 4, 2]),  # one thread would take four times as long, and is left out
    ],
)
def test_the_fastest_number_is_taken(trial: Any, seconds: dict[int, float], taken: int, counts: list[int]) -> None:
    machine, line, threads = trial(seconds)
    assert threads == taken
    assert machine.tried[: len(counts)] == counts
    assert len(machine.tried) <= autotune.ROUNDS * len(seconds)
    assert line.startswith(f"{taken} of {max(seconds)} cores, by a trial of one layer (")


def test_another_start_takes_the_same_without_a_trial(trial: Any, cache: Path) -> None:
    trial({1: 1.0, 2: 1.3})
    again, line, threads = trial({1: 1.3, 2: 1.0})
    assert (again.tried, threads) == ([], 1)
    (record,) = cache.iterdir()
    assert line == f"1 of 2 cores, as an earlier start found: {record}"
    assert json.loads(record.read_text())["threads"] == 1
    for changed in ({**LIKE, "base": "b"}, {**LIKE, "processor": "another"}):
        assert trial({1: 1.3, 2: 1.0}, like=changed)[2] == 2
    assert trial({1: 1.3, 2: 1.1, 3: 1.0})[2] == 3, "another number of cores"


@pytest.mark.parametrize("processes", [alone(1), alone(8, chooses=False), alone(8, peers=lambda own: [own, 1])])
def test_nothing_is_tried_where_nothing_is_to_choose(trial: Any, processes: Any, cache: Path) -> None:
    """One core, a number that OMP_NUM_THREADS gives, a process that has one of these."""
    torch.set_num_threads(3)
    machine, line, threads = trial({1: 1.0, 2: 0.5}, processes=processes)
    assert (machine.tried, line, threads, cache.exists()) == ([], None, 3, False)


def test_the_slowest_process_decides_for_all(trial: Any) -> None:
    def with_a_slow_peer(own: Any) -> list[Any]:
        return [own, own if isinstance(own, int) else (own[0] + 9 * (torch.get_num_threads() == 2), None)]

    assert trial({1: 1.0, 2: 0.5}, processes=alone(2, peers=with_a_slow_peer))[2] == 1


@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.parametrize("on", ["this process", "another one"])
def test_a_request_to_stop_ends_the_trial(on: str, at: int, cache: Path) -> None:
    torch.set_num_threads(3)
    tried: list[int] = []

    def reason() -> str | None:
        return "signal:SIGTERM" if len(tried) >= at else None

    class Asked:
        stop_reason = property(lambda _: reason() if on == "this process" else None)

    def gathered(own: Any) -> list[Any]:
        return [own, own if isinstance(own, int) else (own[0], reason())]

    processes, interrupts = alone(2, peers=gathered), Asked()
    line = set_fastest_threads(lambda: tried.append(torch.get_num_threads()), LIKE, processes, interrupts)  # type: ignore[arg-type]
    assert (len(tried), line, torch.get_num_threads(), cache.exists()) == (at, None, 3, False)


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with two cores, of which nobody has said how many a process takes."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launch, "_num_cores", lambda: 2)
    torch.set_num_threads(2)
    return monkeypatch


def train(folder: Path, *words: str) -> int:
    return main(["train", *small_run.WORDS, "max_train_steps=2", f"output_dir={folder}", *words])


def threads_of(folder: Path, step: int = 2) -> int:
    surroundings: Any = read_manifest(folder / f"checkpoint_step_{step}").info["surroundings"]
    threads: int = surroundings["threads"]
    return threads


class Favour:
    """A clock on which a pass with this number of threads takes one second, and any other two."""

    def __init__(self, threads: int) -> None:
        self._threads, self._now, self.asked = threads, 0.0, 0

    def perf_counter(self) -> float:
        self.asked += 1
        self._now += 1.0 if torch.get_num_threads() == self._threads else 2.0
        return self._now


@pytest.mark.slow
def test_a_run_after_a_trial_has_the_bits_of_one_without(
    two_cores: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Gradients, generators and weights are as if there had been none; and each start takes the same number."""
    random: Sequence[str] = ("lora_dropout=0.1", "dropconnect_p=0.05")
    two_cores.setattr(autotune, "time", Favour(1))
    assert train(tmp_path / "tried", *random) == 0
    assert "threads   1 of 2 cores, by a trial of one layer (1: 1e+03 ms, 2: 2e+03 ms)" in capsys.readouterr().out
    assert train(tmp_path / "given", *random, "cpu_threads=1") == 0
    assert "threads   " not in capsys.readouterr().out
    two_cores.setattr(autotune, "time", clock := Favour(2))
    assert train(tmp_path / "known", *random) == 0
    assert "threads   1 of 2 cores, as an earlier start found: " in capsys.readouterr().out
    assert clock.asked == 0
    final = [digests(tmp_path / name / "final_checkpoint") for name in ("tried", "given", "known")]
    assert final[0] == final[1] == final[2]
    assert [threads_of(tmp_path / name) for name in ("tried", "given", "known")] == [1, 1, 1]


@pytest.mark.slow
def test_a_resume_takes_the_number_of_its_checkpoint(
    two_cores: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = ("max_train_steps=4", "lr_scheduler_type=constant")
    assert train(tmp_path, "lr_scheduler_type=constant", "cpu_threads=2") == 0
    two_cores.setattr(autotune, "time", clock := Favour(1))
    torch.set_num_threads(1)
    capsys.readouterr()
    assert train(tmp_path, *longer) == 0
    assert "exactness: bitwise" in capsys.readouterr().out
    assert (threads_of(tmp_path, 4), clock.asked) == (2, 0)
    assert train(tmp_path, *longer, "max_train_steps=6", "cpu_threads=1") == 0
    assert "exactness: sample-exact (threads 2 -> 1" in capsys.readouterr().out
    assert threads_of(tmp_path, 6) == 1


def train_on_many_cores(folder: str, arguments: list[str], fate: None) -> int:
    """A trial on a machine of eight cores, on whose clock each process is fastest with another number of threads."""
    os.environ.pop("OMP_NUM_THREADS")
    os.environ["CI_LLM_CACHE"] = str(Path(folder, "cache"))
    launch._num_cores = lambda: 8
    autotune.time = Favour(2 if os.environ["RANK"] == "0" else 4)  # type: ignore[assignment]
    code = train_watched(folder, arguments, fate)
    Path(folder, f"threads{os.environ['RANK']}").write_text(f"{torch.get_num_threads()}")
    return code


@pytest.mark.slow
@pytest.mark.parametrize("sharding", sampled(["none", "layers"], ["layers"]))
def test_all_processes_take_one_number(server: ForkServer, tmp_path: Path, sharding: str) -> None:
    """The times differ, and each would choose another one: the smallest of those that are slow on one of them."""
    arguments = [*small_run.WORDS, "max_train_steps=2", "output_dir=run", f"base_sharding={sharding}"]
    log = tmp_path / "log"
    codes = server.run(train_on_many_cores, log, ranks=2, folder=str(tmp_path), arguments=arguments, fate=None)
    assert codes == [0, 0], log.read_text()
    assert [(tmp_path / f"threads{rank}").read_text() for rank in range(2)] == ["1", "1"]
    assert log.read_text().count("threads   1 of 4 cores, by a trial of one layer (") == 1
    assert threads_of(tmp_path / "run") == 1
