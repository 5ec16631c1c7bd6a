"""`ci-llm chat`: turns, commands, Ctrl-C and Ctrl-D, at a real terminal and through a pipe."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from ci_llm import Crowd, Prompter
from ci_llm.cli import main
from ci_llm.cli.generate import Conversation
from ci_llm.crowd.uncertainty import Calibration, Logistic
from ci_llm.data.encoder import use_chat_template
from ci_llm.embedded import rows
from ci_llm.errors import BadInput, ConfigError
from tests.supervisor.terminal import Terminal
from tests.support.children import PYTHONPATH
from tests.support.crowds import K, disturbed_crowd
from tools.testbed.events import DEADLINE_S

QUESTIONS = [row["question"] for row in rows("test")[:3]]
SHORT: Any = {"max_new_tokens": 24}
#: The command, whose answer stands still after each token while a file is there.
HELD = """
import sys, time
from pathlib import Path
from ci_llm.cli.main import main
from ci_llm.crowd.detokenizer import IncrementalDetokenizer
update, held = IncrementalDetokenizer.update, Path(sys.argv[2]).parent / "held"
def stand_after_the_first_piece(self, ids):
    while self.text and held.exists():
        time.sleep(0.01)
    return update(self, ids)
IncrementalDetokenizer.update = stand_after_the_first_piece
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def talker() -> Crowd:
    """A crowd whose chat template shows who speaks."""
    crowd = disturbed_crowd()
    assert crowd.prompter is not None
    use_chat_template(crowd.prompter.tokenizer, "roles")
    crowd.prompter = Prompter(crowd.prompter.tokenizer)
    return crowd


def messages(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * len(texts), texts)]  # noqa: B905


def said(conversation: Conversation, message: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    conversation.say(message)
    return capsys.readouterr().out.removesuffix("\n")


# Turns


@pytest.mark.slow
def test_a_template_that_shows_roles_makes_a_conversation(talker: Crowd, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(talker, SHORT, shows_sureness=False)
    assert talk.kind == "A conversation: earlier turns are remembered."
    first = said(talk, QUESTIONS[0], capsys)
    assert first == talker.generate(QUESTIONS[0], **SHORT)[0]
    second = said(talk, QUESTIONS[1], capsys)
    assert second == talker.generate(messages(QUESTIONS[0], first, QUESTIONS[1]), **SHORT)[0]
    assert second != talker.generate(QUESTIONS[1], **SHORT)[0], (
        "the first turn makes no difference, and this shows nothing"
    )
    talk.command("/reset")
    assert said(talk, QUESTIONS[1], capsys) == talker.generate(QUESTIONS[1], **SHORT)[0]


@pytest.mark.slow
def test_a_run_on_single_questions_keeps_no_history(crowd: Crowd, capsys: pytest.CaptureFixture[str]) -> None:
    talk = Conversation(crowd, SHORT, shows_sureness=False)
    assert talk.kind == "Single questions: each message is one, and none is remembered."
    assert [said(talk, question, capsys) for question in QUESTIONS] == crowd.generate(QUESTIONS, **SHORT)


@pytest.mark.slow
def test_a_conversation_longer_than_the_context_says_how_to_continue(
    talker: Crowd, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Conversation(talker, SHORT)
    long = "Ann has 3 pens. " * 50
    talk.say(long)
    with pytest.raises(BadInput, match="tokens, and the base reads 512") as caught:
        talk.say(long)
    assert (caught.value.where, caught.value.hint) == (
        "a conversation of 3 messages",
        "/reset forgets the conversation",
    )
    talk.command("/reset")
    talk.say(long)
    talk.command("/reset")
    with pytest.raises(BadInput, match="tokens, and the base reads 512") as caught:
        talk.say(long * 2)
    assert caught.value.hint == "shorten it"


# Commands


@pytest.mark.slow
def test_agents_shows_what_each_agent_answers_alone_by_the_names_of_the_run(
    crowd: Crowd, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["agent0", *(f"agent{k + 3}" for k in range(1, K))]  # in the run agents were stopped
    monkeypatch.setattr(crowd, "names", names)
    talk = Conversation(crowd, SHORT)
    with pytest.raises(ConfigError, match="nothing was asked yet"):
        talk.command("/agents")
    talk.say(QUESTIONS[0])
    sure = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"\[confidence 0\.\d\d \(0\.\d\d a token\), disagreement \d\.\d{3}\]", sure)
    talk.command("/agents")
    *told, sure = capsys.readouterr().out.splitlines()
    [answer] = crowd.generate(QUESTIONS[0], details=True, **SHORT)
    assert [line.split()[0] for line in told if not line.startswith(" ")] == ["crowd", *names]
    assert told[0].split() == ["crowd", *answer.answer.splitlines()[0].split()]
    assert f"of {K} agents agree" in sure


@pytest.mark.parametrize("line", ["/nope", "/reset now"])
def test_a_bad_command_is_refused(crowd: Crowd, line: str) -> None:
    with pytest.raises(ConfigError, match=f"there is no command {line}"):
        Conversation(crowd, SHORT).command(line)


# Through a pipe


def piped(run: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main.main(["chat", str(run), "--max-new-tokens", "24"])


@pytest.mark.slow
def test_each_line_of_a_pipe_is_a_turn_and_only_answers_are_printed(
    run: Path, crowd: Crowd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(run, [QUESTIONS[0], "", QUESTIONS[1], "/quit", QUESTIONS[2]], monkeypatch) == 0
    told = capsys.readouterr()
    assert told.out == "".join(f"{answer}\n" for answer in crowd.generate(QUESTIONS[:2], **SHORT))
    assert told.err == (
        f"{K} agents answer together.\nSingle questions: each message is one, and none is remembered.\n"
    )


def test_through_a_pipe_an_error_ends_it(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert piped(run, ["/help", "/nope", QUESTIONS[0]], monkeypatch) == 2
    told = capsys.readouterr()
    assert told.out.startswith("/agents ")
    assert told.out.count("\n") == 4
    assert "error: there is no command /nope" in told.err
    assert main.main(["chat", str(run / "nowhere")]) == 2


# At a terminal


def drop_line(talk: Terminal) -> None:
    """Press Ctrl-C until there is a new prompt.

    Once is nearly always enough. Python looks for signals when one interrupts its wait for a key; it sees one that
    came just before that wait only at the next key.
    """
    start = len(talk.text)
    presses = (talk.type("\x03") for _ in range(6))
    assert any(talk.comes("you> ", start, DEADLINE_S / 6) for _ in presses), talk.text


@pytest.mark.slow
def test_a_chat_at_a_terminal(run: Path, crowd: Crowd) -> None:
    whole, other = crowd.generate(QUESTIONS[:2], **SHORT)
    held = run.parent / "held"
    words, env = (run, "--max-new-tokens", "24"), {"TERM": "xterm", "COLUMNS": "80", "PYTHONPATH": PYTHONPATH}
    with Terminal(*words, cwd=run.parent, env=env, program=("-c", HELD, "chat"), types=True) as talk:
        assert "/help lists the commands" in talk.read_until("you> ")
        told = talk.read_until("you> ", talk.type(f"{QUESTIONS[0]}\n")).replace("\r\n", "\n")
        assert f"\n{whole}\n[confidence 0." in told
        told = talk.read_until("you> ", talk.type("/agents\n"))
        assert "agent2" in told
        assert "agents agree" in told
        assert "error: there is no command /nope" in talk.read_until("you> ", talk.type("/nope\n"))

        held.touch()
        start = talk.type(f"{QUESTIONS[1]}\n")
        talk.read_until(f"\r\n{other[:1]}", start)
        talk.type("\x03")
        talk.read_until("^C", start)  # the terminal has sent the signal
        held.unlink()
        assert "confidence" not in talk.read_until("[stopped]", start)
        talk.read_until("you> ", start)

        talk.read_until("half a line", talk.type("half a line"))
        drop_line(talk)
        for help_again in ("/help\n", "\x1b[A\n"):  # the arrow up brings the last line back
            listed = talk.type(help_again)
            listed += len(talk.read_until("/quit", listed))
            talk.read_until("you> ", listed)
        talk.type("\x04")
        assert talk.wait() == 0
    assert "Traceback" not in talk.text
    shown = re.sub(r"\x1b\[[0-9;?]*\w|\r", "", talk.text).split("\n")
    typed = [question[:20] for question in QUESTIONS]
    assert not [line for line in shown if len(line) > 80 and not any(text in line for text in (*typed, str(run)))]


@pytest.mark.slow
def test_a_withheld_answer_is_announced_and_agents_still_answer(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    never = Logistic((0.0,) * 5, -9.0)
    made = Calibration(never, 0, "probability", 9, "here")
    monkeypatch.setattr(crowd, "calibration", made)
    choices = {"max_new_tokens": 12, "abstain_below": 0.5}
    conversation = Conversation(crowd, choices)
    conversation.say("Ann has 3 pens.")
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == ["", "[no answer: it is too unsure]"]
    assert told[2].startswith("[right with probability 0.00, ")
    conversation.command("/agents")
    shown = capsys.readouterr().out
    assert all(f"agent{k}" in shown for k in range(K))
