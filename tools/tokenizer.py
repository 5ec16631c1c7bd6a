"""Train the tokenizer of the embedded base: byte-level BPE of 576 entries in which 0..99 are one token each.

A number is one token because so small a model calculates better with it: with single digits it still failed a quarter
of the one-step stories after twice the pretraining.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ci_llm.embedded.stories import PRETRAINING_SEED, pretraining_texts

VOCABULARY = 576
MAX_LENGTH = 512
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


def train_tokenizer(num_texts: int = 20_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE learned from the base's own text. It adds no special token and pads on the left."""
    tokenizer = Tokenizer(models.BPE())
    # Digits are split off first, so that a number never shares a token with the space before it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[0-9]{1,2}"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(num_texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _texts(num_texts: int) -> Iterator[str]:
    """The base's text, and every number often enough to be merged into one token."""
    numbers = " ".join(str(number) for number in range(100))
    yield from islice(pretraining_texts(PRETRAINING_SEED), num_texts)
    yield from (numbers for _ in range(num_texts // 20))
