"""The text that the embedded base was pretrained on: equations, and stories easier than those its agents learn.

It is a pure function of a seed.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from ci_llm.embedded import (
    ASK,
    DISTRACTION,
    LARGEST,
    PLACES,
    START,
    TIMES,
    Kind,
    draw_names,
    operate,
    story,
)

KNOWN_VERBS = {
    "+": (
        "{name} buys {by} more.",
        "{friend} gives {name} {by} more.",
        "{name} finds {by} more.",
        "{name} gets {by} from {friend}.",
    ),
    "-": (
        "{name} gives {by} to {friend}.",
        "{name} loses {by}.",
        "{name} sells {by}.",
        "{friend} takes {by} away.",
    ),
    "*": TIMES,
}
PRETRAINING = Kind((1, 1, 2, 2, 3), "+-", KNOWN_VERBS, distraction=0.15, largest_start=25)
PRETRAINING_SEED = 7


def pretraining_texts(seed: int) -> Iterator[str]:
    """Yield the base's text without end: bare and chained equations, stories with their solutions, and narratives."""
    rng = Random(seed)
    kinds = (_equations, _chain, _solved_story, _narrative)
    while True:
        yield rng.choices(kinds, weights=(15, 17, 63, 5))[0](rng)


def equation(rng: Random) -> str:
    """One sum, difference or product, drawn with weights 42, 43 and 15."""
    operation = rng.choices("+-*", weights=(42, 43, 15))[0]
    if operation == "+":
        total = rng.randint(2, LARGEST)
        part = rng.randint(1, total - 1)
        return f"{part}+{total - part}={total}"
    if operation == "-":
        total = rng.randint(2, LARGEST)
        part = rng.randint(1, total - 1)
        return f"{total}-{part}={total - part}"
    times = rng.randint(2, 5)
    part = rng.randint(1, LARGEST // times)
    return f"{part}*{times}={part * times}"


def _equations(rng: Random) -> str:
    return " ".join(equation(rng) for _ in range(rng.randint(4, 8)))


def _chain(rng: Random) -> str:
    """Equations in which each result is the first operand of the next."""
    value = rng.randint(3, 25)
    links = []
    for _ in range(rng.randint(2, 5)):
        operation, by, result = operate(rng, value, "++--*")
        links.append(f"{value}{operation}{by}={result}")
        value = result
    return " ".join(links)


def _solved_story(rng: Random) -> str:
    return "\n".join(story(rng, PRETRAINING))


def _narrative(rng: Random) -> str:
    """Five sentences about the same persons and things, without a question that they answer."""
    names = draw_names(rng)
    numbers = {key: rng.randint(2, 99) for key in ("start", "by", "noise")}
    sentences = (*START, *KNOWN_VERBS["+"], *KNOWN_VERBS["-"], *TIMES, *DISTRACTION, *ASK)
    place = rng.choice(PLACES)
    return " ".join(rng.choice(sentences).format(place=place, **numbers, **names) for _ in range(5))
