"""Traits are declared at their key: each is explained, and what it names exists."""

from __future__ import annotations

from typing import get_type_hints

from ci_llm.config import parsing
from ci_llm.config.schema import AllKeys, Traits, meaning_of


def test_a_trait_is_one_that_is_explained_and_own_keys_have_each_a_number() -> None:
    known = {"kind", "keeps_bits", *get_type_hints(Traits)}
    meanings = {key: meaning_of(field) for key, field in AllKeys.model_fields.items()}
    assert {trait for meaning in meanings.values() for trait in meaning} == known
    numbers = sorted(meaning["own"] for meaning in meanings.values() if "own" in meaning)
    assert numbers == [*range(1, len(numbers) + 1)]
    assert all(f"\n        {trait}: " in str(Traits.__doc__) for trait in get_type_hints(Traits))
    assert not [key for key, meaning in meanings.items() if {"shape", "rows"} & {*meaning} and "own" not in meaning]


def test_a_key_that_is_named_by_another_exists() -> None:
    named = {*parsing.STRONGER.values(), *(other for _, other in parsing.RIVALS)}
    assert named <= {*AllKeys.model_fields}
