"""Trials of a real base in one job that is killed again and again: the bits of the winner, its gain, and the time.

    make proof [SMALL=1] [BASE=FOLDER_OR_GGUF]     on SmolLM2-135M-Instruct, which is fetched, or on another base
    python -m benchmarks.proof [--small] [--base FOLDER_OR_GGUF] [--dataset DATA] [--folder F]

Agents of one job are trials, a learning rate times a rank. Three trainings are made:

undisturbed   the job alone
killed        the same job with a mirror in a bucket, killed by SIGKILL at random moments: about every minute, or where
              that is longer in the time of two checkpoints. After the second kill its disk is wiped, and the next
              attempt fills it from the bucket; after the third its folder has moved
alone         the trial that won, in a run of its own

At the end the SHA-256 of every agent of the first two must be equal, and that of the winner in all three; the exit code
is 1 if they are not. The winner is the trial with the lowest NLL on validation rows. Base and winner are compared on
other rows by teacher forcing, which finds the answers that greedy decoding would give exactly. With TRL installed,
its SFTTrainer trains such trials one after the other, in the full form four of the eight. The bucket is that of
moto, a real S3 server on this machine.

The small form has fewer trials, steps and rows; it is taken where the processor does not multiply bf16.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from scipy import stats

from benchmarks.crowd import over_rows
from benchmarks.crowd_answers import Measured, everyone, folder_of, untrained
from benchmarks.record import surroundings
from ci_llm.checkpoints.layout import committed
from ci_llm.config import Config
from ci_llm.core.evaluation_file import read_evaluation
from ci_llm.core.run_status import readable_status
from ci_llm.crowd.pretrained import open_pretrained
from ci_llm.embedded import BASE_FOLDER
from tools.testbed.object_store import BUCKET, CREDENTIALS, s3_server

ROOT: Final = Path(__file__).parent.parent
ROWS: Final = ROOT / "configs" / "data" / "docstrings"
SEED: Final = 42
SAVE_STEPS: Final = 2
WIPED_AT, MOVED_AT = 2, 3  # of the kills
POLL_S: Final = 0.2
AT_A_TIME = 4


@dataclass(frozen=True)
class Form:
    """The size of the trainings.

    Attributes:
        rows: in a step of one trial.
        validation, test: rows that choose the winner, and rows that compare it with the base.
        kill_every_s: seconds between two kills in the mean, at least.
        rivals: runs of SFTTrainer; fewer than trials are multiplied.
        by_steps: the kills come after steps that the seed draws, and none by the clock. An attempt is told the step in
            `STAND_AFTER`: whoever starts it so must let it stand there.
    """

    rates: tuple[float, ...]
    ranks: tuple[int, ...]
    steps: int
    rows: int
    validation: int
    test: int
    kill_every_s: float = 60.0
    rivals: int = 1
    by_steps: bool = False

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The settings of each, with a seed: such an agent has the same bits alone and in company."""
        return [
            {"learning_rate": rate, "lora_rank": rank, "lora_alpha": 2 * rank, "seed": SEED}
            for rate in self.rates
            for rank in self.ranks
        ]


FULL = Form((5e-4, 1e-3, 2e-3, 4e-3), (8, 16), steps=32, rows=16, validation=100, test=300, rivals=4)
SMALL = Form((1e-3, 4e-3), (4, 8), steps=12, rows=8, validation=40, test=100)


class Job:
    """A training by `ci-llm train` with these trials, in a folder of its own, called again until it has completed."""

    def __init__(self, form: Form, base: str, rows: Path, trials: Sequence[Mapping[str, Any]], folder: Path) -> None:
        self._form, self.folder = form, folder
        (rows / "defaults.yaml").touch()  # and not the file of the project
        self._words = ["train", "--config", str(rows / "defaults.yaml")]
        keys = {
            "model_name": base, "model_dtype": "auto", "mixed_precision": "auto", "pass_per_agent": "true",
            "dataset_name": rows / "train.jsonl", "eval_dataset_name": rows / "validation.jsonl",
            "agents": json.dumps([*trials]), "max_train_steps": form.steps, "batch_size": form.rows,
            "save_steps": SAVE_STEPS, "save_interval_seconds": "null", "save_total_limit": 2, "eval_steps": "null",
            "eval_samples": "null", "generation_eval_samples": 0, "logging_steps": 1,
            "report_to": "none", "num_workers": 0,
        }  # fmt: skip
        self._words += [f"{key}={value}" for key, value in keys.items()]
        self.log = folder.with_suffix(".log")

    def start(self, environment: Mapping[str, str] | None = None, *words: str) -> subprocess.Popen[bytes]:
        """One attempt."""
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "ci_llm", *self._words, f"output_dir={self.folder}", *words],
                cwd=self.log.parent,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
                stdout=log,
                stderr=log,
            )

    def finish(self) -> float:
        """Without disturbance; seconds on the clock."""
        began = time.monotonic()
        self.check(self.start().wait())
        return time.monotonic() - began

    def check(self, code: int) -> None:
        """Raises SystemExit where an attempt failed by itself."""
        if code:
            sys.exit(f"an attempt ended with {code}:\n{self.log.read_text(encoding='utf-8', errors='replace')[-2000:]}")

    @property
    def step(self) -> int:
        """The step of the newest checkpoint; 0 without one."""
        return max((step for step, _ in committed(self.folder)), default=0) if self.folder.is_dir() else 0

    @property
    def mirrored_step(self) -> int:
        """The step of the newest checkpoint in the bucket; 0 without one."""
        status = readable_status(self.folder)
        return (status and status.mirror and status.mirror["step"]) or 0

    def digests(self) -> list[str]:
        """SHA-256 of each agent."""
        files = sorted((self.folder / "final_checkpoint").glob("agent*/adapter_model.safetensors"), key=_number)
        return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]

    def scores(self) -> list[float]:
        """NLL of each trial on the validation rows."""
        found = read_evaluation(self.folder)
        assert found is not None, "the job has completed"
        return [*found.nll.agents]


def _number(file: Path) -> int:
    return int(file.parent.name.removeprefix("agent"))


class Killer:
    """SIGKILL at random moments, a wiped disk, a moved folder.

    Args:
        step_s: seconds of a step of the undisturbed job, its start included.
    """

    def __init__(self, job: Job, form: Form, seed: int, step_s: float) -> None:
        self._job, self._form, self._dice = job, form, random.Random(seed)
        self._least_s = self._every_s = max(form.kill_every_s, 2 * SAVE_STEPS * step_s)
        self.kills, self._began = 0, time.monotonic()
        saved = range(SAVE_STEPS, form.steps, SAVE_STEPS)
        self._steps = sorted(self._dice.sample(saved, MOVED_AT)) if form.by_steps else []

    def run(self, address: str) -> float:
        """Until the job has completed; seconds on the clock.

        Raises:
            SystemExit: it failed by itself, or completed before its disk was wiped and its folder moved.
        """
        environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": address}
        while True:
            before = self._job.step
            if self._form.by_steps:
                environment["STAND_AFTER"] = str([*self._steps, self._form.steps][self.kills])
            process = self._job.start(environment, f"mirror=s3://{BUCKET}/proof")
            wait_s = math.inf if self._form.by_steps else self._dice.uniform(0, 2 * self._every_s)
            code = self._strike(process, time.monotonic() + wait_s)
            if code is not None:
                self._job.check(code)
                self._tell(f"attempt {self.kills + 1} has completed")
                break
            self._every_s = self._least_s if self._job.step > before else 2 * self._every_s
            self._after()
        if self.kills < MOVED_AT:
            sys.exit(f"the job completed after {self.kills} kills, before its disk was wiped and moved")
        return time.monotonic() - self._began

    def _strike(self, process: subprocess.Popen[bytes], at: float) -> int | None:
        """Kill at this time; before the folder has moved also at a quarter of the steps each, so that it comes to it.

        Returns:
            the exit code of an attempt that ended before.
        """
        while (code := process.poll()) is None:
            quotas = self._steps or [self._form.steps * kill // (MOVED_AT + 1) for kill in range(1, MOVED_AT + 1)]
            quota = quotas[self.kills] if self.kills < MOVED_AT else self._form.steps
            due = time.monotonic() > at or self._job.step >= quota > 0
            if due and self._job.step < self._form.steps and self._has_what_it_takes():
                process.send_signal(signal.SIGKILL)
                process.wait()
                self.kills += 1
                self._tell(f"kill -9 of attempt {self.kills}, whose newest checkpoint is of step {self._job.step}")
                return None
            time.sleep(POLL_S)
        return code

    def _has_what_it_takes(self) -> bool:
        """For a wipe, a checkpoint in the bucket; for a move, one on the disk."""
        if self.kills + 1 == WIPED_AT:
            return self._job.mirrored_step > 0
        return self.kills + 1 != MOVED_AT or self._job.step > 0

    def _after(self) -> None:
        if self.kills == WIPED_AT:
            shutil.rmtree(self._job.folder)
            self._tell("the disk is wiped; only the bucket has the run")
        elif self.kills == MOVED_AT:
            elsewhere = self._job.folder.parent / "elsewhere" / self._job.folder.name
            elsewhere.parent.mkdir()
            self._job.folder.rename(elsewhere)
            self._job.folder = elsewhere
            self._tell(f"the folder has moved to {elsewhere.relative_to(self._job.log.parent)}")

    def _tell(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:6.0f} s  {what}", flush=True)


def write_rows(dataset: Path, folder: Path, form: Form) -> None:
    """The training rows, and of the split to test on the rows for validation and those for the comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(dataset / "train.jsonl", folder / "train.jsonl")
    lines = (dataset / "test.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    random.Random(SEED).shuffle(lines)
    (folder / "validation.jsonl").write_text("".join(lines[: form.validation]), encoding="utf-8")
    (folder / "test.jsonl").write_text("".join(lines[form.validation :][: form.test]), encoding="utf-8")


def before_and_after(base: str, winner: Path, rows: Path) -> str:
    """A markdown table: exact match with Wilson's interval, NLL with a normal one, and their paired differences."""
    config = Config(eval_dataset_name=str(rows / "test.jsonl"), eval_samples=None)
    before = untrained(base, config, AT_A_TIME)
    after = everyone(open_pretrained(winner, "cpu"), config, AT_A_TIME)[0]
    out = ["| | exact match, 95 % interval | NLL, nats per answer token |", "|---|---|---|"]
    for name, one in (("the base", before), ("the winner", after)):
        part = stats.binomtest(int(sum(one["right"])), len(one["right"])).proportion_ci(method="wilson")
        share = sum(one["right"]) / len(one["right"])
        out.append(f"| {name} | {share:.3f} ({part.low:.3f} to {part.high:.3f}) | {_spread(_per_token(one))} |")
    gains = torch.tensor(after["right"], dtype=torch.float64) - torch.tensor(before["right"], dtype=torch.float64)
    return "\n".join([*out, f"| difference | {_spread(gains)} | {_spread(_per_token(after) - _per_token(before))} |"])


def _per_token(one: Measured) -> torch.Tensor:
    """[n] shares of the rows in the NLL per token."""
    tokens = torch.tensor(one["tokens"], dtype=torch.float64)
    return torch.tensor(one["nll"], dtype=torch.float64) / tokens.mean()


def _spread(values: torch.Tensor) -> str:
    return f"{float(values.mean()):.3f} ± {over_rows(values):.3f}"


def rivals(form: Form, base: str, rows: Path) -> float | None:
    """Seconds of SFTTrainer for all trials one after the other, its starts included; None without it or if none is
    wanted."""
    if form.rivals == 0 or importlib.util.find_spec("trl") is None:
        return None
    began, chosen = time.monotonic(), form.trials[: form.rivals]
    model = BASE_FOLDER if base == "embedded" else base
    for trial in chosen:
        words = [f"--{key}={trial[key]}" for key in ("learning_rate", "lora_rank")]
        words += [f"--steps={form.steps}", f"--batch={form.rows}", f"--model={model}", f"--rows={rows / 'train.jsonl'}"]
        with (rows.parent / "trl.log").open("ab") as log:
            done = subprocess.run([sys.executable, "-m", "benchmarks.sft", *words], cwd=ROOT, stdout=log, stderr=log)
        if done.returncode:
            sys.exit(f"SFTTrainer ended with {done.returncode}:\n{Path(log.name).read_text(encoding='utf-8')[-2000:]}")
    return (time.monotonic() - began) / len(chosen) * len(form.trials)


@dataclass(frozen=True)
class Proof:
    """The results of the three trainings.

    Attributes:
        seconds: of each, on the clock.
        digests: SHA-256 of the agents of each; `alone` has one.
        scores: NLL of each trial on the rows for validation.
        winner: the final checkpoint of the run alone.
        kills, fills: how often the job was killed, and its disk filled from the bucket.
    """

    seconds: Mapping[str, float]
    digests: Mapping[str, list[str]]
    scores: list[float]
    winner: Path
    kills: int
    fills: int

    @property
    def won(self) -> int:
        """The trial with the lowest NLL."""
        return self.scores.index(min(self.scores))

    @property
    def holds(self) -> bool:
        """True if every byte is the same, and the disk was refilled."""
        same = self.digests["undisturbed"] == self.digests["killed"]
        return same and self.digests["alone"] == [self.digests["killed"][self.won]] and self.fills > 0


def trained(form: Form, base: str, rows: Path, folder: Path, seed: int) -> Proof:
    """The three trainings, one after the other."""
    plain, killed = (Job(form, base, rows, form.trials, folder / name) for name in ("undisturbed", "killed"))
    seconds = {"undisturbed": plain.finish()}
    print(f"{seconds['undisturbed']:6.0f} s  the undisturbed job has completed; now the killed one", flush=True)
    killer = Killer(killed, form, seed, seconds["undisturbed"] / form.steps)
    with s3_server() as address:
        seconds["killed"] = killer.run(address)
    scores = killed.scores()
    alone = Job(form, base, rows, [form.trials[scores.index(min(scores))]], folder / "alone")
    seconds["alone"] = alone.finish()
    return Proof(
        seconds,
        {"undisturbed": plain.digests(), "killed": killed.digests(), "alone": alone.digests()},
        scores,
        alone.folder / "final_checkpoint",
        killer.kills,
        killed.log.read_text(encoding="utf-8", errors="replace").count(f"came from s3://{BUCKET}"),
    )


def prove(form: Form, base: str, dataset: Path, folder: Path, seed: int) -> bool:
    """Print the page; returns True if the proof holds."""
    rows, machine, count = folder / "rows", surroundings(), len(form.trials)
    write_rows(dataset, rows, form)
    print(f"{count} trials (rates {form.rates}, ranks {form.ranks}) of {Path(base).name}, {form.steps} steps of")
    print(f"{form.rows} rows each, a checkpoint every {SAVE_STEPS} steps; {machine['processor']},")
    print(f"{torch.get_num_threads()} thread(s), torch {machine['torch']}, Transformers {machine['transformers']}\n")
    proof = trained(form, base, rows, folder, seed)
    print(f"\nThe winner: {form.trials[proof.won]}, NLL {proof.scores[proof.won]:.3f} on {form.validation} rows\n")
    print("| the winner's adapter | SHA-256 |\n|---|---|")
    for name, digests in proof.digests.items():
        print(f"| {name} | {digests[proof.won if name != 'alone' else 0]} |")
    same = sum(a == b for a, b in zip(proof.digests["undisturbed"], proof.digests["killed"], strict=True))
    print(f"\n{same} of {count} agents are the same file with and without {proof.kills} kills. The disk was", end=" ")
    print(f"filled from the bucket {proof.fills} time(s).\n\n{before_and_after(base, proof.winner, rows)}", flush=True)
    trl_s = rivals(form, base, rows)
    shown = "not installed: pip install trl" if trl_s is None else f"{trl_s:.0f} s"
    told = f"{form.rivals} of {count} measured, " if form.rivals < count else ""
    print(f"\n| | wall time |\n|---|---|\n| one job of {count} trials | {proof.seconds['undisturbed']:.0f} s |")
    print(f"| the same, killed {proof.kills} times, with a mirror | {proof.seconds['killed']:.0f} s |")
    print(f"| the winner alone | {proof.seconds['alone']:.0f} s |")
    print(f"| {count} runs of TRL's SFTTrainer, {told}without evaluation or checkpoints | {shown} |", flush=True)
    return proof.holds


def main() -> int:
    """The exit code is 1 if a byte differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", help="a folder of Transformers or a GGUF file (default: SmolLM2, fetched)")
    parser.add_argument("--dataset", type=Path, default=ROWS, help="train.jsonl and test.jsonl (default: docstrings)")
    parser.add_argument("--small", action="store_true", help="the small form, whatever the processor can do")
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument("--folder", type=Path, help="where the runs stay; a temporary one by default")
    options = parser.parse_args()
    fast = surroundings()["bf16_units"]
    small = options.small or not fast
    print("the small form" if small else "the full form", end="")
    print("" if fast else ", because this processor does not multiply bf16")
    form = SMALL if small else FULL
    base = folder_of(options.base or _fetched())
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        proven = prove(form, base, options.dataset, folder, options.seed)
    print("\nproven: the same bytes" if proven else "\nNOT proven: bytes differ, or the disk was never refilled")
    return 0 if proven else 1


def _fetched() -> Path:
    from tools.real_base import NotFetchedError, real_base

    try:
        return real_base()
    except NotFetchedError as error:
        sys.exit(f"there is no real base: {error}; or give one, BASE=FOLDER")


if __name__ == "__main__":
    sys.exit(main())
