"""A step on a real base with real rows: ours in both ways, PEFT, TRL's SFTTrainer, the floor of `floor.py`.

    python -m benchmarks.step --model BASE --dataset DATA [--rows 4] [--precision bf16]

BASE is a folder of Transformers or a GGUF file, DATA holds rows of questions and answers, K = 4 agents of rank 16 on
all projections. Each trainer lives in a process of its own, on one thread, and all take the same rows in turns. A round
is four steps; SFTTrainer packs its rows into inputs about as long as a step. K runs of PEFT or
TRL are taken to cost K times one, so one is measured. A token counts once for every agent that reads it. The time is
that of the process on its processor, the memory its peak, base and libraries included. TRL is left out where it is not
installed.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.crowd_answers import batches
from benchmarks.floor import Products, necessary_flops
from benchmarks.harness import median_and_range, turn
from benchmarks.step import LOSSES_AGREE_TO, K, Ours, SeparateRuns
from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.batches import Batch
from ci_llm.lora.settings import LoraSettings

STEPS_PER_ROUND: Final = 4
ONE_PASS, PASS_EACH, PEFT, TRL, FLOOR = (
    "ours, one pass for all",
    "ours, a pass per agent",
    "K runs of PEFT",
    "K runs of SFTTrainer, packing",
    "the floor",
)
ALIGNED: Final = 64


@dataclass(frozen=True)
class Case:
    """The size of the measurement.

    Attributes:
        model: a folder of Transformers.
        rows: in a step.
        rounds: of `STEPS_PER_ROUND` steps; the first warms up.
    """

    model: str
    dataset: str
    rows: int
    rounds: int
    precision: str

    def base(self) -> PreTrainedModel:
        """A fresh copy of the base."""
        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
        model.config.use_cache = False
        return model

    def rounds_of_rows(self) -> list[list[Batch]]:
        """The rows of every round, step by step."""
        count = self.rounds * STEPS_PER_ROUND
        config, tokenizer = Config(eval_dataset_name=self.dataset), AutoTokenizer.from_pretrained(self.model)
        every = batches(config, tokenizer, self.rows)[:count]
        return [every[at : at + STEPS_PER_ROUND] for at in range(0, count, STEPS_PER_ROUND)]


def ours(case: Case, *, per_agent: bool) -> Callable[[Sequence[Batch]], tuple[float, float]]:
    """Seconds and mean loss of a round."""
    trainer = Ours(case.base())
    trainer.crowd.storage.pass_per_agent = per_agent
    return lambda steps: _timed(lambda: [trainer.step(batch) for batch in steps])


def peft_run(case: Case) -> Callable[[Sequence[Batch]], tuple[float, float]]:
    """One of K, with the adapter that an agent of ours starts from."""
    base = case.base()
    crowd = Crowd(base, LoraSettings(num_agents=1, rank=16, alpha=32), "real")
    trainer = SeparateRuns(case.base(), crowd)
    del crowd, base
    return lambda steps: _timed(lambda: [trainer.step(batch) for batch in steps])


def sft_run(case: Case) -> Callable[[Sequence[Batch]], tuple[float, float]]:
    """One of K; the losses of packed rows are others."""
    from benchmarks.sft import dataset_of, sft_cpu_s

    base = case.base()

    def take(steps: Sequence[Batch]) -> tuple[float, float]:
        tokens = sum(batch.num_tokens for batch in steps) / len(steps)
        length = ALIGNED * round(tokens / ALIGNED + 0.5)
        settings = {"packing": True, "max_length": length, "per_device_train_batch_size": 1}
        settings["bf16"] = case.precision == "bf16"
        with tempfile.TemporaryDirectory() as folder:
            return sft_cpu_s(base, dataset_of([*steps]), settings, folder), float("nan")

    return take


def floor(case: Case) -> Callable[[Sequence[Batch]], tuple[float, float]]:
    """The seconds that the necessary products take at the speed that they have alone, with the rows of one agent."""
    base = case.base()
    crowd = Crowd(base, LoraSettings(num_agents=1, rank=16, alpha=32), "real")
    products = Products(crowd, base.dtype)

    def take(steps: Sequence[Batch]) -> tuple[float, float]:
        for batch in steps:
            products.step(batch)
        speeds = products.flops_per_s[-len(steps) :]
        print(f"products at {statistics.median(speeds) / 1e9:.0f} GFLOP/s", flush=True)
        return sum(necessary_flops(crowd, b) / at for b, at in zip(steps, speeds, strict=True)), float("nan")

    return take


def _timed(steps: Callable[[], list[float]]) -> tuple[float, float]:
    began = time.process_time()
    losses = steps()
    return time.process_time() - began, statistics.mean(losses)


TRAINERS: Final[dict[str, Callable[[Case], Callable[[Sequence[Batch]], tuple[float, float]]]]] = {
    ONE_PASS: lambda case: ours(case, per_agent=False),
    PASS_EACH: lambda case: ours(case, per_agent=True),
    PEFT: peft_run,
    TRL: sft_run,
    FLOOR: floor,
}
#: How many runs stand behind one that is measured.
RUNS: Final = {ONE_PASS: 1, PASS_EACH: 1, PEFT: K, TRL: K, FLOOR: K}


def work(name: str, case: Case, told: Connection) -> None:
    """A process: for every number that comes, train that round, and answer with seconds, loss and peak in bytes."""
    torch.set_num_threads(1)
    rounds, take = case.rounds_of_rows(), TRAINERS[name](case)
    told.send(None)  # ready
    while (number := told.recv()) is not None:
        seconds, loss = take(rounds[number])
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        told.send((seconds, loss, int(peak.split()[1]) * 1024))


def measure(case: Case, names: Sequence[str]) -> dict[str, list[tuple[float, float, int]]]:
    """CPU seconds of all K, mean loss and peak in bytes, of every trainer and round but the first.

    Raises:
        AssertionError: the losses differ of those that do the same.
    """
    context = multiprocessing.get_context("spawn")
    pipes, found = {}, dict[str, list[tuple[float, float, int]]]()
    for name in names:
        here, there = context.Pipe()
        context.Process(target=work, args=(name, case, there), daemon=True).start()
        there.close()  # so that the end of the process is seen
        pipes[name], found[name] = here, []
    for pipe in pipes.values():
        pipe.recv()  # all are ready
    for number in range(case.rounds):
        for name in turn(names, number):
            pipes[name].send(number)
            seconds, loss, peak = pipes[name].recv()
            found[name].append((seconds * RUNS[name], loss, peak))
    for pipe in pipes.values():
        pipe.send(None)
    if {ONE_PASS, PASS_EACH} <= {*names}:  # the first of K PEFT runs is another agent in each process
        for (_, mine, _), (_, theirs, _) in zip(found[ONE_PASS], found[PASS_EACH], strict=True):
            assert abs(mine - theirs) / mine < LOSSES_AGREE_TO[case.precision], "the losses of both ways differ"
    return {name: each[1:] for name, each in found.items()}


def table(case: Case, found: dict[str, list[tuple[float, float, int]]]) -> str:
    """In markdown; ratios are paired by round."""
    tokens = [K * sum(batch.num_tokens for batch in steps) for steps in case.rounds_of_rows()[1:]]
    best = [seconds for seconds, _, _ in found[PASS_EACH]]
    out = ["| trainer | tokens per CPU second | times a pass per agent | peak, MiB |", "|---|---|---|---|"]
    for name, each in found.items():
        speed = statistics.median(count / seconds for count, (seconds, _, _) in zip(tokens, each, strict=True))
        ratios = [seconds / own for (seconds, _, _), own in zip(each, best, strict=True)]
        times = "1" if name == PASS_EACH else median_and_range(ratios)
        out.append(f"| {name} | {speed:.0f} | {times} | {max(peak for _, _, peak in each) / 2**20:,.0f} |")
    return "\n".join(out)


def report(case: Case) -> str:
    """The page of `benchmarks.step --model`."""
    names = [name for name in TRAINERS if name != TRL or importlib.util.find_spec("trl")]
    steps = [batch for each in case.rounds_of_rows() for batch in each]
    length = statistics.mean(batch.num_tokens / batch.num_rows for batch in steps)
    told = f"{Path(case.model).name}, {case.precision}, {case.rows} rows a step of {length:.0f} tokens in the mean,"
    told += f" medians of {case.rounds - 1} rounds of {STEPS_PER_ROUND} steps\n\n"
    left_out = "" if TRL in names else "\n\nTRL is not installed: pip install trl"
    return told + table(case, measure(case, names)) + left_out
