"""`tools.audit` on a zoo of scripts: mistakes that were planted must be found by name, and exact ones must pass.

One line per script: what was expected, what the audit said, and whether these agree.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.zoo.warm import executor
from tools.audit.audit import Verdict, audit
from tools.audit.runs import Plan
from tools.testbed.forkserver import ForkServer

ROOT = Path(__file__).parent.parent
ZOO = Path(__file__).parent / "zoo"
OTHERS = ("accelerate", "trainer", "lightning")


@dataclass(frozen=True)
class Case:
    """A script and what the audit must say of it; "" for exact."""

    name: str
    expected: str
    command: Sequence[str]
    options: Sequence[str] = ()


def _faults(script: str) -> dict[str, str]:
    """What a script takes as `--fault`, with the mistake that each is: read, because libraries take long to import."""
    for node in ast.parse((ZOO / script).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAULTS":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise LookupError(f"{script} has no FAULTS")


def cases() -> list[Case]:
    """All of them."""
    plain = [str(ZOO / "plain.py")]
    found = [
        Case("torch", "", plain),
        Case("torch, no dropout and no generators saved", "", [*plain, "--plain"]),
        Case("torch, windows of two micro-batches", "", [*plain, "--window", "2"]),
        Case("torch, saves at SIGTERM", "", [*plain, "--stops"]),
    ]
    for fault, kind in _faults("plain.py").items():
        words = ["--window", "2"] if fault == "inside-a-window" else []
        found.append(Case(f"torch, {fault}", kind, [*plain, *words, "--fault", fault]))
    for name in OTHERS:
        script = f"with_{name}.py"
        found.append(Case(name, "", [str(ZOO / script)]))
        for fault, kind in _faults(script).items():
            found.append(Case(f"{name}, {fault}", kind, [str(ZOO / script), "--fault", fault]))
    return [*found, *_ours()]


def _ours() -> list[Case]:
    """The project's trainer and its examples."""
    keys = "num_agents=2 lora_rank=2 max_train_samples=100 batch_size=8 save_steps=5 eval_steps=null report_to=none"
    words = [
        "-m",
        "ci_llm",
        "train",
        *keys.split(),
        "save_interval_seconds=null",
        "num_workers=0",
        "max_train_steps=40",
    ]
    examples = ("own_loop", "hf_trainer", "lightning_trainer")
    return [
        Case("ci_llm", "", words, ["--steps", "16"]),
        *(Case(f"ci_llm, examples/{name}.py", "", [str(ROOT / "examples" / f"{name}.py")]) for name in examples),
    ]


def examine_warm(case: Case, folder: Path, server: ForkServer) -> Verdict:
    """The verdict about a script of the zoo whose processes are forks."""
    (folder / "work").mkdir(parents=True)
    options = dict(zip(case.options[::2], case.options[1::2], strict=True))
    before = Path.cwd()
    os.chdir(folder / "work")
    try:
        plan = Plan(["python", *case.command], steps=int(options.get("--steps", 30)), execute=executor(server))
        return audit(plan, folder / "scratch")
    finally:
        os.chdir(before)


def examine(case: Case, folder: Path) -> tuple[str, float]:
    """What the audit says of a script, and how long it took."""
    folder.mkdir()
    began = time.monotonic()
    command = [sys.executable, "-m", "tools.audit", "--json", *case.options, "--", sys.executable, *case.command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        return done.stderr.strip(), time.monotonic() - began
    told = json.loads(done.stdout)
    assert told["exact"] == (done.returncode == 0) == (told["first_divergence"] is None)
    found = "" if told["exact"] else told["first_divergence"]["kind"]
    return found, time.monotonic() - began


def main() -> None:
    """Prints a line per script, and how many were right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="scripts whose name begins with this")
    parser.add_argument("--warm", default="", metavar="MODULES", help="fork from a process that has imported these")
    options = parser.parse_args()
    right = 0
    chosen = [case for case in cases() if case.name.startswith(options.only)]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        server = stack.enter_context(ForkServer(*options.warm.split(","))) if options.warm else None
        for number, case in enumerate(chosen):
            began = time.monotonic()
            if server is None:
                found, seconds = examine(case, Path(scratch, str(number)))
            else:
                verdict = examine_warm(case, Path(scratch, str(number)), server)
                found, seconds = verdict.first[1].kind if verdict.first else "", time.monotonic() - began
            right += found == case.expected
            told = found or "exact"
            agrees = "right" if found == case.expected else f"WRONG, expected {case.expected or 'exact'}"
            print(f"| {case.name} | {told} | {agrees} | {seconds:.0f} s |", flush=True)
    print(f"{right} of {len(chosen)} right")


if __name__ == "__main__":
    main()
