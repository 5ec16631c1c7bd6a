"""One optimizer step of the loop against PyTorch's own; which gradients count as nonfinite before they are added up."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ci_llm.agents.agent import Training
from ci_llm.crowd.objective import NextToken
from ci_llm.distributed.ballot import Verdict
from ci_llm.run.gradients import apply_gradients
from ci_llm.run.step.nonfinite import HUGE, nonfinite_here
from ci_llm.run.step.state import AgentRecovery, AgentState, TrainState
from ci_llm.run.trainer import Prepared
from tests.lora.test_adapters import K, crowd_of, peft_twin
from tests.support.peft_twins import peft_loss
from tools.testbed.tiny import base, batch


@pytest.mark.slow
def test_a_step_clips_each_agents_mean_gradient_and_uses_its_own_rate() -> None:
    model, packed, rates = base(), batch(), (0.1, 0.05, 0.025)
    crowd = crowd_of(copy.deepcopy(model))
    twins = twins_of(model, crowd, packed)
    norms = sorted(float(torch.nn.utils.get_total_norm([p.grad for p in twin])) for twin in twins)
    limit = (norms[-2] + norms[-1]) / 2  # one is above it
    run: Any = SimpleNamespace(
        crowd=crowd,
        processes=SimpleNamespace(reduce_flat_=lambda tensor: tensor),
        state=TrainState(tuple(AgentState(k, 0, AgentRecovery(rate / 0.1)) for k, rate in enumerate(rates))),
        prepared=Prepared(crowd, torch.optim.SGD([{"params": [row]} for row in crowd.storage.rows])),
    )
    for agent in crowd.agents:
        agent.training = Training(lambda _: 0.1, 0.0, limit, rows=None)  # type: ignore[arg-type]
    crowd.storage.begin_step(0)
    NextToken()(crowd(packed), step=0).total.backward()
    verdict = Verdict(
        packed.num_targets, (False,) * K, (*[0.0] * K, *[float(packed.num_targets)] * K, 0.0, 0.0), False, None, False
    )
    told = apply_gradients(run, 0, verdict, left_out=())
    clipped = 0
    for k, (twin, rate) in enumerate(zip(twins, rates, strict=True)):
        norm = torch.nn.utils.clip_grad_norm_(twin, limit)
        clipped += bool(norm > limit)
        assert told[k].item() == pytest.approx(norm.item(), rel=1e-12)
        wanted = torch.cat([(p.detach() - rate * p.grad).flatten() for p in twin])
        found = torch.cat([tensor.flatten() for tensor in crowd.agents[k].state_dict().values()])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert clipped == 1


def twins_of(model: Any, crowd: Any, packed: Any) -> list[list[Any]]:
    """The parameters of each agent as PEFT's model, with the gradient of its mean loss."""
    twins = []
    for k in range(K):
        twin = peft_twin(model, crowd, k)
        (peft_loss(twin, packed) * packed.num_targets).backward()  # of the sum: the norms of this base round to fp32
        twins.append([p for p in twin.parameters() if p.requires_grad])
        for parameter in twins[-1]:
            parameter.grad /= packed.num_targets
    return twins


def test_a_gradient_that_could_overflow_in_the_sum_counts_as_nonfinite() -> None:
    gradients = torch.tensor([[1e16, 0.0], [HUGE / 2, 0.0], [float("nan"), 0.0], [1.0, 0.0]])
    losses = torch.tensor([1.0, 1.0, 1.0, float("inf")])
    assert nonfinite_here(gradients, losses).tolist() == [True, False, True, True]
    assert torch.linalg.vector_norm(torch.full((1,), HUGE) * 10_000).isfinite()
