"""The embedded task is arithmetically right and never changes; the embedded base solves what it was trained on."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from itertools import islice
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ci_llm.embedded import BASE_FOLDER, rows, stories
from ci_llm.errors import DataError
from tools.testbed.events import DEADLINE_S

EQUATION = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")
SIZES = {"train": 1500, "validation": 320, "test": 1000}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


@pytest.fixture(scope="module")
def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER)


def calculate(left: str, operation: str, right: str) -> int:
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


@pytest.mark.parametrize("split", SIZES)
def test_split_has_its_size_and_no_question_twice(split: str) -> None:
    questions = {row["question"] for row in rows(split)}
    assert len(questions) == len(rows(split)) == SIZES[split]


def test_splits_share_no_question() -> None:
    questions = [{row["question"] for row in rows(split)} for split in SIZES]
    assert len(set.union(*questions)) == sum(SIZES.values())


def test_task_rows_leaves_out_excluded_rows() -> None:
    taken = {row["question"] for row in stories.task_rows(5, 20)}
    rest = stories.task_rows(5, 20, exclude=taken)
    assert taken.isdisjoint(row["question"] for row in rest)
    assert rest == stories.task_rows(5, 40)[20:]


def test_rows_never_change() -> None:
    """Published figures name these rows: another grammar needs new splits, not a new meaning of these."""
    everything = json.dumps([rows(split) for split in SIZES]).encode()
    assert hashlib.sha256(everything).hexdigest() == (
        "d4025d976921960cdf3697f1ec3057a5555071875c86373920b040a341676b4a"
    )


def test_unknown_split_is_named_with_the_known_ones() -> None:
    with pytest.raises(DataError, match="no split 'dev'") as caught:
        rows("dev")
    assert "validation" in str(caught.value)


@pytest.mark.parametrize("split", SIZES)
def test_every_step_of_an_answer_is_right(split: str) -> None:
    for row in rows(split):
        *lines, final = row["answer"].split("\n")
        found = [EQUATION.fullmatch(line) for line in lines]
        assert 2 <= len(lines) <= 3
        assert "*" in row["answer"]
        results = [int(match[4]) for match in found if match]
        assert results == [calculate(*match.groups()[:3]) for match in found if match]
        assert len(results) == len(lines)
        assert all(1 <= result <= stories.LARGEST for result in results)
        assert [match[1] for match in found[1:] if match] == [str(result) for result in results[:-1]]
        assert final == f"#### {results[-1]}"


def test_every_equation_of_the_pretraining_text_is_right() -> None:
    found = [match for text in islice(stories.pretraining_texts(3), 2000) for match in EQUATION.findall(text)]
    assert len(found) > 4000
    assert all(calculate(*operands) == int(result) for *operands, result in found)


def test_pretraining_text_holds_none_of_the_new_verbs() -> None:
    text = " ".join(islice(stories.pretraining_texts(stories.PRETRAINING_SEED), 5000))
    for word in ("wins", "hands over", "in the mail", "breaks", "throws", "stolen"):
        assert word not in text


def test_base_has_its_parameters_in_fp32(base: Any) -> None:
    assert base.num_parameters() == 877_696
    assert {parameter.dtype for parameter in base.parameters()} == {torch.float32}


def test_base_names_no_folder_of_the_machine_that_made_it() -> None:
    for file in BASE_FOLDER.iterdir():
        assert not re.search(rb"/(home|work|root|tmp|Users)/", file.read_bytes())


def test_numbers_are_single_tokens_apart_from_the_space(tokenizer: Any) -> None:
    for number in range(100):
        (alone,) = tokenizer(str(number))["input_ids"]
        assert tokenizer(f"has {number}")["input_ids"][-1] == alone
        assert tokenizer(f"={number}\n")["input_ids"][1] == alone


def test_tokenizer_decodes_to_its_input_and_adds_nothing(tokenizer: Any) -> None:
    for row in [*rows("validation")[:50], {"question": "naïve 東京 007 1234", "answer": " two  spaces\n"}]:
        text = "\n".join(row.values())
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert ids == [
            token for part in (row["question"] + "\n", row["answer"]) for token in tokenizer(part)["input_ids"]
        ]
        assert not set(ids) & set(tokenizer.all_special_ids)


def test_tokenizer_and_model_agree_on_special_tokens(tokenizer: Any, base: Any) -> None:
    assert len(tokenizer) == base.config.vocab_size == 576
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(tokenizer, name) == getattr(base.config, name) == getattr(base.generation_config, name)


def solve(base: Any, tokenizer: Any, questions: list[str]) -> list[str]:
    """Answers by greedy decoding, one string per question."""
    prompts = [f"{tokenizer.bos_token}{question}\n" for question in questions]
    batch = tokenizer(prompts, padding=True, return_tensors="pt", return_token_type_ids=False)
    written = base.generate(**batch, do_sample=False, max_new_tokens=24)
    return tokenizer.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.mark.slow
def test_base_solves_fresh_stories_and_not_the_agents_task(tokenizer: Any, base: Any) -> None:
    one_step = stories.Kind((1,), "+-", stories.KNOWN_VERBS, distraction=0.15, largest_start=25)
    rng = Random("a seed of this test alone")
    problems = [stories.story(rng, one_step) for _ in range(100)]
    answers = solve(base, tokenizer, [question for question, _ in problems])
    assert sum(given == right for given, (_, right) in zip(answers, problems, strict=True)) >= 90

    task = rows("validation")[:100]
    answers = solve(base, tokenizer, [row["question"] for row in task])
    assert sum(given == row["answer"] for given, row in zip(answers, task, strict=True)) <= 10


def test_pretraining_weighs_results_and_answers(tokenizer: Any) -> None:
    from tools.pretrain import token_weights

    def heavy(text: str) -> str:
        document = [tokenizer.bos_token_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        weights = token_weights(tokenizer, document)
        return tokenizer.decode([token for token, weight in zip(document, weights, strict=True) if weight == 1])

    assert heavy("3+4=7 9-2=7") == "7 7<eos>"
    assert heavy("Ann has 3 pens. Ann loses 1.\n3-1=2\n#### 2") == "3-1=2\n#### 2<eos>"
    assert heavy("Ann has 3 pens.") == ""


@pytest.mark.slow
def test_a_few_steps_of_pretraining_repeat_bit_for_bit(tokenizer: Any) -> None:
    from tools.pretrain import new_base, pretrain

    first, second = pretrain(tokenizer, steps=3), pretrain(tokenizer, steps=3)
    untrained = new_base(tokenizer)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.lm_head.weight, untrained.lm_head.weight)


@pytest.mark.slow
def test_pretraining_makes_the_shipped_tokenizer() -> None:
    from tools.tokenizer import train_tokenizer

    shipped = json.loads((BASE_FOLDER / "tokenizer.json").read_text())
    trained = json.loads(train_tokenizer().backend_tokenizer.to_str())
    assert trained["model"] == shipped["model"]


@pytest.mark.slow
def test_embedded_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, ci_llm.embedded as e; e.rows('test'); print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.strip() == "set()"
