"""The common parts of benchmarks: rows as long as those of GSM8K, variants that take turns, ratios paired by turn.

On a machine that others use as well, two variants measured one after the other see two machines. Here each input
goes through all variants before the next one comes, and the one that begins rotates. CPU time of the process is the
figure to trust; wall time stands beside it.

The rows come from a copy of the data set, or from a table of its lengths. The tokenizer is a byte-level BPE trained on
the training split, every digit a token of its own as in Llama 2 and Gemma. So counted, a row has 190 tokens on average,
median 177, 90 % below 283, 99 % below 396, at most 538; 64 % of the tokens are targets.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ci_llm.config import Config
from ci_llm.data.batches import Batch, pack
from ci_llm.data.encoder import Example
from ci_llm.data.rows import Chat, question_of
from ci_llm.data.sources import load_rows

T = TypeVar("T")
Name = TypeVar("Name")

# Turns and ratios


@dataclass(frozen=True)
class Cost:
    """One call: CPU seconds of this process, all threads together, and seconds on the clock."""

    cpu_s: float
    wall_s: float


Costs = dict[str, list[Cost]]


def turn(names: Sequence[Name], number: int) -> list[Name]:
    """The order of a turn: the one that begins rotates."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def take_turns(variants: Mapping[Name, Callable[[T], object]], inputs: Sequence[T]) -> dict[Name, list[Cost]]:
    """The cost of every variant on every input, in the order of the inputs."""
    names = list(variants)
    costs: dict[Name, list[Cost]] = {name: [] for name in variants}
    for number, item in enumerate(inputs):
        for name in turn(names, number):
            costs[name].append(_timed(variants[name], item))
    return costs


def _timed(call: Callable[[T], object], item: T) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    call(item)
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


def median_cost(costs: Sequence[Cost]) -> Cost:
    """Medians of both clocks, each on its own."""
    return Cost(statistics.median(c.cpu_s for c in costs), statistics.median(c.wall_s for c in costs))


def cpu_ratios(slow: Sequence[Cost], fast: Sequence[Cost]) -> list[float]:
    """The ratios of the CPU time of `slow` to that of `fast`, one per input, in ascending order."""
    return sorted(one.cpu_s / other.cpu_s for one, other in zip(slow, fast, strict=True))


def median_and_range(ratios: Sequence[float]) -> str:
    """For a table: median (lowest to highest)."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


# Rows

VOCABULARY = 32_000
LONGEST = 512
# tokens:targets of a hundred training rows, evenly spread over the rows sorted by length
LENGTHS = """
86:36 92:53 97:50 100:58 103:50 106:64 108:64 111:72 113:58 115:64 117:82 119:67 121:71 122:63 124:64 125:68 127:65
129:76 130:70 132:83 134:80 135:90 137:87 138:107 139:84 141:86 142:85 144:88 145:79 146:101 148:102 150:77 151:93
152:94 154:86 155:97 157:95 158:97 160:91 161:97 163:84 164:94 166:96 167:108 169:96 171:122 172:113 174:112 175:106
177:99 178:120 180:128 182:133 184:111 185:118 187:109 189:122 190:127 192:126 194:109 196:138 198:149 200:105
202:108 204:138 206:123 208:152 210:140 212:140 215:148 217:155 219:130 221:149 224:165 226:146 228:170 231:156
233:158 236:135 239:180 242:146 245:200 248:108 251:170 256:138 260:167 263:167 268:165 274:218 280:174 285:187
291:181 298:201 306:206 315:250 323:199 335:238 350:272 373:261 428:346
"""


def batches(dataset: Path | None, rows: int, count: int, seed: int = 0) -> list[Batch]:
    """`count` packed batches of `rows` rows each, drawn at random from `dataset`, or from the table if it is None."""
    examples = list(_from_table(seed) if dataset is None else _from_dataset(dataset))
    chance = random.Random(seed)
    drawn = ([chance.randrange(len(examples)) for _ in range(rows)] for _ in range(count))
    return [pack([examples[i] for i in ids], ids) for ids in drawn]


def _from_table(seed: int) -> Iterator[Example]:
    chance = np.random.default_rng(seed)
    for entry in LENGTHS.split():
        length, targets = map(int, entry.split(":"))
        yield _example(chance.integers(3, VOCABULARY, length), targets)


def _from_dataset(dataset: Path) -> Iterator[Example]:
    questions, answers = texts(dataset)
    tokenizer = trained_tokenizer([*questions, *answers])
    begin, end = (tokenizer.token_to_id(word) for word in ("<s>", "</s>"))
    for asked, said in zip(tokenizer.encode_batch(questions), tokenizer.encode_batch(answers), strict=True):
        yield _example([begin, *asked.ids, *said.ids, end], len(said.ids) + 1)


def texts(dataset: Path) -> tuple[list[str], list[str]]:
    """The questions and the answers of the training split."""
    rows = load_rows(Config(dataset_name=str(dataset)), "train")
    chats = [row for row in rows if isinstance(row, Chat)]
    answers = [f" {chat.messages[-1].content}" for chat in chats]
    return [f"Question: {question_of(chat)}\nAnswer:" for chat in chats], answers


def _example(ids: Sequence[int] | np.ndarray, targets: int) -> Example:
    supervised = np.arange(len(ids)) >= len(ids) - targets
    return Example(np.asarray(ids, dtype=np.int32)[:LONGEST], supervised[:LONGEST])


def trained_tokenizer(texts: Sequence[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """The byte-level BPE of `texts`, every digit a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, special_tokens=["<pad>", "<s>", "</s>"], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
