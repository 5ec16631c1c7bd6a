"""An agent of a crowd as PEFT has it: a model of its own, with the same weights, trained or asked by PEFT alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.decoder import Decoder
from ci_llm.crowd.next_token import CROWD, Decoding, Request
from ci_llm.data.batches import Batch


def with_weights_of(wrapped: Any, crowd: Crowd, agent: int) -> Any:
    """A model of PEFT, in training mode, once it has taken the weights of an agent."""
    weights = {in_twin(name): tensor for name, tensor in crowd.agents[agent].state_dict().items()}
    assert not wrapped.load_state_dict(weights, strict=False).unexpected_keys
    return wrapped.train()


def exported_twin(model: Any, crowd: Crowd, agent: int) -> Any:
    """The twin on a copy of the base, with the configuration that the crowd exports for the agent."""
    config = peft.LoraConfig(**crowd.adapter_files()[f"agent{agent}/adapter_config"] | {"inference_mode": False})
    return with_weights_of(
        peft.get_peft_model(copy.deepcopy(model), config, autocast_adapter_dtype=False), crowd, agent
    )


def in_twin(name: str) -> str:
    """The name of a tensor of an agent, as a parameter of its twin."""
    return name.replace(".weight", ".default.weight")


def assert_weights_equal(found: dict[str, Tensor], twin: Any, crowd: Crowd, agent: int, atol: float) -> None:
    """All weights of an agent, among the tensors by name in `found`, are those of its twin."""
    wanted = dict(twin.named_parameters())
    for name in crowd.agents[agent].state_dict():
        torch.testing.assert_close(found[name], wanted[in_twin(name)].data, rtol=0, atol=atol)


def peft_loss(twin: Any, packed: Batch) -> Tensor:
    """Mean cross-entropy over all targets, row by row, without packing or padding."""
    total = torch.zeros((), dtype=torch.float64)
    for row, (start, end) in enumerate(zip(packed.bounds, packed.bounds[1:], strict=False)):
        log_probs = twin(input_ids=packed.input_ids[start:end][None]).logits[0].log_softmax(-1)
        mine = packed.target_rows == row
        total = total - log_probs[packed.predict_from[mine] - start, packed.targets[mine]].sum()
    return total / packed.num_targets


class PlainAnswers:
    """Greedy answers of exported agents in plain PEFT.

    Args:
        base: the folder of the base.
        exported: a folder with the agents in `agent0`, `agent1`, ...
    """

    def __init__(self, base: Path, exported: Path, num_agents: int, decoding: Decoding) -> None:
        plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self._model: Any = peft.PeftModel.from_pretrained(plain, exported / "agent0", adapter_name="agent0").eval()
        for k in range(1, num_agents):
            self._model.load_adapter(exported / f"agent{k}", adapter_name=f"agent{k}")
        self._num_agents, self._decoding = num_agents, decoding

    def of_agent(self, agent: int, prompt: list[int]) -> list[int]:
        """By Transformers' own `generate`."""
        self._model.set_adapter(f"agent{agent}")
        ids, ends = torch.tensor([prompt]), sorted(self._decoding.ends)
        how: Any = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[0]}
        how["max_new_tokens"] = self._decoding.max_new_tokens
        found: list[int] = self._model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)[
            0, len(prompt) :
        ].tolist()
        return found

    @torch.no_grad()
    def of_crowd(self, prompt: list[int]) -> list[int]:
        """By the mean of the agents' probabilities in full passes without a cache."""
        text: list[int] = []
        while len(text) < self._decoding.max_new_tokens and not self._decoding.ends.intersection(text):
            each = []
            for k in range(self._num_agents):
                self._model.set_adapter(f"agent{k}")
                logits = self._model(input_ids=torch.tensor([prompt + text]), use_cache=False).logits[0, -1]
                each.append(logits.softmax(-1))
            text.append(int(torch.stack(each).mean(0).argmax()))
        return text


def assert_writes_as_peft(crowd: Crowd, base: Path, exported: Path, prompts: Sequence[list[int]], count: int) -> None:
    """The decoder's greedy texts of the crowd and of each agent, of `count` tokens, are those of plain PEFT.

    They may part only at a token whose two best lie within 1e-4, and at one prompt in ten at most.
    """
    assert crowd.prompter is not None
    decoding = Decoding(count, crowd.prompter.ends)
    everybody = (CROWD, *range(crowd.num_agents))
    requests = [Request(prompt, decoding, who, top=2) for prompt in prompts for who in everybody]
    decoder, waiting = Decoder(crowd, slots=20), [*requests]
    while waiting or decoder.open:
        free = decoder.free
        decoder.admit(waiting[:free])
        del waiting[:free]
        decoder.step()
    plain, ties = PlainAnswers(base, exported, crowd.num_agents, decoding), 0
    for request in requests:
        prompt = [*request.prompt]
        wanted = plain.of_crowd(prompt) if request.author is CROWD else plain.of_agent(int(request.author or 0), prompt)
        ties += near_ties(request, wanted)
    print(f"{ties} of {len(requests)} texts part at a near tie")
    assert ties <= len(prompts) // 10


def near_ties(request: Request, wanted: Sequence[int]) -> int:
    """1 if the texts part, which they may only at a token whose two best lie within 1e-4; 0 if they are the same."""
    parting = next((at for at, (a, b) in enumerate(zip(request.tokens, wanted, strict=False)) if a != b), None)
    if parting is None:
        assert request.tokens == list(wanted)
        return 0
    best, second = request.chosen[parting].top
    assert best[1] - second[1] < 1e-4
    return 1
