"""Options of all commands: typed with hyphens or with underscores, and shown with hyphens alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci_llm.cli.command import Parser
from ci_llm.cli.main import main
from ci_llm.errors import ConfigError
from ci_llm.evaluation import saved_crowd


@pytest.fixture
def parser() -> Parser:
    made = Parser("ci-llm ask", description="Ask.", epilog="")
    made.add_argument_group("answers").add_argument("--max-new-tokens", type=int)
    made.add_argument("words", nargs="*")
    return made


@pytest.mark.parametrize("typed", [["--max_new_tokens", "8"], ["--max_new_tokens=8"], ["--max-new_tokens=8"]])
def test_options_may_be_typed_with_underscores(typed: list[str], parser: Parser) -> None:
    assert parser.parse_args(typed).max_new_tokens == 8
    assert parser.parse_args(["a_b", *typed, "c_d"]).words == ["a_b", "c_d"]
    assert "max_new_tokens" not in parser.format_help()


def test_a_misspelt_value_is_answered_with_a_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "run", "--to", "a", "--weights", "1,x"]) == 2
    assert "'1,x' is not a list of numbers, such as 0.5,0.5" in capsys.readouterr().err


def test_options_stand_anywhere_among_other_words() -> None:
    parser = Parser("ci-llm ask", description="Ask.", epilog="")
    parser.add_argument("run")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--file", required=False)
    for typed in (["--file", "f", "R", "a", "b"], ["R", "--file", "f", "a", "b"], ["R", "a", "--file", "f", "b"]):
        found = parser.parse_args(typed)
        assert (found.run, found.words, found.file) == ("R", ["a", "b"], "f")
    assert parser.parse_args(["R", "--file", "f", "--", "-5", "--file"]).words == ["-5", "--file"]
    with pytest.raises(ConfigError, match="required: run"):
        parser.parse_args([])


def test_a_nested_verb_takes_options_with_underscores_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoints", "prune", str(tmp_path), "--keep", "1", "--dry_run"]) == 2
    assert "unrecognized" not in capsys.readouterr().err


def test_a_data_set_that_is_not_there_is_refused_before_a_base_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saved_crowd, "evaluate", None)
    assert main(["evaluate", "embedded", "--data", "missing.jsonl"]) == 2
    assert "the data set does not exist\n  where: --data: " in capsys.readouterr().err
