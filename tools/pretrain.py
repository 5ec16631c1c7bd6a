"""Make the embedded base: `python -m tools.pretrain [--out DIR]`, two minutes on two cores.

Tokenizer, text, initial weights and order follow from fixed seeds, and the budget is a number of steps. A second run on
the same machine gives the same files byte for byte; on another machine the base differs by rounding.

Legend: B rows, T tokens per row, V vocabulary.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

from ci_llm.embedded import BASE_FOLDER
from tools.pretraining_text import PRETRAINING_SEED, pretraining_texts

VOCABULARY = 576
MAX_LENGTH = 512
PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
STEPS, WARMUP_STEPS = 1500, 100
ROWS, LENGTH = 24, 88
LEARNING_RATE = 3e-3
# Results and answers can be predicted; names, objects and verbs cannot, so they weigh less.
WEIGHT_ELSEWHERE = 0.25


def main() -> None:
    """Train tokenizer and base, and save both."""
    parser = argparse.ArgumentParser(prog="python -m tools.pretrain", description=__doc__)
    parser.add_argument("--out", type=Path, default=BASE_FOLDER, help="folder to write (default: the package's own)")
    out: Path = parser.parse_args().out
    tokenizer = train_tokenizer()
    model = pretrain(tokenizer)
    save(model, tokenizer, out)
    print(f"saved to {out}")


def train_tokenizer(num_texts: int = 20_000) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 576 entries learned from the base's own text. It adds no special token and pads on the left.

    Each of 0 to 99 is one token: with single digits so small a model still failed a quarter of the one-step stories
    after twice the pretraining.
    """
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


def new_base(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """An untrained Llama of 877,696 parameters."""
    torch.manual_seed(PRETRAINING_SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        attn_implementation="eager",  # on a CPU twice as fast as sdpa at this length
    )
    return LlamaForCausalLM(config)


def pretrain(tokenizer: PreTrainedTokenizerFast, steps: int = STEPS) -> LlamaForCausalLM:
    """Train a new base under bf16 autocast for `steps` optimizer steps of ROWS rows of LENGTH tokens."""
    model = new_base(tokenizer).train()
    optimizer = torch.optim.AdamW(_groups(model), lr=LEARNING_RATE, betas=(0.9, 0.98), fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP_STEPS, steps)
    ids, weights = text(tokenizer, steps * ROWS * (LENGTH + 1))
    batches = zip(ids.view(steps, ROWS, LENGTH + 1), weights.view(steps, ROWS, LENGTH + 1), strict=True)
    start = time.monotonic()
    for step, (batch, weight) in enumerate(batches, start=1):
        loss = weighted_loss(model, batch, weight)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step} of {steps}  loss {loss.item():.4f}  {time.monotonic() - start:.0f} s", flush=True)
    return model.eval()


def text(tokenizer: PreTrainedTokenizerFast, num_tokens: int) -> tuple[Tensor, Tensor]:
    """The first tokens of the pretraining text and the loss weight of each: int64, fp32 [num_tokens]."""
    ids: list[int] = []
    weights: list[float] = []
    texts = pretraining_texts(PRETRAINING_SEED)
    while len(ids) < num_tokens:
        for encoded in tokenizer(list(islice(texts, 1000)))["input_ids"]:
            document = [tokenizer.bos_token_id, *encoded, tokenizer.eos_token_id]
            ids += document
            weights += token_weights(tokenizer, document)
    return torch.tensor(ids[:num_tokens]), torch.tensor(weights[:num_tokens])


def token_weights(tokenizer: PreTrainedTokenizerFast, document: list[int]) -> list[float]:
    """The loss weight of each token as a target.

    It is 1 for a token after the question, for the result of an equation and for the token that ends the result.
    """
    newline, equals = tokenizer.convert_tokens_to_ids(["Ċ", "="])
    weights = []
    answering = False
    for position, token in enumerate(document):
        counts = answering or equals in document[max(position - 2, 0) : position]
        weights.append(1.0 if counts else WEIGHT_ELSEWHERE)
        answering = answering or token == newline
    return weights


def weighted_loss(model: LlamaForCausalLM, batch: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean of the next-token cross-entropy, [] in nats.

    Args:
        batch: [B, T + 1] token ids.
        weight: [B, T + 1] loss weight of each token as a target.
    """
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits  # [B, T, V]
    losses = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
    kept = weight[:, 1:].flatten()
    return (losses * kept).sum() / kept.sum()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write fp32 safetensors, configs and tokenizer."""
    model.generation_config = GenerationConfig(
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _groups(model: LlamaForCausalLM) -> list[dict[str, object]]:
    """Parameter groups of the optimizer: weight decay acts on matrices and not on norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]


if __name__ == "__main__":
    main()
