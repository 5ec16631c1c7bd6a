"""The benchmarks run, and what they print follows from what they measured."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import __main__ as listing
from benchmarks import campaign, checkpoint_stall, crowd, crowd_answers, families, floor, harness, record, step
from benchmarks.harness import Cost, cpu_ratios, median_cost, take_turns
from ci_llm.config import load_config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.scoring import score
from ci_llm.lora.layer import LoraSettings
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


def test_the_shipped_lengths_are_those_of_gsm8k() -> None:
    rows = harness.batches(None, 1, 600)
    lengths = torch.tensor([batch.num_tokens for batch in rows], dtype=torch.float64)
    assert lengths.mean().item() == pytest.approx(190, rel=0.05)
    assert lengths.quantile(0.9).item() == pytest.approx(283, rel=0.05)
    assert sum(batch.num_targets for batch in rows) / lengths.sum() == pytest.approx(0.64, abs=0.01)


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


class ProductCounter(TorchDispatchMode):
    """Counts the operations of matrix products and of attention; torch's own counter leaves out what works in place."""

    PRODUCTS: ClassVar = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}
    PRODUCTS |= {torch.ops.aten.baddbmm_, torch.ops.aten.addmm_}

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in self.PRODUCTS:
            self.flops += 2.0 * found.numel() * args[-1].shape[-2]
        elif "flash_attention" in str(func):  # 2 products forward, 5 backward
            *batch, tokens, width = args[0].shape
            self.flops += 2.0 * (5 if "backward" in str(func) else 2) * math.prod(batch) * tokens**2 * width
        return found


def test_the_floor_of_a_step_counts_its_necessary_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held against the products that the dispatcher sees: the floor leaves out masked attention, and what the first
    layer does for each agent. The longer the rows, the larger the first."""
    for module in (harness, step):
        monkeypatch.setattr(module, "VOCABULARY", 500)
    ours = Crowd(step.random_base("tiny"), LoraSettings(num_agents=4, rank=16, alpha=32), "random").train()
    (batch,) = harness.batches(None, 2, 1)
    ours.agents.begin_step(0)
    with ProductCounter() as counted:
        ours(batch).loss.backward()
    assert 0.6 < floor.necessary_flops(ours, batch) / counted.flops < 1


def test_a_figure_that_is_clearly_worse_than_recorded_is_named() -> None:
    assert record.worse({"a": 0.9, "b": 5.0}, {"a": 1.0, "b": 6.0, "gone": 1.0}) == ["b: 5.00, recorded 6.00"]
    recorded = json.loads(record.RECORDED.read_text(encoding="utf-8"))["surroundings"]
    assert recorded.keys() == record.surroundings().keys(), "they say when, where and with which versions"


def answer(right: list[float], nll: float, agents: float = 1.0) -> crowd_answers.Measured:
    """Of rows of one token each."""
    return {"right": right, "nll": [nll] * len(right), "tokens": [1] * len(right), "ece": 0.1, "agents": agents}


def test_the_crowds_table_has_scores_and_costs(tmp_path: Path) -> None:
    """From the files that are there; a part without its file of every seed has no line."""
    many, few = answer([1, 1, 1, 0], 0.1, 4.0), answer([1, 1, 0, 0], 0.2)
    generated = answer([1, 0, 1, 0], 0.2, 1.6) | {"nll": [], "tokens": []}
    files = {
        "steps/1": {"one agent": few},
        "steps/2": {"one agent": few},
        "crowd/1": {"agents, mean of 4": few, "crowd": many},
        "crowd/2": {"agents, mean of 4": few, "crowd": many},
        "escalation/1": {"escalation, generated": generated},
        "escalation/2": {"escalation, generated": generated},
        "auto/1": {"auto": many},
    }
    for name, answers in files.items():
        path = tmp_path / f"50/{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(answers))
    lines = crowd.table(crowd.results_of(50, [1, 2], [*crowd.PARTS], tmp_path)).splitlines()[2:]
    assert lines == [
        "| one agent | 0.500 ± 0.000 | 0.2000 ± 0.0000 | 0.100 ± 0.000 | 1 | +0.250 ± 0.490 |",
        "| agents, mean of 4 | 0.500 ± 0.000 | 0.2000 ± 0.0000 | 0.100 ± 0.000 | 1 | +0.250 ± 0.490 |",
        "| crowd | 0.750 ± 0.000 | 0.1000 ± 0.0000 | 0.100 ± 0.000 | 4 | |",
        "| escalation, generated | 0.500 ± 0.000 |  | 0.100 ± 0.000 | 1.6 | |",
    ]
    assert crowd_answers.best_agent([few, many, many]) == 1
    assert crowd_answers.best_agent([answer([1, 0], 0.2), answer([0, 1], 0.1)]) == 1
    assert crowd.measure("steps", 50, 2, tmp_path) == {"one agent": few}  # nothing is trained again


def test_scores_of_the_benchmark_equal_those_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (harness, step):
        monkeypatch.setattr(module, "VOCABULARY", 500)
    ours = Crowd(step.random_base("tiny"), LoraSettings(num_agents=2, rank=2, alpha=4), "random").eval()
    batches = harness.batches(None, 2, 2)
    wanted = score(ours, batches, "probability")
    assert wanted is not None
    found = crowd_answers.scored(ours, batches)
    assert [sum(each["right"]) for each in found] == wanted.right.sum(1).tolist()
    assert torch.allclose(torch.tensor([each["nll"] for each in found], dtype=torch.float64), wanted.nll)
    assert found[0]["tokens"] == wanted.tokens.tolist()
    assert all(0 <= each["ece"] <= 1 for each in found)


def test_the_controls_have_the_crowds_size_and_compute() -> None:
    config = load_config(crowd.CONFIG, [])
    assert (config.num_agents, config.lora_rank, config.max_train_steps) == (4, 8, 260)
    assert (crowd.RANK.keys["lora_rank"], crowd.STEPS.keys["max_train_steps"]) == ("32", "1040")
    rates = [crowd.STEPS.settings(rows)["learning_rate"] for rows in (40, 120, 400, 1500, 20_000)]
    assert rates == ["4e-3", "2e-3", "4e-3", "4e-3", "4e-3"]
    assert "learning_rate" not in crowd.CROWD.settings(100)


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
@pytest.mark.parametrize(
    ("family", "kind", "detail"),
    [
        *((family, "equal", "padded") for family in ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")),
        ("openai-gpt", "equal", "padded"),  # it takes no cache
        ("moshi", "refused", "Moshi's cache forgets"),
    ],
)
def test_families_that_differ_are_equal_or_refused(family: str, kind: str, detail: str) -> None:
    """The rows are longer than what the first four choose to attend to (`index_topk`), unlike those of a trial."""
    assert families.SIZE["index_topk"] < min(map(len, families.PROMPTS)) + families.NEW_TOKENS
    found = families.compare_family(family)
    assert (found.kind, found.detail[: len(detail)]) == (kind, detail), found


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
    told = (listing.FOLDER.parent / "docs" / "results.md").read_text(encoding="utf-8")
    assert [name for name in listing.found() if f"`{name}`" not in told] == []


def test_a_campaign_of_faults_is_drawn_by_its_seed_with_room_between_them() -> None:
    faults = campaign.draw(seed=3, count=100)
    assert faults == campaign.draw(seed=3, count=100) != campaign.draw(seed=4, count=100)
    kinds = [fault.kind for fault in faults]
    assert len(kinds) == 100
    assert set(kinds) == set(campaign.KINDS)
    assert kinds.count("oom") == campaign.OOMS_AT_MOST
    gaps = [after.step - before.step for before, after in pairwise(faults)]
    assert min(gaps) > 2 * campaign.SAVE_STEPS
    assert {fault.kind for fault in campaign.draw(seed=3, count=1000, kinds=campaign.ALL)} == set(campaign.ALL)


@pytest.mark.slow
def test_a_supervised_run_survives_a_dead_node_and_a_lost_disk_to_the_same_bits(tmp_path: Path) -> None:
    """A sample of the campaign of 1,000."""
    kinds = ("nan", "node", "lost_disk")
    faults = campaign.draw(seed=1, count=3, kinds=kinds)
    kept = [fault for fault in faults if fault.kind == "nan"]
    runs = [campaign.Campaign(tmp_path / str(len(some)), some, 48, 1, mirror=True) for some in (faults, kept)]
    assert [run.run(DEADLINE_S) for run in runs] == [3, 1]
    assert {line["kind"] for line in campaign.ledger(tmp_path / "3")} == {"start", *kinds}
    assert runs[0].bits() == runs[1].bits() != {}


def test_the_cost_of_a_fault_is_read_from_the_ledger() -> None:
    told = [("start", 0), ("nan", 5), ("kill", 10), ("start", 9), ("terminate", 20), ("start", 21)]
    assert campaign.costs([{"kind": kind, "step": step} for kind, step in told]) == {
        "nan": [0],
        "kill": [1],
        "terminate": [0],
    }
