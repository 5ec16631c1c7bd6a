"""Token ids as text: whole, or while the answer still grows, and cut before the first stop string."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedTokenizerBase

from ci_llm.data.prompts import spoken

#: The character in decoded text for bytes that are not a complete character.
_INCOMPLETE: Final = "\ufffd"
#: How many tokens are decoded again with new ones, because a token's text may depend on those before it.
_WINDOW: Final = 16
#: A token that stands for one byte, as in Llama 2's vocabulary: several in a row are decoded together.
_BYTE: Final = re.compile(r"<0x[0-9A-F]{2}>")


def cut(text: str, stop_strings: Sequence[str]) -> str:
    """The text before the first stop string in it."""
    found = [at for at in (text.find(string) for string in stop_strings) if at >= 0]
    return text[: min(found)] if found else text


def held_back(text: str, stop_strings: Sequence[str]) -> int:
    """The length of the longest end of `text` with which a stop string begins, or 0."""
    longest = max(map(len, stop_strings), default=1) - 1
    lengths = range(min(longest, len(text)), 0, -1)
    return next((n for n in lengths if any(string.startswith(text[-n:]) for string in stop_strings)), 0)


class IncrementalDetokenizer:
    """The text of an answer that still grows.

    Args:
        tokenizer: decodes the ids; special tokens are left out.
        stop_strings: the text ends before the first of them.

    Attributes:
        text: what further tokens cannot change: whole characters, and nothing that a stop string may still cut off.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = stop_strings
        self.text = ""
        self._num_given = 0  # characters that `next_text` has returned
        # The tokens from `_start` on are decoded again; those before `_read` gave `_before`, whose end is `_context`.
        self._start = 0
        self._read = 0
        self._before = ""
        self._context = ""

    def update(self, ids: Sequence[int]) -> bool:
        """Extend the text by that of new tokens; True if a stop string is in it.

        Args:
            ids: all tokens so far, the earlier ones included.
        """
        text = self._so_far(self._settled(spoken(self._tokenizer, ids))).rstrip(_INCOMPLETE)
        kept = cut(text, self._stop_strings)
        if len(kept) < len(text):
            self._advance(kept)
            return True
        if self._tokenizer.clean_up_tokenization_spaces:  # a sign that follows takes the space away
            text = text[: max(0, text.rfind(" "))]
        self._advance(text[: len(text) - held_back(text, self._stop_strings)])
        return False

    def finish(self, ids: Sequence[int]) -> None:
        """Extend the text to that of all tokens, after which no others come."""
        self._advance(cut(self._decode(spoken(self._tokenizer, ids)), self._stop_strings))

    def next_text(self) -> str:
        """What the text has gained since the last call."""
        gained = self.text[self._num_given :]
        self._num_given = len(self.text)
        return gained

    def _so_far(self, ids: Sequence[int]) -> str:
        """The text of all ids, of which only the last are decoded: decoding all every time would take T² steps."""
        fresh = self._decode(ids[self._start :])
        text = self._before + fresh[len(self._context) :]
        is_settled = not fresh.endswith(_INCOMPLETE) and not self._tokenizer.clean_up_tokenization_spaces
        if not is_settled or len(ids) - self._read < _WINDOW:
            return text
        context = self._decode(ids[self._read :])
        if context.strip():
            self._start = self._read
            self._read = len(ids)
            self._before = text
            self._context = context
        return text

    def _advance(self, text: str) -> None:
        if len(text) > len(self.text):
            self.text = text

    def _settled(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids without the byte tokens at their end, whose characters one more byte may change."""
        end = len(ids)
        while end and _BYTE.fullmatch(str(self._tokenizer.convert_ids_to_tokens(int(ids[end - 1])))):
            end -= 1
        return ids[:end]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
