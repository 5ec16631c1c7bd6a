"""Runs whose agents have data and settings of their own: alone and in company, killed, on one to three processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

from ci_llm import embedded
from tests.support.agent_facts import facts_of
from tests.support.campaign import sampled
from tests.support.crowds import bits_in_company
from tools.testbed.trials import Cell, Fate, Trials, account, differences

pytestmark = pytest.mark.slow

#: 12 steps of 4 rows: epochs of 2, 5, 3 and 5 steps, with short last steps of one micro-batch or with one row.
CELL: Final = Cell(accumulation=2)


def keys(*entries: str) -> dict[str, Any]:
    return {"agents": f"[{', '.join(entries)}]", "num_agents": len(entries)}


def write(folder: Path, first: int, count: int, evaluated: Sequence[int]) -> Path:
    """A data set with rows to evaluate on."""
    folder.mkdir()
    rows, test = embedded.rows("train"), embedded.rows("test")
    chosen = {"train": rows[first : first + count], "test": [test[number] for number in evaluated]}
    for split, written in chosen.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return folder


@pytest.fixture(scope="module")
def entries(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    one, two = write(folder / "one", 100, 7, range(3)), write(folder / "two", 200, 30, range(3, 8))
    return [
        f"{{name: few, seed: 1, dataset_name: {one}, lora_rank: 3, lora_alpha: 5, learning_rate: 1e-3}}",
        f"{{name: many, seed: 2, dataset_name: {two}, max_train_samples: 17, lora_dropout: 0.2, dropconnect_p: 0.1}}",
        "{name: weighted, seed: 3, max_train_samples: 12, row_weights: bootstrap, weight_decay: 0.1,"
        " use_rslora: true, max_grad_norm: 0.3, lora_target_modules: [q_proj, v_proj], agent_layers: upper_half,"
        " num_warmup_steps: 2}",
        f"{{name: fewer, seed: 4, dataset_name: {two}, max_train_samples: 15, lora_rank: 8}}",
    ]


@pytest.fixture(scope="module")
def mixed(trials: Trials, entries: list[str]) -> Path:
    """The folder of an undisturbed run of all of them."""
    return trials.complete(CELL, **keys(*entries))


def without_epochs(facts: dict[str, Any]) -> dict[str, Any]:
    """An agent alone has the epochs of the run."""
    return {name: fact for name, fact in facts.items() if "/epoch at" not in name}


@pytest.mark.parametrize("k", sampled(range(4), [1, 3]))
def test_an_agent_ends_as_it_would_alone(trials: Trials, mixed: Path, entries: list[str], k: int) -> None:
    alone = without_epochs(facts_of(trials.complete(CELL, **keys(entries[k])), "agent0"))
    assert not differences(alone, without_epochs(facts_of(mixed, f"agent{k}")))
    for part in ("lora_B", "exp_avg_sq", "train/loss at 12", "train/grad_norm at 12", "eval/nll at 8"):
        assert any(part in name for name in alone), part


@pytest.mark.parametrize("workers", sampled([0, 2], [2]))
def test_killed_and_resumed(trials: Trials, mixed: Path, entries: list[str], workers: int) -> None:
    cell = Cell(accumulation=2, workers=workers)
    folder = trials.ended(cell, Fate("SIGKILL", 5, 1, committed=3), save_steps=3, **keys(*entries))
    trials.complete(cell, folder, **keys(*entries))
    assert "exactness: bitwise" in (folder / "run/training.log").read_text()
    assert not differences(account(mixed), account(folder))


def test_two_processes_killed_and_resumed(trials: Trials, entries: list[str]) -> None:
    """Each writes its part of a checkpoint."""
    cell, own = Cell(ranks=2), keys(*entries[1:3]) | {"checkpoint_backend": "distributed"}
    undisturbed = trials.complete(cell, **own)
    folder = trials.ended(cell, Fate("SIGKILL", 5, 0, committed=3), save_steps=3, **own)
    assert not differences(account(undisturbed), account(trials.complete(cell, folder, **own)))


def rows_of_steps(folder: Path) -> dict[int, list[int]]:
    """The rows of every optimizer step, of all processes and agents, sorted."""
    found: dict[int, list[int]] = {}
    for file in sorted(folder.glob("process*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            found.setdefault(line["step"], []).extend(row for rows in line["rows"] for row in rows)
    return {step: sorted(rows) for step, rows in found.items()}


@bits_in_company
@pytest.mark.parametrize("k", sampled(range(2), [1]))
def test_an_agent_on_common_rows_ends_as_it_would_alone(trials: Trials, k: int) -> None:
    entries = (
        "{name: dropping, seed: 2, lora_dropout: 0.2, dropconnect_p: 0.1, lr_scheduler_type: linear}",
        "{name: few layers, seed: 3, lora_target_modules: [q_proj, v_proj], agent_layers: upper_half, lora_rank: 3,"
        " lora_alpha: 5, use_rslora: true, max_grad_norm: 0.3, row_weights: bootstrap, weight_decay: 0.1}",
    )
    company, alone = (trials.complete(CELL, **keys(*each)) for each in (entries, entries[k : k + 1]))
    assert not differences(facts_of(alone, "agent0"), facts_of(company, f"agent{k}"))


@pytest.mark.parametrize("k", sampled(range(2), [1]))
def test_three_processes_sum_an_agents_gradients_as_in_a_run_alone(trials: Trials, k: int) -> None:
    entries = ("{seed: 1, lora_rank: 3, lora_alpha: 5, learning_rate: 1e-3}", "{seed: 4, lora_rank: 8}")
    company, alone = (trials.complete(Cell(ranks=3), **keys(*each)) for each in (entries, entries[k : k + 1]))
    assert not differences(facts_of(alone, "agent0"), facts_of(company, f"agent{k}"))


def test_on_another_number_of_processes_the_steps_keep_their_rows(
    trials: Trials, mixed: Path, entries: list[str]
) -> None:
    folder = trials.ended(CELL, Fate("SIGTERM", 4), **keys(*entries))
    trials.complete(Cell(ranks=2), folder, **keys(*entries))
    assert "exactness: sample-exact" in (folder / "run/training.log").read_text()
    assert rows_of_steps(folder) == rows_of_steps(mixed)
    assert sum(map(len, rows_of_steps(mixed).values())) == sum(
        {"few": 6 * 7, "many": 2 * 17 + 8, "weighted": 4 * 12, "fewer": 3 * 15}.values()
    )


def test_a_resume_with_other_rows_or_settings_for_an_agent_is_refused(
    trials: Trials, mixed: Path, entries: list[str]
) -> None:
    for there, here, said in (
        (
            "max_train_samples: 12",
            "max_train_samples: 11",
            "max_train_samples was [17, 17, 12, 15], is [17, 17, 11, 15]",
        ),
        ("two, max_train_samples: 17, lora_d", "one, max_train_samples: 17, lora_d", "the training rows are not those"),
        ("lora_dropout: 0.2", "lora_dropout: 0.3", "lora_dropout was [0.0, 0.2, 0.0, 0.0], is [0.0, 0.3, 0.0, 0.0]"),
        (
            "upper_half",
            "[0]",
            "another crowd: agent_layers was ['all', 'all', 'upper_half', 'all'], is ['all', 'all', [0], 'all']",
        ),
    ):
        other = [entry.replace(there, here) for entry in entries]
        assert other != entries
        assert trials.train(CELL, mixed, max_train_steps=13, **keys(*other)) == [2]
        assert said in (mixed / "log").read_text()
