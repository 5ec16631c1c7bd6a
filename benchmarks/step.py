"""One optimizer step of K agents: this program, the original's way, and K separate PEFT runs.

A random Llama on one CPU thread; K = 4 LoRA agents of rank 16 on all seven projections; rows as long as those
of GSM8K (`benchmarks/harness.py`). Each batch goes through three trainers in turn, which start from the same adapters
and do the same mathematics: forward, backward, clipping per agent, AdamW. Their losses are compared at every step.

ours           the training loop's own functions on the packed crowd
original's way one PEFT model, `set_adapter` for one agent after the other, rows padded to 512, all logits, the graphs
               of all agents alive until one backward. Repaired: the agents left behind keep their gradients
separate runs  K PEFT models, each its own forward, backward and optimizer; rows padded to the longest of the batch
ours in bf16   the same as ours on a base in bf16, under autocast; with --precision bf16 all trainers are

The last line says which share of our step the necessary products take at the speed that they have alone (`floor.py`).
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.floor import Products, shares
from benchmarks.harness import (
    LONGEST,
    VOCABULARY,
    Costs,
    batches,
    cpu_ratios,
    median_and_range,
    median_cost,
    take_turns,
)
from ci_llm.agents.agent import Training
from ci_llm.base.targets import Layers, peft_targets
from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import NextToken
from ci_llm.data.batches import Batch, MicroBatch, padded
from ci_llm.distributed.ballot import Ballot
from ci_llm.distributed.processes import Processes
from ci_llm.lora.kernels import PARTS
from ci_llm.lora.settings import LoraSettings
from ci_llm.run.gradients import apply_gradients, compute_gradients
from ci_llm.run.step.state import TrainState
from ci_llm.run.trainer import Prepared
from ci_llm.run.watchdog import Heartbeat

K, RANK, ALPHA = 4, 16, 32
LEARNING_RATE, MAX_NORM = 1e-4, 1.0
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES = {  # hidden, layers, feed-forward, heads
    "tiny": (32, 2, 48, 2),
    "15M": (256, 8, 688, 4),
    "125M": (768, 14, 2048, 12),
}
OURS, ORIGINAL, SEPARATE, BF16 = "ours", "original's way", "separate runs", "ours in bf16"
#: Three ways to round the same sums, by precision; a wrong mask, shift or scale is far above.
LOSSES_AGREE_TO = {"fp32": 1e-3, "bf16": 3e-2}  # of the first steps of a real base, whose updates bf16 rounds


class Ours:
    """One step as the training loop takes it; the attributes are what its functions read of a trainer."""

    def __init__(self, base: PreTrainedModel, layers: Layers = "all", agents: int = K) -> None:
        mixed: Any = "bf16" if base.dtype == torch.bfloat16 else "no"
        wanted = Config(learning_rate=LEARNING_RATE, max_grad_norm=MAX_NORM, mixed_precision="auto")
        self.processes = Processes(wanted)
        self.config, _ = self.processes.choose_precision(wanted.model_copy(update={"mixed_precision": mixed}))
        self.state = TrainState.at_start(agents)
        self.crowd = Crowd(base, LoraSettings(num_agents=agents, rank=RANK, alpha=ALPHA, layers=layers), "random")
        self.crowd.base_model.choose_route()
        self.crowd.base_model.compute_fast(PARTS)
        optimizer = torch.optim.AdamW([{"params": [row]} for row in self.crowd.storage.rows], fused=True)
        self.prepared = Prepared(*self.processes.accelerator.prepare(self.crowd, optimizer))
        self.heartbeat = Heartbeat()
        for agent in self.crowd.agents:
            agent.training = Training(lambda _: LEARNING_RATE, 0.0, MAX_NORM, rows=None)  # type: ignore[arg-type]

    def step(self, batch: Batch) -> float:
        sums, agents = self.move(batch).sums, self.crowd.num_agents
        return float(torch.as_tensor(sums[:agents]).sum()) / agents / batch.num_targets

    def compute_gradients(self, step: int, micro_batches: Sequence[MicroBatch]) -> Ballot:
        trainer: Any = self
        return compute_gradients(trainer, step, micro_batches, NextToken(), loss_scale=None)

    def move(self, batch: Batch) -> Ballot:
        """The step; what it returns is on the device, and not waited for."""
        trainer: Any = self
        ballot = self.compute_gradients(self.state.step, [self.crowd.for_all(batch)])
        verdict = self.processes.agree(ballot)
        left_out = [k for k, nonfinite in enumerate(verdict.nonfinite) if nonfinite]
        apply_gradients(trainer, self.state.step, verdict, left_out)
        self.state = self.state.advance(batch.num_rows, batch.num_tokens, left_out)
        return ballot


class OriginalsWay:
    """K forward passes by `set_adapter`, padded to 512, one backward."""

    def __init__(self, base: PreTrainedModel, crowd: Crowd) -> None:
        self.model = peft.get_peft_model(base, _lora(crowd), adapter_name="agent0")
        for k in range(1, crowd.num_agents):
            self.model.add_adapter(f"agent{k}", _lora(crowd))
        self.agents = []
        for k in range(crowd.num_agents):
            name = f"agent{k}"
            peft.set_peft_model_state_dict(self.model, crowd.agents[k].state_dict(), adapter_name=name)
            self.agents.append([p for n, p in self.model.named_parameters() if f".{name}." in n])
        self.optimizer = torch.optim.AdamW([p for agent in self.agents for p in agent], LEARNING_RATE)
        self.model.train()

    def step(self, batch: Batch) -> float:
        inputs = rectangle(batch, LONGEST)
        losses = []
        for k in range(len(self.agents)):
            self.model.set_adapter(f"agent{k}")
            with in_precision_of(self.model):
                losses.append(self.model(**inputs).loss)
        for agent in self.agents:  # the repair: set_adapter froze all but the last
            for parameter in agent:
                parameter.requires_grad_(True)
        torch.stack(losses).sum().backward()
        for agent in self.agents:
            torch.nn.utils.clip_grad_norm_(agent, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(loss.item() for loss in losses) / len(losses)


class SeparateRuns:
    """K PEFT models that know nothing of each other."""

    def __init__(self, base: PreTrainedModel, crowd: Crowd) -> None:
        self.models = [peft.get_peft_model(copy.deepcopy(base), _lora(crowd)).train() for _ in range(crowd.num_agents)]
        for k, model in enumerate(self.models):
            peft.set_peft_model_state_dict(model, crowd.agents[k].state_dict())
        self.agents = [[p for p in model.parameters() if p.requires_grad] for model in self.models]
        self.optimizers = [torch.optim.AdamW(agent, LEARNING_RATE) for agent in self.agents]

    def step(self, batch: Batch) -> float:
        inputs = rectangle(batch)
        total = 0.0
        for model, agent, optimizer in zip(self.models, self.agents, self.optimizers, strict=True):
            with in_precision_of(model):
                loss = model(**inputs).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(agent, MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        return total / len(self.models)


def _lora(crowd: Crowd) -> peft.LoraConfig:
    """The adapter of each of its agents."""
    places = peft_targets(crowd.model, crowd.agents[0].adapted)
    return peft.LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **places)


def in_precision_of(model: torch.nn.Module) -> torch.autocast:
    """Autocast where the base is in bf16, as in our own runs."""
    return torch.autocast("cpu", torch.bfloat16, enabled=model.dtype == torch.bfloat16)


def rectangle(batch: Batch, width: int | None = None) -> dict[str, Tensor]:
    """The batch as Transformers trains on it: padded to its longest row, and to `width`, with unshifted labels."""
    inputs, index = padded(batch, pad_id=0)
    labels = torch.full_like(batch.input_ids, -100)
    labels[batch.predict_from + 1] = batch.targets
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    missing = max(0, (width or 0) - ids.shape[1])
    return {
        "input_ids": F.pad(ids, (0, missing)),
        "attention_mask": F.pad(mask, (0, missing)),
        "labels": F.pad(torch.full_like(ids, -100).index_put_(index, labels), (0, missing), value=-100),
    }


def random_base(size: str) -> PreTrainedModel:
    """A Llama of one of the `SIZES` with random weights, vocabulary 32,000, tied head."""
    hidden, layers, feed_forward, heads = SIZES[size]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=feed_forward,
        num_attention_heads=heads,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Measured:
    """The results of one size and number of rows.

    Attributes:
        costs: of every trainer on every batch but the first, which warms up.
        floor: of every batch, the share of our step that the necessary products take at their own speed, ascending.
        flops_per_s: the median of that speed.
    """

    costs: Costs
    floor: list[float]
    flops_per_s: float

    def ratio(self, name: str) -> float:
        """The median ratio of a trainer's CPU time to ours."""
        return statistics.median(cpu_ratios(self.costs[name], self.costs[OURS]))


def measure(size: str, inputs: Sequence[Batch], precision: str = "fp32") -> Measured:
    """Every trainer on every batch, in turns.

    Raises:
        AssertionError: the trainers' losses differ, so they did not do the same.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    base = random_base(size).to(dtype)
    ours = Ours(copy.deepcopy(base))
    products = Products(ours.crowd, dtype)
    trainers = {
        OURS: ours,
        ORIGINAL: OriginalsWay(copy.deepcopy(base), ours.crowd),
        SEPARATE: SeparateRuns(base, ours.crowd),
        **({BF16: Ours(random_base(size).bfloat16())} if precision == "fp32" else {}),
    }
    losses: dict[str, list[float]] = {name: [] for name in trainers}

    def noting(name: str) -> Callable[[Batch], None]:
        return lambda batch: losses[name].append(trainers[name].step(batch))

    costs = take_turns({**{name: noting(name) for name in trainers}, "products": products.step}, inputs)
    del costs["products"]
    ours.processes.shutdown()
    for name in trainers:
        gap = max(abs(a - b) / a for a, b in zip(losses[OURS], losses[name], strict=True))
        allowed = LOSSES_AGREE_TO["bf16" if name == BF16 else precision]
        assert gap < allowed, f"the losses of {name} differ by up to {gap:.1e}"
    floor = shares(ours.crowd, inputs, products.flops_per_s, [cost.cpu_s for cost in costs[OURS]])
    speed = statistics.median(products.flops_per_s)
    return Measured({name: listed[1:] for name, listed in costs.items()}, sorted(floor[1:]), speed)


def table(measured: Measured, rows: int) -> str:
    """Rows of the table for one batch size, and its floor."""
    lines, costs = [], measured.costs
    for name, listed in costs.items():
        median = median_cost(listed)
        times = "1" if name == OURS else median_and_range(cpu_ratios(listed, costs[OURS]))
        lines.append(f"| {rows} | {name} | {median.cpu_s:.3f} | {median.wall_s:.3f} | {times} |")
    speed, share = measured.flops_per_s / 1e9, statistics.median(measured.floor)
    floor = f"| {rows} | the floor, at {speed:.0f} GFLOP/s | | | {share:.2f} |"
    return "\n".join([*lines, floor])


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="a copy of GSM8K; by default rows of the same lengths are made up")
    parser.add_argument("--size", choices=SIZES, default="15M", help="parameters of the base (default: 15M)")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 8], help="rows per step (default: 2 8)")
    parser.add_argument("--precision", choices=LOSSES_AGREE_TO, default="fp32", help="of all trainers (default: fp32)")
    parser.add_argument("--rounds", type=int, default=5, help="batches measured per number of rows (default: 5)")
    parser.add_argument("--model", help="a real base instead, with --dataset of questions and answers: `real_step.py`")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model:
        from benchmarks.crowd_answers import folder_of
        from benchmarks.real_step import Case, report

        if not options.dataset:
            parser.error("--model needs a --dataset")
        for rows in options.rows:
            case = Case(folder_of(options.model), str(options.dataset), rows, options.rounds + 1, options.precision)
            print(report(case), flush=True)
        return
    print(f"{options.size}, K = {K}, rank {RANK}, {options.precision}, one thread;")
    print(f"medians of {options.rounds} batches, ratios of CPU time paired by batch: median (lowest to highest)\n")
    print("| rows | trainer | CPU s | wall s | times ours |\n|---|---|---|---|---|")
    for rows in options.rows:
        inputs = batches(options.dataset, rows, options.rounds + 1)
        measured = measure(options.size, inputs, options.precision)
        print(table(measured, rows), flush=True)


if __name__ == "__main__":
    main()
