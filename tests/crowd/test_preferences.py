"""Objectives of pairs and rated rows: the agents of a crowd have the losses and gradients of TRL's trainers."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from ci_llm.base.load import load_base
from ci_llm.config import Config
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.objective import Preferences
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Example
from ci_llm.data.units import Unit, unit_of
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import BadInput
from ci_llm.lora.settings import LoraSettings
from ci_llm.objectives import Evidence, Needs, objective_of
from tests.support.micro_steps import micro_step, owned

K, RANK, ALPHA, RATE = 2, 4, 8.0, 0.05
STEPS: Final = 3
ROWS: Final = (
    ("Ann has 3 pens and buys 4. How many?\n", "3+4=7\n#### 7", "#### 8"),
    ("Ben has 9.\n", "#### 9", "9+9=18\n18-2=16\n#### 16"),
    ("Zoe has 12 hats. She breaks 5. How many hats are left?\n", "12-5=7\n#### 7", "12-5=6\n#### 6"),
    ("Tom sells 2 of 8.\n", "8-2=6\n#### 6", "8*2=16\n#### 16"),
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of trl and of what it loads
]


@dataclass(frozen=True)
class Case:
    """An objective with its settings by name, which are TRL's as well."""

    objective: str
    settings: tuple[tuple[str, Any], ...] = ()
    #: Whether TRL computes its loss in fp64. The norms of the base are in fp32 all the same, so that the gradient of a
    #: sum is that of a mean to the last bit only where the factor is a power of two: there are four rows.
    exact: bool = False

    def __str__(self) -> str:
        return " ".join([self.objective, *(f"{key}={value}" for key, value in self.settings if key != "beta")])


def case(objective: str, *, exact: bool = False, **settings: Any) -> Case:
    return Case(objective, tuple(settings.items()), exact)


CASES: Final = (
    *(case("dpo", beta=0.3, loss_type=(kind,)) for kind in ("sigmoid", "ipo", "hinge", "sigmoid_norm", "apo_zero")),
    case("dpo", beta=0.3, loss_type=("robust",), label_smoothing=0.1),
    case("dpo", beta=0.3, loss_type=("sigmoid", "sft"), loss_weights=(0.7, 0.4)),
    case("orpo", beta=0.3),
    case("simpo", exact=True, beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0),
    case("simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.5),
    case("kto", beta=0.3, desirable_weight=1.3, undesirable_weight=0.8),
    case("kto", beta=0.3, loss_type=("apo_zero_unpaired",)),
)


def ours(case: Case, **more: Any) -> Any:
    return objective_of(case.objective, [Config(objective=case.objective, **dict(case.settings), **more)] * K)


def crowd_of(dtype: torch.dtype, **settings: Any) -> Crowd:
    """Agents that differ from the base and from each other: with B = 0 every loss of DPO is log 2."""
    base = load_base("embedded", "fp64" if dtype == torch.float64 else "fp32")
    own = LoraSettings(**{"num_agents": K, "rank": RANK, "alpha": ALPHA, **settings})
    crowd = Crowd(base.model, own, "embedded", base.pad_id)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        crowd.storage.weights.add_(torch.randn(crowd.storage.weights.shape, generator=generator, dtype=dtype) * 0.03)
    return crowd.train()


def example(prompt: Sequence[int], answer: Sequence[int]) -> Example:
    return Example(np.array([*prompt, *answer], np.int32), np.array([False] * len(prompt) + [True] * len(answer)))


# ------------------------------------------------------------------------------------------ TRL's side


def arguments(case: Case, folder: Path) -> dict[str, Any]:
    settings = dict(case.settings)
    if "loss_type" in settings:
        settings["loss_type"] = settings["loss_type"][0] if case.objective == "kto" else [*settings["loss_type"]]
    if "loss_weights" in settings:
        settings["loss_weights"] = [*settings["loss_weights"]]
    return settings | {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": len(ROWS),
    }


def trainer_of(case: Case, dtype: torch.dtype, folder: Path) -> Any:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    pairs = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in ROWS]
    rated = [
        {"prompt": prompt, "completion": answers[n % 2], "label": n % 2 == 0}
        for n, (prompt, *answers) in enumerate(ROWS)
    ]
    kinds: dict[str, tuple[Any, Any, list[dict[str, Any]]]] = {
        "dpo": (DPOTrainer, DPOConfig, pairs),
        "kto": (KTOTrainer, KTOConfig, rated),
        "orpo": (ORPOTrainer, ORPOConfig, pairs),
        "simpo": (CPOTrainer, CPOConfig, pairs),
    }
    kind, config, rows = kinds[case.objective]
    more = {"loss_type": "simpo"} if case.objective == "simpo" else {}
    return kind(
        AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=dtype),
        args=config(**arguments(case, folder), **more),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(BASE_FOLDER),
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


def units_of(trainer: Any, case: Case) -> tuple[list[Unit], list[Unit]]:
    """The rows of a trainer as our units, with its tokens, and for KTO the mismatched ones."""
    units, mismatched = [], []
    for row in trainer.train_dataset:
        if case.objective == "dpo":
            units.append(unit_of([example(row["prompt_ids"], row[f"{side}_ids"]) for side in ("chosen", "rejected")]))
        elif case.objective == "kto":
            units.append(unit_of([example(row["prompt_ids"], row["completion_ids"])], int(row["label"])))
            if "KL_completion_ids" in row:
                mismatched.append(unit_of([example(row["prompt_ids"], row["KL_completion_ids"])], 0))
        else:
            branches = []
            for side in ("chosen", "rejected"):
                ids, labels = row[f"{side}_input_ids"], row[f"{side}_labels"]
                start = next(n for n, label in enumerate(labels) if label != -100)
                branches.append(example(ids[:start], ids[start:]))
            units.append(unit_of(branches, learn_prompt=case.objective == "orpo"))
    return units, mismatched


def load(model: Any, tensors: dict[str, Tensor]) -> None:
    from peft import set_peft_model_state_dict

    assert not set_peft_model_state_dict(model, tensors).unexpected_keys
    model.zero_grad()


def gradients_of(crowd: Crowd, agent: int) -> dict[str, Tensor]:
    """The gradients of an agent by the names of PEFT's tensors: they lie as its weights do."""
    kept = crowd.storage.weights.clone()
    try:
        crowd.storage.weights.copy_(crowd.storage.gradients)
        return {name: tensor.clone() for name, tensor in crowd.agents[agent].state_dict().items()}
    finally:
        crowd.storage.weights.copy_(kept)


# ---------------------------------------------------------------------------------------------- the comparison


def kl_of(crowd: Crowd, mismatched: Sequence[Unit]) -> Tensor | None:
    """[K, 1] by how many nats agents are away from the base on mismatched rows, at least 0; None without rows."""
    if not mismatched:
        return None
    other = pack(mismatched, range(len(mismatched)))
    with torch.no_grad():
        gained = crowd(other).log_probs.double().sum(1) - crowd.reference((0, 1), other).double().sum(1)
    return (gained / len(mismatched)).clamp(min=0)[:, None]


def shares_of(units: Sequence[Unit]) -> tuple[float, ...]:
    """The `nll_shares` of a step that consists of these units."""
    return (len(units) / sum(unit.num_learned for unit in units),) * K


def fused_step(crowd: Crowd, case: Case, units: Sequence[Unit], mismatched: Sequence[Unit]) -> Tensor:
    """[K] losses of a step; gradients are in the crowd."""
    batch = pack(units, range(len(units)))
    kl = kl_of(crowd, mismatched)
    objective = Preferences(ours(case), crowd, nll_shares=shares_of(units), kl=kl)
    crowd.storage.begin_step(0)
    loss = micro_step(crowd, objective, batch, 0)
    crowd.storage.gradients.div_(len(units))
    return loss.task / len(units)


def runs() -> Iterator[Any]:
    """Every case in fp32, in one pass for all agents; one of each objective in fp64, in a pass for each agent."""
    seen = set[str]()
    for number, each in enumerate(CASES):
        marks = [pytest.mark.campaign] if number % 2 or each.objective not in seen else []
        yield pytest.param(each, torch.float32, id=f"{each}, fp32", marks=marks)
        if each.objective not in seen:
            yield pytest.param(each, torch.float64, id=f"{each}, fp64")
        seen.add(each.objective)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "dtype"), [*runs()])
def test_losses_and_gradients_are_those_of_trl(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    trainer = trainer_of(case, dtype, tmp_path)
    units, mismatched = units_of(trainer, case)
    assert len({end for unit in units for end in unit.prompts}) > 1
    assert bool(mismatched) == ours(case).needs.mismatched
    crowd = crowd_of(dtype)
    crowd.storage.pass_per_agent = dtype == torch.float64
    atol = 1e-5 if dtype == torch.float32 else 1e-9 if case.exact else 1e-6
    inputs = trainer._prepare_inputs(trainer.data_collator([*trainer.train_dataset]))
    trainer.model.train()
    for step in range(STEPS):
        losses = fused_step(crowd, case, units, mismatched)
        for k in range(K):
            load(trainer.model, crowd.agents[k].state_dict())
            theirs = trainer.compute_loss(trainer.model, copy.copy(inputs))
            theirs.backward()
            assert float(losses[k]) == pytest.approx(float(theirs), rel=0, abs=atol)
            wanted = {
                name.replace(".default", ""): parameter.grad
                for name, parameter in trainer.model.named_parameters()
                if parameter.requires_grad
            }
            found = gradients_of(crowd, k)
            assert {*found} == {*wanted}
            assert step or max(float(tensor.abs().max()) for tensor in found.values()) > 1e-3
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=atol)
        with torch.no_grad():
            crowd.storage.weights.sub_(RATE * crowd.storage.gradients)


# ------------------------------------------------------------------------------------------------ without TRL


@cache
def small_units() -> tuple[Unit, ...]:
    """Pairs of unequal lengths, of any tokens."""
    draw = torch.Generator().manual_seed(0)

    def row(prompt: int, answer: int) -> Example:
        return example(*(torch.randint(3, 200, (n,), generator=draw).tolist() for n in (prompt, answer)))

    return tuple(unit_of([row(4 + n, 3 + n), row(4 + n, 7 - n)]) for n in range(3))


def step_of(crowd: Crowd, objective: Preferences, batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """Losses [K], gradients and metrics of a step of these micro-batches, as the loop adds them up."""
    crowd.storage.begin_step(0)
    task, metrics = torch.zeros(crowd.num_agents, dtype=torch.float64), torch.zeros(())
    for batch in batches:
        together = micro_step(crowd, objective, batch, 0)
        task, metrics = task + together.task, metrics + together.metrics
    return task, crowd.storage.gradients.clone(), metrics


def test_an_agent_has_the_bits_that_it_has_alone_with_its_own_beta() -> None:
    crowd, batch = crowd_of(torch.float32), pack(small_units(), range(3))
    crowd.storage.pass_per_agent = True
    each = [Config(objective="dpo", beta=beta, num_agents=1) for beta in (0.2, 0.7)]
    together = Preferences(objective_of("dpo", each), crowd)
    losses, gradients, _ = step_of(crowd, together, [batch])
    for k, own in enumerate(each):
        alone = Crowd(load_base("embedded").model, LoraSettings(num_agents=1, rank=RANK, alpha=ALPHA), "embedded")
        alone.storage.weights.copy_(crowd.storage.weights[k : k + 1])
        found = step_of(alone.train(), Preferences(objective_of("dpo", [own]), alone), [batch])
        assert torch.equal(found[0], losses[k : k + 1])
        assert torch.equal(found[1], gradients[k : k + 1])


def test_agents_with_rows_of_their_own_have_what_they_have_alone() -> None:
    crowd, units = crowd_of(torch.float32), small_units()
    each = [pack(units[:1], [0]), pack(units[1:], [1, 2])]
    objective = Preferences(ours(case("dpo")), crowd)
    crowd.storage.begin_step(0)
    loss = micro_step(crowd, objective, owned(each), 0)
    assert loss.targets == (1, 2)
    for k, batch in enumerate(each):
        crowd.storage.begin_step(0)
        both = objective(crowd(batch), 0)
        torch.testing.assert_close(loss.task[k], both.task[k], rtol=0, atol=1e-5)
        assert loss.metrics is not None
        assert both.metrics is not None
        torch.testing.assert_close(loss.metrics[k], both.metrics[k], rtol=0, atol=1e-5)


def test_the_reference_is_the_base_without_agents() -> None:
    crowd, batch = crowd_of(torch.float32), pack(small_units(), range(3))
    found = crowd.reference((0, 1), batch)
    crowd.storage.weights.zero_()
    assert torch.equal(found, crowd(batch).log_probs[:1].detach())
    assert not found.requires_grad


@pytest.mark.parametrize("pass_per_agent", [False, True])
def test_the_reference_may_be_the_start_of_each_agent(pass_per_agent: bool) -> None:
    crowd, batch = crowd_of(torch.float32), pack(small_units(), range(3))
    crowd.storage.pass_per_agent = pass_per_agent
    objective, start = Preferences(ours(case("dpo", beta=0.5)), crowd), crowd.storage.weights.clone()
    with torch.no_grad():
        wanted = crowd.eval()(batch).log_probs
    crowd.train().start = start
    losses, gradients, _ = step_of(crowd, objective, [batch])
    assert losses.tolist() == pytest.approx([3 * math.log(2)] * K)
    assert torch.equal(crowd.storage.weights, start)
    with torch.no_grad():
        crowd.storage.weights.sub_(0.01 * gradients)
    torch.testing.assert_close(crowd.reference((0, 1), batch), wanted, rtol=0, atol=1e-5)
    moved, _, _ = step_of(crowd, objective, [batch])
    assert (moved < losses).all()
    crowd.start = None
    assert not torch.allclose(step_of(crowd, objective, [batch])[0], moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pass_per_agent", [False, True])
def test_a_pass_at_the_start_has_the_bits_of_agents_that_are_there(pass_per_agent: bool, dtype: torch.dtype) -> None:
    crowd, batch = crowd_of(torch.float32), pack(small_units(), range(3))
    crowd.storage.pass_per_agent = pass_per_agent
    own = crowd.storage.weights.clone()
    crowd.start = own.flip(1)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        found = crowd.reference((0, 1), batch)
        again = crowd.eval()(batch).log_probs
        crowd.storage.weights.copy_(crowd.start)
        assert torch.equal(found, crowd(batch).log_probs)
        crowd.storage.weights.copy_(own)
        assert torch.equal(again, crowd(batch).log_probs)


def test_agents_that_are_the_base_have_the_loss_of_no_preference() -> None:
    crowd, batch = crowd_of(torch.float64), pack(small_units(), range(3))
    crowd.storage.weights.zero_()
    losses, _, _ = step_of(crowd, Preferences(ours(case("dpo", beta=0.3)), crowd), [batch])
    torch.testing.assert_close(losses, torch.full((K,), 3 * math.log(2), dtype=torch.float64), rtol=0, atol=1e-12)


def test_the_next_token_loss_is_a_mean_over_the_tokens_of_the_step() -> None:
    """Two pairs whose chosen answers have 1 and 4 tokens: a mean over pairs would be another number."""
    nll = torch.tensor([[3.0, 2.0]], dtype=torch.float64)
    e = evidence([-3.0, -9.0, -2.0, -9.0], [1, 2, 4, 2], nll=nll, nll_tokens=torch.tensor([1, 4]), nll_share=2 / 5)
    losses = ours(case("dpo", loss_type=("sft",))).losses(e)
    assert float(losses.mean()) == pytest.approx(5 / 5)


def test_row_weights_of_an_agent_weigh_its_units() -> None:
    crowd, batch = crowd_of(torch.float64), pack(small_units(), range(3))
    plain = Preferences(ours(case("dpo")), crowd)
    drawn = Preferences(ours(case("dpo")), crowd, bootstrap=((1, 0), None))
    losses, gradients, _ = step_of(crowd, plain, [batch])
    told, other, _ = step_of(crowd, drawn, [batch])
    assert torch.equal(losses, told)  # weights change what is learned, and not what is told
    assert torch.equal(gradients[1], other[1])
    assert not torch.allclose(gradients[0], other[0])


# ------------------------------------------------------------------------------------------- numbers by hand


def evidence(sums: Sequence[float], lengths: Sequence[int], **more: Any) -> Evidence:
    return Evidence(torch.tensor([sums], dtype=torch.float64), torch.tensor(lengths), **more)


def test_an_answer_with_probability_one_has_finite_odds() -> None:
    e = evidence([0.0, -3.0], [2, 3], nll=torch.zeros(1, 1), nll_tokens=torch.tensor([2]))
    e.sums.requires_grad_()
    losses = ours(case("orpo")).losses(e)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert e.sums.grad is not None
    assert e.sums.grad.isfinite().all()


def own_loss(e: Evidence) -> Tensor:
    return -e.means[:, 0::2]


own_loss.needs = Needs()  # type: ignore[attr-defined]


def refused() -> Iterator[tuple[str, dict[str, Any], str]]:
    yield "dpo", {"loss_type": ["nca_pair"]}, "no loss_type nca_pair"
    yield "dpo", {"label_smoothing": 0.1}, "label_smoothing 0.1 does nothing"
    yield "dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}, "loss_weights has 1 for 2"
    yield "kto", {"loss_type": ["sigmoid"]}, "no loss_type sigmoid"
    yield "kto", {"loss_type": ["kto", "apo_zero_unpaired"]}, "no loss_type kto with apo"
    yield "nowhere:loss", {}, "there is no such objective"


@pytest.mark.parametrize(("objective", "settings", "message"), [*refused()])
def test_settings_that_do_not_fit_are_refused(objective: str, settings: dict[str, Any], message: str) -> None:
    config = Config(objective=objective, **settings)
    with pytest.raises(BadInput, match=message):
        objective_of(objective, [config])
