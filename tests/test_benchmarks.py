"""The benchmarks run, and what they print follows from what they measured."""

from __future__ import annotations

import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import __main__ as listing
from benchmarks import (
    campaign,
    checkpoint_growth,
    checkpoint_stall,
    checkpoint_writers,
    crowd,
    crowd_answers,
    families,
    floor,
    generation,
    growth,
    gsm8k,
    mirror_stall,
    objectives,
    passes,
    precision,
    probe,
    real_rows,
    record,
    serving,
    sharded,
    step,
    sweep,
    sweep_crowd,
    uncertainty,
)
from benchmarks.timing import Cost, cpu_ratios, median_cost, take_turns
from ci_llm import embedded
from ci_llm.config import load_config
from ci_llm.crowd.aggregators import Learned
from ci_llm.crowd.answers import fit, signals
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.scoring import score
from ci_llm.lora.layer import LoraSettings
from ci_llm.sweep.trials import Trial, agents_of
from tests.support.crowds import disturbed_crowd
from tools.testbed.events import DEADLINE_S
from tools.testbed.forkserver import ForkServer


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
    rows = gsm8k.batches(None, 1, 600)
    lengths = torch.tensor([batch.num_tokens for batch in rows], dtype=torch.float64)
    assert lengths.mean().item() == pytest.approx(190, rel=0.05)
    assert lengths.quantile(0.9).item() == pytest.approx(283, rel=0.05)
    assert sum(batch.num_targets for batch in rows) / lengths.sum() == pytest.approx(0.64, abs=0.01)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_growth_of_a_step_is_measured_for_agents_and_lengths(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (gsm8k, step, growth):
        monkeypatch.setattr(module, "VOCABULARY", 500)
    monkeypatch.setattr(growth, "random_base", lambda _: step.random_base("tiny"))
    cases = [(3, 3, gsm8k.batches(None, 2, 2)), (600, 1, [*growth.rows_of(600, 2)])]
    found = growth.measured("what grows", cases)
    assert [*found] == [3, 600]
    assert all(cost > 0 for own in found.values() for cost in own.values())
    assert capsys.readouterr().out.count("|\n") == 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_trainers_of_the_step_benchmark_train_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over two optimizer steps; `measure` compares their losses."""
    for module in (gsm8k, step):
        monkeypatch.setattr(module, "VOCABULARY", 500)
    measured = step.measure("tiny", gsm8k.batches(None, 2, 2), trunk=True, parts=True)
    table = step.table(measured, rows=2)
    assert [len(listed) for listed in measured.costs.values()] == [1] * 8
    assert table.count("| 2 |") == 14
    assert "| 2 | original's way, upper half / shared trunk |" in table
    assert "the floor" in table
    assert len(measured.floor) == 1


@pytest.mark.slow
def test_a_checkout_beside_itself_trains_the_same() -> None:
    """`beside` compares the losses of two processes."""
    inputs, itself = gsm8k.batches(None, 1, 2), Path(passes.__file__).parent.parent
    cells = passes.beside(itself, "tiny", "fp32", inputs, per_agent=True).split("|")
    assert cells[1:4] == [" tiny ", " fp32 ", " 1 "]
    assert all(int(peak) > 100 for peak in cells[-3:-1])


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
    for module in (gsm8k, step):
        monkeypatch.setattr(module, "VOCABULARY", 500)
    ours = Crowd(step.random_base("tiny"), LoraSettings(num_agents=4, rank=16, alpha=32), "random").train()
    (batch,) = gsm8k.batches(None, 2, 1)
    ours.agents.begin_step(0)
    with ProductCounter() as counted:
        ours(batch).loss.backward()
    assert 0.6 < floor.necessary_flops(ours, batch) / counted.flops < 1


def test_curves_of_two_precisions_are_paired_by_seed(tmp_path: Path) -> None:
    def run(name: str, losses: list[float], agents: list[float]) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines = [{"train/task_loss": loss} for loss in losses] + [{"eval/crowd/nll": 9.0}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "evaluation.json").write_text(json.dumps({"nll": {"agents": agents, "crowd": 0.5}}))
        return folder

    fp32 = precision.Curves.of([run("a", [4.0, 3.0], [1.0, 2.0]), run("b", [4.5, 3.25], [1.0, 1.0])])
    bf16 = precision.Curves.of([run("c", [4.125, 3.0], [1.0, 2.0]), run("d", [4.5, 3.0], [1.0, 2.0])])
    assert precision.table({"fp32": fp32, "bf16": bf16}).splitlines() == [
        "| | fp32 | highest minus lowest seed | bf16 | largest difference |",
        "|---|---|---|---|---|",
        "| to step 20 | 4.2500 | 0.5000 | 4.3125 | 0.1250 |",
        "| to step 40 | 3.1250 | 0.2500 | 3.0000 | 0.2500 |",
        "| agents, held out | 1.2500 | 0.5000 | 1.5000 | 0.5000 |",
        "| crowd, held out | 0.5000 | 0.0000 | 0.5000 | 0.0000 |",
    ]


def test_a_figure_that_is_clearly_worse_than_recorded_is_named() -> None:
    assert record.worse({"a": 0.9, "b": 5.0}, {"a": 1.0, "b": 6.0, "gone": 1.0}) == ["b: 5.00, recorded 6.00"]
    recorded = json.loads(record.RECORDED.read_text(encoding="utf-8"))["surroundings"]
    assert recorded.keys() == record.surroundings().keys(), "they say when, where and with which versions"


@pytest.mark.slow
def test_the_benchmark_of_sharding_trains_the_same_on_half_of_the_layers(server: ForkServer) -> None:
    """In two processes; `measure` compares their gradients."""
    found = sharded.measure(server, 2, "tiny")
    lines = sharded.table(found)
    assert [line.split()[:2] for line in lines] == [["2", "none"], ["2", "layers"]]
    (whole, part) = ({one["layers"] for one in found[way]} for way in ("none", "layers"))
    assert {2 * each for each in part} == whole


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
    for module in (gsm8k, step):
        monkeypatch.setattr(module, "VOCABULARY", 500)
    ours = Crowd(step.random_base("tiny"), LoraSettings(num_agents=2, rank=2, alpha=4), "random").eval()
    batches = gsm8k.batches(None, 2, 2)
    wanted = score(ours, batches, "probability")
    assert wanted is not None
    found = crowd_answers.scored(ours, batches)
    assert [sum(each["right"]) for each in found] == wanted.right.sum(1).tolist()
    assert torch.allclose(torch.tensor([each["nll"] for each in found], dtype=torch.float64), wanted.nll)
    assert found[0]["tokens"] == wanted.tokens.tolist()
    assert all(0 <= each["ece"] <= 1 for each in found)
    *agents, one, both = crowd_answers.scored(ours, batches, [[1], [1, 0]])
    assert agents == found[:2]
    assert one["nll"] == pytest.approx(found[1]["nll"])
    assert both["nll"] == pytest.approx(found[2]["nll"])


def test_the_crowd_of_the_best_trials_is_held_against_that_of_equals() -> None:
    mean = "agents, mean of 4"
    best = {mean: answer([1, 0, 0, 0], 0.3), "crowd": answer([1, 1, 1, 0], 0.1, 4.0)}
    equals = {mean: answer([1, 1, 0, 0], 0.2), "crowd": answer([1, 1, 0, 0], 0.15, 4.0)}
    lines = sweep_crowd.lines_of([best], [equals])
    assert [float(line.exact_match) for line in lines] == [0.25, 0.5, 0.5, 0.75]
    of_equals = crowd.table(lines, against=sweep_crowd.BEST).splitlines()[4]
    assert of_equals.startswith("| crowd of equals | 0.500 | 0.1500 | 0.100 | 4 | +0.250 ±"), of_equals
    trials = [Trial(3, {"lora_rank": 4, "learning_rate": 2e-3}), Trial(7, {"lora_rank": 16, "learning_rate": 1e-3})]
    config = load_config(None, [f"agents={agents_of(trials)}"])
    assert [(own.lora_rank, own.learning_rate) for own in config.each_agent] == [(4, 2e-3), (16, 1e-3)]


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
        monkeypatch.setattr(checkpoint_writers, constant, value)
    training = checkpoint_writers.Training(1)
    save = checkpoint_writers.WRITERS[name][1](training, tmp_path / name)
    training.after_other_hooks()
    cost = checkpoint_stall.one_save(training, save, tmp_path / "folder")
    state = sum(tensor.nbytes for tensor in training.tensors.values())
    assert len(training.tensors) == 224
    assert state < cost.nbytes < state + 200_000
    assert 0 < cost.stall_s <= cost.durable_s + training.joined_s


def test_the_table_of_saves_shows_the_first_apart() -> None:
    slow = checkpoint_stall.Save(2.0, 0.5, 3.0, 10_000_000, 1_000_000)
    fast = checkpoint_stall.Save(0.5, 0.25, 1.0, 10_000_000, 2_000_000)
    row = checkpoint_stall.table({"ours": [slow, fast, fast]}).splitlines()[-1]
    assert row == "| ours, `optimizers=[...]` | 500.0 | 250 | 1000 | 10.0 | 2 | 2000 |"


def test_growth_is_measured_with_the_step_that_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_growth, "STEP_S", 0.01)
    point = checkpoint_growth.measure(1, 5, tmp_path)
    assert (point.megabytes, point.tensors) == (1, 5)
    assert point.stall_ms > 0
    assert point.durable_ms > 0


@pytest.mark.slow
def test_every_way_to_train_a_crowd_trains_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objectives, "STEPS", 2)
    evaluated = objectives.evaluated
    monkeypatch.setattr(objectives, "evaluated", lambda rows: [next(iter(evaluated(rows)))])
    bench = objectives.Bench.of(8, 7, "validation")
    kinds = {name.split(",")[0].split(" at ")[0]: name for name in bench.ways()}
    assert {"crowd", "specialists", "population", "snapshots", "ivon", "one agent", "average"} <= {*kinds}
    found = {name: bench.measured(name) for name in kinds.values()}
    bench.processes.shutdown()
    assert all(math.isfinite(sum(each["nll"])) and len(each["nll"]) == 50 for each in found.values())
    assert {each["agents"] for name, each in found.items() if name.startswith("one agent")} == {1.0}


@pytest.mark.slow
def test_real_rows_are_learned_on_a_base_that_is_made_of_their_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": f"How much is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(40)]
    data = DatasetDict({"train": Dataset.from_list(rows[:32]), "test": Dataset.from_list(rows[32:])})
    data.save_to_disk(tmp_path / "data")
    monkeypatch.setattr(real_rows, "VOCABULARY", 300)
    monkeypatch.setattr(real_rows, "WIDTH", 16)
    monkeypatch.setattr(
        real_rows, "SYSTEMS", {name: {**own, "max_train_steps": "2"} for name, own in real_rows.SYSTEMS.items()}
    )
    places = [str(tmp_path / "data"), "--folder", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["real_rows", *places, "--rows", "8", "--seeds", "1"])
    real_rows.main()
    table = capsys.readouterr().out
    assert [line.split("|")[1].strip() for line in table.splitlines()[2:]] == ["agents, mean of 4", *real_rows.SYSTEMS]
    assert all(0 < float(line.split("|")[2]) < 10 for line in table.splitlines()[2:])


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
def test_turns_with_a_mirror_and_without_it_are_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writers, "LAYERS", 1)
    turns = mirror_stall.measure(scale=1, rounds=1, steps=1, home=tmp_path)
    assert [len(costs) for costs in (*turns.seconds.values(), turns.sent)] == [1, 1, 1]
    assert "1 pairs" in mirror_stall.table(turns)


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


@pytest.mark.slow
def test_numbers_are_judged_by_the_wrong_answers_that_they_find() -> None:
    signals = [[-1.0, -0.1, -0.5, 0.1, 0.05], [-9.0, -0.9, -4.0, 0.8, 0.5]] * 20
    rows = [
        {
            "answer": "#### 3",
            "agents": ["#### 3", f"#### {number % 2}"],
            "correct": number % 2 == 0,
            "agents_correct": [number % 2 == 0, False],
            "confidence": 0.9 - 0.8 * (number % 2),
            "signals": each,
            "agents_signals": [each, each],
        }
        for number, each in enumerate(signals)
    ]
    right = [row["correct"] for row in rows]
    agents = [(signals, right), (signals, [False] * 40)]
    made = fit(Learned((0.5, 0.5)), (signals, right), agents, aggregator="probability", rows=40, data="here")
    lines = uncertainty.table(rows, made).splitlines()
    assert lines[0] == "40 rows, exact match 0.500"
    found = {line.split(" | ")[0].removeprefix("| "): line for line in lines[3:]}
    assert list(found) == list(uncertainty.sureness(made))
    for name in ("probability_right", "confidence", "entropy", "disagreement", "least probable token"):
        assert "| 1.000 (1.000 to 1.000) | 0.625 |" in found[name]
    assert "| 0.500 (0.500 to 0.500)" in found["agreement"]
    assert "| 0.100 |" in found["confidence"]
    priced = uncertainty.escalation(rows, made).splitlines()[2:]
    assert priced[0] == "| 1 | 1.00 | 0.500 | 100.0% |"
    assert priced[-1].startswith("| 3 | 3.00 |")


@pytest.mark.slow
def test_a_probe_reads_the_written_bytes() -> None:
    crowd = disturbed_crowd()
    questions: list[Any] = [row["question"] for row in embedded.rows("test")[:20]]
    complete = [answer for answer in crowd.generate(questions, details=True, max_new_tokens=64) if answer.complete]
    assert complete
    found, states = probe.read(crowd, [(str(answer.prompt), answer.answer) for answer in complete])
    assert found == pytest.approx(np.array([signals(answer.tokens) for answer in complete]), abs=1e-4)
    assert states.shape == (len(complete), 4 * crowd.head.weight.shape[1])
    [alone], [own] = probe.read(crowd, [(str(complete[-1].prompt), complete[-1].answer)])
    assert alone == pytest.approx(found[-1], abs=1e-4)
    assert own == pytest.approx(states[-1], abs=1e-4), "whatever it is read with"


def test_a_probe_learns_from_each_answer_once() -> None:
    row = {"prompt": "p", "answer": "a", "agents": ["a", "b"], "correct": True, "agents_correct": [True, False]}
    assert probe.labelled([row, {**row, "prompt": "q"}]) == (
        [("p", "a"), ("p", "b"), ("q", "a"), ("q", "b")],
        [True, False, True, False],
    )
    told = probe.table({"signals": np.array([0.9, 0.8, 0.2, 0.1])}, np.array([1.0, 1.0, 0.0, 0.0]))
    assert told.splitlines()[2] == "| signals | 1.000 (1.000 to 1.000) | 0.667 |"


@pytest.mark.slow
def test_the_programs_of_the_generation_benchmark_choose_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """`measure` compares them."""
    monkeypatch.setattr(step, "VOCABULARY", 500)
    costs = generation.measure("tiny", [[5, 6, 7], [8, 9, 10, 11]], tokens=4)
    told = generation.table(costs, tokens=4)
    assert [len(listed) for listed in costs.values()] == [1, 1, 1]
    assert "| ours |" in told
    assert "1.00 x" in told


@pytest.mark.slow
def test_the_programs_of_the_serving_benchmark_write_as_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them asserts it, and a prompt with a beginning in common that it is read once."""
    monkeypatch.setattr(step, "VOCABULARY", 500)
    programs = serving.Programs(step.random_base("tiny"))
    found = {clients: serving.rates(programs, clients, length=8, tokens=3, rounds=1) for clients in (1, 2)}
    shared = serving.prefixes(programs, length=8)
    for told in (f"crowd of {step.K}", "one agent", "continuous batching"):  # no rate: three tokens take no time
        assert all(told in each for each in found.values())
    assert "PEFT" in found[1]
    assert shared["one agent: shared"] < shared["one agent: alone"]
    assert "| crowd of 4: shared |" in serving.table(found, shared)


def test_the_regret_of_a_way_is_taken_from_the_pass_in_which_all_went_to_their_end() -> None:
    """None without it, or where not all full runs were measured; the others of these are taken to cost the same."""
    whole = {number: 1.0 + number / 10 for number in range(len(sweep.GRID))}
    grid, ours = sweep.Way("grid", 40.0, 0, whole), sweep.Way("sweep", 10.0, 2, {2: 1.2})
    theirs, pruned = sweep.Way("peft", 10.0, 0, {0: 1.0, 8: 1.5}), sweep.Way("peft pruned", 20.0, 3, {3: 1.3})
    rows = sweep.table({1: [ours, grid, theirs, pruned]}).splitlines()[2:]
    assert rows == [
        "| sweep | 10.0 | 1.00 (1.00 to 1.00) | 0.2000 (at most 0.2000) | rank 4 at 0.00164 |",
        "| grid | 40.0 | 4.00 (4.00 to 4.00) | 0.0000 (at most 0.0000) | rank 4 at 0.0005 |",
        "| peft | 80.0 | 8.00 (8.00 to 8.00) |  |  |",
        "| peft pruned | 20.0 | 2.00 (2.00 to 2.00) | 0.3000 (at most 0.3000) | rank 4 at 0.00297 |",
    ]
    assert "0.2000" not in sweep.table({1: [ours]})
