"""`ci-llm generate` answers as `Crowd.generate` does, on a pipe, a terminal and as JSON; a bad call is one message."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from ci_llm import Crowd
from ci_llm.cli import main
from ci_llm.cli.command import to_json
from ci_llm.core.run_status import Status, pid_space
from ci_llm.crowd import given_path
from ci_llm.crowd.uncertainty import Calibration, Logistic
from ci_llm.embedded import BASE_FOLDER, rows
from tests.support.children import Child, command, python
from tests.support.crowds import K, save_crowd
from tools.testbed.forkserver import ForkServer

QUESTIONS = [row["question"] for row in rows("test")[:3]]
SHORT = ["--max-new-tokens", "24"]


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    code = main.main(["generate", *map(str, words)])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    return said.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "choices"),
    [
        ([], {}),
        (["--stop", "####", "--stop", r"=1\n"], {"stop_strings": ["####", "=1\n"]}),
        (
            ["--temperature", "2", "--top-p", "0.9", "--top-k", "40", "--seed", "1"],
            {"do_sample": True, "temperature": 2.0, "top_p": 0.9, "top_k": 40, "seed": 1},
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_pipe_gets_the_answers_of_the_crowd(
    run: Path, crowd: Crowd, tmp_path: Path, options: list[str], choices: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = crowd.generate(QUESTIONS, max_new_tokens=24, **choices)
    file = tmp_path / "questions.txt"
    file.write_text("\n".join(QUESTIONS) + "\n\n")
    assert asked(capsys, run, "--file", file, *SHORT, *options) == "".join(f"{answer}\n" for answer in wanted)
    assert asked(capsys, run, *QUESTIONS, *SHORT, *options) == "".join(f"{answer}\n" for answer in wanted)


@pytest.mark.slow
def test_json_holds_the_fields_of_details(
    run: Path, crowd: Crowd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = crowd.generate(QUESTIONS, details=True, max_new_tokens=24)
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": "left out"}) + "\n" for q in QUESTIONS))
    lines = asked(capsys, run / "final_checkpoint", "--file", file, *SHORT, "--json").splitlines()
    found = [json.loads(line) for line in lines]
    assert [list(answer)[:5] for answer in found] == [["prompt", "answer", "agents", "confidence", "disagreement"]] * 3
    fields = [json.loads(json.dumps(asdict(answer))) for answer in wanted]
    assert all(answer.pop("tokens") for answer in fields)
    assert found == fields


@pytest.mark.slow
def test_a_terminal_shows_how_sure_the_crowd_is(
    run: Path, crowd: Crowd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    [answer] = crowd.generate(QUESTIONS[0], details=True, max_new_tokens=24)
    agree = sum(own == answer.answer for own in answer.agents)
    *text, sure = asked(capsys, run, QUESTIONS[0], *SHORT).splitlines()
    assert "\n".join(text) == answer.answer
    assert sure == (
        f"[confidence {answer.confidence:.2f} ({answer.probability_per_token:.2f} a token), "
        f"{agree} of {K} agents agree, disagreement {answer.disagreement:.3f}]"
    )
    for limit, told_limit in (("3", "3 tokens"), ("1", "1 token")):
        cut = asked(capsys, run, QUESTIONS[0], "--max-new-tokens", limit).splitlines()[-1]
        assert cut.endswith(f", cut after {told_limit}]")
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(QUESTIONS)))
    told = asked(capsys, run, "-", *SHORT).splitlines()
    shown = [line.removesuffix(" ...") for line in told if line.startswith("> ")]
    assert len(shown) == 3
    assert all(f"> {question}".startswith(line) for line, question in zip(shown, QUESTIONS, strict=True))
    assert all(len(line) <= 80 for line in told)


def test_a_chat_with_tools_is_shown_by_its_last_message(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "tools": [{"name": "add"}]}
    file = tmp_path / "chats.jsonl"
    file.write_text(f"{json.dumps(chat)}\n" * 2)
    shown = asked(capsys, run, "--file", file, "--agents", "--max-new-tokens", "1").splitlines()
    prompts = [line.removesuffix(" ...") for line in shown if line.startswith("> ")]
    assert len(prompts) == 2
    assert all(f"> {QUESTIONS[0]}".startswith(prompt) for prompt in prompts)


def test_an_answer_that_is_withheld_is_not_shown_beside_those_of_the_agents(
    crowd: Crowd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    never = Calibration(Logistic((0.0,) * 5, -9.0), 0, "probability", 9, "here")
    write = crowd.save_pretrained
    crowd.calibration = never
    try:
        write(tmp_path / "saved")
    finally:
        crowd.calibration = None
    words = [tmp_path / "saved", QUESTIONS[0], *SHORT, "--agents", "--abstain-below", "0.5"]
    shown = asked(capsys, *words)
    assert shown.startswith("crowd   [no answer: it is too unsure]\nagent0  ")


# Bad input


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    capsys.readouterr()
    assert main.main(["generate", *map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return said.err


def test_a_bad_call_is_one_message(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no prompt" in refused(capsys, run)
    assert "both given" in refused(capsys, run, "hello", "--file", "f")
    assert "- stands beside another prompt" in refused(capsys, run, "-", "hello")
    assert "required: RUN\n" in refused(capsys)
    assert "a prompt is empty" in refused(capsys, run, "Ann has 7 pens.", " ")
    assert "there is no such file" in refused(capsys, run, "--file", tmp_path / "none.txt")
    assert "this is a folder" in refused(capsys, run, "--file", tmp_path)
    (tmp_path / "image").write_bytes(b"\xff\xfe\xfa")
    assert "it is not UTF-8 text" in refused(capsys, run, "--file", tmp_path / "image")
    (tmp_path / "blank").write_text("\n \n")
    assert "there is no prompt" in refused(capsys, run, "--file", tmp_path / "blank")
    assert "--top-p: must be from 0 to 1" in refused(capsys, run, "hello", "--top-p", "2")
    assert "--aggregator: invalid choice" in refused(capsys, run, "hello", "--aggregator", "median")
    assert "a stop string is empty" in refused(capsys, run, "hello", "--stop", "")
    assert "--batch-size: must be at least 1" in refused(capsys, run, "hello", "--batch-size", "0")
    assert "all agents answer" in refused(capsys, run, "hello", "--agents-per-prompt", "1.6")


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["generate", "{run}", "hello", "--temperature", "-1"],
        ["chat", "{run}", "--top-k", "0"],
        *(["evaluate", "{empty}"], ["export", "{empty}"]),
    ],
    ids=" ".join,
)
def test_a_bad_call_is_refused_before_torch_is_imported(
    words: list[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if words[0] == "export":
        words = [*words, "--to", str(tmp_path / "new")]
    code = "import sys; from ci_llm.cli.main import main; found = main(sys.argv[1:])\n"
    code += "assert 'torch' not in sys.modules; sys.exit(found)"
    (tmp_path / "empty").mkdir()
    given = [word.format(run=run, empty=tmp_path / "empty") for word in words]
    done = python("-c", code, *given)
    assert done.returncode == 2, done.stderr
    told = "there is no checkpoint at this path" if "{empty}" in words else ": must be at least"
    assert told in done.stderr


@pytest.mark.slow
def test_a_base_is_asked_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [json.loads(asked(capsys, name, QUESTIONS[0], "--json", *SHORT)) for name in ("embedded", BASE_FOLDER)]
    assert found[0] == found[1]
    assert (found[0]["agents"], found[0]["agreement"], found[0]["agents_asked"]) == ([], None, 0)
    assert asked(capsys, BASE_FOLDER, QUESTIONS[0], *SHORT) == found[0]["answer"] + "\n"
    assert main.main(["export", str(BASE_FOLDER), "--to", str(tmp_path / "new")]) == 2
    assert "this is a base and not a checkpoint" in capsys.readouterr().err


def test_a_model_on_the_hub_is_a_base_if_it_holds_no_crowd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[object] = []

    def fetch(name: str, patterns: object) -> Path:
        wanted.append((name, patterns))
        return tmp_path

    monkeypatch.setattr(given_path, "fetch", fetch)
    assert not given_path.is_base("somebody/nothing")
    (tmp_path / "config.json").write_text("{}")
    assert given_path.is_base("somebody/base")
    (tmp_path / "manifest.json").write_text("{}")
    assert not given_path.is_base("somebody/crowd")
    assert wanted[0] == ("somebody/nothing", ("manifest.json", "config.json"))


def test_a_gguf_file_and_a_folder_that_holds_one_are_bases(tmp_path: Path) -> None:
    assert not given_path.is_base(str(tmp_path))
    (tmp_path / "model.gguf").write_text("")
    assert given_path.is_base(str(tmp_path))
    assert given_path.is_base(str(tmp_path / "model.gguf"))
    assert not given_path.is_base(str(tmp_path / "other.gguf"))


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copied"))


def test_a_damaged_checkpoint_is_named_with_the_command_that_lists_the_others(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = copied / "final_checkpoint" / "agent1" / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    told = refused(capsys, copied, "hello")
    assert "final_checkpoint is damaged: agent1/adapter_model.safetensors" in told
    assert f"ci-llm checkpoints list {copied}" in told


@pytest.mark.slow
def test_a_missing_base_is_named_with_the_option_that_replaces_it(
    crowd: Crowd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(crowd.base_model, "base_name", "somebody/base")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # it was read at the import
    folder = save_crowd(crowd, tmp_path / "final_checkpoint")
    told = refused(capsys, folder, "hello")
    assert "somebody/base" in told
    assert "--base-model" in told
    assert asked(capsys, folder, QUESTIONS[0], *SHORT, "--base-model", "embedded")


def status(folder: Path, state: Any, step: int) -> None:
    now = time.time()
    made = Status(state, None, step, 1, os.getpid(), "here", pid_space(), now, now, next_command="python train.py")
    (folder / "status.json").write_text(json.dumps(asdict(made)))


def test_a_run_without_a_checkpoint_names_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status(tmp_path, "running", 12)
    told = refused(capsys, tmp_path, "hello")
    assert "this run has not saved a checkpoint yet" in told
    assert f"ci-llm status {tmp_path}" in told


@pytest.mark.slow
def test_a_run_that_is_still_training_answers_with_its_newest_checkpoint_and_says_so(
    crowd: Crowd, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_crowd(crowd, tmp_path / "checkpoint_step_8", step=8)
    save_crowd(crowd, tmp_path / "checkpoint_step_16", step=16)
    status(tmp_path, "running", 19)
    assert main.main(["generate", str(tmp_path), QUESTIONS[0], *SHORT]) == 0
    said = capsys.readouterr()
    assert said.err == "the run is running at step 19; checkpoint_step_16 answers\n"
    assert said.out == crowd.generate(QUESTIONS[0], max_new_tokens=24)[0] + "\n"


def test_ctrl_c_ends_generate_and_printed_answers_stay(
    run: Path, crowd: Crowd, server: ForkServer, tmp_path: Path
) -> None:
    file = tmp_path / "many.txt"
    file.write_text("".join(f"{question}\n" for question in QUESTIONS * 400))
    words = ["generate", str(run), "--file", str(file), *SHORT, "--batch-size", "1", "--json"]
    with Child.forked(server, command, words=words) as child:
        first = json.loads(child.read_until("{"))
        child.signal(signal.SIGINT)
        assert child.wait() == 130
        child.read_to_the_end()
    assert "Traceback" not in "\n".join(child.seen)
    assert first["answer"] == crowd.generate(QUESTIONS[0], max_new_tokens=24)[0]
    printed = [line for line in child.seen if line.startswith("{")]
    assert all(json.loads(line)["prompt"] for line in printed)
    assert len(printed) < 1200


def test_json_has_null_for_a_number_that_is_not_finite() -> None:
    found = to_json({"mean": math.nan, "scores": [1.0, -math.inf], "label": None})
    assert json.loads(found, parse_constant=pytest.fail) == {"mean": None, "scores": [1.0, None], "label": None}
