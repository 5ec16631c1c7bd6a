"""Our trainer without training: real checkpoints, status, failures and recovery, and a fault where the plan says so.

plan.json: {"<attempt>": fault}; a fault comes after the second checkpoint of its attempt. What every attempt was asked
for goes to trace.jsonl.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil

from ci_llm.checkpoints.manifest import FileImage
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.cli.main import run_guarded  # its import makes this script one of ours
from ci_llm.core.run_folder import GOOD_AFTER_STEPS, Failure, read_recovery, write_failure
from ci_llm.core.run_status import RunStatus, read_status
from ci_llm.interrupts import Interrupts

TOTAL_STEPS, SAVE_STEPS = 1000, 2
FOLDER = Path("ci_llm_output")
EXIT_REASONS = ("nonfinite", "out_of_memory", "disk_full", "hang")


def main() -> int:
    with Interrupts() as interrupts:
        store = CheckpointStore(FOLDER)
        last = read_status(FOLDER).attempt if (FOLDER / "status.json").exists() else None
        recovery = read_recovery(FOLDER)
        allowed = recovery.latest_step_allowed(last)
        attempt = store.acquire_lease()  # before anything is looked at, as in a real run
        step = resume(store, allowed)
        store.supersede(step)
        status = RunStatus(FOLDER, attempt, still_held=store.holds_lease)
        status.start(step)
        tell(attempt, step, allowed, recovery.learning_rate_factor, recovery.micro_batch_size)
        fault = json.loads(Path("plan.json").read_text()).get(str(attempt))
        for _ in range(2 if fault else (TOTAL_STEPS - step) // SAVE_STEPS):
            step += SAVE_STEPS
            status.update(step=step)
            if fault or step == TOTAL_STEPS:
                store.save(step, {"weights": FileImage((step.to_bytes(8, "big") * 64,))})
        if fault:
            return fail(fault, attempt, step, store, status, interrupts)
        status.finish("completed")
    return 0


def resume(store: CheckpointStore, allowed: int | None) -> int:
    """The newest step that verifies and is allowed; 0 for a fresh start."""
    newest = store.latest_step()
    fine = [step for step in store.all_steps() if allowed is None or step <= allowed]
    return (newest or 0) if allowed is None else max(fine, default=0)


def tell(attempt: int, step: int, allowed: int | None, factor: float, micro_batch_size: int | None) -> None:
    facts = {"attempt": attempt, "from": step, "allowed": allowed, "factor": factor, "micro": micro_batch_size}
    with Path("trace.jsonl").open("a") as trace:
        trace.write(json.dumps(facts) + "\n")


def fail(fault: str, attempt: int, step: int, store: CheckpointStore, status: RunStatus, interrupts: Interrupts) -> int:
    if fault in EXIT_REASONS:
        # The newest checkpoint counts as bad, and the one before it as good.
        at = step + GOOD_AFTER_STEPS - 1 if fault == "nonfinite" else step
        write_failure(FOLDER, attempt, 0, Failure(fault, f"as planned: {fault}", 0, time.time(), at))
        status.finish("failed", fault)
        return 1
    if fault == "interrupted":
        supervisor = psutil.Process().parent().parent()  # type: ignore[union-attr]
        supervisor.terminate()  # type: ignore[union-attr]
        assert interrupts.wait()
        status.finish("interrupted", interrupts.stop_reason)
        return 0
    if fault == "damaged":
        path = store.path(step) / "weights"
        path.write_bytes(b"\x01" + path.read_bytes()[1:])
    os.kill(os.getpid(), 9)
    return 0


if __name__ == "__main__":
    sys.exit(run_guarded(main, debug=True))
