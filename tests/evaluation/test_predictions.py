"""A predictions file is appended durably, continues after a kill, and is never mixed with answers of something else."""

from __future__ import annotations

import errno
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ci_llm.errors import BadInput
from ci_llm.evaluation import predictions
from ci_llm.evaluation.predictions import Source, open_predictions, source_path
from tools.testbed.forkserver import ForkServer

SOURCE = Source("w1", "q1", "step 7 of run", "my.jsonl", 3, "exact_match", "probability", 256)
PROMPTS = ["a", "b\u2028ü", "c"]


def line(number: int) -> dict[str, Any]:
    return {"prompt": PROMPTS[number], "answer": "1\n2", "correct": number == 1}


def opened(path: Path, source: Source = SOURCE, **how: Any) -> list[dict[str, Any]]:
    with open_predictions(path, source, PROMPTS, **how) as found:
        return list(found.rows)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two of three lines."""
    path = tmp_path / "new" / "predictions.jsonl"
    with open_predictions(path, SOURCE, PROMPTS) as found:
        assert found.rows == []
        found.append([line(0)])
        found.append([line(1)])
    return path


def test_lines_are_plain_json_and_stay(path: Path) -> None:
    assert [json.loads(text) for text in path.read_text().split("\n")[:-1]] == [line(0), line(1)]
    assert opened(path) == [line(0), line(1)]
    assert json.loads(source_path(path).read_text())["data"] == "my.jsonl"


@pytest.mark.parametrize("rest", [b'{"prompt": "c", "ans', b"\xc3", b'{"prompt": "c"}'])
def test_a_line_that_was_cut_is_removed(path: Path, rest: bytes) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole + rest)
    with open_predictions(path, SOURCE, PROMPTS) as found:
        assert found.rows == [line(0), line(1)]
        assert path.read_bytes() == whole
        found.append([line(2)])
    assert opened(path) == [line(0), line(1), line(2)]


def test_another_place_of_the_same_weights_and_rows_is_the_same_source(path: Path) -> None:
    assert len(opened(path, replace(SOURCE, checkpoint="step 7 of copy", data="copy.jsonl"))) == 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weights": "w2", "checkpoint": "step 9 of run"}, "checkpoint step 7 of run and not step 9 of run"),
        ({"questions": "q2", "data": "other.jsonl"}, "data my.jsonl and not other.jsonl"),
        ({"metric": "string_match"}, "metric exact_match and not string_match"),
        ({"aggregator": "logit"}, "aggregator probability and not logit"),
        ({"max_new_tokens": 9}, "max_new_tokens 256 and not 9"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "/".join(value),
)
def test_answers_of_something_else_are_refused_and_stay(path: Path, change: dict[str, Any], told: str) -> None:
    before = path.read_bytes(), source_path(path).read_bytes()
    other = replace(SOURCE, **change)
    with pytest.raises(BadInput, match=told) as refusal:
        opened(path, other)
    assert refusal.value.hint is not None
    assert "--output" in refusal.value.hint
    assert "--overwrite" in refusal.value.hint
    assert (path.read_bytes(), source_path(path).read_bytes()) == before
    assert opened(path, other, overwrite=True) == []
    assert opened(path, other) == []


@pytest.mark.parametrize("content", [b"my notes\n", b""])
def test_a_file_that_no_evaluation_wrote_is_refused_and_stays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=r"notes\.source\.json is not beside it"):
        opened(path)
    assert path.read_bytes() == content
    assert opened(path, overwrite=True) == []


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not the predictions file"):
        opened(tmp_path, overwrite=True)
    assert tmp_path.is_dir()


@pytest.mark.parametrize("broken", [b'{"prompt": "z"}\n', b"no json\n", b"\xff\n", b'["a"]\n'])
def test_a_damaged_line_is_named(path: Path, broken: bytes) -> None:
    path.write_bytes(path.read_bytes() + broken)
    with pytest.raises(BadInput, match="not a prediction") as refusal:
        opened(path)
    assert refusal.value.where == f"{path}:3"


def test_more_lines_than_questions_are_damage(path: Path) -> None:
    path.write_text("".join(json.dumps(line(0)) + "\n" for _ in range(2)))
    with pytest.raises(BadInput, match="not a prediction"):
        opened(path)


def test_a_damaged_source_is_named(path: Path) -> None:
    source_path(path).write_text("{")
    with pytest.raises(BadInput, match=r"predictions\.source\.json cannot be read"):
        opened(path)


def evaluate_beside(path: str) -> int:
    """A trial for the fork server: the file is another evaluation's."""
    for how in ({}, {"overwrite": True}):
        with pytest.raises(BadInput, match="another process"):
            opened(Path(path), **how)
    return 0


def test_a_second_evaluation_at_the_same_time_is_refused(path: Path, server: ForkServer, tmp_path: Path) -> None:
    with open_predictions(path, SOURCE, PROMPTS):
        assert server.run(evaluate_beside, log := tmp_path / "log", path=str(path)) == [0], log.read_text()
    assert len(opened(path)) == 2


def test_a_line_that_cannot_be_written_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with open_predictions(path, SOURCE, PROMPTS) as found:
        monkeypatch.setattr(predictions, "append", refuse)
        with pytest.raises(BadInput, match="cannot be written: No space left on device"):
            found.append([line(2)])
    assert len(opened(path)) == 2


def test_an_error_of_the_evaluation_itself_is_not_taken_for_the_file_s(path: Path) -> None:
    with pytest.raises(OSError, match="of the model"), open_predictions(path, SOURCE, PROMPTS):
        raise OSError("of the model")


def test_names_with_dots_have_records_of_their_own(tmp_path: Path) -> None:
    names = ("out-0.5", "out-0.7", "a.dev.jsonl", "a.test.jsonl")
    assert len({source_path(tmp_path / name) for name in names}) == 4
    assert source_path(tmp_path / "predictions.jsonl").name == "predictions.source.json"
