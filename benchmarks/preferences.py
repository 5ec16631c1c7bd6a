"""What pairs, ratings and rewards cost: four agents of ours beside TRL's trainers, one adapter each, on the same rows.

    OMP_NUM_THREADS=1 python -m benchmarks.preferences                                     on the embedded base
    OMP_NUM_THREADS=1 python -m benchmarks.preferences --base BASE --dataset DATA --rows 4 --steps 3

A step is loss, backward pass and optimizer, in fp32, on one thread: of one adapter in TRL's DPOTrainer, KTOTrainer or
RewardTrainer (`compute_loss` on the tokens that it has made), and of four agents of ours on these tokens, the passes
of the reference included, in passes and kernels as a run on a CPU has them by default. For pairs it is measured twice,
with `shared_prompts` and on whole rows. They take turns step by step, and the ratio is four times the CPU time of TRL's
by that of ours. Pairs are questions with their answer and that of the next row. The last line counts the bytes of all
tensors that are held between two steps: what the reference takes is the difference to an objective that has none.

TRL is no dependency of this project: `pip install trl` first.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.timing import cpu_ratios, median_cost, take_turns
from ci_llm import embedded
from ci_llm.base.load import load_base
from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.preferences import Preferences, StepFacts
from ci_llm.data.batches import pack
from ci_llm.data.encoder import Example
from ci_llm.data.rows import Chat
from ci_llm.data.sources import load_rows
from ci_llm.data.units import Unit, unit_of
from ci_llm.lora.kernels import PARTS
from ci_llm.lora.layer import LoraSettings
from ci_llm.objectives import objective_of

K, RANK, RATE = 4, 8, 1e-6
OBJECTIVES: Final = ("dpo", "kto", "reward")
Step = Callable[[int], object]


def asked(dataset: Path | None, count: int) -> list[tuple[str, str]]:
    """Questions and answers."""
    if dataset is None:
        return [(row["question"], row["answer"]) for row in embedded.rows("train")[:count]]
    rows = list(load_rows(Config(dataset_name=str(dataset), max_train_samples=count), "train"))
    chats = [row.messages for row in rows if isinstance(row, Chat)]
    return [(messages[-2].content, messages[-1].content) for messages in chats]


def rows_of(objective: str, found: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows in the columns of an objective."""
    others = [answer for _, answer in (*found[1:], found[0])]
    if objective == "kto":
        return [
            {"prompt": f"{question}\n", "completion": (answer, other)[n % 2], "label": n % 2 == 0}
            for n, ((question, answer), other) in enumerate(zip(found, others, strict=True))
        ]
    return [
        {"prompt": f"{question}\n", "chosen": answer, "rejected": other}
        for (question, answer), other in zip(found, others, strict=True)
    ]


def trainer_of(objective: str, base: Path, rows: list[dict[str, Any]], per_step: int, folder: str) -> Any:
    """TRL's trainer of an objective, with one adapter."""
    import trl  # type: ignore[import-not-found,unused-ignore]

    name = {"dpo": "DPO", "kto": "KTO", "reward": "Reward"}[objective]
    heads = {"num_labels": 1} if objective == "reward" else {}
    kind = AutoModelForSequenceClassification if heads else AutoModelForCausalLM
    arguments = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True, "max_length": 512}
    lora = LoraConfig(
        r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="SEQ_CLS" if heads else "CAUSAL_LM"
    )
    return getattr(trl, f"{name}Trainer")(
        kind.from_pretrained(base, dtype=torch.float32, **heads),
        args=getattr(trl, f"{name}Config")(
            output_dir=folder, gradient_checkpointing=False, per_device_train_batch_size=per_step, **arguments
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(base),
        peft_config=lora,
    )


def theirs(trainer: Any, batches: Sequence[Sequence[dict[str, Any]]]) -> Step:
    """A step of TRL's trainer on one of the batches."""
    inputs = [trainer._prepare_inputs(trainer.data_collator([*batch])) for batch in batches]
    optimizer = torch.optim.AdamW([p for p in trainer.model.parameters() if p.requires_grad], lr=RATE)
    trainer.model.train()

    def step(number: int) -> None:
        optimizer.zero_grad()
        trainer.compute_loss(trainer.model, dict(inputs[number])).backward()
        optimizer.step()

    return step


def _branch(prompt: Sequence[int], answer: Sequence[int]) -> Example:
    return Example(np.array([*prompt, *answer], np.int32), np.array([False] * len(prompt) + [True] * len(answer)))


def units_of(objective: str, batch: Sequence[dict[str, Any]]) -> tuple[list[Unit], list[Unit]]:
    """The rows of a trainer as our units with its tokens, and the mismatched ones of KTO."""
    if objective == "kto":
        own = [unit_of([_branch(row["prompt_ids"], row["completion_ids"])], int(row["label"])) for row in batch]
        return own, [unit_of([_branch(row["prompt_ids"], row["KL_completion_ids"])], 0) for row in batch]
    sides = ("chosen_ids", "rejected_ids")
    prompts = [row.get("prompt_ids", []) for row in batch]
    if objective == "reward":  # whose tokens are those of the whole text
        return [unit_of([_branch(row[side][:1], row[side][1:]) for side in sides]) for row in batch], []
    pairs = zip(batch, prompts, strict=True)
    return [unit_of([_branch(prompt, row[side]) for side in sides]) for row, prompt in pairs], []


def kl_of(crowd: Crowd, mismatched: Sequence[Unit]) -> Tensor | None:
    """[K, 1] by how many nats agents are away from the base on mismatched rows, at least 0; None without rows."""
    if not mismatched:
        return None
    other = pack(mismatched, range(len(mismatched)))
    with torch.no_grad():
        gained = crowd(other).log_probs.double().sum(1) - crowd.reference(other).double().sum(1)
    return (gained / len(mismatched)).clamp(min=0)[:, None]


def ours(objective: str, base: Path, batches: Sequence[Sequence[dict[str, Any]]], *, shared: bool = False) -> Step:
    """A step of K agents on one of the batches."""
    opened = load_base(str(base), "fp32")
    outputs = int(objective == "reward")
    settings = LoraSettings(num_agents=K, rank=RANK, alpha=2.0 * RANK, outputs=outputs)
    crowd = Crowd(opened.model, settings, opened.name, opened.pad_id).train()
    crowd.choose_route()
    crowd.compute_fast(PARTS)
    crowd.agents.pass_per_agent, crowd.shares_prompts = True, shared
    config = [Config(objective=objective)] * K
    optimizer = torch.optim.AdamW([{"params": [row]} for row in crowd.agents.rows], lr=RATE)
    units = [units_of(objective, batch) for batch in batches]

    def step(number: int) -> None:
        own, mismatched = units[number]
        crowd.agents.begin_step(0)
        batch = pack(own, range(len(own)))
        facts = StepFacts((1.0,) * K, kl_of(crowd, mismatched))
        found = Preferences(objective_of(objective, config), crowd, facts=facts)
        for part in crowd.parts(batch):
            with part.reading():
                found(crowd(part.rows), part.rows, 0, part.agent).total.backward()
        crowd.agents.gradients.div_(len(own))
        optimizer.step()

    return step


def held_bytes() -> int:
    """Of all tensors of this process, each storage once."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


def memory_of_reference(base: Path, batches: Sequence[Sequence[dict[str, Any]]]) -> int:
    """Bytes held after a step of DPO beyond those after a step of SimPO, by the same crowd on the same pairs."""
    held = []
    for objective in ("simpo", "dpo"):
        before = held_bytes()
        step = ours(objective, base, batches[:1])
        step(0)
        held.append(held_bytes() - before)
        del step
    return held[1] - held[0]


def main() -> None:
    """Prints a line for each objective, and one about memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=embedded.BASE_FOLDER, help="a folder (default: the embedded base)")
    parser.add_argument("--dataset", type=Path, help="questions and answers (default: the embedded stories)")
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=OBJECTIVES, help="default: all")
    parser.add_argument("--rows", type=int, default=8, help="pairs or rated rows in a step (default: 8)")
    parser.add_argument("--steps", type=int, default=9, help="of each way (default: 9)")
    call = parser.parse_args()
    torch.set_num_threads(1)
    found = asked(call.dataset, call.rows * (call.steps + 1))
    for objective in call.objectives:
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainer_of(objective, call.base, rows_of(objective, found), call.rows, folder)
            rows = [*trainer.train_dataset]
            batches = [rows[at : at + call.rows] for at in range(0, len(rows) - call.rows + 1, call.rows)]
            ways = {"TRL": theirs(trainer, batches), "whole rows": ours(objective, call.base, batches)}
            if objective != "kto":
                ways["shared prompts"] = ours(objective, call.base, batches, shared=True)
            costs = take_turns(ways, range(len(batches)))
        costs = {way: each[1:] for way, each in costs.items()}  # the first step of each warms up
        for way in [*ways][1:]:
            ratios = [K * ratio for ratio in cpu_ratios(costs["TRL"], costs[way])]
            of_trl, of_ours = (median_cost(costs[each]).cpu_s for each in ("TRL", way))
            print(
                f"{objective}, {way}: 4 x TRL / ours {statistics.median(ratios):.2f} ({ratios[0]:.2f} to"
                f" {ratios[-1]:.2f} over {len(ratios)} steps of {call.rows}); CPU seconds a step: TRL {of_trl:.3f},"
                f" four of ours {of_ours:.3f}",
                flush=True,
            )
        if objective == "dpo":
            print(f"memory of the reference: {memory_of_reference(call.base, batches)} bytes", flush=True)


if __name__ == "__main__":
    main()
