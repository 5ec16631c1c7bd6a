"""The benchmarks run, and what they print follows from what they measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as listing
from benchmarks import campaign, checkpoint_stall, grpo, harness, step
from benchmarks.harness import Cost, cpu_ratios, median_cost, take_turns
from tests.support.children import START
from tools.testbed.events import DEADLINE_S


def test_turns_rotate_and_ratios_are_paired() -> None:
    seen: list[str] = []
    variants = {name: lambda item, name=name: seen.append(f"{name}{item}") for name in "abc"}
    costs = take_turns(variants, [1, 2])
    assert seen == ["a1", "b1", "c1", "b2", "c2", "a2"]
    assert {name: len(listed) for name, listed in costs.items()} == {"a": 2, "b": 2, "c": 2}
    slow, fast = [Cost(6.0, 1.0), Cost(2.0, 1.0), Cost(9.0, 2.0)], [Cost(2.0, 1.0), Cost(1.0, 1.0), Cost(1.0, 1.0)]
    assert cpu_ratios(slow, fast) == [2.0, 3.0, 9.0]
    assert median_cost(slow) == Cost(6.0, 1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_trainers_of_the_step_benchmark_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two optimizer steps; `measure` compares their losses."""
    for module in (harness, step):
        monkeypatch.setattr(module, "VOCABULARY", 500)
    measured = step.measure("tiny", harness.batches(None, 2, 2))
    assert [len(listed) for listed in measured.costs.values()] == [1] * 4
    assert all(measured.ratio(name) > 0 for name in measured.costs)
    assert step.table(measured, rows=2).count("| 2 |") == 5, "the last is the floor"
    assert len(measured.floor) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore")
def test_the_benchmark_of_grpo_measures_steps_and_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"K": 2, "SFT_STEPS": 1, "PROMPTS": 2, "LEARNED_FROM": 2, "GENERATIONS": 2, "LONGEST": 4}
    for name, value in small.items():
        monkeypatch.setattr(grpo, name, value)
    monkeypatch.setitem(grpo.COMMON, "num_agents", 2)
    costs = grpo.cost(tmp_path, rounds=1, steps=1)
    assert all(one.cpu_s > 0 and 1 <= one.tokens <= 4 for each in costs.values() for one in each)
    ratio = costs["TRL"][0].cpu_s / costs["ours"][0].cpu_s
    assert grpo.cost_table(costs).endswith(f"{ratio:.2f} ({ratio:.2f} to {ratio:.2f}) |")
    learned = grpo.learn(1, tmp_path, 1, "1e-3", "8e-3", grpo.rows("test")[:2])
    assert all(0 <= float(x) <= 1 for found in learned.rewards.values() for x in found)
    assert all(seconds > 0 for seconds in learned.cpu_s.values())


def test_the_table_of_what_was_learned_pairs_changes_by_seed() -> None:
    def of_seed(before: float, after: float) -> grpo.Learned:
        return grpo.Learned({"before": torch.tensor([before, 0.5]), "GRPO": torch.tensor([after, 0.5])}, {"GRPO": 9.0})

    _, _, before, after = grpo.learned_table([of_seed(0.2, 0.4), of_seed(0.3, 0.5)]).splitlines()
    assert before == "| before |  | 0.250 ± 0.635 |  | 0.500 ± 0.000 |  |"
    assert after == "| GRPO | 9 | 0.450 ± 0.635 | +0.200 ± 0.000 | 0.500 ± 0.000 | +0.000 ± 0.000 |"


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ["ours", "ours_at_once", "ours_plain", "torch_save", "accelerate_adapters"])
def test_a_save_of_every_kind_is_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a small state; all of it is written, and nothing of the base."""
    small = {"WIDTH": 16, "INNER": 32, "LAYERS": 1, "PRODUCTS": 1, "BASE_BYTES": 1 << 20}
    for constant, value in small.items():
        monkeypatch.setattr(checkpoint_stall, constant, value)
    training = checkpoint_stall.Training(1)
    save = checkpoint_stall.WRITERS[name][1](training, tmp_path / name)
    training.after_other_hooks()
    cost = checkpoint_stall.one_save(training, save, tmp_path / "folder")
    state = sum(tensor.nbytes for tensor in training.tensors.values())
    assert len(training.tensors) == 224
    assert state < cost.nbytes < state + 200_000
    assert 0 < cost.stall_s <= cost.durable_s + training.joined_s


@pytest.mark.slow
def test_every_benchmark_is_listed_with_what_it_measures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    listing.main()
    printed = capsys.readouterr().out.splitlines()
    assert {"step", "crowd"} <= set(listing.found())
    assert [line.split()[0] for line in printed] == list(listing.found())
    assert all(len(line.split()) > 4 for line in printed)
    told = (listing.FOLDER / "README.md").read_text(encoding="utf-8")
    assert [name for name in listing.found() if f"`{name}`" not in told] == []


@pytest.mark.slow
def test_a_supervised_run_survives_a_node_that_dies_with_its_disk_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample of the campaign of 1,000."""
    monkeypatch.setenv("PYTHONPATH", str(START))
    kinds = ("nan", "lost_disk")
    faults = campaign.draw(seed=1, count=2, kinds=kinds)
    kept = [fault for fault in faults if fault.kind == "nan"]
    runs = [campaign.Campaign(tmp_path / str(len(some)), some, 30, 1, mirror=True) for some in (faults, kept)]
    assert [run.run(DEADLINE_S) for run in runs] == [2, 1]
    assert {line["kind"] for line in campaign.ledger(tmp_path / "2")} == {"start", *kinds}
    assert runs[0].bits() == runs[1].bits() != {}
