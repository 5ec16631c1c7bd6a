"""Mutated configurations and command lines: each gives a valid Config or a ConfigError, nothing else."""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ci_llm.config import Config, load_config
from ci_llm.config.foreign import ALIASES, NO_EFFECT, TRANSLATIONS, UNSUPPORTED
from ci_llm.errors import ConfigError

PRESETS = Path(__file__).parents[2] / "configs"
NAMES = [
    *Config.model_fields,
    *ALIASES,
    *TRANSLATIONS,
    *UNSUPPORTED,
    *NO_EFFECT,
    "config",
    "<<",
    "",
    "no_compile",
    "training.lr",
    "Seed",
    "ключ",
]
VALUES = [
    *("", "null", "~", "none", "true", "no", "on", "0", "-1", "0123", "1", "2", "4.0", "1e-4", "1e999"),
    *(".nan", ".inf", "9" * 5000, "1_000", "0x10", "٣", "11:55:00", "1h30m", "90:61", "2000-01-01", "fp16"),
    *("swd", "auto", "latest", "[]", "[a, b]", "[1, [2]]", "{a: 1}", "{", "[", "'", '"', "&a [*a]"),
    *("*a", "!!python/name:os.system x", "!x y", "|", "> a", "q_proj,v_proj", "wandb,mlflow", "a: b", "# c"),
    *("../x", "/dev/null", "\x00", "\x85", "\udcff", "🦙", "\t"),
]  # fmt: skip
NOISE = [*"\x00\t:#[{'\"&*!%|-\n \x85\ufeffé=,"]


@dataclass
class Outcome:
    """How many cases were valid configurations, and how many were refused in words."""

    valid: int = 0
    refused: int = 0


def fuzz(cases: int, seed: int) -> Outcome:
    """Runs `cases` random cases.

    Raises:
        AssertionError: an error without words, or a valid Config that its own dump does not give back.
        Exception: whatever `load_config` raised that is no ConfigError, which is the finding.
    """
    chance = random.Random(seed)
    bases = [path.read_text(encoding="utf-8") for path in sorted(PRESETS.glob("*.yaml"))]
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.yaml")
        for _ in range(cases):
            text = mutate(chance.choice(bases), chance)
            path.write_bytes(text.encode("utf-8", errors=chance.choice(["replace", "surrogatepass"])))
            _try(path, arguments(chance), outcome)
    return outcome


def mutate(text: str, chance: random.Random) -> str:
    """The text after none to two random edits of lines and characters."""
    lines = text.splitlines()
    for _ in range(chance.randrange(3)):
        place = chance.randrange(len(lines))
        edit = chance.randrange(5)
        if edit == 0:
            lines[place] = f"{chance.choice(NAMES)}: {chance.choice(VALUES)}"
        elif edit == 1:
            lines.insert(place, chance.choice(lines))
        elif edit == 2:
            lines[place] = lines[place].partition(":")[0] + ": " + chance.choice(VALUES)
        elif edit == 3:
            lines[place] = "  " + lines[place]
        else:
            column = chance.randrange(len(lines[place]) + 1)
            lines[place] = lines[place][:column] + chance.choice(NOISE) + lines[place][column + 1 :]
    return "\n".join(lines)


def arguments(chance: random.Random) -> list[str]:
    """None, one or two words and pairs of a command line."""
    forms = ("{0}={1}", "--{0}={1}", "--{0}|{1}", "--{0}", "{1}")
    words = []
    for _ in range(chance.randrange(3)):
        words += chance.choice(forms).format(chance.choice(NAMES), chance.choice(VALUES)).split("|")
    return words


def _try(path: Path, words: list[str], outcome: Outcome) -> None:
    try:
        config = load_config(path, words)
    except ConfigError as error:
        if not error.what or not (error.where or "problems" in error.what):
            raise AssertionError("an error without words or place") from error
        outcome.refused += 1
        return
    path.write_text(config.dump(), encoding="utf-8")
    assert load_config(path).model_dump() == config.model_dump()
    outcome.valid += 1
