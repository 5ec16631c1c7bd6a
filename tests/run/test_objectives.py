"""Runs on pairs, rated rows and prompts: killed and resumed, alone and in company, on other processes and batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from ci_llm import Crowd, embedded
from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.cli.main import main
from tests.run.test_own_rows import keys
from tests.support.agent_facts import facts_of
from tests.support.asked import metrics
from tests.support.campaign import sampled, sampled_cases
from tools.testbed.trials import Cell, Fate, Trials, account, differences

pytestmark = pytest.mark.slow

#: Epochs of 5 steps, the last of which has one row.
ROWS, EVALUATED = 17, 6
CELL: Final = Cell(accumulation=2)
KILLED: Final = ("dpo", "kto", "reward", "classification", "regression", "grpo")
#: Completions of agents that have learned nothing yet, whose rewards differ.
DRAWN: Final[dict[str, Any]] = {
    "rewards": "length,regex:[0-4]",
    "num_generations": 3,
    "max_completion_length": 6,
    "temperature": 3.0,
    "max_new_tokens_eval": 4,
}
#: Agents with a setting of the objective of their own; all take rows that are common, in passes of their own.
ENTRIES: Final = ("{name: near, seed: 1, beta: 0.5}", "{name: far, seed: 2, beta: 0.1, desirable_weight: 1.5}")


def write(folder: Path, kind: str) -> Path:
    """Pairs, rated or labelled rows about the embedded stories, with rows to evaluate on."""
    for split, first, count in (("train", 300, ROWS), ("test", 400, EVALUATED)):
        rows = []
        for number, story in enumerate(embedded.rows("train")[first : first + count]):
            wrong = story["answer"].split("\n")[-1] + "1"
            rows.append({"prompt": story["question"] + "\n", "chosen": story["answer"], "rejected": wrong})
            if kind == "rated":
                pair, good = rows.pop(), number % 2 == 0
                rows.append(
                    {"prompt": pair["prompt"], "completion": pair["chosen" if good else "rejected"], "label": good}
                )
            if kind == "labelled":
                rows[-1] = {"text": story["question"], "label": ("even", "odd")[number % 2]}
            if kind == "numbers":
                rows[-1] = {"text": story["question"], "label": len(story["question"]) / 40}
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, dict[str, Any]]:
    """Keys of a run, by its objective."""
    kinds = ("pairs", "rated", "labelled", "numbers")
    pairs, rated, labelled, numbers = (write(tmp_path_factory.mktemp(kind), kind) for kind in kinds)
    names = {"dpo": pairs, "orpo": pairs, "kto": rated, "reward": pairs, "classification": labelled}
    names |= {"regression": numbers, "grpo": pairs}
    common = {"max_train_samples": "null", "generation_eval_samples": 0}
    return {
        name: {"objective": name, "dataset_name": folder, **common, **(DRAWN if name == "grpo" else {})}
        for name, folder in names.items()
    }


@pytest.fixture(scope="module")
def undisturbed(trials: Trials, data: Mapping[str, dict[str, Any]]) -> dict[str, Path]:
    """The folders of runs of two agents, each of which is made when it is asked for."""

    class Runs(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            self[name] = trials.complete(CELL, **{**keys(*ENTRIES), **data[name]})
            return self[name]

    return Runs()


@pytest.mark.parametrize("step", sampled([5, 9], [9]))
def test_killed_while_completions_are_drawn_and_resumed_in_any_epoch(
    trials: Trials, data: Mapping[str, dict[str, Any]], undisturbed: dict[str, Path], step: int
) -> None:
    own = {**keys(*ENTRIES), **data["grpo"]}
    folder = trials.ended(CELL, Fate("SIGKILL", step, 0, committed=step - 2), save_steps=step - 2, **own)
    trials.complete(CELL, folder, **own)
    assert "exactness: bitwise" in (folder / "run/training.log").read_text()
    found = account(folder)
    assert not differences(account(undisturbed["grpo"]), found)
    moved = [line["train/agent0/grad_norm"] for line in metrics(folder) if "train/agent0/grad_norm" in line]
    assert all(norm > 1e-4 for norm in moved)


@pytest.mark.parametrize("name", sampled(tuple(name for name in KILLED if name != "grpo"), ("dpo", "classification")))
def test_killed_and_resumed(
    trials: Trials, data: Mapping[str, dict[str, Any]], undisturbed: dict[str, Path], name: str
) -> None:
    own = {**keys(*ENTRIES), **data[name]}
    folder = trials.ended(CELL, Fate("SIGKILL", 5, 0, committed=3), save_steps=3, **own)
    # The columns say which objective it is, and a run keeps what it began with.
    trials.complete(CELL, folder, **own | {"objective": "auto"})
    assert "exactness: bitwise" in (folder / "run/training.log").read_text()
    surroundings: Any = read_manifest(folder / "run/final_checkpoint").info["surroundings"]
    assert surroundings["shared_prompts"] == (name in ("dpo", "reward"))
    assert not differences(account(undisturbed[name]), account(folder))


@pytest.mark.parametrize("name", sampled(KILLED, ("reward", "grpo")))
def test_an_agent_ends_as_it_would_alone(
    trials: Trials, data: Mapping[str, dict[str, Any]], undisturbed: dict[str, Path], name: str
) -> None:
    alone = facts_of(trials.complete(CELL, **keys(ENTRIES[1]), **data[name]), "agent0")
    assert not differences(alone, facts_of(undisturbed[name], "agent1"))
    parts = ("lora_B", "train/loss at 12", "train/rewards/margins at 12", "eval/nll at 8", "eval/rewards")
    if name == "classification":
        parts = ("lora_B", "score.weight", "train/loss at 12", "train/accuracy at 12", "eval/nll at 8", "eval/f1")
    if name == "grpo":
        parts = ("lora_B", "train/loss at 12", "train/rewards/length/mean at 12", "eval/reward")
    if name == "regression":  # it has no metrics in training beside its loss
        parts = ("lora_B", "score.weight", "train/loss at 12", "eval/nll at 8", "eval/mse")
    for part in parts:
        assert any(part in fact for fact in alone), part


SPLIT: Final[list[tuple[str, Cell, dict[str, Any]]]] = [
    ("kto", Cell(accumulation=1, ranks=2), {}),
    ("kto", Cell(accumulation=4), {"batch_size": 1}),
    ("orpo", Cell(accumulation=4), {"batch_size": 1}),
    ("orpo", Cell(accumulation=1, ranks=2), {"pass_per_agent": "false"}),
    ("reward", Cell(accumulation=1, ranks=2), {}),
    ("reward", Cell(accumulation=4), {"batch_size": 1}),
    ("classification", Cell(accumulation=1, ranks=2), {"pass_per_agent": "false"}),
    ("grpo", Cell(accumulation=1, ranks=2), {"pass_per_agent": "false"}),
    ("grpo", Cell(accumulation=4), {"batch_size": 1}),
    ("grpo", Cell(accumulation=1, ranks=2), {"scale_rewards": "batch"}),
]


@pytest.mark.parametrize(("name", "cell", "more"), sampled_cases(SPLIT, (SPLIT[0], SPLIT[-1])), ids=str)
def test_a_step_does_not_depend_on_processes_and_micro_batches(
    trials: Trials, data: Mapping[str, dict[str, Any]], name: str, cell: Cell, more: dict[str, Any]
) -> None:
    """The first step, at which agents equal the base, and the second, where kl and rewards are not 0 any more."""
    own = data[name] | {"model_dtype": "fp64", "max_train_steps": 2, "logging_steps": 1, "lora_rank": 8}
    of_both = {key: value for key, value in more.items() if key == "scale_rewards"}
    one, other = trials.complete(CELL, **own | of_both), trials.complete(cell, **own | more)
    wanted, found = (trained(folder) for folder in (one, other))
    assert {*found} == {*wanted}
    measured = {"classification": "/accuracy", "grpo": "/reward_std"}.get(name, "/rewards/chosen")
    assert any(measured in metric for _, metric in wanted)
    for key, value in wanted.items():
        # Adam turns a rounded sign of a gradient near 0 into a whole step: only then the second step can tell.
        assert found[key] == pytest.approx(value, rel=1e-12 if key[0] == 1 else 1e-6, abs=1e-12), key
    if name == "kto":
        assert wanted[2, "train/agent0/kl"] > 0


def trained(folder: Path) -> dict[tuple[int, str], float]:
    """Losses, norms and what the objective measures, by step and metric."""
    return {
        (line["step"], metric): value
        for line in metrics(folder)
        for metric, value in line.items()
        if metric.startswith("train/agent")
    }


def test_a_resume_recognises_the_start_that_agents_are_compared_with(
    trials: Trials,
    data: Mapping[str, dict[str, Any]],
    undisturbed: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = tmp_path / "start"
    for agent in ("agent0", "agent1"):
        shutil.copytree(undisturbed["dpo"] / "run/final_checkpoint" / agent, start / agent)

    def turn_round() -> None:
        for old, new in (("agent0", "other"), ("agent1", "agent0"), ("other", "agent1")):
            (start / old).rename(start / new)

    own = {**keys(*ENTRIES), **data["dpo"], "init_from": start, "reference": "start"}
    folder = trials.ended(CELL, Fate("SIGKILL", 5, 0, committed=3), save_steps=3, **own)
    turn_round()
    assert trials.train(CELL, folder, **own) != [0]
    assert "the adapters of init_from are not those that agents were compared with" in (folder / "log").read_text()
    turn_round()
    trials.complete(CELL, folder, **own)
    recorded = json.loads((folder / "run/evaluation.json").read_text())["preferences"]
    assert evaluated(capsys, folder / "run")["preferences"] == recorded
    turn_round()
    assert "preferences" not in evaluated(capsys, folder / "run")
    assert "answers are not ranked" in caplog.text
    assert "these are not the adapters that the run began with" in caplog.text


def evaluated(capsys: pytest.CaptureFixture[str], run: Path, *words: str) -> dict[str, Any]:
    """What `ci-llm evaluate RUN --json` prints."""
    capsys.readouterr()
    assert main(["evaluate", str(run), *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_temperature_of_classes_is_fitted_once_and_kept(
    undisturbed: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(undisturbed["classification"] / "run", tmp_path / "run"))
    before = evaluated(capsys, run)
    made = evaluated(capsys, run, "--calibrate")
    after = evaluated(capsys, run, "--abstain-below", "0.5")
    temperature = made["classes"]["temperature"]
    assert json.loads((run / "calibration.json").read_text())["temperature"] == temperature
    assert made["nll"]["crowd"] == pytest.approx(after["nll"]["crowd"])
    assert made["nll"]["crowd"] < before["nll"]["crowd"]
    assert made["nll"]["agents"] == before["nll"]["agents"] == after["nll"]["agents"]
    assert "temperature" not in before["classes"]
    assert made["exact_match"] == before["exact_match"]
    assert (after["sureness"]["by"], after["sureness"]["rows"]) == ("probability", 4)
    texts = [story["question"] for story in embedded.rows("train")[400 : 400 + EVALUATED]]
    sure = [max((own.probabilities or {}).values()) for own in Crowd.from_pretrained(run).score(texts)]
    assert 0 < after["sureness"]["abstention"]["answered"] * 4 <= sum(p >= 0.5 for p in sure)
    assert evaluated(capsys, run, "--calibrate")["classes"]["temperature"] == pytest.approx(temperature)
    assert main(["evaluate", str(undisturbed["reward"] / "run"), "--calibrate"]) == 2
    assert "heads that give no probabilities" in capsys.readouterr().err
