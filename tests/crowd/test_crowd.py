"""What `Crowd` says of given answers, and an agent of it as a plain PEFT model."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel

from ci_llm.crowd.crowd import Crowd
from tests.support.crowds import K

PROMPTS = ["Ann has 7 pens. Ann breaks 6. How many pens are left?", "Ben has 2 cups. How many cups are there?"]
ANSWERS = ["7 - 6 = 1 #### 1", "#### 2"]


def by_hand(crowd: Crowd, agent: int, n: int) -> torch.Tensor:
    """The nats of each token of an answer and its end, from the logits of the model's own forward pass."""
    assert crowd.prompter is not None
    row = crowd.prompter.row(PROMPTS[n], ANSWERS[n])
    ids = torch.from_numpy(row.input_ids).long()
    with torch.no_grad(), crowd.base_model.active_agent(agent) as model:
        logits = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    return torch.stack([logits[at - 1, ids[at]] for at in range(len(ids)) if row.supervised[at]]).double()


def test_log_probs_are_those_of_the_base_with_each_agent(crowd: Crowd) -> None:
    found = crowd.log_probs(PROMPTS, ANSWERS)
    assert found.shape == (K + 1, 2)
    for n in range(2):
        each = torch.stack([by_hand(crowd, agent, n) for agent in range(K)])
        together = each.logsumexp(0) - math.log(K)
        torch.testing.assert_close(found[:, n], torch.cat([each, together[None]]).sum(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(crowd.log_probs(PROMPTS[0], ANSWERS[0]), found[:, :1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(crowd.log_probs(PROMPTS, ANSWERS, batch_size=1), found, rtol=1e-5, atol=1e-5)


def test_an_agent_is_a_plain_peft_model_that_answers_alone(crowd: Crowd, tmp_path: Path) -> None:
    assert crowd.prompter is not None
    ids = torch.tensor([crowd.prompter.ids(PROMPTS[0])])
    alone = crowd.generate(PROMPTS[:1], max_new_tokens=6, details=True)[0].agents
    weights = crowd.storage.weights.clone()
    for number in range(K):
        agent = crowd[number]
        assert isinstance(agent, PeftModel)
        with torch.no_grad(), crowd.base_model.active_agent(number) as model:
            wanted = model(input_ids=ids, use_cache=False).logits
            torch.testing.assert_close(agent(input_ids=ids).logits, wanted, rtol=1e-5, atol=1e-5)
            text = agent.generate(input_ids=ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        ends = crowd.prompter.ends
        told = [int(token) for token in text]
        until = next((at for at, token in enumerate(told) if token in ends), len(told))
        assert crowd.prompter.text(told[:until]) == alone[number]
    shared = agent.get_input_embeddings().weight.data_ptr()
    assert shared == crowd.model.get_input_embeddings().weight.data_ptr()
    agent.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    with torch.no_grad():
        for name, parameter in agent.named_parameters():
            if "lora_B" in name:
                parameter.add_(1)
    assert torch.equal(crowd.storage.weights, weights), "it has a copy"
    assert crowd.generate(PROMPTS[:1], max_new_tokens=6, details=True)[0].agents == alone


def test_agents_are_counted_from_both_ends(crowd: Crowd) -> None:
    assert len([*crowd]) == K
    first, last = ({n: p for n, p in crowd[k].named_parameters() if "lora_A" in n} for k in (0, -1))
    assert not all(torch.equal(first[name], last[name]) for name in first)
    same = {n: p for n, p in crowd[K - 1].named_parameters() if "lora_A" in n}
    assert all(torch.equal(same[name], last[name]) for name in last)
    for number in (K, -K - 1):
        with pytest.raises(IndexError, match=f"there is no agent {number}: there are {K}"):
            crowd[number]
