"""Runs that begin in each way, and end in each way before their work is done: the parts of a matrix.

The trainer is the real one, on few rows and for few steps; what ends it is real as well, but for the clock of the
deadline, the launching of the supervisor's processes and the answers of SLURM.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ci_llm.cluster import deadline
from ci_llm.interrupts import Interrupts
from tests.support.supervised import supervise_forks
from tools.testbed.forkserver import DEADLINE_S, ForkServer
from tools.testbed.trials import Cell, Fate, train_watched

get_checkpoint_conversion_mapping("llama")  # once for all trials that are forked from here: it takes half a second

#: A run of another folder that has come to this step is the source of those that begin from a path.
SOURCE_STEP = 2
STEPS = 6
SAVE_STEPS = 2

#: Begin: the words for it, with the folder of the source; and the step where it begins.
BEGINS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "fresh": lambda _: {},
    "null": lambda _: {"resume_from_checkpoint": "null"},
    "PATH": lambda source: {"resume_from_checkpoint": source / f"checkpoint_step_{SOURCE_STEP}"},
    "run folder": lambda source: {"resume_from_checkpoint": source},
    "final_checkpoint": lambda source: {"resume_from_checkpoint": source / "final_checkpoint"},
    "init_from": lambda source: {"init_from": source / "final_checkpoint"},
}
ENDS = ("SIGTERM", "SIGKILL", "walltime", "requeue", "supervisor", "second call")

#: What a batch job is told by SLURM, and what it may ask.
IN_A_JOB = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}
SCONTROL = """#!/bin/sh
case $1 in
requeue) echo $2 >>requeued ;;
*) echo "JobState=RUNNING Reason=None BatchFlag=1 Requeue=1 EndTime=Unknown" ;;
esac
"""


def begins_at(begin: str) -> int:
    return SOURCE_STEP if begin in ("PATH", "run folder", "final_checkpoint") else 0


# ------------------------------------------------------------------------------------- in the trial's process


def train_surrounded(
    folder: str, arguments: list[str], fate: dict[str, Any] | None, environment: Mapping[str, str]
) -> int:
    """A trial for the fork server: `train.py` in an environment, where a SIGALRM means that the time is over."""
    os.environ.update(environment)
    if fate and fate["signal"] == "SIGALRM":
        _let_time_run_out()
    return train_watched(folder, arguments, fate)


def _let_time_run_out() -> None:
    """A SIGALRM makes the clock of the walltime jump, and returns once the run has been asked to stop."""
    jump_s, asked = [0.0], threading.Event()
    ask = Interrupts.request_stop

    def ring(*_: object) -> None:
        jump_s[0] = 1e9
        assert asked.wait(DEADLINE_S / 2)

    def tell(interrupts: Interrupts, reason: str) -> None:
        ask(interrupts, reason)
        asked.set()

    Interrupts.request_stop = tell  # type: ignore[method-assign]
    deadline._LONGEST_WAIT_S = 0.05  # type: ignore[misc]
    clock = partial(deadline.Walltime, clock=lambda: time.time() + jump_s[0])
    deadline.Walltime = clock  # type: ignore[misc, assignment]
    signal.signal(signal.SIGALRM, ring)


# ----------------------------------------------------------------------------------------- in the test's process


class Beginnings:
    """Runs of one number of processes, each in a folder of its own.

    Args:
        folder: where they leave what they leave.
        base: what they train, as `model_name`.
    """

    def __init__(self, server: ForkServer, folder: Path, ranks: int, base: str) -> None:
        self._server, self.folder, self.ranks, self._base = server, folder, ranks, base
        self._made: dict[str, Path] = {}
        folder.mkdir(parents=True, exist_ok=True)
        rows = [{"question": f"What is {n} + 1?", "answer": f"{n + 1}"} for n in range(13)]  # one is held out
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def words(self, **keys: Any) -> list[str]:
        """The command line of train.py, complete."""
        own = {
            "model_name": self._base,
            "dataset_name": self.folder / "rows.jsonl",
            "max_train_samples": "null",
            "max_train_steps": STEPS,
            "max_seq_length": 64,
            "batch_size": 1,
            "save_steps": SAVE_STEPS,
            "save_total_limit": "null",
            "eval_steps": "null",
            "eval_samples": 2,
            "generation_eval_samples": 0,
            "lora_dropout": 0.1,
        }
        return Cell(ranks=self.ranks).arguments(**own | keys)

    def train(
        self, folder: Path, fate: Fate | None = None, environment: Mapping[str, str] | None = None, **keys: Any
    ) -> list[int]:
        """One attempt in `folder`; returns the exit codes of its processes."""
        folder.mkdir(parents=True, exist_ok=True)
        return self._server.run(
            train_surrounded,
            folder / "log",
            ranks=self.ranks,
            folder=str(folder),
            arguments=self.words(**keys),
            fate=asdict(fate) if fate else None,
            environment=dict(environment or {}),
        )

    @property
    def source(self) -> Path:
        """The output folder of a run that others begin from."""
        return self._once("source", {"max_train_steps": SOURCE_STEP}) / "run"

    def undisturbed(self, begin: str) -> Path:
        """The folder of an uninterrupted run."""
        return self._once(begin, BEGINS[begin](self.source))

    def _once(self, name: str, keys: dict[str, Any]) -> Path:
        if name not in self._made:
            folder = self.folder / f"undisturbed {name}"
            assert self.train(folder, **keys) == [0] * self.ranks, (folder / "log").read_text()
            self._made[name] = folder
        return self._made[name]

    # Ends: after each the run has its own step `begins_at + 2`, and was called again

    def end(self, end: str, folder: Path, begin: str) -> None:
        """One attempt that ends before its work is done, and the next ones until it is."""
        keys, kept = BEGINS[begin](self.source), begins_at(begin) + 2
        if end == "supervisor":
            self._supervised(folder, keys, kept)
            return
        term, told = Fate("SIGTERM", steps=1, rank=self.ranks - 1), "signal:SIGTERM"
        if end == "SIGKILL":
            codes = self.train(folder, Fate("SIGKILL", steps=3, committed=kept), **keys)
            assert codes == [-signal.SIGKILL] * self.ranks, (folder / "log").read_text()
        elif end == "requeue":
            scontrol = folder / "bin" / "scontrol"
            scontrol.parent.mkdir(parents=True)
            scontrol.write_text(SCONTROL)
            scontrol.chmod(0o755)
            job = IN_A_JOB | {"PATH": f"{scontrol.parent}{os.pathsep}{os.environ['PATH']}"}
            self._interrupted(folder, told, term, job, **keys)
            assert (folder / "requeued").read_text() == "7\n", (folder / "log").read_text()
            assert self.train(folder, None, job | {"SLURM_RESTART_COUNT": "1"}, **keys) == [0] * self.ranks
            return
        elif end == "walltime":
            self._interrupted(folder, end, Fate("SIGALRM", steps=1, rank=0), None, max_runtime="1000d", **keys)
        else:
            self._interrupted(folder, told, term, None, **keys)
        assert self.train(folder, **keys) == [0] * self.ranks, (folder / "log").read_text()

    def _interrupted(
        self, folder: Path, reason: str, fate: Fate, environment: Mapping[str, str] | None, **keys: Any
    ) -> None:
        assert self.train(folder, fate, environment, **keys) == [0] * self.ranks, (folder / "log").read_text()
        status = json.loads((folder / "run/status.json").read_text())
        assert (status["status"], status["reason"]) == ("interrupted", reason), (folder / "log").read_text()

    def _supervised(self, folder: Path, keys: dict[str, Any], kept: int) -> None:
        """Under the supervisor; its first attempt is killed."""
        fates = iter([Fate("SIGKILL", steps=3, committed=kept), None])
        words = self.words(**keys | {"output_dir": folder / "run"})

        def train(environment: Mapping[str, str]) -> list[int]:
            return self.train(folder, next(fates), environment, **keys)

        assert supervise_forks(words, folder / "safe_train.log", train) == 0, (folder / "log").read_text()
