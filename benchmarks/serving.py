"""What the decoder of a server costs: tokens per CPU second beside Transformers' continuous batching and plain PEFT.

    python -m benchmarks.serving [--size 15M] [--clients 1 8] [--tokens 16] [--prompt 24] [--rounds 3]
    python -m benchmarks.serving --model BASE

K = 4 LoRA agents of rank 8 on all projections, in fp32, on one CPU thread. Every client sends another prompt of random
tokens, all at once, and gets the same number of new tokens. The programs take turns in one process:

crowd, one agent        the decoder of `ci-llm serve`, as its engine steps it
continuous batching     `generate_batch`, which `transformers serve --continuous-batching` runs, on a merged agent
PEFT                    Transformers' `generate` with one adapter, for one client

A rate counts tokens after the first of each text, in CPU seconds of this process, so that it means something on a
machine that others use; prompts are told apart from it. HTTP is not in it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, DynamicCache, GenerationConfig

from benchmarks.crowd_answers import folder_of
from benchmarks.step import ALPHA, PROJECTIONS, RANK, SIZES, K, random_base
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoder import Decoder
from ci_llm.crowd.decoding import CROWD, Decoding, Request
from ci_llm.lora.layer import LoraSettings

#: Tokens that prompts have in common, where a table asks what that saves.
PREFIX = 240
CROWD_OF, AGENT, BATCHING, PEFT = f"crowd of {K}", "one agent", "continuous batching", "PEFT"


class Programs:
    """One base with the same agents in every program.

    Args:
        base: of Transformers; it is copied.
    """

    def __init__(self, base: Any) -> None:
        self.vocabulary = base.config.vocab_size
        config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=PROJECTIONS, task_type="CAUSAL_LM")
        self.peft = peft.get_peft_model(copy.deepcopy(base), config).eval()
        settings = LoraSettings(K, rank=RANK, alpha=ALPHA, target_modules=tuple(PROJECTIONS))
        self.crowd = Crowd(copy.deepcopy(base), settings, "served").eval()
        with torch.no_grad():
            self.crowd.agents.weights.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
        peft.set_peft_model_state_dict(self.peft, self.crowd.agents.agent_tensors(0))
        self.merged = copy.deepcopy(self.peft).merge_and_unload().eval()

    def decode(self, who: int | None, prompts: Sequence[list[int]], tokens: int) -> tuple[float, float]:
        """CPU seconds until every text has its first token, and from there to its last."""
        requests = [Request(prompt, Decoding(tokens), who) for prompt in prompts]
        decoder, began, first = Decoder(self.crowd, len(prompts)), time.process_time(), None
        decoder.admit(requests)
        while decoder.open:
            decoder.step()
            if first is None and all(request.tokens for request in requests):
                first = time.process_time()
        assert all(len(request.tokens) == tokens for request in requests)
        assert first is not None
        return first - began, time.process_time() - first

    def batching(self, prompts: Sequence[list[int]], tokens: int) -> None:
        """Transformers' own server without its HTTP."""
        how = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        room = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512)
        found = self.merged.generate_batch([*prompts], how, room, warmup=False)
        assert all(len(each.generated_tokens) == tokens for each in found.values())

    def by_peft(self, prompts: Sequence[list[int]], tokens: int) -> None:
        ids = torch.tensor(prompts)
        fixed = {"min_new_tokens": tokens, "max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
        fixed["use_cache"] = True
        found = self.peft.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **fixed)
        assert found.shape == (len(prompts), ids.shape[1] + tokens)

    @torch.no_grad()
    def bare_step(self, count: int, columns: int) -> float:
        """CPU seconds of one pass of the model itself over one token of `count` texts for each agent."""
        self.crowd.route = "padded"
        model, cache = self.crowd.model, DynamicCache(config=self.crowd.model.config)
        ids = torch.ones(K * count, columns, dtype=torch.long)
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        began = time.process_time()
        model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cost = time.process_time() - began
        self.crowd.route = "packed"
        return cost


def steps_only(call: Callable[[int], None], tokens: int) -> float:
    """CPU seconds of the steps after the first of `tokens` tokens, by the difference of two long calls."""
    costs = []
    for count in (tokens, 2 * tokens - 1):
        began = time.process_time()
        call(count)
        costs.append(time.process_time() - began)
    return costs[1] - costs[0]


def rates(programs: Programs, clients: int, length: int, tokens: int, rounds: int) -> dict[str, float]:
    """Tokens per CPU second by program, and the shares that are aimed at; medians over rounds, each with new prompts.

    Args:
        length: tokens of a prompt.
    """
    generator = torch.Generator().manual_seed(clients)
    found: dict[str, list[float]] = {}
    for _ in range(1 + rounds):
        prompts = torch.randint(3, programs.vocabulary, (clients, length), generator=generator).tolist()
        costs: dict[str, float] = {}
        for name, who in ((CROWD_OF, CROWD), (AGENT, 0)):
            costs[f"{name}: first token"], costs[name] = programs.decode(who, prompts, tokens)
        costs[BATCHING] = steps_only(lambda n, asked=prompts: programs.batching(asked, n), tokens)  # type: ignore[misc]
        if clients == 1:
            costs[PEFT] = steps_only(lambda n, asked=prompts: programs.by_peft(asked, n), tokens)  # type: ignore[misc]
        bare = programs.bare_step(clients, length + tokens // 2)
        costs["step / bare forward"] = costs[CROWD_OF] / (tokens - 1) / bare
        for name, cost in costs.items():
            is_rate = name in (CROWD_OF, AGENT, BATCHING, PEFT)
            found.setdefault(name, []).append(clients * (tokens - 1) / cost if is_rate else cost)
    return {name: statistics.median(each[1:]) for name, each in found.items()}  # the first round warms up


def prefixes(programs: Programs, length: int) -> dict[str, float]:
    """CPU seconds to the first token after a prompt of `PREFIX` + `length` tokens: alone, and after one like it."""
    generator, found = torch.Generator().manual_seed(0), {}
    begin, *ends = (
        torch.randint(3, programs.vocabulary, (size,), generator=generator).tolist()
        for size in (PREFIX, length, length)
    )
    for name, who in ((CROWD_OF, CROWD), (AGENT, 0)):
        decoder = Decoder(programs.crowd, 2)
        for told, end in zip(("alone", "shared"), ends, strict=True):
            request, began = Request(begin + end, Decoding(1), who), time.process_time()
            decoder.admit([request])
            while decoder.open:
                decoder.step()
            found[f"{name}: {told}"] = time.process_time() - began
        assert request.reused == PREFIX // 16 * 16
    return found


def table(found: dict[int, dict[str, float]], shared: dict[str, float]) -> str:
    """In markdown: a column for each number of clients."""
    names = list(dict.fromkeys(name for each in found.values() for name in each))
    lines = ["| clients | " + " | ".join(map(str, found)) + " |", "|---" * (1 + len(found)) + "|"]
    for name in names:
        unit = "CPU s" if "first" in name else "ratio" if "/" in name else "tokens per CPU s"
        lines.append(
            f"| {name}, {unit} | " + " | ".join(f"{each.get(name, float('nan')):.2f}" for each in found.values()) + " |"
        )
    lines += ["", f"| prompt with {PREFIX} tokens in common | first token, CPU s |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {cost:.3f} |" for name, cost in shared.items())])


def main() -> None:
    """Print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="15M")
    parser.add_argument("--model", help="a real base instead: a folder of Transformers, or a GGUF file")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=16, help="new ones of every text")
    parser.add_argument("--prompt", type=int, default=24, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=3, help="and one that warms up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = random_base(options.size)
    if options.model:
        base = AutoModelForCausalLM.from_pretrained(folder_of(options.model), dtype=torch.float32)
    programs, found = Programs(base), {}
    for clients in options.clients:
        found[clients] = rates(programs, clients, options.prompt, options.tokens, options.rounds)
    print(table(found, prefixes(programs, options.prompt)))


if __name__ == "__main__":
    main()
