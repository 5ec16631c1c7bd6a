"""IVON: the algorithm of its paper, gradients at drawn weights, and noise that does not depend on other agents."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from ci_llm.base.load import load_base
from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.data.agent_rows import AgentRows, TrainingRows
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import tokenize
from ci_llm.lora.layer import LoraSettings
from ci_llm.lora.optimizer import BETA1, BETA2, Ivon
from ci_llm.run.start.agent_settings import optimizer_of
from tests.support.crowds import bits_in_company
from tools.testbed.tiny import base, batch

pytestmark = pytest.mark.usefixtures("one_thread")

LR, DECAY, ESS, HESS = 0.3, 1e-2, 40.0, 0.7
AGENT: Final = {"rank": 3, "seed": 5}


def crowd_of(*agents: dict[str, Any], dtype: torch.dtype = torch.float64) -> Crowd:
    crowd = Crowd(copy.deepcopy(base("llama", dtype)), LoraSettings(agents=agents), "toy").train()
    crowd.agents.begin_step(0)
    return crowd


def ivon_of(crowd: Crowd) -> Ivon:
    return Ivon([{"params": [row], "lr": LR, "weight_decay": DECAY, "ess": ESS} for row in crowd.agents.rows], HESS)


def backward(crowd: Crowd, step: int) -> None:
    crowd.agents.begin_step(step)
    rows = batch((8 + step, 15, 22))
    (-crowd(rows).log_probs.sum() / rows.num_targets).backward()


def test_a_step_is_that_of_the_paper() -> None:
    """Algorithm 1 of Shen et al. (2024), number by number."""
    crowd = crowd_of(AGENT)
    optimizer, agents = ivon_of(crowd), crowd.agents
    mean, momentum, hess = agents.rows[0].detach().tolist(), [0.0] * agents.sizes[0], [HESS] * agents.sizes[0]
    for step in range(3):
        optimizer.draw(agents, step)
        backward(crowd, step)
        [noise] = agents.drawn.draw_noise(
            step, [torch.ones(agents.sizes[0], dtype=torch.float64)]
        )  # before it is scaled
        normal = noise.tolist()
        optimizer.draw(agents, step)
        gradient = agents.rows[0].grad
        assert gradient is not None
        for i, g in enumerate(gradient.tolist()):
            drawn = normal[i] / math.sqrt(ESS * (hess[i] + DECAY))
            estimate = g * drawn * ESS * (hess[i] + DECAY)
            momentum[i] = BETA1 * momentum[i] + (1 - BETA1) * g
            correction = 0.5 * (1 - BETA2) ** 2 * (hess[i] - estimate) ** 2 / (hess[i] + DECAY)
            hess[i] = BETA2 * hess[i] + (1 - BETA2) * estimate + correction
            towards = momentum[i] / (1 - BETA1 ** (step + 1)) + DECAY * mean[i]
            mean[i] -= LR * (HESS + DECAY) * towards / (hess[i] + DECAY)
        optimizer.step()
        state = optimizer.state[agents.rows[0]]
        for found, wanted in ((agents.rows[0], mean), (state["hess"], hess), (state["momentum"], momentum)):
            expected = torch.tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-14)
    assert float(state["step"]) == 3


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropconnect", [0.0, 0.3])
def test_gradients_are_those_at_the_weights_that_were_drawn(checkpointing: bool, dropconnect: float) -> None:
    own = {**AGENT, "dropconnect": dropconnect}
    crowd, moved = crowd_of(own, {**own, "seed": 6}), crowd_of(own, {**own, "seed": 6})
    if checkpointing:
        crowd.gradient_checkpointing_enable()
    at_rest = crowd.eval()(batch()).log_probs
    optimizer = ivon_of(crowd)
    optimizer.draw(crowd.agents, 4)
    noise = crowd.agents.drawn.draw_noise(
        4, [torch.full((size,), 0.1, dtype=torch.float64) for size in crowd.agents.sizes]
    )
    with torch.no_grad():
        for row, added in zip(moved.agents.rows, noise, strict=True):
            assert added.count_nonzero() == row.numel()
            row.add_(added)
    backward(crowd.train(), 4)
    backward(moved, 4)
    assert torch.equal(crowd.agents.gradients, moved.agents.gradients)
    assert torch.equal(crowd.eval()(batch()).log_probs, at_rest), "answers are those of the means"


def trained(*agents: dict[str, Any]) -> tuple[list[Tensor], Ivon]:
    crowd = crowd_of(*agents, dtype=torch.float32)
    optimizer = ivon_of(crowd)
    for step in range(3):
        optimizer.draw(crowd.agents, step)
        backward(crowd, step)
        optimizer.step()
    return [row.detach() for row in crowd.agents.rows], optimizer


@bits_in_company
@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 2])
def test_an_agent_has_the_bits_that_it_has_alone(place: int) -> None:
    others = [{"rank": 3, "seed": 7}, {"rank": 8, "seed": 8}]
    ([alone], by_itself), (rows, among) = trained(AGENT), trained(*others[:place], AGENT, *others[place:])
    assert torch.equal(alone, rows[place])
    [own], theirs = [*by_itself.state.values()], [*among.state.values()][place]
    assert all(torch.equal(own[name], theirs[name]) for name in ("momentum", "hess", "step"))


def test_an_agent_that_is_left_out_keeps_its_bits() -> None:
    crowd = crowd_of(AGENT, {**AGENT, "seed": 6})
    optimizer = ivon_of(crowd)
    before = crowd.agents.weights.clone()
    optimizer.draw(crowd.agents, 0)
    backward(crowd, 0)
    crowd.agents.leave_out([1])
    optimizer.step()
    assert torch.equal(crowd.agents.weights[1], before[1])
    assert not torch.equal(crowd.agents.weights[0], before[0])
    assert crowd.agents.rows[1] not in optimizer.state


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dropconnect", [0.0, 0.3])
def test_a_draw_that_memory_ran_out_for_is_repeated(dropconnect: float, monkeypatch: pytest.MonkeyPatch) -> None:
    undisturbed = crowd_of({**AGENT, "dropconnect": dropconnect})
    crowd = Crowd(copy.deepcopy(base()), undisturbed.agents.settings, "toy").train()
    optimizer, other = ivon_of(crowd), ivon_of(undisturbed)
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "bernoulli_" if dropconnect else "normal_", _no_memory)
        with pytest.raises(MemoryError):
            _draw_all(crowd, optimizer)
    for one, its in ((crowd, optimizer), (undisturbed, other)):
        its.draw(one.agents, 0)
        backward(one, 0)  # which begins the step
    assert torch.equal(crowd.agents.gradients, undisturbed.agents.gradients)
    assert not torch.equal(gradient_at_rest(undisturbed), undisturbed.agents.gradients)


def _draw_all(crowd: Crowd, optimizer: Ivon) -> None:
    crowd.agents.begin_step(0)
    optimizer.draw(crowd.agents, 0)


def _no_memory(*_: object, **__: object) -> Tensor:
    raise MemoryError


def gradient_at_rest(crowd: Crowd) -> Tensor:
    still = Crowd(copy.deepcopy(base()), crowd.agents.settings, "toy").train()
    backward(still, 0)
    return still.agents.gradients


def test_a_step_without_a_draw_is_an_error_that_names_it() -> None:
    crowd = crowd_of(AGENT)
    with pytest.raises(RuntimeError, match="call it first"):
        ivon_of(crowd).step()


def test_a_crowd_that_moves_draws_in_its_new_storage() -> None:
    crowd = crowd_of(AGENT)
    optimizer = ivon_of(crowd)
    optimizer.draw(crowd.agents, 0)
    crowd.to(torch.float32)
    optimizer.draw(crowd.agents, 1)
    backward(crowd, 1)
    optimizer.step()
    assert crowd.agents.weights.dtype == torch.float32
    assert crowd.agents.weights.isfinite().all()


@pytest.mark.slow
def test_examples_are_the_tokens_that_an_agent_learns(tmp_path: Path) -> None:
    """They are counted over its own rows, if it has some, and `ivon_ess` overrides the count."""
    tokenizer, common = load_base("embedded").tokenizer, {"dataset_name": "embedded"}
    few, more = (load_rows(Config(**common, max_train_samples=n), "train") for n in (2, 5))
    each = [tokenize(rows, tokenizer, max_seq_length=256, cache_folder=tmp_path) for rows in (few, more)]
    targets = [sum(int(rows[n].supervised.sum()) for n in range(len(rows))) for rows in each]
    assert 0 < targets[0] < targets[1]
    crowd = crowd_of(AGENT, {**AGENT, "seed": 6})
    config = Config(optimizer="ivon", num_agents=2)

    def ess(config: Config, rows: TrainingRows) -> list[float]:
        return [group["ess"] for group in optimizer_of(config, crowd, rows).param_groups]

    assert ess(config, AgentRows(tuple(each))) == targets
    assert ess(config, each[1]) == [targets[1]] * 2
    assert ess(config.model_copy(update={"ivon_ess": 7.0}), each[1]) == [7.0] * 2
