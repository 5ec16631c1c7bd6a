"""The head, the diversity terms and the objective against references, closed forms and gradcheck."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ci_llm.crowd.aggregators import aggregate
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.diversity import jensen_gap, row_states, sliced_wasserstein, unit_directions
from ci_llm.crowd.model import CrowdOutput
from ci_llm.crowd.objective import NextToken
from ci_llm.data.batches import Batch
from ci_llm.lora.passes import Head, target_log_probs
from ci_llm.lora.settings import LoraSettings
from tools.testbed.tiny import base, batch

ALL_AGENTS = torch.ones(3, dtype=torch.bool)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head(**family: float) -> Head:
    return Head(random(11, 6), random(11, seed=1), **family)


@pytest.mark.parametrize("family", [{}, {"scale": 0.25}, {"softcap": 2.0}, {"scale": 3.0, "softcap": 1.5}])
def test_target_log_probs_equal_plain_cross_entropy(family: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ci_llm.lora.passes.LOGITS_PER_CHUNK", 11 * 16)  # 16 rows a chunk, so several of them
    states, targets, own = random(3, 15, 6).requires_grad_(), torch.arange(15) % 11, head(**family)
    found = target_log_probs(states, targets, own)
    wanted = own.logits(states).log_softmax(-1).gather(-1, targets.expand(3, -1)[..., None]).squeeze(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    weights = random(3, 15, seed=2)
    (ours,) = torch.autograd.grad((found * weights).sum(), states)
    (theirs,) = torch.autograd.grad((wanted * weights).sum(), states)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_loss_scale_that_fp16_cannot_hold_scales_gradients_that_it_can() -> None:
    """65536 overflows in fp16, so that the first step of every run in fp16 was lost."""
    generator = torch.Generator().manual_seed(0)
    head = Head(torch.randn(11, 4, generator=generator).half() / 8, None)
    states = torch.randn(2, 3, 4, generator=generator).half().requires_grad_()
    (2.0**16 * target_log_probs(states, torch.tensor([1, 2, 3]), head).sum()).backward()
    assert states.grad is not None
    assert states.grad.isfinite().all()
    assert states.grad.abs().max() > 1000


def test_target_log_probs_pass_gradcheck() -> None:
    own, targets = head(softcap=2.0, scale=0.5), torch.tensor([0, 3, 10, 3])
    states = random(2, 4, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: target_log_probs(s, targets, own), (states,))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("rows", [2, 5, 8])
def test_sliced_wasserstein_equals_pot(rows: int) -> None:
    import ot  # slow to import: it loads all of scikit-learn

    points, directions = random(3, rows, 6), unit_directions(6, 40, torch.Generator().manual_seed(3))
    pairs = [
        ot.sliced_wasserstein_distance(points[i].numpy(), points[j].numpy(), projections=directions.numpy()) ** 2
        for i, j in ((0, 1), (0, 2), (1, 2))
    ]
    found = sliced_wasserstein(points, directions, ALL_AGENTS)
    assert found.item() == pytest.approx(sum(pairs) / 3, rel=1e-12)


def test_diversity_terms_pass_gradcheck() -> None:
    directions = unit_directions(4, 5, torch.Generator().manual_seed(3))
    points = random(3, 6, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: sliced_wasserstein(p, directions, ALL_AGENTS), (points,))
    log_probs = random(3, 9).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: jensen_gap(p.log_softmax(0), ALL_AGENTS), (log_probs,))


@pytest.mark.parametrize("term", ["jensen", "swd"])
def test_a_nonfinite_agent_is_masked_out_before_the_operation(term: str) -> None:
    finite = torch.tensor([True, False, True])
    directions = unit_directions(4, 5, torch.Generator().manual_seed(3))

    def value(x: Tensor, mask: Tensor) -> Tensor:
        return jensen_gap(x[..., 0], mask) if term == "jensen" else sliced_wasserstein(x, directions, mask)

    clean = random(3, 6, 4) - 5
    broken = clean.clone()
    broken[1] = float("nan")
    broken.requires_grad_()
    alone = value(clean[[0, 2]], ALL_AGENTS[:2])
    found = value(broken, finite)
    assert found.item() == pytest.approx(alone.item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(found, broken)
    assert gradient[[0, 2]].isfinite().all()
    assert value(broken.detach(), torch.tensor([False, False, True])).item() == pytest.approx(0.0, abs=1e-12)


def output_of(crowd: Crowd, packed: Batch) -> CrowdOutput:
    with torch.no_grad():
        return crowd(packed)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def crowd() -> Crowd:
    made = Crowd(base(), LoraSettings(num_agents=3, rank=4), "toy")
    with torch.no_grad():
        made.storage.weights.copy_(random(*made.storage.weights.shape) * 0.1)
    return made


def test_the_gap_is_a_sum_over_tokens_and_that_of_the_crowds_loss(crowd: Crowd) -> None:
    output = output_of(crowd, batch((9, 17, 23)))
    gap = jensen_gap(output.log_probs, ALL_AGENTS)
    halves = jensen_gap(output.log_probs[:, :10], ALL_AGENTS) + jensen_gap(output.log_probs[:, 10:], ALL_AGENTS)
    assert gap.item() == pytest.approx(halves.item(), rel=1e-12)
    assert gap.item() > 0
    difference = aggregate(output.log_probs, "probability").sum() - output.log_probs.mean(0).sum()
    assert gap.item() == pytest.approx(difference.item(), rel=1e-12)


def test_diversity_none_adds_no_term_and_measures_the_gap(crowd: Crowd) -> None:
    packed = batch((9, 17))
    output = output_of(crowd, packed)
    loss = NextToken("none", weight=5.0)(output, step=0)
    assert loss.total.item() == pytest.approx(-output.log_probs.sum().item(), rel=1e-12)
    assert loss.diversity.item() == pytest.approx(jensen_gap(output.log_probs, ALL_AGENTS).item(), rel=1e-12)


def test_swd_is_bounded_and_left_out_for_a_single_row(crowd: Crowd) -> None:
    packed = batch((9, 17, 12))
    output = output_of(crowd, packed)
    objective = NextToken("swd", weight=1.0)
    loss = objective(output, step=2)
    value = loss.diversity.item() / packed.num_targets
    assert 0 < value <= 4
    assert loss.total.item() == pytest.approx(loss.task.sum().item() - 3 * loss.diversity.item(), rel=1e-12)
    assert objective(output, step=3).diversity.item() != loss.diversity.item()
    single = batch((9,))
    assert objective(output_of(crowd, single), step=2).diversity.item() == 0


def test_row_states_hold_only_their_own_row(crowd: Crowd) -> None:
    packed = batch((5, 8))
    states = output_of(crowd, packed).states
    assert torch.equal(row_states(states, packed, "last_token"), states[:, [4, 12]])
    assert torch.equal(row_states(states, packed, "first_token"), states[:, [0, 5]])
    mean = torch.stack([states[:, :5].mean(1), states[:, 5:].mean(1)], dim=1)
    torch.testing.assert_close(row_states(states, packed, "mean"), mean)
