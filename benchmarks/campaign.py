"""One real run under `safe_train.py` and a seeded campaign of faults: does it complete without a person, at what cost?

Every fault strikes once, at a step drawn by the seed, in the trainer that people use:

nan          the loss of one agent is NaN
oom          the forward pass runs out of memory
disk_full    the next checkpoint finds no space
terminate    SIGTERM: the run saves and ends, and the same command is called again, as a scheduler does
kill         SIGKILL
damage       a byte of the newest checkpoint is flipped, then SIGKILL
hang         the main thread never comes back

Afterwards the same run is made undisturbed. If no fault changed the mathematics (`nan`, `oom`), both must end with the
same bits. What a fault has cost is read off a ledger that the faulted trainer keeps.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ci_llm.core.durable import read_json

ROOT = Path(__file__).parent.parent
KINDS = ("nan", "oom", "disk_full", "terminate", "kill", "damage", "hang")
CHANGES_MATHS = ("nan", "oom")
ENDS_ATTEMPT = ("terminate", "kill", "damage", "hang")
OOMS_AT_MOST = 3  # each halves the micro-batch for good, and a batch of one row cannot be halved
SAVE_STEPS, SPACING = 3, 12  # between two faults there is room for a checkpoint more than the one that may be damaged
LEDGER, PLAN = "ledger.jsonl", "plan.json"
KEYS = {
    "num_agents": 2,
    "lora_rank": 2,
    "max_train_samples": 100,
    "batch_size": 16,
    "learning_rate": 1e-3,
    "eval_steps": "null",
    "eval_samples": 16,
    "generation_eval_samples": 0,
    "save_steps": SAVE_STEPS,
    "save_interval_seconds": "null",
    "num_workers": 0,
    "report_to": "none",
    "hang_timeout": 20,
}
DOOR = "import sys\nfrom ci_llm.cli.main import main\nfrom benchmarks import campaign\ncampaign.arm()\n"
DOOR += "sys.exit(main(['train', *sys.argv[1:]]))\n"


@dataclass(frozen=True)
class Fault:
    """What strikes, and in which 0-based optimizer step."""

    kind: str
    step: int


def draw(seed: int, count: int, kinds: tuple[str, ...] = KINDS) -> list[Fault]:
    """A campaign: one fault in every stretch of `SPACING` steps, of kinds that come equally often."""
    dice = random.Random(seed)
    pool = list(kinds) * (count // len(kinds) + 1)
    spare = [kind for kind in kinds if kind != "oom"]
    drawn = pool[:count]
    for place in [place for place, kind in enumerate(drawn) if kind == "oom"][OOMS_AT_MOST:]:
        drawn[place] = dice.choice(spare)
    dice.shuffle(drawn)
    return [Fault(kind, SPACING * (n + 1) - dice.randrange(1, SPACING // 2)) for n, kind in enumerate(drawn)]


# ------------------------------------------------------------------------------------------------- in the trainer


def arm() -> None:
    """Let the faults of the plan that have not struck yet strike in this process."""
    from ci_llm.run import job, loop

    plan = [Fault(**fault) for fault in json.loads(Path(PLAN).read_text())]
    struck = {(line["kind"], line["step"]) for line in ledger(Path())}
    waiting = {fault.step: fault.kind for fault in plan if (fault.kind, fault.step) not in struck}
    train, compute = job.train, loop.compute_gradients

    def begin(run: Any, *rest: Any) -> Any:
        _note(run, "start", run.state.step)
        return train(run, *rest)

    def strike(run: Any, step: int, *rest: Any) -> Any:
        if kind := waiting.pop(step, None):
            _note(run, kind, step)
            globals()[f"_{kind}"](run)
        return compute(run, step, *rest)

    job.train, loop.compute_gradients = begin, strike


def _note(run: Any, kind: str, step: int) -> None:
    line = {"kind": kind, "step": step, "attempt": run.manager.acquire_lease(), "time": time.time()}
    with Path(LEDGER).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _nan(_: Any) -> None:
    def spoil(output: Any) -> Any:
        factors = output.log_probs.new_ones(len(output.log_probs), 1)
        factors[0] = float("nan")
        return replace(output, log_probs=output.log_probs * factors)

    _at_next_forward(spoil)


def _oom(_: Any) -> None:
    def refuse(_: Any) -> Any:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    _at_next_forward(refuse)


def _at_next_forward(change: Callable[[Any], Any]) -> None:
    from ci_llm.crowd.model import Crowd

    original = Crowd.forward

    def once(crowd: Crowd, batch: Any) -> Any:
        Crowd.forward = original  # type: ignore[method-assign]
        return change(original(crowd, batch))

    Crowd.forward = once  # type: ignore[method-assign]


def _disk_full(_: Any) -> None:
    from ci_llm.checkpoints import store

    original = store.commit

    def once(*_: Any) -> Any:
        store.commit = original
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store.commit = once


def _terminate(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _kill(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _damage(run: Any) -> None:
    run.manager.wait_until_finished()
    path = run.manager.path(run.manager.all_steps()[-1]) / "agent0" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    _kill(run)


def _hang(_: Any) -> None:
    threading.Event().wait()


# ------------------------------------------------------------------------------------------------ around the run


def ledger(folder: Path) -> list[dict[str, Any]]:
    """What the trainers noted: starts, and faults as they struck."""
    path = folder / LEDGER
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def supervise(folder: Path, faults: list[Fault], seconds: float) -> int:
    """Run under safe_train until it has completed, calling again what was interrupted; how often it was called.

    Raises:
        AssertionError: it gave up.
    """
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(DOOR)
    (folder / "configs.yaml").touch()  # the defaults, and not the project's own
    (folder / PLAN).write_text(json.dumps([asdict(fault) for fault in faults]))
    words = [f"{key}={value}" for key, value in KEYS.items()]
    words += [f"max_train_steps={SPACING * (len(faults) + 1)}", "output_dir=run"]
    command = [sys.executable, str(ROOT / "safe_train.py"), "--max-retries", str(2 * len(faults) + 1), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    code, calls = 75, 0
    while code == 75 and calls <= len(faults):
        calls += 1
        with (folder / "output").open("ab") as output:
            code = subprocess.run(
                command, cwd=folder, env=environment, stdout=output, stderr=output, timeout=seconds
            ).returncode
    assert code == 0, f"the supervisor ended with {code}; its story: {folder / 'safe_train.log'}"
    return calls


def costs(lines: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Optimizer steps that had to be taken again, of every fault, by kind."""
    lost: dict[str, list[int]] = {}
    for number, line in enumerate(lines):
        if line["kind"] in ENDS_ATTEMPT:
            again = next(later["step"] for later in lines[number:] if later["kind"] == "start")
            # The step under way when a signal comes is finished first.
            lost.setdefault(line["kind"], []).append(max(0, line["step"] - again))
        elif line["kind"] != "start":
            lost.setdefault(line["kind"], []).append(0)
    return lost


def bits(folder: Path) -> dict[str, bytes]:
    """What a run has learned, and what it would go on with."""
    final = folder / "run" / "final_checkpoint"
    return {str(path.relative_to(final)): path.read_bytes() for path in sorted(final.rglob("*.safetensors"))}


def main() -> None:
    """Prints the table of faults and what they cost, and whether the bits are those of the undisturbed run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="some of them, with commas")
    parser.add_argument("--folder", type=Path, help="where the runs stay; a temporary one by default")
    parser.add_argument("--seconds", type=float, default=7200, help="limit of each call of the supervisor")
    options = parser.parse_args()
    faults = draw(options.seed, options.faults, tuple(options.kinds.split(",")))
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        began = time.monotonic()
        calls = supervise(folder / "faulted", faults, options.seconds)
        took = time.monotonic() - began
        lines = ledger(folder / "faulted")
        struck = Counter(line["kind"] for line in lines)
        assert struck == Counter(fault.kind for fault in faults) | {"start": struck["start"]}, "a fault never struck"
        status = read_json(folder / "faulted" / "run" / "status.json")
        print(f"{len(faults)} faults, {struck['start']} attempts, {calls} call(s) of safe_train.py, {took:.0f} s")
        print(f"status {status['status']} at step {status['step']}")  # type: ignore[call-overload, index]
        print("| fault | times | steps taken again: median | most |\n|---|---|---|---|")
        for kind, lost in sorted(costs(lines).items()):
            print(f"| {kind} | {len(lost)} | {statistics.median(lost):g} | {max(lost)} |")
        if not {fault.kind for fault in faults} & set(CHANGES_MATHS):
            never = [Fault("kill", 10**9)] * len(faults)  # the list says how long the run is
            supervise(folder / "undisturbed", never, options.seconds)
            print(f"same bits as the undisturbed run: {bits(folder / 'faulted') == bits(folder / 'undisturbed')}")


if __name__ == "__main__":
    main()
