"""Eight answers to a question, and who finds the right one: rewards beside the likelihood of what writes answers.

    OMP_NUM_THREADS=1 python -m benchmarks.worth_rewards --dataset DATA --base BASE --folder F

The rows, seeds and runs of `benchmarks.worth_heads`, in the same folder: its runs that learned labels as text are the
likelihoods, and are trained if they are missing. Rewards learn pairs, the right class before a wrong one that is drawn
by the seed, in as many steps of 16 pairs as the text had of 16 rows, so that their step costs more. The candidates for
a test row are all classes; its figure is the share of rows whose right class has the highest number.

A training resumes where it was cut off, and what is done is a line of `worth_rewards.jsonl` below F.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.record import surroundings
from benchmarks.worth_heads import ARMS as WRITERS
from benchmarks.worth_heads import Arm, Line, Row, common_keys, drawn, files, options, results, trained
from ci_llm import Crowd
from ci_llm.core.durable import write_bytes

#: By arm the keys of its run, beside those that all have; `steps` times as many as asked for.
ARMS: Final[Mapping[str, Arm]] = {
    **{arm: WRITERS[arm] for arm in WRITERS if arm.startswith("text")},
    "rewards": ({"objective": "reward", "num_agents": "4"}, 1),
    "rewards, one agent of 4x the steps": ({"objective": "reward", "num_agents": "1"}, 4),
}


def pairs(rows: Sequence[Row], classes: Sequence[str], seed: int) -> list[Row]:
    """Each row's answer before another class."""
    chance = random.Random(seed)
    return [
        {
            "prompt": row["question"],
            "chosen": row["answer"],
            "rejected": chance.choice([name for name in classes if name != row["answer"]]),
        }
        for row in rows
    ]


def found_right(numbers: Tensor, right: Tensor) -> list[float]:
    """For each of some judges the share of rows whose right candidate has the highest number.

    Args:
        numbers: [judges, rows, candidates]
        right: [rows] places of the right ones.
    """
    return (numbers.argmax(-1) == right).double().mean(-1).tolist()


def judged(place: Path, rows: Sequence[Row], classes: Sequence[str], *, rewards: bool) -> dict[str, Any]:
    """What the agents of a run find, and what they find together."""
    prompts = [row["question"] for row in rows for _ in classes]
    answers = [name for _ in rows for name in classes]
    crowd = Crowd.from_pretrained(str(place))
    if rewards:
        scores = [[*score.scores, score.mean] for score in crowd.score(prompts, answers)]
        numbers = torch.tensor(scores, dtype=torch.float64).T
    else:
        numbers = crowd.log_probs(prompts, answers)
    right = torch.tensor([classes.index(row["answer"]) for row in rows])
    *agents, together = found_right(numbers.unflatten(1, (len(rows), len(classes))), right)
    return {"agents": agents, "together": together}


def run(arm: str, call: argparse.Namespace, seed: int) -> Line:
    """Train and judge an arm with one seed: its line of the results."""
    (keys, factor), began, rewards = ARMS[arm], time.monotonic(), arm.startswith("rewards")
    folder = call.folder.resolve() / f"{call.rows}_{seed}"
    rows = drawn(call.dataset, call.classes, call.rows, call.held_out, seed)
    classes = sorted({row["answer"] for part in rows.values() for row in part})
    found = files(rows, folder / "rows", heads=False)
    if rewards:
        for part in ("train", "calibration"):
            found[part] = folder / "rows" / f"pairs_{part}.jsonl"
            lines = "".join(json.dumps(pair) + "\n" for pair in pairs(rows[part], classes, seed))
            write_bytes(found[part], lines.encode())
    place = trained(
        folder, arm, common_keys(call, seed, call.steps * factor, found["train"], found["calibration"]) | keys
    )
    trained_s = time.monotonic() - began
    about = {"arm": arm, "seed": seed, "rows": call.rows, "steps": call.steps * factor, "keys": call.keys}
    about |= {"test": len(rows["test"]), "classes": classes}
    figures = judged(place, rows["test"], classes, rewards=rewards)
    seconds = {"training_s": round(trained_s, 1), "seconds": round(time.monotonic() - began, 1)}
    return about | figures | seconds | {"machine": surroundings()}


def table(lines: Sequence[Line]) -> Iterator[str]:
    """In markdown, a line for each arm and seed."""
    yield "| | seed | agents, mean | together |"
    yield "|---|---|---|---|"
    for line in lines:
        agents = sum(line["agents"]) / len(line["agents"])
        yield f"| {line['arm']} | {line['seed']} | {agents:.3f} | {line['together']:.3f} |"


def main() -> None:
    """Runs what is not done yet, and prints the table."""
    call = options(__doc__ or "", [*ARMS]).parse_args()
    torch.set_num_threads(1)
    print(*table(results(call.folder / "worth_rewards.jsonl", call, ARMS, run)), sep="\n")


if __name__ == "__main__":
    main()
