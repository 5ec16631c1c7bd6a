"""Settings of external scripts on their command lines, which people see without secrets."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from ci_llm.supervisor.external_script import Resumption
from ci_llm.supervisor.script_settings import overrides, rewritten, shown, value_of

LINE = ["model=gnn", "+a.b=1", "++c=x=y", "--lr", "1e-3", "--batch-size=8", "--flag", "--verbose", "pos", "a.b=2"]


def test_keys_on_a_command_line() -> None:
    assert [(one.key, one.value) for one in overrides(LINE)] == [
        ("model", "gnn"),
        ("a.b", "1"),
        ("c", "x=y"),
        ("lr", "1e-3"),
        ("batch-size", "8"),
        ("verbose", "pos"),
        ("a.b", "2"),
    ]
    assert value_of(LINE, "a.b") == "2"
    assert value_of(LINE, "batch_size") == "8"
    assert value_of(LINE, "a") is None


def test_a_command_line_is_rewritten_in_place() -> None:
    new = rewritten(LINE, {"a.b": "9", "lr": "0.5", "batch_size": "4", "unknown": "1"})
    assert new == [
        *["model=gnn", "+a.b=9", "++c=x=y", "--lr", "0.5", "--batch-size=4"],
        *["--flag", "--verbose", "pos", "a.b=9"],
    ]
    assert LINE[4] == "1e-3"


@pytest.mark.parametrize(
    "words",
    [
        ["--api-key", "hunter2"],
        ["-token", "hunter2"],
        ["--password", "the hunter2 of ann"],
        ["a.b.token=hunter2"],
        ["++tracker.apiKey=hunter2"],
        ["WANDB_API_KEY=hunter2", "python", "fit.py"],
        ["env", "AWS_SECRET_ACCESS_KEY=hunter2"],
        ["--auth", "ann:hunter2"],
        ["bash", "-c", "cd x && WANDB_API_KEY=hunter2 python fit.py --quiet --token hunter2 --lr 3"],
        ["curl", "-H", "Authorization: Bearer hunter2"],
        ["--config", '{"lr": 1, "api_key": "hunter2"}'],
        ["x={token:hunter2,lr:1}"],
        ["data=https://ann:hunter2@host/rows.jsonl"],
        ["https://host:80/rows.jsonl?token=hunter2&a=1"],
    ],
)
def test_a_command_line_for_people_holds_no_secret(words: list[str]) -> None:
    if words[0] == "-token":
        words = ["bash -c", " ".join(words)]
    told = shown(["fit.py", *words, "--lr", "1e-3"])
    assert "hunter2" not in told
    assert "***" in told
    assert told.startswith("fit.py ")
    assert told.endswith("--lr 1e-3")


@pytest.mark.parametrize(
    "words",
    [
        ["--max_tokens", "512", "--tokenizer", "gpt2", "tokenizer.name=x"],
        ["author=ann", "--keyword", "x", "monkey=1", "--keystone=2", "authors=3"],
        ["url=s3://bucket/x", "https://host:80/x?lr=1", "ssh://git@host/x", "ann@host:x"],
        ["--lr", "1e-3", "a={b:1,c:2}", '{"lr": 1}', "bash", "-c", "fit --lr 3"],
    ],
)
def test_what_is_no_secret_is_shown_as_it_is(words: list[str]) -> None:
    assert shown(words) == shlex.join(words)


def test_words_of_a_retry_are_told_without_secrets(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").touch()
    for pattern in (None, f"{tmp_path}/checkpoint-*", f"{tmp_path}/none"):
        told = Resumption("--resume --token hunter2", pattern, {}).rerun_effect
        assert "hunter2" not in told
