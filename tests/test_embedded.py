"""The embedded task is arithmetically right and never changes; the embedded base solves what it was trained on."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from ci_llm.embedded import BASE_FOLDER, rows

SIZES = {"train": 1500, "validation": 320, "test": 1000}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(BASE_FOLDER)


@pytest.fixture(scope="module")
def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(BASE_FOLDER)


def test_rows_never_change() -> None:
    """Published figures name these rows: another grammar needs new splits, not a new meaning of these."""
    everything = json.dumps([rows(split) for split in SIZES]).encode()
    assert hashlib.sha256(everything).hexdigest() == (
        "d4025d976921960cdf3697f1ec3057a5555071875c86373920b040a341676b4a"
    )


def test_base_names_no_folder_of_the_machine_that_made_it() -> None:
    for file in BASE_FOLDER.iterdir():
        assert not re.search(rb"/(home|work|root|tmp|Users)/", file.read_bytes())


def test_tokenizer_decodes_to_its_input_and_adds_nothing(tokenizer: Any) -> None:
    for row in [*rows("validation")[:50], {"question": "naïve 東京 007 1234", "answer": " two  spaces\n"}]:
        text = "\n".join(row.values())
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert ids == [
            token for part in (row["question"] + "\n", row["answer"]) for token in tokenizer(part)["input_ids"]
        ]
        assert not set(ids) & set(tokenizer.all_special_ids)
