"""Heads: losses and gradients are those of TRL and Transformers, and an agent's head goes where its row goes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ci_llm.base.load import load_base
from ci_llm.config import Config
from ci_llm.crowd import exporting
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.importing import import_crowd, load_initial_adapters
from ci_llm.crowd.objective import Preferences
from ci_llm.crowd.uncertainty import Calibration
from ci_llm.data.batches import pack
from ci_llm.data.prompts import Prompter
from ci_llm.data.rows import Completion, Pair
from ci_llm.data.units import Unit, label_of, unit_of
from ci_llm.embedded import BASE_FOLDER
from ci_llm.errors import BadInput, ForeignCheckpoint, ModelError
from ci_llm.lora.heads import SCORE
from ci_llm.lora.settings import LoraSettings
from ci_llm.objectives import objective_of
from ci_llm.sweep.runner import write_best
from ci_llm.sweep.successive_halving import Trial
from tests.crowd import test_preferences
from tests.crowd.test_preferences import ALPHA, RANK, ROWS, STEPS, K, example, gradients_of, load, step_of
from tests.support.campaign import sampled, sampled_cases
from tests.support.micro_steps import owned

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # of trl, peft, and of what they load
]

CLASSES: Final = 3
RATE: Final = 0.002
TEXTS: Final = ("Ann has 3 pens.", "Ben has 9 hats, and Zoe has 12 hats.", "Tom", "Zoe breaks 5 of 12. How many?")


def crowd_of(outputs: int, dtype: torch.dtype = torch.float32, **settings: Any) -> Crowd:
    """With heads that differ from their start."""
    return test_preferences.crowd_of(dtype, outputs=outputs, **settings)


def ours(name: str, **keys: Any) -> Any:
    return objective_of(name, [Config(objective=name, **keys)] * K)


def pairs() -> list[Unit]:
    ids = AutoTokenizer.from_pretrained(BASE_FOLDER)
    return [
        unit_of([example(ids(prompt)["input_ids"], ids(answer)["input_ids"]) for answer in answers])
        for prompt, *answers in ROWS
    ]


def texts(labels: Sequence[float] = (0, 2, 1, 2)) -> list[Unit]:
    ids = AutoTokenizer.from_pretrained(BASE_FOLDER)
    return [unit_of([example(ids(text)["input_ids"], [])], label) for text, label in zip(TEXTS, labels, strict=True)]


# ------------------------------------------------------------------------------------------ the others' side


def plain_model(outputs: int, dtype: torch.dtype) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(BASE_FOLDER, num_labels=outputs, dtype=dtype)


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="SEQ_CLS")


def compare(crowd: Crowd, objective: Any, units: Sequence[Unit], model: Any, loss_of: Any, atol: float) -> None:
    """Three steps of gradient descent, with the losses and gradients of both sides."""
    batch, head_moved = pack(units, range(len(units))), crowd.agents[0].state_dict()[SCORE].clone()
    for _ in range(STEPS):
        losses, gradients, _ = step_of(crowd, Preferences(objective, crowd), [batch])
        for k in range(K):
            load(model, crowd.agents[k].state_dict())
            theirs = loss_of()
            theirs.backward()
            assert float(losses[k]) / len(units) == pytest.approx(float(theirs), rel=0, abs=atol)
            wanted = {
                name.replace(".default", "").replace(".modules_to_save", ""): parameter.grad
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
            }
            found = gradients_of(crowd, k)
            assert {*found} == {*wanted}
            assert float(found[SCORE].abs().max()) > 1e-3
            for name, tensor in found.items():
                torch.testing.assert_close(tensor / len(units), wanted[name], rtol=0, atol=atol)
        with torch.no_grad():
            crowd.storage.weights.sub_(RATE / len(units) * gradients)
    assert not torch.equal(head_moved, crowd.agents[0].state_dict()[SCORE])


REWARDS: Final = (
    (torch.float32, None, None),
    (torch.float32, 0.3, (0.5, 0.0, 2.0, -1.0)),
    (torch.float64, 0.3, None),
    (torch.float64, None, (0.5, 0.0, 2.0, -1.0)),
)


@pytest.mark.slow
@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize(
    ("dtype", "center", "margins"),
    sampled_cases(REWARDS, REWARDS[1:3]),
    ids=str,
)
def test_rewards_are_learned_as_by_trl(
    dtype: torch.dtype, center: float | None, margins: tuple[float, ...] | None, tmp_path: Path
) -> None:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    trainer = RewardTrainer(
        plain_model(1, dtype),
        args=RewardConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to="none",
            gradient_checkpointing=False,
            center_rewards_coefficient=center,
            per_device_train_batch_size=len(ROWS),
        ),
        train_dataset=Dataset.from_list(
            [
                {"prompt": p, "chosen": c, "rejected": r} | ({"margin": margins[n]} if margins else {})
                for n, (p, c, r) in enumerate(ROWS)
            ]
        ),
        processing_class=AutoTokenizer.from_pretrained(BASE_FOLDER),
        peft_config=lora_config(),
    )
    labels = [label_of(Pair(Completion("", ""), Completion("", ""), own)) for own in margins or [None] * len(ROWS)]
    units = [
        unit_of([example(row[f"{side}_ids"][:2], row[f"{side}_ids"][2:]) for side in ("chosen", "rejected")], label)
        for row, label in zip(trainer.train_dataset, labels, strict=True)
    ]
    inputs = trainer._prepare_inputs(trainer.data_collator([*trainer.train_dataset]))
    trainer.model.train()
    crowd = crowd_of(1, dtype)
    crowd.storage.pass_per_agent = dtype == torch.float64
    atol = 1e-5 if dtype == torch.float32 else 1e-9
    compare(
        crowd,
        ours("reward", center_rewards_coefficient=center),
        units,
        trainer.model,
        lambda: trainer.compute_loss(trainer.model, copy.copy(inputs)),
        atol,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("dtype", sampled([torch.float32, torch.float64], [torch.float64]), ids=str)
@pytest.mark.parametrize(("name", "labels"), [("classification", (0, 2, 1, 2)), ("regression", (0.5, -2, 1, 3.25))])
def test_labels_are_learned_as_by_transformers(name: str, labels: tuple[float, ...], dtype: torch.dtype) -> None:
    from peft import get_peft_model

    outputs = CLASSES if name == "classification" else 1
    model = get_peft_model(plain_model(outputs, dtype), lora_config()).train()
    tokenizer = AutoTokenizer.from_pretrained(BASE_FOLDER, padding_side="right")  # rotary angles are in fp32
    rows = tokenizer([*TEXTS], padding=True, return_tensors="pt")
    given = torch.tensor(labels).long() if outputs > 1 else torch.tensor(labels, dtype=dtype)
    inputs = {"input_ids": rows["input_ids"], "attention_mask": rows["attention_mask"], "labels": given}
    atol = 1e-5 if dtype == torch.float32 else 1e-9
    compare(crowd_of(outputs, dtype), ours(name), texts(labels), model, lambda: model(**inputs).loss, atol)


# ------------------------------------------------------------------------------------------ heads in a crowd


@pytest.mark.parametrize(("name", "outputs", "units"), [("reward", 1, pairs), ("regression", 1, texts)])
def test_the_loss_of_a_step_does_not_depend_on_micro_batches(name: str, outputs: int, units: Any) -> None:
    crowd, rows = crowd_of(outputs, torch.float64), units()
    objective = Preferences(ours(name), crowd)
    whole = step_of(crowd, objective, [pack(rows, range(4))])
    parts = step_of(crowd, objective, [pack(rows[:3], range(3)), pack(rows[3:], [3])])
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_agents_with_rows_of_their_own_have_heads_of_their_own() -> None:
    crowd, rows = crowd_of(CLASSES), texts()
    each = [pack(rows[:1], [0]), pack(rows[1:], [1, 2, 3])]
    values = crowd(owned(each))
    for k, batch in enumerate(each):
        torch.testing.assert_close(values[k].values, crowd(batch).values[k : k + 1], rtol=0, atol=1e-5)


def head_of(crowd: Crowd, storage: Tensor) -> Tensor:
    return storage[:, -crowd.storage.head.size :]


def test_masks_leave_heads_alone() -> None:
    crowd, batch = crowd_of(CLASSES, dropconnect=0.5), pack(texts(), range(4))
    crowd.storage.begin_step(1)
    masks = crowd.storage.drawn.masks
    assert masks is not None
    assert (head_of(crowd, masks) == 1).all()
    assert (masks == 0).any()
    assert crowd(batch).values.shape == (K, 4, CLASSES)


def test_heads_follow_their_agents_into_another_crowd_and_precision() -> None:
    crowd, batch = crowd_of(CLASSES).eval(), pack(texts(), range(4))
    values = crowd(batch).values
    twin = copy.deepcopy(crowd)
    with torch.no_grad():
        twin.storage.rows[0].zero_()
        assert torch.equal(crowd(batch).values, values)
        assert not twin(batch).values[0].any()
    assert {f"heads.agent{k}" for k in range(K)} <= {name for name, _ in crowd.named_parameters()}
    wide = crowd.double()(batch).values
    torch.testing.assert_close(wide, values.double(), rtol=0, atol=1e-5)
    settings = LoraSettings(num_agents=1, rank=RANK, alpha=ALPHA, outputs=CLASSES)
    crowd.keep_agents(settings, [1], ["agent1"])
    torch.testing.assert_close(crowd.eval()(batch).values[0], wide[1], rtol=0, atol=1e-12)
    assert [*crowd.heads] == ["agent0"]


# ------------------------------------------------------------------------------------------ files and questions


def saved(folder: Path, classes: Sequence[str] = ("a", "b", "c"), **facts: Any) -> Crowd:
    crowd = crowd_of(len(classes) or 1).eval()
    crowd.prompter, crowd.classes = Prompter(AutoTokenizer.from_pretrained(BASE_FOLDER), "text"), tuple(classes)
    for name, value in facts.items():
        setattr(crowd, name, value)
    crowd.base_model.base_name = str(BASE_FOLDER)
    crowd.save_pretrained(folder)
    return crowd


@pytest.mark.slow
def test_plain_peft_scores_texts_alike(tmp_path: Path) -> None:
    from peft import PeftModel

    crowd = saved(tmp_path / "crowd")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "crowd/agent1")
    rows = tokenizer([*TEXTS], padding=True, return_tensors="pt")
    rows.pop("token_type_ids", None)
    wanted = torch.stack([torch.tensor([*own.probabilities.values()]) for own in crowd.score([*TEXTS])])
    bases = [plain_model(CLASSES, torch.float32) for _ in range(K)]
    plain = [PeftModel.from_pretrained(base, tmp_path / f"crowd/agent{k}") for k, base in enumerate(bases)]
    plain.append(AutoModelForSequenceClassification.from_pretrained(tmp_path / "crowd/agent1", num_labels=CLASSES))
    for each in plain:
        each.eval()
    with torch.no_grad():
        found = [model(**rows).logits.softmax(-1) for model in plain]
    torch.testing.assert_close((found[0] + found[1]) / 2, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(found[1], found[2], rtol=0, atol=1e-6)
    torch.testing.assert_close(crowd[1](**rows).logits.softmax(-1), found[1], rtol=0, atol=1e-5)


def test_agents_with_heads_are_not_imported(tmp_path: Path) -> None:
    saved(tmp_path / "crowd")
    with pytest.raises(ModelError, match="scores texts by a head, and only adapters that write answers") as refusal:
        import_crowd([tmp_path / "crowd"], tmp_path / "imported")
    assert "init_from=" in str(refusal.value.hint)


def test_the_card_of_the_best_of_a_sweep_opens_its_head(tmp_path: Path) -> None:
    saved(tmp_path / "crowd", ("low", "middle", "high")).detach()
    (tmp_path / "crowd").rename(tmp_path / "final_checkpoint")
    best = Trial(0, {"learning_rate": 0.1}, (0.5,), 0, 1)
    sweep: Any = SimpleNamespace(
        folder=tmp_path,
        best=best,
        has_winner=True,
        segment_folder=lambda _: tmp_path,
        standings=SimpleNamespace(trials=[best], plan=SimpleNamespace(metric="nll")),
        config=Config(),
    )
    card = (write_best(sweep) or tmp_path).joinpath("README.md").read_text()
    assert "num_labels=3)  # low, middle, high" in card
    for word in ("AutoModelForCausalLM", "vllm", "gguf"):
        assert word not in card


def test_a_saved_crowd_keeps_the_order_of_its_classes(tmp_path: Path) -> None:
    names = [f"class {number}" for number in range(12)]
    one = saved(tmp_path / "crowd", names).score("Ann has 3 pens.", abstain_below=0.99)
    crowd = Crowd.from_pretrained(tmp_path / "crowd")
    other = crowd.score("Ann has 3 pens.", abstain_below=0.99)
    assert one == other
    with pytest.raises(BadInput, match="abstain_below must be a probability, from 0 to 1, and is 99"):
        crowd.score("Ann has 3 pens.", abstain_below=99)
    assert crowd.classes == tuple(names)
    [found] = one
    assert found.label == max(found.probabilities, key=found.probabilities.get)  # type: ignore[arg-type, union-attr]
    assert found.abstained
    assert found.mean == pytest.approx(sum(found.scores) / K)
    assert found.lower == pytest.approx(found.mean - found.std)


def test_a_temperature_is_applied_in_scores_and_exports(tmp_path: Path) -> None:
    crowd = saved(tmp_path / "crowd")
    [plain] = crowd.score("Ann has 3 pens.")
    crowd.calibration = Calibration.of_classes(torch.eye(3).log_softmax(-1), torch.arange(3), rows=3, data="here")
    assert crowd.calibration.temperature == pytest.approx(1 / 16)
    crowd.save_pretrained(tmp_path / "sharp")
    [sharp] = Crowd.from_pretrained(tmp_path / "sharp").score("Ann has 3 pens.", abstain_below=0.9)
    assert sharp.label == plain.label
    before, after = (torch.tensor([*(own.probabilities or {}).values()]).double() for own in (plain, sharp))
    torch.testing.assert_close(after, (before.log() * 16).softmax(-1), rtol=1e-5, atol=1e-9)
    assert sharp.scores == plain.scores
    assert sharp.abstained == (float(after.max()) < 0.9)
    assert "the temperature of the crowd's probabilities: 0.0625" in exporting._note(crowd.calibration)


def test_rewards_are_of_answers(tmp_path: Path) -> None:
    crowd = saved(tmp_path / "crowd", (), reads_pairs=True)
    apart = crowd.score(["2 + 2?\n", "2 + 3?\n"], ["4", "5"], batch_size=1)
    whole = Crowd.from_pretrained(tmp_path / "crowd").score(["2 + 2?\n4", "2 + 3?\n5"])
    for one, other in zip(apart, whole, strict=True):
        assert one.scores == pytest.approx(other.scores)
    assert apart[0].lower == pytest.approx(apart[0].mean - apart[0].std)
    assert apart[0].label is None
    crowd.prompter.form = "chat"  # type: ignore[union-attr]
    [chat] = crowd.score([{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}])
    [asked] = crowd.score("2 + 2?", "4")
    assert chat.scores == pytest.approx(asked.scores)
    with pytest.raises(BadInput, match="no prompt"):
        crowd.score("4")
    with pytest.raises(BadInput, match="2 prompts and 1 answers"):
        crowd.score(["2?", "3?"], ["4"])


@pytest.mark.slow
def test_agents_start_from_adapters_with_heads_and_without(tmp_path: Path) -> None:
    donor = saved(tmp_path / "crowd")
    crowd = crowd_of(CLASSES)
    load_initial_adapters(crowd, tmp_path / "crowd")
    assert torch.equal(crowd.storage.weights, donor.storage.weights)
    base = load_base("embedded")
    writers = Crowd(base.model, LoraSettings(num_agents=1, rank=RANK, alpha=ALPHA), str(BASE_FOLDER), base.pad_id)
    with pytest.raises(ForeignCheckpoint, match=r"score\.weight"):
        load_initial_adapters(writers, tmp_path / "crowd/agent0")
    writers.save_pretrained(tmp_path / "writers")
    heads = crowd.agents[1].state_dict()[SCORE].clone()
    load_initial_adapters(crowd, tmp_path / "writers")
    assert torch.equal(crowd.agents[1].state_dict()[SCORE], heads)
    assert torch.equal(crowd.storage.weights[1, : writers.storage.sizes[0]], writers.storage.weights[0])


@pytest.mark.slow
def test_a_crowd_with_heads_refuses_to_write_and_one_without_refuses_to_score(tmp_path: Path) -> None:
    crowd = saved(tmp_path / "crowd")
    for ask in (lambda: crowd.generate("2 + 2?"), lambda: crowd.log_probs("2 + 2?", "4")):
        with pytest.raises(ModelError, match="these agents have heads"):
            ask()
    base = load_base("embedded")
    with pytest.raises(ModelError, match="no heads"):
        Crowd(base.model, LoraSettings(num_agents=1), "embedded").score("2 + 2?")
