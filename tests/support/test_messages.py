"""The golden file of messages: a changed message fails, and so does a hint that cannot be typed."""

from __future__ import annotations

import re

import pytest

from ci_llm.errors import BadInput
from tests.support.messages import ROOT, Messages, golden, require_typable, written


def test_another_message_fails_and_the_same_one_does_not() -> None:
    file, texts = next(iter(golden().items()))
    test, text = next((name, text) for name, text in texts.items() if not name.endswith(")"))
    Messages(file, test, {}).same(text)
    with pytest.raises(AssertionError, match=r"another message; python -m tests\.support\.messages tests/"):
        Messages(file, test, {}).same(f"{text} ")
    with pytest.raises(AssertionError, match="another message"):
        Messages(file, f"{test} that is not there", {}).same(text)


@pytest.mark.parametrize(
    "hint", ["ci-llm exprt --help", "ci-llm export RUN --dennsity 3", "write batchsize=4", "write batch_size=four"]
)
def test_a_hint_that_cannot_be_typed_fails(hint: str) -> None:
    with pytest.raises(AssertionError):
        Messages("file", "test", {}, {}).same(BadInput("it is wrong", hint=hint))


@pytest.mark.parametrize("hint", ["ci-llm export --help", "write lr=1e-3", "text_column=, or dataset_name=FILE"])
def test_a_hint_that_can_be_typed_does_not(hint: str) -> None:
    require_typable(hint)


def test_every_message_is_that_of_a_test_that_is_there() -> None:
    for file, texts in golden().items():
        there = {*re.findall(r"^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)}
        assert {re.match(r"\w+", name)[0] for name in texts} <= there, file  # type: ignore[index]


def test_the_file_is_as_it_is_written() -> None:
    assert written(golden()) == (ROOT / "tests/messages.yaml").read_text(encoding="utf-8")
