"""Pieces of a text: whole characters, nothing that a stop string may still cut, and joined the text of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from ci_llm.crowd.detokenizer import IncrementalDetokenizer, cut, held_back
from ci_llm.data.prompts import Prompter
from tests.data.test_encoder import byte_tokenizer


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: some pieces, and a token for every byte; runs of bytes are decoded together."""
    pieces = ["<unk>", "▁", "a", "b", "▁ab", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    core = Tokenizer(models.BPE(vocab={p: n for n, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


TOKENIZERS = {"byte level": byte_tokenizer(), "byte fallback": byte_fallback_tokenizer()}


def streamed(tokenizer: Any, ids: list[int], stops: list[str]) -> tuple[list[str], int]:
    """The pieces, and how many tokens were read."""
    pieces: list[str] = []
    text = IncrementalDetokenizer(tokenizer, stops)
    for count in range(1, len(ids) + 1):
        is_over = text.update(ids[:count])
        pieces.append(text.next_text())
        if is_over:
            break
    text.finish(ids[:count])
    pieces.append(text.next_text())
    return [piece for piece in pieces if piece], count


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@given(
    text=st.text(alphabet="ab é日本🙂\n#", min_size=1, max_size=30),
    stops=st.lists(st.sampled_from(["##", "ab", "é\n", "本a", "🙂🙂"]), max_size=2),
)
def test_pieces_joined_are_the_text_of_all_tokens(tokenizer: Any, text: str, stops: list[str]) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces, count = streamed(tokenizer, ids, stops)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert "".join(pieces) == cut(whole, stops)
    assert cut(tokenizer.decode(ids[:count], skip_special_tokens=True), stops) == cut(whole, stops)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_sent_with_its_last_byte() -> None:
    tokenizer = TOKENIZERS["byte level"]
    ids = tokenizer("é日b", add_special_tokens=False)["input_ids"]
    text = IncrementalDetokenizer(tokenizer)
    told = []
    for count in range(1, len(ids) + 1):
        text.update(ids[:count])
        told.append(text.text)
    assert told == ["", "é", "é", "é", "é日", "é日b"]


def test_the_channel_of_an_answer_is_not_part_of_its_text() -> None:
    tokenizer = byte_tokenizer()
    names = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    written = "<|channel|>analysis<|message|>2+5<|end|><|start|>assistant<|channel|>final<|message|>=7"
    ids = tokenizer(written, add_special_tokens=False)["input_ids"]
    assert Prompter(tokenizer).text(ids) == "2+5=7"
    assert streamed(tokenizer, ids, []) == (["2", "+", "5", "=", "7"], len(ids))


@pytest.mark.parametrize(
    ("text", "stops", "held"),
    [("abc#", ["##"], 1), ("abc##x", ["##"], 0), ("ab", ["bcd", "abcd"], 2), ("abc", [], 0), ("abcd", ["abcd"], 0)],
)
def test_the_possible_beginning_of_a_stop_string_is_held_back(text: str, stops: list[str], held: int) -> None:
    assert held_back(text, stops) == held


@pytest.mark.parametrize(
    ("text", "stops", "kept"), [("a##b", ["##"], "a"), ("abc", ["c", "b"], "a"), ("abc", ["x"], "abc"), ("a", [], "a")]
)
def test_the_first_stop_string_in_the_text_counts(text: str, stops: list[str], kept: str) -> None:
    assert cut(text, stops) == kept
