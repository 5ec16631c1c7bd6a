"""One run under `safe_train.py` and a seeded campaign of faults: does it complete without a person, at what cost?

    python -m benchmarks.campaign                                  100 faults of seven kinds, one process
    python -m benchmarks.campaign --kinds all --faults 1000 --processes 2 --folder F      every kind, with a mirror

Every fault strikes at a step drawn by the seed, in the trainer that people use, on a narrow base; the kinds are
below. Afterwards the same run is made with no other faults than those that decide what is
learned (`nan`, `oom`, and `world`, at the same steps): both must end with the same bits. What a fault has cost is read
off a ledger that the struck trainer keeps. With `--folder` a campaign that was interrupted resumes.

nan             the loss of one agent is NaN in one process
oom             the forward pass of one process runs out of memory
disk_full       the next checkpoint finds no space
write_fails     the next write of this process to its disk fails with EIO
store_refuses   the mirror's store refuses the next five objects
pause           a process stands still for a second
terminate       SIGTERM to one process: all save and end, and the same command is called again, as a scheduler does
walltime        the deadline has come: the same
kill            SIGKILL to one process
node            SIGKILL to all processes at once, the supervisor among them
lost_disk       the same, and the folder of the run is gone with them
damage          a byte of the newest checkpoint is flipped, then SIGKILL
hang            the main thread of one process never comes back
world           SIGTERM, and the next call has another number of processes
"""

from __future__ import annotations

import argparse
import errno
import itertools
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ci_llm.core.durable import read_json

ROOT = Path(__file__).parent.parent
KINDS = ("nan", "oom", "disk_full", "terminate", "kill", "damage", "hang")
#: Of every kind; the more often, the less an attempt costs.
ALL = (
    *("nan", "disk_full", "write_fails", "store_refuses", "pause") * 15,
    *("terminate", "kill") * 4,
    *("walltime", "node", "lost_disk", "damage") * 3,
    *("oom", "hang", "world"),
)
WORLDS = (0, -1, 0, 1)  # processes more than `--processes`, in turns: each `world` takes the next
OOMS_AT_MOST = 3  # each halves the micro-batch for good, and a batch of one row cannot be halved
SAVE_STEPS, SPACING = 3, 12  # between two faults there is room for a checkpoint more than the one that may be damaged
INTERRUPTED = 75
KEYS = {
    "num_agents": 2,
    "lora_rank": 2,
    "max_train_samples": 100,
    "global_batch_size": 16,
    "batch_size": 16,
    "learning_rate": 1e-3,
    "eval_steps": "null",
    "eval_samples": 16,
    "generation_eval_samples": 0,
    "save_steps": SAVE_STEPS,
    "save_interval_seconds": "null",
    "num_workers": 0,
    "report_to": "none",
    "output_dir": "run",
}
DOOR = "import sys\nfrom ci_llm.cli.main import main\nfrom benchmarks import campaign\ncampaign.arm()\n"
DOOR += "sys.exit(main(['train', *sys.argv[1:]]))\n"
#: These decide what is learned, so that they strike whenever their step is computed; the others strike once.
CHANGES_MATHS = ("nan", "oom", "world")
ENDS_ATTEMPT = ("terminate", "walltime", "kill", "node", "lost_disk", "damage", "hang", "world")
MAIN_ONLY = ("disk_full", "store_refuses", "walltime", "damage")
REFUSALS = 5
LEDGER, PLAN = "ledger.jsonl", "plan.json"
#: Names the campaign in the environment of every process of it.
TOKEN = "CI_LLM_CAMPAIGN"


@dataclass(frozen=True)
class Fault:
    """A fault of one kind, in a 0-based optimizer step."""

    kind: str
    step: int

    @property
    def victim(self) -> int:
        """The index of the process that it strikes."""
        return 0 if self.kind in MAIN_ONLY else self.step % int(os.environ.get("WORLD_SIZE", "1"))


def draw(seed: int, count: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """A campaign: one fault in every stretch of `SPACING` steps, of kinds that come as often as `kinds` names them."""
    dice = random.Random(seed)
    pool = list(kinds) * (count // len(kinds) + 1)
    spare = [kind for kind in kinds if kind != "oom"]
    drawn = pool[:count]
    for place in [place for place, kind in enumerate(drawn) if kind == "oom"][OOMS_AT_MOST:]:
        drawn[place] = dice.choice(spare)
    dice.shuffle(drawn)
    return [Fault(kind, SPACING * (n + 1) - dice.randrange(1, SPACING // 2)) for n, kind in enumerate(drawn)]


class Campaign:
    """One run in a folder of its own, called again and again until it has completed.

    Args:
        folder: made if it is not there; with what an earlier call left, the campaign resumes.
        steps: of the run.
        processes: at first; 1 starts the trainer itself, more start it with torchrun.
        mirror: the run has one, in a folder beside it.
    """

    def __init__(self, folder: Path, faults: Sequence[Fault], steps: int, processes: int, mirror: bool) -> None:
        self._folder, self._faults, self._processes = folder, faults, processes
        self._words = [f"{key}={value}" for key, value in KEYS.items()]
        self._words += [f"max_train_steps={steps}", f"model_name={folder / 'base'}"]
        self._words += [f"mirror={(folder / 'mirror').as_uri()}"] if mirror else []
        if not folder.exists():
            self._prepare()

    def _prepare(self) -> None:
        from tools.testbed.worlds import toy_base

        self._folder.mkdir(parents=True)
        toy_base(self._folder / "base")
        (self._folder / "train.py").write_text(DOOR)
        (self._folder / "configs.yaml").touch()  # the defaults, and not the project's own
        (self._folder / PLAN).write_text(json.dumps([asdict(fault) for fault in self._faults]))

    def run(self, seconds: float) -> int:
        """Call safe_train again as a scheduler does, until the run has completed; the number of all calls.

        Args:
            seconds: limit of each call.

        Raises:
            AssertionError: the supervisor gave up.
        """
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path, TOKEN: str(self._folder), "OMP_NUM_THREADS": "1"}
        told = self._folder / "output"
        for _ in range(len(self._faults) + 1):
            with told.open("ab") as output:
                code = subprocess.run(
                    self._command(), cwd=self._folder, env=environment, stdout=output, stderr=output, timeout=seconds
                ).returncode
            if code == 0:
                return told.read_bytes().count(b"safe_train: attempt 1 of")
            assert code in (INTERRUPTED, -signal.SIGKILL), (
                f"the supervisor ended with {code}; its story: {self._folder / 'safe_train.log'}"
            )
        raise AssertionError("more calls than faults")

    def _command(self) -> list[str]:
        supervisor = [sys.executable, str(ROOT / "safe_train.py"), "--max-retries", str(2 * len(self._faults) + 1)]
        if self._processes == 1:
            return [*supervisor, *self._words]
        changes = len({line["step"] for line in ledger(self._folder) if line["kind"] == "world"})
        processes = max(1, self._processes + WORLDS[changes % len(WORLDS)])
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        return [*supervisor, "--", *launcher, "train.py", *self._words]

    def bits(self) -> dict[str, bytes]:
        """The tensors of the final checkpoint: weights, and what a resume needs."""
        final = self._folder / "run" / "final_checkpoint"
        return {str(path.relative_to(final)): path.read_bytes() for path in sorted(final.rglob("*.safetensors"))}


def costs(lines: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Optimizer steps that had to be taken again, of every fault, by kind."""
    lost: dict[str, dict[int, int]] = {}
    for number, line in enumerate(lines):
        kind, step = line["kind"], line["step"]
        if kind in ENDS_ATTEMPT:
            again = next(later["step"] for later in lines[number:] if later["kind"] == "start")
            # The step under way when a signal comes is finished first.
            lost.setdefault(kind, {})[step] = max(0, step - again)
        elif kind != "start":
            lost.setdefault(kind, {})[step] = 0
    return {kind: list(steps.values()) for kind, steps in lost.items()}


def table(lines: list[dict[str, Any]]) -> str:
    """In markdown: how often each kind struck, and what it cost."""
    out = ["| fault | times | steps taken again: median | most |", "|---|---|---|---|"]
    for kind, lost in sorted(costs(lines).items()):
        out.append(f"| {kind} | {len(lost)} | {statistics.median(lost):g} | {max(lost)} |")
    return "\n".join(out)


# In the processes of the trainer that they strike


def ledger(folder: Path) -> list[dict[str, Any]]:
    """The notes of the trainers: starts, and faults as they struck."""
    path = folder / LEDGER
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def arm() -> None:
    """Let the faults of the plan that are due in this process strike."""
    from ci_llm.run import job, loop, watchdog

    plan = [Fault(**fault) for fault in json.loads(Path(PLAN).read_text())]
    own = int(os.environ.get("RANK", "0"))
    struck = {(line["kind"], line["step"]) for line in ledger(Path()) if line["kind"] not in CHANGES_MATHS}
    waiting = {fault.step: fault for fault in plan if fault.victim == own and (fault.kind, fault.step) not in struck}
    train, agree = job.train, loop.agree_on_gradients

    def begin(trainer: Any, *rest: Any) -> Any:
        if own == 0:
            _note("start", trainer.state.step)
        return train(trainer, *rest)

    def strike(trainer: Any, attempt: Any, step: int, *rest: Any) -> Any:
        if fault := waiting.pop(step, None):
            _note(fault.kind, step)
            globals()[f"_{fault.kind}"](attempt)
        return agree(trainer, attempt, step, *rest)

    job.train, loop.agree_on_gradients = begin, strike
    watchdog.FIRST_S = watchdog.LEAST_S = 20.0  # type: ignore[misc]


def _note(kind: str, step: int) -> None:
    line = {"kind": kind, "step": step, "time": time.time()}
    with Path(LEDGER).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _nan(_: Any) -> None:
    def spoil(outputs: Any) -> Any:
        first, *others = outputs
        factors = first.log_probs.new_ones(len(first.log_probs), 1)
        factors[0] = float("nan")
        return [replace(first, log_probs=first.log_probs * factors), *others]

    _at_next_forward(spoil)


def _oom(_: Any) -> None:
    def refuse(_: Any) -> Any:
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    _at_next_forward(refuse)


def _at_next_forward(change: Callable[[Any], Any]) -> None:
    from ci_llm.crowd.crowd import Crowd

    original = Crowd.forward

    def once(crowd: Crowd, batch: Any) -> Any:
        Crowd.forward = original  # type: ignore[method-assign]
        return change(original(crowd, batch))

    Crowd.forward = once  # type: ignore[method-assign]


def _disk_full(_: Any) -> None:
    from ci_llm.checkpoints import store

    _fail(store, "commit", lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _write_fails(_: Any) -> None:
    from ci_llm.core.durable import Filesystem

    _fail(Filesystem, "write", lambda: OSError(errno.EIO, os.strerror(errno.EIO)))


def _store_refuses(_: Any) -> None:
    from ci_llm.errors import MirrorUnreachable
    from ci_llm.mirror.objects import FolderObjects

    refusal = MirrorUnreachable("503 Slow Down", where="the store of the campaign", hint="try again")
    _fail(FolderObjects, "put", lambda: refusal, times=REFUSALS)


def _fail(owner: Any, name: str, error: Callable[[], Exception], times: int = 1) -> None:
    """Let the next calls of a function raise."""
    original, left = getattr(owner, name), itertools.count(times - 1, -1)

    def fail(*_: Any, **__: Any) -> Any:
        if next(left) == 0:
            setattr(owner, name, original)
        raise error()

    setattr(owner, name, fail)


def _pause(_: Any) -> None:
    own = os.getpid()
    subprocess.Popen(["sh", "-c", f"kill -STOP {own}; sleep 1; kill -CONT {own}"])


def _terminate(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


_world = _terminate


def _walltime(attempt: Any) -> None:
    attempt.interrupts.request_stop("walltime")


def _kill(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _node(attempt: Any, last_act: Callable[[], None] = lambda: None) -> None:
    others = [process for process in psutil.process_iter() if process.pid != os.getpid() and _belongs(process)]
    for process in others:
        process.kill()
    psutil.wait_procs(others, timeout=1)  # who has no parent left may stay in the table, but does nothing
    last_act()
    _kill(attempt)


def _belongs(process: psutil.Process) -> bool:
    try:
        return process.environ().get(TOKEN) == os.environ[TOKEN]
    except psutil.Error:
        return False


def _lost_disk(attempt: Any) -> None:
    _node(attempt, lambda: shutil.rmtree(attempt.config.run_folder))


def _damage(attempt: Any) -> None:
    attempt.manager.wait_until_finished()
    path = attempt.manager.store.path(attempt.manager.all_steps()[-1]) / "agent0" / "adapter_model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    _kill(attempt)


def _hang(_: Any) -> None:
    threading.Event().wait()


# The report


def main() -> None:
    """Prints the table of faults and what they cost, and whether the bits are those of the undisturbed run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help='some of them, with commas, or "all"')
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the runs stay; a temporary one by default")
    parser.add_argument("--seconds", type=float, default=7200, help="limit of each call of the supervisor")
    options = parser.parse_args()
    kinds = ALL if options.kinds == "all" else options.kinds.split(",")
    faults = draw(options.seed, options.faults, kinds)
    steps = SPACING * (len(faults) + 1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).resolve()
        mirror = bool({"lost_disk", "store_refuses"} & set(kinds))
        faulted = Campaign(folder / "faulted", faults, steps, options.processes, mirror)
        calls = faulted.run(options.seconds)
        lines = ledger(folder / "faulted")
        took = lines[-1]["time"] - lines[0]["time"]
        struck = Counter(kind for kind, _ in {(line["kind"], line["step"]) for line in lines})
        planned = Counter(fault.kind for fault in faults)
        assert {**struck, "start": 0} == {**planned, "start": 0}, "a fault never struck"
        attempts = sum(line["kind"] == "start" for line in lines)
        print(f"{len(faults)} faults, {attempts} attempts, {calls} call(s) of safe_train.py, {took:.0f} s")
        status = read_json(folder / "faulted" / "run" / "status.json")
        print(f"status {status['status']} at step {status['step']}")  # type: ignore[call-overload, index]
        print(table(lines), flush=True)
        kept = [fault for fault in faults if fault.kind in CHANGES_MATHS]
        other = Campaign(folder / "undisturbed", kept, steps, options.processes, mirror=False)
        other.run(options.seconds)
        print(f"same bits as the run without the others: {faulted.bits() == other.bits()}")


if __name__ == "__main__":
    main()
