"""How many trials fit into a pass, by the estimate of the dry run, and what a sweep is said to cost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ci_llm.cluster.launch import read_launch
from ci_llm.config.sweep import read_sweep
from ci_llm.distributed import processes as processes_module
from ci_llm.distributed.processes import Processes
from ci_llm.errors import ConfigError
from ci_llm.interrupts import Interrupts
from ci_llm.lora.layer import AdaptedLinear
from ci_llm.run import job
from ci_llm.run.start.loading import Loaded, load
from ci_llm.sweep import runner
from ci_llm.sweep.successive_halving import HalvingPlan

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("threads_as_they_were")]
READING = read_sweep(None, ["learning_rate=log(1e-4,1e-2)", "lora_rank=[2,64]", "max_train_samples=9", "batch_size=2"])
GIB = 1 << 30


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    joined = Processes(READING.config, launch=read_launch())
    yield joined
    joined.shutdown()


@pytest.fixture(scope="module")
def loaded(processes: Processes) -> Loaded:
    return load(READING.config, processes)


def fitting(wanted: int | str, free: int, loaded: Loaded, processes: Processes, patch: pytest.MonkeyPatch) -> int:
    patch.setattr(processes_module, "free_memory", lambda device: (free, 4 * free))
    return runner.trials_per_pass(READING.config, READING.spaces, wanted, 1000, loaded, processes)


def test_more_memory_takes_more_trials_of_the_largest_rank(
    loaded: Loaded, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, more = (fitting("auto", free, loaded, processes, monkeypatch) for free in (GIB // 8, GIB // 2))
    assert 1 <= few < more < 1000
    assert fitting(few, GIB // 8, loaded, processes, monkeypatch) == few
    assert fitting("auto", 1 << 44, loaded, processes, monkeypatch) == 1000
    assert fitting("auto", 1, loaded, processes, monkeypatch) == 1
    with pytest.raises(ConfigError, match=f"do not fit into memory(.|\n)*agents_per_pass={few}"):
        fitting(few + 500, GIB // 8, loaded, processes, monkeypatch)


def test_several_processes_of_one_machine_share_its_memory(
    loaded: Loaded, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = fitting("auto", GIB // 2, loaded, processes, monkeypatch)
    monkeypatch.setattr(processes, "launch", replace(processes.launch, num_local_processes=4))
    assert 1 <= fitting("auto", GIB // 2, loaded, processes, monkeypatch) < alone


@pytest.mark.parametrize(("words", "wanted"), [(["trials=5"], 5), (["trials=2"], None), ([], None)])
def test_a_plan_says_that_the_spaces_have_fewer_settings_than_trials_are_asked_for(
    words: list[str], wanted: int | None
) -> None:
    reading = read_sweep(None, ["learning_rate=[1e-3,1e-2]", *words])
    assert (reading.keys.trials, reading.trials_wanted) == (2, wanted)
    said = [*runner.described(HalvingPlan.of(64, 3, 2, 2, keep=0.25, metric="nll"), reading)]
    told = f"trials={wanted} asks for more trials than the spaces have settings: they have only 2"
    assert (told in said) is (wanted is not None)


def test_a_run_that_fails_before_it_trains_leaves_a_shared_base_without_agents(
    loaded: Loaded, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("the resume failed")

    monkeypatch.setattr(job, "_resume", broken)
    config = READING.config.model_copy(update={"output_dir": str(tmp_path)})
    with job.opened(processes, config, Interrupts()) as attempt, pytest.raises(RuntimeError, match="the resume failed"):
        job.run_attempt(attempt, processes, loaded=loaded)
    assert not [layer for layer in loaded.base.model.modules() if isinstance(layer, AdaptedLinear)]
