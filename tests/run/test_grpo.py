"""GRPO: losses and gradients are TRL's, completions depend on nothing but their keys, and rewards fail loudly."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

import ci_llm
from ci_llm.base.load import load_base
from ci_llm.config import Config
from ci_llm.core.run_folder import read_failures
from ci_llm.core.run_status import read_status
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.metrics import final_answer
from ci_llm.crowd.objective import GrpoObjective
from ci_llm.crowd.rewarding import AgentPrompt, Drawer, PromptRow, RewardScorer, rewards_of_group
from ci_llm.data.prompts import Prompter
from ci_llm.data.sources import load_rows
from ci_llm.data.tokens import TokenizedRows, tokenize
from ci_llm.embedded import BASE_FOLDER, rows
from ci_llm.errors import ConfigError, DataError, RewardFailed
from ci_llm.lora.settings import LoraSettings
from ci_llm.objectives import objective_of
from ci_llm.objectives.grpo import Watch, advantages, metrics_of, std, total_rewards
from ci_llm.objectives.grpo.rewards import Reward, compute_rewards, require_answers, rewards_of
from ci_llm.run.step.rollout import Group, Rollout, Rollouts
from tests.crowd.test_preferences import gradients_of, load
from tests.support.campaign import sampled
from tools.testbed.forkserver import ForkServer
from tools.testbed.trials import train_watched
from tools.testbed.worlds import arguments

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]

K, G, LONGEST = 2, 4, 40
WEIGHTS: Final = (0.7, 0.3)


def crowd_of(num_agents: int = K, **more: Any) -> Crowd:
    """Agents that differ from the base and from each other."""
    base = load_base("embedded", "fp32")
    crowd = Crowd(base.model, LoraSettings(num_agents=num_agents, rank=4, alpha=8, **more), "embedded", base.pad_id)
    for k, agent in enumerate(crowd.agents):
        own = torch.Generator().manual_seed(k + 1)
        with torch.no_grad():
            agent.weights.add_(torch.randn(agent.weights.shape, generator=own) * 0.02)
    crowd.prompter = Prompter(base.tokenizer)
    return crowd.train()


def grpo(**settings: Any) -> Any:
    given = {"num_generations": G, "max_completion_length": LONGEST, "rewards": ("length", "final_number")}
    config = Config(objective="grpo", reward_weights=WEIGHTS, **(given | settings))
    return objective_of("grpo", [config] * K)


def prompts(crowd: Crowd, count: int) -> list[list[int]]:
    assert crowd.prompter is not None
    return [crowd.prompter.ids(row["question"]) for row in rows("train")[:count]]


def groups_of(crowd: Crowd, agent: int, end: int) -> list[Group]:
    """Four groups: a third of the completions is cut, one reward of a function is None, one group is flat."""
    draw = torch.Generator().manual_seed(10 + agent)
    found = []
    for row, prompt in enumerate(prompts(crowd, 4)):
        lengths = torch.randint(3, 10, (G,), generator=draw).tolist()
        cut = [(row * G + n) % 3 == 0 for n in range(G)]
        tokens = [
            torch.randint(5, 500, (length,), generator=draw).tolist() + [end] * (not is_cut)
            for length, is_cut in zip(lengths, cut, strict=True)
        ]
        rewards = torch.rand(G, 2, generator=draw, dtype=torch.float64).float().double()
        if row == 0:
            rewards[1, 0] = torch.nan
        if row == 2:
            rewards[:] = 0.5
        found.append(Group(AgentPrompt(agent, row, prompt), tokens, [""] * G, cut, False, rewards, rewards[:, 0]))
    return found


def compared(groups: Sequence[Group], scale: str) -> list[Group]:
    total = torch.stack([total_rewards(group.rewards, WEIGHTS) for group in groups])
    gains = advantages(total, scale, std(total.flatten()) if scale == "batch" else None)
    return [replace(group, advantages=own) for group, own in zip(groups, gains, strict=True)]


def step_of(crowd: Crowd, objective: Any, each: Sequence[Sequence[Group]], *how: int) -> Tensor:
    """[K] the losses of a step in these parts; its gradients are in the crowd."""
    named = tuple(Reward(name, lambda **_: []) for name in "ab")
    learner = GrpoObjective(objective, crowd, named)
    crowd.train()
    crowd.storage.begin_step(0)
    losses, counted = torch.zeros(K, dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
    for number, batch in enumerate(Rollout(learner, each).parts(*how)):
        crowd.storage.begin_micro_step(0, 0, number)
        for part in crowd.passes_of(batch):
            found = [learner(output, 0) for output in crowd(part)]
            sum(loss.total for loss in found).backward()  # type: ignore[union-attr]
            for loss in found:
                losses[loss.agents[0]] += loss.task[0]
                counted[loss.agents[0]] += loss.targets[0]
    crowd.storage.gradients.div_(counted[:, None])
    return losses / counted


class Trl:
    """TRL's own trainer, with given completions and rewards."""

    def __init__(self, folder: Path, temperature: float = 1.0) -> None:
        from datasets import Dataset
        from peft import LoraConfig
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        self.rows = [{"prompt": row["question"]} for row in rows("train")[:4] for _ in range(G)]
        self.groups: Sequence[Group] = ()
        config = GRPOConfig(
            str(folder), num_generations=G, per_device_train_batch_size=4 * G, max_completion_length=LONGEST,
            use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
            reward_weights=[*WEIGHTS], temperature=temperature,
        )  # fmt: skip
        self.trainer: Any = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(BASE_FOLDER, dtype=torch.float32),
            [self._first, self._second],
            config,
            processing_class=AutoTokenizer.from_pretrained(BASE_FOLDER),
            train_dataset=Dataset.from_list(self.rows),
            peft_config=LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"),
        )
        self.trainer._tokenize_prompts = lambda _: (
            [[*group.asked.prompt] for group in self.groups for _ in range(G)],
            None,
            {},
        )
        self.trainer._generate_single_turn = lambda *_, **__: ([t for g in self.groups for t in g.tokens], None)

    def _rewards(self, function: int) -> list[float | None]:
        found = [x for group in self.groups for x in group.rewards[:, function].tolist()]
        return [None if math.isnan(x) else x for x in found]

    def _first(self, **_: Any) -> list[float | None]:
        return self._rewards(0)

    def _second(self, **_: Any) -> list[float | None]:
        return self._rewards(1)

    def step(self, groups: Sequence[Group], objective: Any) -> tuple[float, Tensor, dict[str, Tensor]]:
        """Loss, advantages and gradients."""
        self.groups, trainer = groups, self.trainer
        trainer.loss_type, trainer.scale_rewards = objective.kind, objective.scale_rewards
        trainer.beta, _ = objective.of_agent(0)  # the temperature is that of its making
        trainer.mask_truncated_completions = objective.mask_truncated_completions
        trainer.args.use_bias_correction_kl = objective.use_bias_correction_kl
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
        trainer.model.train()
        trainer.model.zero_grad()
        with torch.no_grad():
            inputs = trainer._generate_and_score_completions(self.rows)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        named = trainer.model.named_parameters()
        found = {name.replace(".default", ""): p.grad for name, p in named if p.requires_grad}
        return float(loss), inputs["advantages"], found


#: Divisions of a step: all prompts at once, two, one, and one whose group is divided.
PARTS: Final = ((4,), (2,), (1,), (1, 2))
#: Scales, divergences and masks; each case takes a part of them.
SETTINGS: Final = [
    *itertools.product(("group", "batch", "none"), ((0.0, True), (0.04, True), (0.04, False)), (False, True))
]
CASES: Final = [*itertools.product(("dapo", "grpo", "dr_grpo"), (1.0, 0.7))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", sampled(range(len(CASES)), (0, 3, 4)), ids=lambda case: f"{CASES[case][0]}, {CASES[case][1]}"
)
def test_losses_advantages_and_gradients_are_those_of_trl(case: int, tmp_path: Path) -> None:
    kind, temperature = CASES[case]
    crowd, trl = crowd_of(), Trl(tmp_path, temperature)
    end = trl.trainer.processing_class.eos_token_id
    drawn = [groups_of(crowd, k, end) for k in range(K)]
    for number, (scale, (beta, corrected), masked) in [*enumerate(SETTINGS)][case % 4 :: 4]:
        objective = grpo(
            loss_type=(kind,), temperature=temperature, scale_rewards=scale, beta=beta,
            use_bias_correction_kl=corrected, mask_truncated_completions=masked,
        )  # fmt: skip
        each = [compared(groups, scale) for groups in drawn]
        crowd.storage.pass_per_agent = number % 3 == 0
        losses = step_of(crowd, objective, each, *PARTS[(number + case) % 4])
        for k, groups in enumerate(each):
            load(trl.trainer.model, crowd.agents[k].state_dict())
            loss, gains, wanted = trl.step(groups, objective)
            assert float(losses[k]) == pytest.approx(loss, abs=1e-5)
            torch.testing.assert_close(torch.cat([g.advantages for g in groups]).float(), gains, atol=1e-5, rtol=0)
            found = gradients_of(crowd, k)
            assert {*found} == {*wanted}
            assert max(float(x.abs().max()) for x in wanted.values()) > 1e-3
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, wanted[name], atol=1e-5, rtol=0)


@pytest.mark.slow
def test_a_completion_without_a_reward_is_left_out_where_trl_counts_it(tmp_path: Path) -> None:
    crowd, trl, objective = crowd_of(), Trl(tmp_path), grpo(loss_type=("grpo",))
    groups = groups_of(crowd, 0, trl.trainer.processing_class.eos_token_id)
    groups[1].rewards[2] = torch.nan
    each = [compared(groups, "group"), compared(groups_of(crowd, 1, 2), "group")]
    found = step_of(crowd, objective, each, 4)
    load(trl.trainer.model, crowd.agents[0].state_dict())
    loss, gains, _ = trl.step(each[0], objective)
    assert gains[4 + 2] == 0
    assert each[0][1].advantages[2].isnan()
    assert float(found[0]) == pytest.approx(loss * 16 / 15, abs=1e-5)  # 15 of 16 count


def drawer(crowd: Crowd) -> Drawer:
    return Drawer(crowd, lambda: None)


def ids_of(crowd: Crowd, agents: Sequence[int], objective: Any, *, step: int = 3, most: int = 512) -> Any:
    asked = [AgentPrompt(k, row, ids) for row, ids in enumerate(prompts(crowd, 3)) for k in agents]
    found = replace(drawer(crowd), most=most).draw(asked, objective, step)
    return {(one.agent, one.row): [r.tokens for r in own] for one, own in zip(asked, found, strict=True)}


@pytest.mark.slow
def test_completions_depend_on_agent_step_row_and_number_alone() -> None:
    crowd, objective = crowd_of(), grpo(temperature=4.0)
    found = ids_of(crowd, (0, 1), objective)
    assert len({tuple(ids) for own in found.values() for ids in own}) > 20
    alone = ids_of(crowd, (1,), objective, most=2)
    assert alone == {key: own for key, own in found.items() if key[0] == 1}
    assert ids_of(crowd, (0, 1), objective, step=4) != found
    by_seed = crowd_of(1, seed=42, agents=({"seed": 42},))
    assert ids_of(by_seed, (0,), objective) == {key: own for key, own in found.items() if key[0] == 0}


@pytest.mark.slow
def test_tokens_are_drawn_as_often_as_the_softmax_at_the_temperature_says() -> None:
    crowd, count, warmth = crowd_of(), 2000, 3.0
    objective = grpo(temperature=warmth, num_generations=count, max_completion_length=1)
    [prompt] = prompts(crowd, 1)
    [drawn] = drawer(crowd).draw([AgentPrompt(1, 0, prompt)], objective, 0)
    with torch.no_grad(), crowd.base_model.active_agent(1) as model:
        shares = (model(torch.tensor([prompt])).logits[0, -1].double() / warmth).softmax(-1)
    found = torch.bincount(torch.tensor([r.tokens[0] for r in drawn]), minlength=len(shares)).double()
    common = shares * count >= 5
    wanted = torch.cat([shares[common], shares[~common].sum()[None]]) * count
    seen = torch.cat([found[common], found[~common].sum()[None]])
    degrees = len(wanted) - 1
    assert degrees > 5
    assert float(((seen - wanted) ** 2 / wanted).sum()) < degrees + 4 * math.sqrt(2 * degrees)


@pytest.mark.slow
def test_memory_that_runs_out_while_texts_are_drawn_changes_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd, objective = crowd_of(), grpo(temperature=4.0)
    wanted, own = ids_of(crowd, (0, 1), objective), drawer(crowd)
    base, fails = type(crowd.base_model), iter([True, False, True, False])
    step = base.reordered
    monkeypatch.setattr(base, "reordered", lambda self, *a: _fail(next(fails, False)) or step(self, *a))
    asked = [AgentPrompt(k, row, ids) for row, ids in enumerate(prompts(crowd, 3)) for k in (0, 1)]
    found = own.draw(asked, objective, 3)
    assert own.most == 12
    assert [[r.tokens for r in each] for each in found] == [wanted[one.agent, one.row] for one in asked]


def _fail(fails: bool) -> None:
    if fails:
        raise torch.OutOfMemoryError("CUDA out of memory")


GIVEN: Final = {"prompts": ["p"] * 3, "completions": ["a 1,000.", "b 3", ""], "completion_ids": [[1], [2, 3], [4]]}


def test_built_in_rewards() -> None:
    names = ("final_number", "exact_match", "regex:^b", "length", "regex:x")
    found = rewards_of(names, None, 4)
    assert [reward.name for reward in found] == ["final_number", "exact_match", "regex", "length", "regex#2"]
    given = {**GIVEN, "rows": [{"answer": want} for want in ("2+2=4\n#### 1000", "b 3", None)]}
    values = [compute_rewards(reward, given, "row 0") for reward in found]
    assert values[0][:2] == [1.0, 1.0]
    assert math.isnan(values[0][2])
    assert values[1][:2] == [0.0, 1.0]
    assert values[2:] == [[0.0, 1.0, 0.0], [0.75, 0.5, 0.75], [0.0] * 3]


@pytest.mark.parametrize(
    "answer",
    [
        [{"role": "assistant", "content": "4"}],
        {"role": "assistant", "content": "4"},
        [{"from": "gpt", "value": "4"}],
        [{"role": "assistant", "content": [{"type": "text", "text": "4"}]}],
        4,
    ],
    ids=str,
)
def test_a_right_answer_may_be_messages(answer: Any) -> None:
    given = {"prompts": ["2+2"] * 2, "completions": ["4", "5"], "completion_ids": [[1], [1]]}
    for reward in rewards_of(("exact_match", "final_number"), None, 4):
        assert compute_rewards(reward, given | {"rows": [{"answer": answer}] * 2}, "row 0") == [1.0, 0.0]


def test_a_sign_after_a_digit_is_an_operation_as_in_an_evaluation() -> None:
    (reward,) = rewards_of(("final_number",), None, 4)
    said = ["between 5-10", "10-3 = 10", "it is -10", "10.0", "$1,010"]
    given = {"prompts": ["?"] * 5, "completions": said, "completion_ids": [[1]] * 5}
    found = compute_rewards(reward, given | {"rows": [{"answer": "10"}] * 5}, "row 0")
    assert found == [1.0, 1.0, 0.0, 1.0, 0.0]
    assert found == [float(final_answer(text, "number") == "10") for text in said]


def read_rows(folder: Path, lines: Sequence[dict[str, Any]], tokenizer: Any, **keys: Any) -> TokenizedRows:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = Config(objective="grpo", rewards=("length",), dataset_name=str(folder / "rows.jsonl"), **keys)
    return tokenize(load_rows(config, "train"), tokenizer, max_seq_length=512, cache_folder=folder / "cache")


def test_built_in_rewards_read_the_rows_own_columns_and_keep_their_settings(tmp_path: Path) -> None:
    base = load_base("embedded", "fp32")
    odd = {"pattern": "x", "longest": 1, "named": "pattern", "most": 1, "rows": "r"}
    rows = read_rows(tmp_path, [{"prompt": "two?", "completion": "2", **odd}] * 3, base.tokenizer)
    rewards = rewards_of(("exact_match", "final_number", "regex:^2", "length"), None, 4)
    require_answers(rewards, rows.rows.column_sets, None, "")
    found = rewards_of_group(rewards, PromptRow.of(rows, 0), ["2", "it is 2"], [[1], [1, 2]], "", None)
    assert found.tolist() == [[1.0, 1.0, 1.0, 0.75], [0.0, 1.0, 0.0, 0.5]]


def test_a_final_number_is_not_rewarded_where_the_answer_has_none(tmp_path: Path) -> None:
    base = load_base("embedded", "fp32")
    rows = read_rows(tmp_path, [{"prompt": "two?", "completion": "none of these"}] * 3, base.tokenizer)
    rewards = rewards_of(("final_number",), None, 4)
    found = rewards_of_group(rewards, PromptRow.of(rows, 0), ["I do not know", "it is 3"], [[1], [1]], "", None)
    assert found.isnan().all()


SEEN: Final[list[tuple[str, list[int]]]] = []


def seen(completions: Sequence[str], completion_ids: Sequence[list[int]], **_: Any) -> list[float]:
    SEEN.extend(zip(completions, completion_ids, strict=True))
    return [1.0] * len(completions)


@pytest.mark.parametrize("aggregator", ["probability", "majority"])
def test_an_agent_with_nan_weights_has_no_score_and_spoils_no_other(aggregator: str, tmp_path: Path) -> None:
    crowd, config = crowd_of(3), Config(aggregator=aggregator, max_new_tokens_eval=5)
    with torch.no_grad():
        crowd.agents[1].weights.fill_(torch.nan)
    asked = read_rows(
        tmp_path, [{"prompt": row["question"]} for row in rows("train")[:9]], load_base("embedded", "fp32").tokenizer
    )
    each = [Config(objective="grpo", rewards=("length",), temperature=warmth) for warmth in (5.0, 5.0, 1e-4)]
    objective = objective_of("grpo", each)
    scorer = RewardScorer(config, objective, (Reward("seen", seen),), config.aggregator)
    SEEN.clear()
    with crowd.base_model.plain():
        scores = scorer.scores(crowd, asked, [[0, 1], [2]])
    assert scores is not None
    judged: Any = scores.units
    assert judged.found[1].isnan().all()
    assert (judged.found[[0, 2]] == 1).all()
    assert (judged.labels == 1).all()
    assert scores.right.tolist() == [[True] * 3, [False] * 3, [True] * 3, [True] * 3]
    assert math.isnan(scores.mean_nll[1])
    assert len(SEEN) == 3 * 3 * 2, "a reward was asked about an answer that nobody wrote"
    assert all(ids for _, ids in SEEN)
    for row in range(3):  # an agent that draws at almost no temperature draws what it finds most probable
        greedy, drawn = SEEN[6 * row + 2 : 6 * row + 4]
        assert greedy == drawn
    assert any(SEEN[6 * row] != SEEN[6 * row + 1] for row in range(3)), "the first agent has another temperature"
    ends = crowd.prompter.ends  # type: ignore[union-attr]
    assert all(len(ids) == 5 or ids[-1] in ends for _, ids in SEEN), "a completion has its end, as in training"


def test_a_function_that_only_a_checkpoint_names_is_not_imported() -> None:
    with pytest.raises(ConfigError, match="no code is imported on its word"):
        rewards_of(("tests.run.test_grpo:raising",), None, 4)


def raising(completions: Sequence[str], **_: Any) -> list[float]:
    if "b 3" in completions:
        raise KeyError("three")
    return [0.0] * len(completions)


def slow(**_: Any) -> list[float]:
    time.sleep(5)
    return []


async def waiting(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def failures() -> Iterator[tuple[Any, float | None, Sequence[str]]]:
    yield raising, None, ("KeyError", "step 4, row 7", "completion 1: 'b 3'")
    yield (lambda **_: [0.0] * 2), None, ("2 values for 3 completions", "row 7")
    yield (lambda **_: [0.0, math.inf, 0.0]), None, ("infinite", "completion 1")
    yield (lambda **_: ["x", "y", "z"]), None, ("ValueError", "row 7")
    yield slow, 0.05, ("TimeoutError", "reward_timeout", "row 7")


@pytest.mark.parametrize(("function", "timeout", "told"), [*failures()])
def test_a_reward_that_fails_says_function_row_and_completion(
    function: Any, timeout: float | None, told: Sequence[str]
) -> None:
    with pytest.raises(RewardFailed) as raised:
        compute_rewards(Reward("mine", function), GIVEN, "step 4, row 7", timeout)
    assert raised.value.exit_code == 1
    assert all(part in str(raised.value) for part in ("reward mine", *told))


def test_a_reward_may_be_awaited_and_may_give_none() -> None:
    async def in_a_notebook() -> list[float]:
        return compute_rewards(Reward("mine", waiting), GIVEN, "")

    assert compute_rewards(Reward("mine", waiting), GIVEN, "") == [8.0, 3.0, 0.0]
    assert compute_rewards(Reward("mine", waiting), GIVEN, "", 5.0) == [8.0, 3.0, 0.0]
    assert asyncio.run(in_a_notebook()) == [8.0, 3.0, 0.0]
    assert math.isnan(compute_rewards(Reward("mine", lambda **_: [None, 1, True]), GIVEN, "", 5.0)[0])


def test_the_log_says_once_that_completions_teach_nothing(caplog: pytest.LogCaptureFixture) -> None:
    watch, rewards = Watch(), torch.ones(10, 1, 1, dtype=torch.float64)
    stds, cut = torch.tensor([0.0] * 9 + [1.0]), [True] * 9 + [False]
    found = metrics_of(["length"], rewards, rewards[..., 0], stds, [3] * 9 + [7], cut)
    for step in range(1, 31):
        watch.look([found, found], step)
    assert [record.message.split()[0] for record in caplog.records] == ["step", "in"]
    assert found["completions/max_length"] == (7.0, 1.0)
    assert found["completions/min_length"] == (3.0, 1.0)
    assert found["reward_std"] == (0.0, 1.0)
    assert found["completions/clipped_ratio"] == (9.0, 10.0)
    assert found["frac_reward_zero_std"] == (9.0, 10.0)


def test_an_agent_without_completions_in_a_step_has_no_metrics_of_it() -> None:
    nothing = torch.zeros(0, G, 1, dtype=torch.float64)
    found = metrics_of(["length"], nothing, nothing[..., 0], nothing[:, 0, 0], [], [])
    assert {count for _, count in found.values()} == {0.0}


def test_a_function_of_weight_0_is_only_measured() -> None:
    rewards = torch.tensor([[1.0, 5.0], [torch.nan, 5.0], [torch.nan, torch.nan]], dtype=torch.float64)
    assert total_rewards(rewards, (2.0, 0.0))[0] == 2.0
    assert total_rewards(rewards, (2.0, 0.0))[1:].isnan().all()
    assert total_rewards(rewards, (2.0, 1.0)).tolist()[:2] == [7.0, 5.0]


def test_rows_to_evaluate_on_without_an_answer_are_refused_before_the_run(tmp_path: Path) -> None:
    for name, row in (("train", {"prompt": "2+2?", "answer": "4"}), ("eval", {"prompt": "3+3?"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    files = {"dataset_name": str(tmp_path / "train.jsonl"), "eval_dataset_name": str(tmp_path / "eval.jsonl")}
    with pytest.raises(DataError, match="no column holds it: prompt") as refused:
        ci_llm.train({"objective": "grpo", "rewards": "exact_match", **files}, output_dir=tmp_path / "run")
    assert "eval.jsonl" in str(refused.value.where)


def test_completions_of_a_step_are_one_file_with_numbers_and_a_full_disk_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = crowd_of()
    groups = groups_of(crowd, 0, 2)
    groups[0].rewards[:] = torch.nan
    each = [compared(groups[:1], "group"), []]
    named = tuple(Reward(name, lambda **_: []) for name in ("first", "second"))
    rollout = Rollout(GrpoObjective(grpo(), crowd, named), each)
    here: Any = SimpleNamespace(gather_object=lambda mine: [mine, mine], is_main_process=True)
    rollouts, held = Rollouts(drawer(crowd), here), iter([True, False, True, True])
    store = SimpleNamespace(staging=tmp_path, holds_lease=lambda: next(held))
    manager: Any = SimpleNamespace(directory=tmp_path, store=store)
    rollouts.write(rollout, 0, manager)
    [file] = (tmp_path / "completions").iterdir()
    table = pq.read_table(file)
    assert table.num_rows == 2 * G
    assert {str(table.schema.field(name).type) for name in ("first", "second", "advantage")} == {"double"}
    file.unlink()
    rollouts.write(rollout, 0, manager)
    assert not file.exists(), "another attempt writes here"
    file.parent.rmdir()
    file.parent.write_text("no folder")
    for step in range(2):
        rollouts.write(rollout, step, manager)
    assert len([record for record in caplog.records if "are not written" in record.message]) == 1


THIRD: Final = {"call": 0}


def third_call(completions: Sequence[str], **_: Any) -> list[float]:
    """In the third call the first process is asked to stop, and the second one fails."""
    THIRD["call"] += 1
    if THIRD["call"] == 3:
        if os.environ["RANK"] == "1":
            raise RuntimeError("the judge is away")
        os.kill(os.getpid(), signal.SIGTERM)
    return [float(len(text)) for text in completions]


@pytest.mark.slow
@pytest.mark.parametrize("eval_steps", ["null", 1], ids=["step", "evaluation"])
def test_a_reward_that_fails_on_one_process_ends_all_though_another_is_asked_to_stop(
    eval_steps: object, server: ForkServer, tmp_path: Path
) -> None:
    """After the first step, of two calls: in the second step, or in the evaluation between them."""
    keys = {
        "objective": "grpo", "rewards": "tests.run.test_grpo:third_call", "num_generations": 2,
        "max_completion_length": 4, "temperature": 3.0, "max_train_samples": 8, "max_train_steps": 3, "batch_size": 1,
        "global_batch_size": 2, "eval_samples": 2, "eval_steps": eval_steps,
    }  # fmt: skip
    log = tmp_path / "log"
    codes = server.run(train_watched, log, ranks=2, folder=str(tmp_path), arguments=arguments(**keys), fate=None)
    assert codes == [1, 1], log.read_text()
    status = read_status(tmp_path / "run")
    assert (status.status, status.reason, status.step) == ("failed", "reward", 1), log.read_text()
    assert (tmp_path / "run/checkpoint_step_1").is_dir()
    failures = read_failures(tmp_path / "run", 1)
    assert {failure.reason for failure in failures} == {"reward"}
    assert len(failures) == 2


CALLS: Final = {"count": 0, "fails_at": 0}


def brittle(completions: Sequence[str], **_: Any) -> list[float]:
    """Fails once."""
    CALLS["count"] += 1
    if CALLS["count"] == CALLS["fails_at"]:
        raise RuntimeError("the judge is away")
    return [float(len(text)) for text in completions]


@pytest.mark.slow
def test_a_run_whose_reward_fails_saves_its_last_step_and_resumes_to_the_same_bits(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "objective": "grpo", "rewards": "tests.run.test_grpo:brittle", "num_generations": 2, "max_completion_length": 4,
        "temperature": 3.0, "num_agents": 2, "lora_rank": 2, "max_train_samples": 6, "max_train_steps": 3,
        "batch_size": 2, "eval_steps": "null", "eval_samples": 2, "save_steps": "null", "num_workers": 0,
        "report_to": "none", "logging_steps": 1, "log_completions": True,
    }  # fmt: skip
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    CALLS.update(count=0, fails_at=0)
    ci_llm.train(given, output_dir=whole)
    CALLS.update(count=0, fails_at=8)  # in the second step, of four calls each
    with pytest.raises(RewardFailed, match="the judge is away") as raised:
        ci_llm.train(given, output_dir=broken)
    assert "step 2, agent1, embedded" in str(raised.value)
    assert read_status(broken).reason == "reward"
    assert (broken / "checkpoint_step_1").is_dir()
    result = ci_llm.train(given, output_dir=broken)
    assert result.status == "completed"
    for name in ("agent0", "agent1"):
        files = [folder / "final_checkpoint" / name / "adapter_model.safetensors" for folder in (whole, broken)]
        assert files[0].read_bytes() == files[1].read_bytes()
    tables = [pq.read_table(folder / "completions").to_pylist() for folder in (whole, broken)]
    assert tables[0] == tables[1]
    status = read_status(whole)
    assert (status.warning, status.first_loss) == (None, None), "a loss of this objective tells nothing"
    assert len(tables[0]) == 3 * 2 * 2 * 2
    assert {"step", "agent", "prompt", "completion", "brittle", "advantage"} <= {*tables[0][0]}
