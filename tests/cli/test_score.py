"""`ci-llm score`: what heads say about texts and answers, for people and scripts; a bad call is one message."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ci_llm import Crowd
from ci_llm.base.load import load_base
from ci_llm.cli import main
from ci_llm.data.prompts import Prompter
from ci_llm.embedded import BASE_FOLDER
from ci_llm.lora.settings import LoraSettings

pytestmark = pytest.mark.slow

TEXTS = ["Ann has 3 pens.", "Ben has 9."]


def save(folder: Path, outputs: int) -> None:
    base = load_base("embedded")
    crowd = Crowd(base.model, LoraSettings(num_agents=2, outputs=outputs), str(BASE_FOLDER), base.pad_id).eval()
    crowd.prompter = Prompter(AutoTokenizer.from_pretrained(BASE_FOLDER), "text")
    crowd.classes, crowd.reads_pairs = (("yes", "no") if outputs == 2 else ()), outputs == 1
    crowd.save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    for name, outputs in (("reward", 1), ("classes", 2), ("writers", 0)):
        save(root / name, outputs)
    return {name: root / name for name in ("reward", "classes", "writers")}


def called(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main.main([*map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


def objects(capsys: pytest.CaptureFixture[str], *words: object) -> list[dict[str, Any]]:
    code, out, _ = called(capsys, "score", *words, "--json")
    assert code == 0
    return [json.loads(line) for line in out.splitlines()]


def test_texts_are_read_from_a_call_a_file_and_a_stream(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = folders["classes"]
    wanted = Crowd.from_pretrained(run).score(TEXTS)
    found = objects(capsys, run, *TEXTS)
    assert [row["text"] for row in found] == TEXTS
    assert [tuple(row["scores"]) for row in found] == [own.scores for own in wanted]
    assert {*found[0]} == {"text", "scores", "mean", "std", "lower", "label", "probabilities", "abstained"}
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"label": 1, "text": text}) + "\n" for text in TEXTS))
    (tmp_path / "rows.csv").write_text("id,Sentence\n1,Ann has 3 pens.\n2,Ben has 9.\n")
    for name in ("texts.txt", "rows.jsonl", "rows.csv"):
        assert objects(capsys, run, "--file", tmp_path / name) == found, name
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(TEXTS)))
    assert objects(capsys, run, "-") == found


def test_a_terminal_shows_a_line_for_each_text(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = called(capsys, "score", folders["classes"], TEXTS[0])
    assert out.startswith(("yes ", "no "))
    assert out.endswith(f"  {TEXTS[0]}\n")
    _, out, _ = called(capsys, "score", folders["classes"], TEXTS[0], "--abstain-below", 0.999)
    assert out.startswith("[unsure]")
    _, out, _ = called(capsys, "score", folders["reward"], TEXTS[0])
    assert "agents" in out


def test_answers_are_scored_beside_their_prompts(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2 + 2?\\n", "chosen": "4", "rejected": "5"}\n')
    [found] = objects(capsys, folders["reward"], "--file", tmp_path / "rows.jsonl")
    assert (found["prompt"], found["answer"]) == ("2 + 2?\n", "4")
    [wanted] = Crowd.from_pretrained(folders["reward"]).score("2 + 2?\n", "4")
    assert found["lower"] == wanted.lower
    assert {*found} == {"prompt", "answer", "scores", "mean", "std", "lower"}, "rewards have no classes"
    code, _, said = called(capsys, "score", folders["classes"], "--file", tmp_path / "rows.jsonl")
    assert code == 2
    assert "and not answers to prompts" in said
    assert "objective=reward" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("score", "classes"), "there is no text"),
        (("score", "classes", "a", "--file", "b"), "both given"),
        (("score", "reward", "a", "--abstain-below", "0.5"), "abstain_below is a probability of a class"),
        (("score", "writers", "a"), "these agents have no heads"),
        (("generate", "classes", "a"), "these agents have heads"),
        (("chat", "classes"), "these agents have heads"),
        (("serve", "classes", "--port", "0"), "these agents have heads"),
        (("export", "classes", "--merge", "svd", "--to", "x"), "agents with heads are not merged"),
        (("export", "classes", "--agent", "0", "--into-base", "--to", "x"), "agents with heads are neither"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_bad_call_is_one_message(
    words: tuple[str, ...], message: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, said = called(capsys, *(folders.get(word, word) for word in words))
    assert code == 2
    assert message in said
    assert out == ""
