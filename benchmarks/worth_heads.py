"""Texts sorted into classes on a real base: heads beside labels that are written as text, at equal steps and rows.

    OMP_NUM_THREADS=1 python -m benchmarks.worth_heads --dataset DATA --base BASE --folder F

DATA has `train.jsonl` and `test.jsonl` with `question` and `answer`, a class; BASE is a folder of Transformers. The
rows of its most frequent classes are taken. Both ways learn the same rows in the same order for the same steps, at a
rate that was chosen for neither. One temperature or one calibration is fitted on half of the rows held out, and the
figures are of the other half. The NLL of heads is that of the class; of text that of the answer's tokens with its end,
in nats per row, which is more wherever something that is no class is probable.

A training resumes where it was cut off, and what is done is a line of `worth_heads.jsonl` below F.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.crowd import train
from benchmarks.record import surroundings
from ci_llm.core.durable import write_bytes
from ci_llm.evaluation.evaluate import evaluate
from ci_llm.evaluation.loading import Choice, Request

K, ROWS_PER_STEP = 4, 16
Row = dict[str, str]
Line = dict[str, Any]
Arm = tuple[dict[str, str], int]

#: By arm the keys of its run, beside those that all have; `steps` times as many as asked for.
ARMS: Final[Mapping[str, Arm]] = {
    "heads": ({"objective": "classification", "num_agents": str(K)}, 1),
    "text": ({"objective": "sft", "num_agents": str(K)}, 1),
    "heads, one agent of 4x the steps": ({"objective": "classification", "num_agents": "1"}, K),
    "text, one agent of 4x the steps": ({"objective": "sft", "num_agents": "1"}, K),
}


def drawn(dataset: Path, classes: int, rows: int, held_out: int, seed: int) -> dict[str, list[Row]]:
    """Rows to train on, to calibrate on and to test on; each half of those held out is the same for all seeds."""
    read = {
        split: [json.loads(line) for line in (dataset / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
        for split in ("train", "test")
    }
    wanted = {name for name, _ in Counter(row["answer"] for row in read["train"]).most_common(classes)}
    kept = {split: [row for row in found if row["answer"] in wanted] for split, found in read.items()}
    held = random.Random(0).sample(kept["test"], held_out)
    return {
        "train": random.Random(seed).sample(kept["train"], rows),
        "calibration": held[: held_out // 2],
        "test": held[held_out // 2 :],
    }


def files(rows: Mapping[str, Sequence[Row]], folder: Path, *, heads: bool) -> dict[str, Path]:
    """The rows in the columns that an objective reads, a file for each part."""
    found = {}
    for part, own in rows.items():
        named = [{"text": row["question"], "label": row["answer"]} if heads else row for row in own]
        found[part] = folder / f"{'labelled' if heads else 'asked'}_{part}.jsonl"
        found[part].parent.mkdir(parents=True, exist_ok=True)
        write_bytes(found[part], "".join(json.dumps(row) + "\n" for row in named).encode())
    return found


def measured(run: Path, data: Path, **how: Any) -> dict[str, Any]:
    """The figures of agents and crowd on a file of rows."""
    output = None if how.pop("heads") else run / f"{data.stem}.jsonl"
    request = Request(str(run), Choice(str(data), None, None, {}), batch_size=8, output=output, **how)
    record = evaluate(request).record
    tokens = record.get("tokens", 0) / record.get("teacher_forced", record)["n"] if output else 1
    sure = record["sureness"]
    return {
        "agents": record["exact_match"]["agents"],
        "accuracy": record["exact_match"]["crowd"],
        "over the mean": record["exact_match"]["crowd_minus_mean"],
        "nll": record["nll"]["crowd"] * (tokens or 1),
        "agents' nll": [nll * (tokens or 1) for nll in record["nll"]["agents"]],
        "calibration error": sure["calibration_error"],
        "surest 80 %": sure["exact_match_at_coverage"],
    }


def common_keys(call: argparse.Namespace, seed: int, steps: int, train_on: Path, held_out: Path) -> dict[str, str]:
    """The keys of every run."""
    return {
        "model_name": str(call.base.resolve()), "model_dtype": "auto", "mixed_precision": "auto", "seed": str(seed),
        "batch_size": str(ROWS_PER_STEP), "lora_rank": "16", "lora_alpha": "32", "learning_rate": call.rate,
        "max_train_steps": str(steps), "dataset_name": str(train_on), "max_train_samples": "null",
        "eval_dataset_name": str(held_out), "eval_samples": "8", "generation_eval_samples": "0",
        "num_workers": "0", "progress_bar": "false", "save_interval_seconds": "120", "save_total_limit": "1",
        **dict(word.split("=", 1) for word in call.keys),
    }  # fmt: skip


def trained(folder: Path, arm: str, keys: Mapping[str, str]) -> Path:
    """The folder of an arm's run, which is trained or resumed if it has not ended."""
    place = folder / arm.replace(" ", "_").replace(",", "")
    place.mkdir(parents=True, exist_ok=True)
    defaults = folder / "defaults.yaml"
    defaults.touch()
    train(keys, place, defaults)
    return place


def run(arm: str, call: argparse.Namespace, seed: int) -> Line:
    """Train and judge an arm with one seed: its line of the results."""
    (keys, factor), began, heads = ARMS[arm], time.monotonic(), arm.startswith("heads")
    folder = call.folder.resolve() / f"{call.rows}_{seed}"
    rows = drawn(call.dataset, call.classes, call.rows, call.held_out, seed)
    found = files(rows, folder / "rows", heads=heads)
    names = ",".join(sorted({row["answer"] for row in rows["train"]}))
    keys = common_keys(call, seed, call.steps * factor, found["train"], found["calibration"]) | keys
    place = trained(folder, arm, keys | ({"label_names": f"[{names}]"} if heads else {}))
    trained_s = time.monotonic() - began
    before = measured(place, found["test"], heads=True) if heads else {}
    measured(place, found["calibration"], heads=heads, calibrate=True)
    after = measured(place, found["test"], heads=heads)
    about = {"arm": arm, "seed": seed, "rows": call.rows, "steps": call.steps * factor, "keys": call.keys}
    about |= {"test": len(rows["test"])}
    seconds = {"training_s": round(trained_s, 1), "seconds": round(time.monotonic() - began, 1)}
    return about | {"before": before, "calibrated": after} | seconds | {"machine": surroundings()}


def table(lines: Sequence[Line]) -> Iterator[str]:
    """In markdown, a line for each arm and seed."""
    titles = ("accuracy: agents", "crowd", "NLL: agents", "crowd", "calibration error", "right of the surest 80 %")
    yield f"| | seed | {' | '.join(titles)} |"
    yield "|---" * (len(titles) + 2) + "|"
    for line in lines:
        for kind in ("before", "calibrated"):
            if own := line[kind]:
                agents, nll = (sum(own[key]) / len(own[key]) for key in ("agents", "agents' nll"))
                numbers = (agents, own["accuracy"], nll, own["nll"], own["calibration error"], own["surest 80 %"])
                shown = " | ".join(f"{number:.3f}" for number in numbers)
                yield f"| {line['arm']}, {kind} | {line['seed']} | {shown} |"


def options(about: str, arms: Sequence[str]) -> argparse.ArgumentParser:
    """The options of a call that trains these arms."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, required=True, help="a folder with train.jsonl and test.jsonl")
    parser.add_argument("--base", type=Path, required=True, help="a folder of Transformers")
    parser.add_argument("--folder", type=Path, required=True, help="of rows, runs and results")
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms, help="default: all, in their order")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="default: 1 2 3")
    parser.add_argument("--classes", type=int, default=8, help="the most frequent ones (default: 8)")
    parser.add_argument("--rows", type=int, default=512, help="training rows (default: 512)")
    parser.add_argument("--steps", type=int, default=64, help="of 16 rows (default: 64)")
    parser.add_argument("--held-out", type=int, default=400, help="rows, half to calibrate on (default: 400)")
    parser.add_argument("--rate", default="1e-3", help="learning rate of all arms (default: 1e-3)")
    parser.add_argument("--keys", nargs="*", default=[], metavar="key=value", help="of all runs, beside those")
    return parser


def results(
    file: Path, call: argparse.Namespace, arms: Mapping[str, Arm], run: Callable[[str, argparse.Namespace, int], Line]
) -> list[Line]:
    """The lines of all arms and seeds that were asked for; what `file` does not have is run."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []
    for arm, seed in [(arm, seed) for seed in call.seeds for arm in call.arms]:
        about = {"arm": arm, "seed": seed, "rows": call.rows, "steps": call.steps * arms[arm][1], "keys": call.keys}
        if not any(about == {key: line[key] for key in about} for line in lines):
            print(f"{arm}, seed {seed}", flush=True)
            lines.append(run(arm, call, seed))
            write_bytes(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return lines


def main() -> None:
    """Runs what is not done yet, and prints the table."""
    call = options(__doc__ or "", [*ARMS]).parse_args()
    torch.set_num_threads(1)
    print(*table(results(call.folder / "worth_heads.jsonl", call, ARMS, run)), sep="\n")


if __name__ == "__main__":
    main()
