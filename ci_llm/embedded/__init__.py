"""A tiny base model with a task for it, so that a first run needs no network.

    BASE_FOLDER           a Llama of 877,696 parameters and its tokenizer; `from_pretrained` opens it
    rows("train")         1,500 rows of question and answer, as in GSM8K; "validation" has 320, "test" 1,000

The task is stories in arithmetic. A person has some things, things come and go, and the question is how many are left.
Every number in an equation is from 1 to 30, and an answer solves the story line by line, as in GSM8K:

    Ann has 5 pens. Ann makes it 3 times as many. Ben hands over 2. How many pens are left?
    5*3=15
    15+2=17
    #### 17

The base was pretrained on easier text of the same grammar (`tools/pretraining_text.py`). Its agents have to learn what
that text does not have: new verbs, and multiplication in the solution of a story (the base has seen multiplication in
bare equations only). Everything here is a pure function of a seed, and this file loads neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from random import Random

from ci_llm.errors import DataError

BASE_FOLDER = Path(__file__).parent / "base"

LARGEST = 30

# fmt: off
NAMES = (
    "Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kim", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Vic",
)
THINGS = (
    "apples", "pens", "books", "coins", "cards", "shells", "stamps", "eggs", "cups", "balls",
    "keys", "hats", "nuts", "rocks", "toys", "figs",
)
PLACES = (
    "park", "shop", "school", "lake", "farm", "market", "beach", "station",
)
# fmt: on

START = (
    "{name} has {start} {things}.",
    "There are {start} {things} in the box of {name}.",
    "{name} starts with {start} {things}.",
)
ASK = ("How many {things} does {name} have now?", "How many {things} are left?")
DISTRACTION = (
    "{name} walks to the {place}.",
    "{friend} goes home.",
    "The day is warm.",
    "{friend} has {noise} {others}.",
    "{name} is {noise} years old.",
)
TIMES = ("Then the number becomes {by} times as big.", "{name} makes it {by} times as many.")
NEW_VERBS = {
    "+": ("{name} wins {by}.", "{friend} hands over {by}.", "{by} come in the mail."),
    "-": ("{name} breaks {by}.", "{name} throws {by} out.", "{by} are stolen."),
    "*": TIMES,
}


@dataclass(frozen=True)
class Kind:
    """A kind of story.

    Attributes:
        steps: the numbers of operations to draw from; a repeated number is drawn more often.
        operations: the characters of operations to draw from.
        verbs: the sentences for each operation.
        distraction: the probability of a sentence without meaning for the answer, before each step.
        largest_start: the first number is drawn from 3 to this.
    """

    steps: tuple[int, ...]
    operations: str
    verbs: dict[str, tuple[str, ...]]
    distraction: float
    largest_start: int


TASK = Kind((2, 3), "+-*", NEW_VERBS, distraction=0.25, largest_start=15)

# The seed and the size of each split of the agents' task. Take a new seed for the test once a choice has been made by
# looking at test rows, because their figures are then no longer a test.
SPLITS = {"train": (11, 1500), "validation": (12, 320), "test": (481_516_234, 1000)}


def rows(split: str) -> list[dict[str, str]]:
    """The agents' task: rows of "question" and "answer". No question is in two splits.

    Args:
        split: train, validation or test.

    Raises:
        DataError: there is no such split.
    """
    if split not in SPLITS:
        raise DataError(f"the embedded stories have no split {split!r}", hint=f"use one of {', '.join(SPLITS)}")
    return [dict(row) for row in _rows(split)]


@cache
def _rows(split: str) -> list[dict[str, str]]:
    earlier = takewhile(lambda name: name != split, SPLITS)
    seed, count = SPLITS[split]
    return task_rows(seed, count, exclude={row["question"] for name in earlier for row in _rows(name)})


def task_rows(seed: int, count: int, exclude: Collection[str] = frozenset()) -> list[dict[str, str]]:
    """`count` rows of the agents' task with different questions, none of them in `exclude`."""
    rng = Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        question, answer = story(rng, TASK)
        if "*" in answer and question not in found and question not in exclude:
            found[question] = answer
    return [{"question": question, "answer": answer} for question, answer in found.items()]


def story(rng: Random, kind: Kind) -> tuple[str, str]:
    """A question, and its answer, which ends with `#### n`."""
    names = draw_names(rng)
    value = rng.randint(3, kind.largest_start)
    sentences = [rng.choice(START).format(start=value, **names)]
    lines = []
    for _ in range(rng.choice(kind.steps)):
        if rng.random() < kind.distraction:
            text = rng.choice(DISTRACTION)
            sentences.append(text.format(noise=rng.randint(2, 99), place=rng.choice(PLACES), **names))
        operation, by, result = operate(rng, value, kind.operations)
        sentences.append(rng.choice(kind.verbs[operation]).format(by=by, **names))
        lines.append(f"{value}{operation}{by}={result}")
        value = result
    sentences.append(rng.choice(ASK).format(**names))
    return " ".join(sentences), "\n".join([*lines, f"#### {value}"])


def draw_names(rng: Random) -> dict[str, str]:
    """The persons and things of a story."""
    name, friend = rng.sample(NAMES, 2)
    things, others = rng.sample(THINGS, 2)
    return {"name": name, "friend": friend, "things": things, "others": others}


def operate(rng: Random, value: int, operations: str) -> tuple[str, int, int]:
    """An operation on `value`, its second operand and its result.

    If the result of the operation drawn could leave 1..30, another operation takes its place.
    """
    operation = rng.choice(operations)
    if (operation == "+" and value >= LARGEST - 3) or (operation == "*" and value > LARGEST // 2):
        operation = "-"
    if operation == "-" and value <= 4:
        operation = "+"
    if operation == "+":
        by = rng.randint(2, LARGEST - value)
        return operation, by, value + by
    if operation == "-":
        by = rng.randint(2, value - 1)
        return operation, by, value - by
    by = rng.randint(2, min(4, LARGEST // value))
    return operation, by, value * by
