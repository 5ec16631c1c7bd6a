"""How a line of output is classified, and how lines are made of bytes in pieces of any size."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

from ci_llm.supervisor import output_scan
from ci_llm.supervisor.output_scan import (
    RECENT_LINES,
    Evidence,
    LineSplitter,
    WandbRun,
    says_killed,
    says_nonfinite,
    wandb_run,
)
from tests.supervisor.heard import heard
from tests.support.campaign import drawn, size


class Seen(NamedTuple):
    """A line of the corpus: its verdict, the program that prints it, where it was seen, and the line itself.

    It was seen at an address, or has the format of the program's file and version, or was written here in the words of
    such lines. Numbers and names in the lines are not those seen.
    """

    verdict: str
    program: str
    seen_at: str
    line: str


CORPUS = [
    Seen(*row.split("\t", 3)) for row in Path(__file__).with_name("corpus.tsv").read_text().split("\n") if row.strip()
]
LEAST_RECALL = 0.9


def verdicts(line: str) -> set[str]:
    """What the supervisor makes of the line."""
    evidence = heard(line)
    return {
        *(["nonfinite"] if evidence.nonfinite else []),
        *(["out_of_memory"] if evidence.out_of_memory else []),
    }


def test_lines_of_the_trainers_of_the_field_have_their_verdicts() -> None:
    """`lines.tsv` has (verdict, program, line): each line is one that somebody has met, and none may be missed."""
    rows = [row.split("\t", 2) for row in Path(__file__).with_name("lines.tsv").read_text().split("\n") if row]
    assert len(rows) > 250
    assert [row for row in rows if verdicts(row[2]) != {row[0]} - {"innocent"}] == []
    failures = [row[2] for row in rows if row[:2] == ["nonfinite", "a loop"]]
    assert [line for line in failures if not says_nonfinite(line.upper())] == []


def test_the_corpus_is_as_large_as_it_says_and_half_of_it_is_innocent() -> None:
    num_innocent = sum(seen.verdict == "innocent" for seen in CORPUS)
    assert len(CORPUS) >= 500
    assert 0.45 < num_innocent / len(CORPUS) < 0.6
    assert {seen.verdict for seen in CORPUS} == {"nonfinite", "out_of_memory", "innocent"}
    assert len({seen.line for seen in CORPUS}) == len(CORPUS)
    assert all(seen.program and seen.seen_at for seen in CORPUS)


def test_no_innocent_line_of_the_corpus_raises_an_alarm() -> None:
    assert [seen for seen in CORPUS if seen.verdict == "innocent" and verdicts(seen.line)] == []


def test_in_each_program_nearly_all_failures_are_found() -> None:
    found: dict[str, list[bool]] = defaultdict(list)
    for seen in CORPUS:
        if seen.verdict != "innocent":
            found[seen.program].append(verdicts(seen.line) == {seen.verdict})
    assert len(found) > 30
    assert {one: recall for one, all_ in found.items() if (recall := sum(all_) / len(all_)) < LEAST_RECALL} == {}


LONG = size(1 << 17, 1 << 20)
LONG_S = 120.0  # 2 s a megabyte on an idle core; a pattern that tries all ways takes hours


PIECES = (
    *(
        "nan ",
        "inf inf ",
        "nan loss ",
        "loss",
        "loss ",
        "loss=",
        "loss nan-",
        "loss_",
        "loss/",
        "loss: [1, ",
        "'loss': ",
    ),
    *("best_", "if ", "out of memory ", "Error: ", "RuntimeError: a ", "10G 1 ", "a.", "A", "1 ", " ", "([("),
    *("cost at 1 ", "nll in ", "nan in a ", "weights of a ", "loss -> ", "nan stop ", "objective function "),
    *("step 1 NaN ", "failed to allocate a ", "cannot allocate 1 ", "memory allocation of 1 bytes ", "A_B_OUT_OF_"),
    *("RESOURCE_EXHAUSTED ", "skipping ", "\x1b[", "\x1b]", "nan" + " " * 5000, "│" + " " * 5000, "│ 1 │"),
)


@pytest.mark.slow
@pytest.mark.parametrize("piece", drawn(PIECES, 14))
def test_no_line_takes_long(piece: str) -> None:
    """Text without a line end, in the chunks in which a relay reads it."""
    data = (piece * (LONG // len(piece))).encode()
    evidence = Evidence()
    splitter = LineSplitter(evidence.note)
    started = time.process_time()
    for start in range(0, len(data), 1 << 16):
        splitter.feed(data[start : start + (1 << 16)])
    splitter.feed(b"")
    assert time.process_time() - started < LONG_S


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: DataLoader worker (pid 17) is killed by signal: Killed.",
        "  exitcode  : -9 (pid: 4711)",
        "  traceback : Signal 9 (SIGKILL) received by PID 4711",
    ],
)
def test_says_killed(line: str) -> None:
    assert says_killed(line)
    assert output_scan.may_match(line)


@pytest.mark.parametrize(
    ("line", "run"),
    [
        (
            "wandb: 🚀 View run at https://wandb.ai/team/project/runs/abc123def",
            WandbRun("abc123def", "team", "project"),
        ),
        (
            "wandb: 🚀 View run calm-sky-3 at: https://wandb.example.org:8080/a%20b/p-1/runs/x1?nw=nwuser",
            WandbRun("x1", "a b", "p-1"),
        ),
        ("wandb: Run data is saved locally in wandb/run-20240115_103045-abc123def", WandbRun("abc123def")),
        ("WandB run ID: abc123de", WandbRun("abc123de")),
        ("wandb: Run data is saved locally in /x/wandb/offline-run-20240115_103045-abc123def", None),
        ("wandb: ⭐️ View project at https://wandb.ai/team/project", None),
        ("wandb: Syncing run calm-sky-3", None),
        ("https://example.org/team/project/runs/abc", None),
    ],
)
def test_wandb_runs(line: str, run: WandbRun | None) -> None:
    assert wandb_run(line) == run
    assert run is None or output_scan.may_match(line)


def test_colours_do_not_hide_anything() -> None:
    assert heard("\x1b[1mtrain\x1b[0m/\x1b[31mloss\x1b[0m: \x1b[2Knan").nonfinite == "train/loss: nan"


@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000])
def test_lines_are_the_same_in_whatever_pieces_they_arrive(length: int) -> None:
    data = "eins\r\rzwei é\n\nLoss=nan\r\nrest ohne Ende \U0001f680".encode()
    lines: list[str] = []
    splitter = LineSplitter(lines.append)
    for start in range(0, len(data), length):
        splitter.feed(data[start : start + length])
    splitter.feed(b"")
    assert lines == ["eins", "zwei é", "Loss=nan", "rest ohne Ende \U0001f680"]


def test_the_first_sign_and_the_last_lines_are_kept() -> None:
    evidence = heard(*(f"step {step} Loss={'nan' if step in (70, 80) else step}" for step in range(100)))
    assert evidence.nonfinite == "step 70 Loss=nan"
    assert [*evidence.last_lines][-1] == "step 99 Loss=99"
    assert len(evidence.last_lines) == RECENT_LINES
    assert evidence.num_lines == 100


def test_a_script_that_continues_after_out_of_memory_has_recovered() -> None:
    evidence = heard("CUDA out of memory")
    assert evidence.ended_out_of_memory(failed=False)
    for step in range(RECENT_LINES):
        evidence.note(f"step {step}")
    assert not evidence.ended_out_of_memory(failed=False)
    assert evidence.ended_out_of_memory(failed=True)
    assert evidence.out_of_memory == "CUDA out of memory"
