"""The exception that ended a script is found, whatever launchers and peers print around it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.supervisor.heard import heard

ENDS = yaml.safe_load(Path(__file__).with_name("ends.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end["told"])
def test_the_exception_is_found(end: dict[str, str]) -> None:
    evidence = heard(*end["output"].splitlines())
    assert evidence.exception == end["told"]
    assert evidence.last_words == end["told"]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("half way\nno such luck", "no such luck"),
        ("no weights\nwandb: 🚀 View run at https://wandb.ai/a/b/runs/c\n======\n", "no weights"),
        ("Error: 3\nSet the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace.", "Error: 3"),
        ("/x/a.py:3: UserWarning: old\n  warnings.warn('old')\ndone: nothing", "done: nothing"),
        ("    except ValueError: pass\n    raise Boom", "raise Boom"),
        ("", "it said nothing"),
    ],
)
def test_without_an_exception_the_last_words_count(output: str, words: str) -> None:
    evidence = heard(*output.splitlines())
    assert evidence.exception is None
    assert evidence.last_words == words


def test_an_exception_of_long_ago_did_not_end_the_script() -> None:
    evidence = heard("Traceback (most recent call last):", "KeyError: 3", *["next epoch"] * 1000)
    assert evidence.exception is None
    assert evidence.last_words == "next epoch"
