"""An answer of K agents: this program, K sequential agents with a cache each, and the original's way without one.

    python -m benchmarks.generation [--size 15M] [--tokens 64] [--prompts 3]
    python -m benchmarks.generation --model BASE --dataset DATA [--precision bf16]

A random Llama in fp32 on one CPU thread with K = 4 LoRA agents on all projections. Every prompt is continued by three
programs in turn, which choose the same tokens: the most probable one under the mean of the agents' distributions.

ours             all agents in one batch with one cache, as `Crowd.generate_ids`
K caches         one PEFT model, `set_adapter` for one agent after the other at every token, each with its own cache
original's way   the same without any cache: K full passes over the whole text at every token

With `--model`, a folder of Transformers or a GGUF file, its answers to questions of DATA are measured instead: plain
`generate` of Transformers, one adapter of PEFT in it, and the crowd; tokens per second after the first token, and the
time to the first one. Adapters have learned nothing, which costs what any others cost.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Sequence
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.crowd_answers import folder_of
from benchmarks.gsm8k import VOCABULARY
from benchmarks.step import ALPHA, LOSSES_AGREE_TO, PROJECTIONS, RANK, SIZES, K, random_base
from benchmarks.timing import Costs, cpu_ratios, median_cost, take_turns
from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoding import Decoding
from ci_llm.data.rows import Chat
from ci_llm.data.sources import load_rows
from ci_llm.lora.layer import LoraSettings

OURS, CACHES, ORIGINAL = "ours", "K caches", "original's way"
PROMPT_TOKENS = 64


class OneAfterTheOther:
    """One PEFT model with K adapters, which are asked in turn for every token."""

    def __init__(self, base: Any, crowd: Crowd, tokens: int, *, caches: bool) -> None:
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
        self.model = peft.get_peft_model(base, config, adapter_name="agent0")
        for k in range(K):
            if k:
                self.model.add_adapter(f"agent{k}", config)
            peft.set_peft_model_state_dict(self.model, crowd.agents.agent_tensors(k), adapter_name=f"agent{k}")
        self.model.eval()
        self.tokens, self.caches = tokens, caches

    @torch.no_grad()
    def generate(self, prompt: list[int]) -> list[int]:
        """The new tokens."""
        ids, caches = list(prompt), [None] * K
        for _ in range(self.tokens):
            each = []
            for k in range(K):
                self.model.set_adapter(f"agent{k}")
                each.append(self._logits(ids, caches, k).log_softmax(-1))
            ids.append(int(torch.stack(each).logsumexp(0).argmax()))
        return ids[len(prompt) :]

    def _logits(self, ids: list[int], caches: list[Any], k: int) -> Tensor:
        """Of the next token [V]."""
        new = ids[-1:] if self.caches and caches[k] is not None else ids
        out = self.model(input_ids=torch.tensor([new]), past_key_values=caches[k], use_cache=self.caches)
        caches[k] = out.past_key_values if self.caches else None
        return out.logits[0, -1]  # type: ignore[no-any-return]


def measure(size: str, prompts: Sequence[list[int]], tokens: int) -> Costs:
    """The cost of every program on every prompt but the first, which warms up.

    Raises:
        AssertionError: two programs have chosen different tokens.
    """
    base = random_base(size)
    plain = copy.deepcopy(base)
    crowd = Crowd(base, LoraSettings(K, rank=RANK, alpha=ALPHA, target_modules=tuple(PROJECTIONS)), "random").eval()
    with torch.no_grad():
        crowd.agents.weights.normal_(0, 0.05, generator=torch.Generator().manual_seed(1))
    chosen: dict[str, list[list[int]]] = {OURS: [], CACHES: [], ORIGINAL: []}
    others = {
        name: OneAfterTheOther(copy.deepcopy(plain), crowd, tokens, caches=name == CACHES)
        for name in (CACHES, ORIGINAL)
    }
    decoding = Decoding(tokens)
    costs = take_turns(
        {
            OURS: lambda prompt: chosen[OURS].append(crowd.generate_ids([prompt], decoding).crowd[0]),
            **{name: lambda p, name=name: chosen[name].append(others[name].generate(p)) for name in others},  # type: ignore[misc]
        },
        prompts,
    )
    for name in others:
        assert chosen[name] == chosen[OURS], f"{name} and {OURS} chose different tokens"
    return {name: listed[1:] for name, listed in costs.items()}


def on_real_base(model: str, questions: Sequence[str], tokens: int, precision: str) -> str:
    """A table in markdown: medians over the questions, of which the first warms up, in seconds of the processor."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = tokenizer.chat_template is not None
    inputs = [
        tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)["input_ids"]
        if chats
        else tokenizer(question)["input_ids"]
        for question in questions
    ]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    plain, own, tuned = (AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval() for _ in range(3))
    adapter = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
    tuned = peft.get_peft_model(tuned, adapter).eval()
    crowd = Crowd(own, LoraSettings(K, rank=RANK, alpha=ALPHA, target_modules=tuple(PROJECTIONS)), "real").eval()

    def by_transformers(asked: Any, prompt: list[int], count: int) -> None:
        ids = torch.tensor([prompt])
        fixed = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        found = asked.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **fixed)
        assert found.shape[1] == len(prompt) + count

    def by_crowd(prompt: list[int], count: int) -> None:
        assert len(crowd.generate_ids([prompt], Decoding(count)).crowd[0]) == count

    ways = {
        "plain Transformers": lambda *given: by_transformers(plain, *given),
        "one adapter of PEFT": lambda *given: by_transformers(tuned, *given),
        f"the crowd of {K}": by_crowd,
    }
    costs = take_turns(
        {
            (name, count): lambda prompt, way=way, count=count: way(prompt, count)  # type: ignore[misc]
            for name, way in ways.items()
            for count in (1, tokens)
        },
        inputs,
    )
    lines = [f"| {tokens} new tokens | tokens per second | first token, s |", "|---|---|---|"]
    for name in ways:
        first, every = (median_cost(costs[name, count][1:]).cpu_s for count in (1, tokens))
        lines.append(f"| {name} | {(tokens - 1) / (every - first):.1f} | {first:.3f} |")
    return "\n".join(lines)


def table(costs: Costs, tokens: int) -> str:
    """In markdown; ratios are medians over prompts."""
    lines = [f"| {tokens} new tokens | CPU s | wall s | CPU time of ours |", "|---|---|---|---|"]
    for name, listed in costs.items():
        cost, ratio = median_cost(listed), statistics.median(cpu_ratios(listed, costs[OURS]))
        lines.append(f"| {name} | {cost.cpu_s:.2f} | {cost.wall_s:.2f} | {ratio:.2f} x |")
    return "\n".join(lines)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="15M")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=3, help="and one that warms up")
    parser.add_argument("--model", help="a real base instead")
    parser.add_argument("--dataset", help="with --model: questions and answers")
    parser.add_argument("--precision", choices=LOSSES_AGREE_TO, default="fp32", help="with --model (default: fp32)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.model:
        if not options.dataset:
            parser.error("--model needs a --dataset")
        rows = load_rows(Config(eval_dataset_name=options.dataset), "eval")
        questions = [str(row.question) for row in rows if isinstance(row, Chat)][: options.prompts + 1]
        print(on_real_base(folder_of(options.model), questions, options.tokens, options.precision))
        return
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, VOCABULARY, (options.prompts + 1, PROMPT_TOKENS), generator=generator).tolist()
    print(table(measure(options.size, drawn, options.tokens), options.tokens))


if __name__ == "__main__":
    main()
