"""Requested faults in real runs: `Fault(kind, steps, process)`. Each leaves a line when it strikes, so that no test
passes because nothing happened.
"""

from __future__ import annotations

import ctypes
import errno
import json
import math
import os
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import ci_llm.run.job  # noqa: F401  the fork server imports all the rooms through this file
from ci_llm.base import sharded
from ci_llm.checkpoints import saver, store
from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.checkpoints.layout import committed
from ci_llm.cli.main import main
from ci_llm.core import run_folder
from ci_llm.crowd import questions, scoring
from ci_llm.crowd.crowd import Crowd
from ci_llm.crowd.model import CrowdOutput
from ci_llm.data import batches, loader
from ci_llm.lora import kernels, products
from ci_llm.run import gradients, loop, result
from ci_llm.run import watchdog as hang_watch
from ci_llm.run.watchdog import Heartbeat
from tests.support.bit_flips import flip
from tools.testbed.events import DEADLINE_S, new_rows, wait_until, wait_until_committed
from tools.testbed.forkserver import ForkServer

FIRED = "fired.jsonl"
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
SAMPLES = "samples.jsonl"


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and where.

    Attributes:
        kind: a key of `KINDS`.
        steps: 0-based optimizer steps in which it strikes.
        process: the only one that it strikes; None: all of them.
        agents: whom it strikes, where the kind asks for agents.
        amount: bytes of memory, rows, or whatever the kind asks for.
        times: how often it strikes in a process; 0: whenever it can.
        committed: step whose checkpoint must be committed before a process is killed; the process waits for it.
    """

    kind: str
    steps: tuple[int, ...] = ()
    process: int | None = None
    agents: tuple[int, ...] = ()
    amount: int = 0
    times: int = 0
    committed: int | None = None


Kind: TypeAlias = Callable[[Fault], None]


class Now:
    """The step that the loop computes in this process, and what strikes in it."""

    step = -1
    rows: list[int]
    struck: ClassVar[Counter[Fault]] = Counter()

    @classmethod
    def strikes(cls, fault: Fault) -> bool:
        """True if it is time; then it leaves a line."""
        if cls.step not in fault.steps or (fault.times and cls.struck[fault] >= fault.times):
            return False
        cls.struck[fault] += 1
        with Path(FIRED).open("a") as file:
            file.write(json.dumps({"kind": fault.kind, "step": cls.step, "process": own_index()}) + "\n")
        return True


def own_index() -> int:
    return int(os.environ.get("RANK", "0"))


def wrap(owner: Any, name: str, before: Callable[..., Any]) -> None:
    """Let each call of a function first call `before` with the same arguments."""
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


# ------------------------------------------------------------------------------------------------------ kinds


def nan_gradient(fault: Fault) -> None:
    """The backward pass leaves one number that is not finite in the gradient of each agent that is struck."""

    def strike(gradients: Tensor, losses: Tensor) -> None:
        if Now.strikes(fault):
            gradients[list(fault.agents), 0] = math.nan

    wrap(gradients, "nonfinite_here", strike)


def nan_output(fault: Fault) -> None:
    """The forward pass of the agents that are struck gives NaN: their losses, and their part of a diversity term."""
    original = Crowd.forward

    def forward(crowd: Crowd, rows: batches.MicroBatch) -> list[CrowdOutput]:
        outputs = original(crowd, rows)
        if not (torch.is_grad_enabled() and Now.strikes(fault)):
            return outputs
        factors = outputs[0].log_probs.new_ones(crowd.num_agents, 1)
        factors[list(fault.agents)] = math.nan
        return [replace(each, log_probs=each.log_probs * factors[list(each.agents)]) for each in outputs]

    Crowd.forward = forward  # type: ignore[method-assign]


def short_memory(fault: Fault) -> None:
    """From this step to the last the process may take `amount` bytes more than it holds: the kernel refuses others."""

    def lift(*_: object) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def strike(*_: object) -> None:
        if Now.strikes(fault):
            held = next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line)
            limit = int(held.split()[1]) * 1024 + fault.amount
            resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))

    # Blocks of more than 128 KiB go back to the kernel when they are freed. By default glibc keeps some of them, which
    # can be taken again without asking the kernel; how many depends on the threads of the process.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10) == 1
    wrap(gradients, "compute_gradients", strike)
    wrap(loop, "save", lift)  # of the last step: its threads want memory for their stacks


def hang(fault: Fault) -> None:
    """The main thread never comes back, once the other processes wait for it in the ballot of the step."""

    def wait_for_nothing(*_: object) -> None:
        if Now.step in fault.steps:
            others = [Path(f"votes_{index}") for index in range(int(os.environ.get("WORLD_SIZE", "1")))]
            others.pop(own_index())
            wait_until("the others vote", lambda: all(str(Now.step) in other.read_text().split() for other in others))
        if Now.strikes(fault):
            threading.Event().wait()

    wrap(gradients, "compute_gradients", wait_for_nothing)


def note_votes() -> None:
    """A process writes down the steps in which it comes to the ballot: the last line before it waits for the others."""
    votes = Path(f"votes_{own_index()}")
    votes.touch()

    def note(*_: object) -> None:
        with votes.open("a") as file:
            file.write(f"{Now.step}\n")

    wrap(dist, "all_reduce", note)


def hang_in_worker(fault: Fault) -> None:
    """A process of the data loader never comes back with the rows of a step."""

    def stuck_in_worker(_places: object, place: loader.Place) -> None:
        Now.step = place.step
        if Now.strikes(fault):
            threading.Event().wait()

    wrap(loader._Places, "__getitems__", stuck_in_worker)


# What a kind does when it is its turn


def no_memory(_: Fault) -> None:
    """Fail as a GPU does."""
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def no_space(_: Fault) -> None:
    """Fail as a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def bit_flipped(_: Fault) -> None:
    """The disk spoils the newest checkpoint, which was read back whole."""
    newest = committed(Path("run"))[0][1]
    flip(newest / "optimizer.safetensors", -1)


def bug(_: Fault) -> None:
    """Fail for a reason that has nothing to do with memory."""
    raise RuntimeError("a bug: memory is fine")


def nothing_drawn(_: Fault) -> None:
    raise RuntimeError("nothing can be drawn")


def killed(fault: Fault) -> None:
    """The process gets a SIGKILL, once what has to be committed is."""
    if fault.committed is not None:
        wait_until_committed(Path("run"), fault.committed)
    os.kill(os.getpid(), signal.SIGKILL)


def terminated(_: Fault) -> None:
    """The process gets a SIGTERM: it finishes that step, saves it and leaves."""
    os.kill(os.getpid(), signal.SIGTERM)


def terminated_after_another(fault: Fault) -> None:
    """The process gets a SIGTERM once another one has written why it failed."""
    wait_until("another process has failed", lambda: any(Path("run/attempts").glob("*/process_*.json")))
    terminated(fault)


# When it is


def before(owner: Any, name: str, act: Kind, when: Callable[..., bool] = lambda *_: True) -> Kind:
    """Act before a call of a function, if `when` says so of the fault and of what the call is given."""

    def arm_one(fault: Fault) -> None:
        def strike(*given: Any, **_: Any) -> None:
            if when(fault, *given) and Now.strikes(fault):
                act(fault)

        wrap(owner, name, strike)

    return arm_one


def before_the_step(act: Kind) -> Kind:
    return before(gradients, "compute_gradients", act)


def in_a_product(act: Kind) -> Kind:
    """Act in product number `amount` of the step with adapted layers, counted from 1 over forward and backward."""

    def arm_one(fault: Fault) -> None:
        done = Counter[int]()

        def count(*_: object) -> None:
            done[Now.step] += 1
            if done[Now.step] == fault.amount and Now.strikes(fault):
                act(fault)

        for function in (products.FusedLinear, kernels._JoinedLinears):
            for name in ("forward", "backward"):
                wrap(function, name, count)
                setattr(function, name, staticmethod(getattr(function, name)))

    return arm_one


def in_an_evaluation(act: Kind) -> Kind:
    """Act where more than `amount` rows are scored, or answered by the crowd, at a time."""

    def arm_one(fault: Fault) -> None:
        before(scoring, "_score_batch", act, lambda fault, _crowd, batch, *_: batch.num_rows > fault.amount)(fault)
        before(questions, "generate_each", act, lambda fault, *given: given[3] > fault.amount)(fault)

    return arm_one


def has_many_rows(fault: Fault, _crowd: Crowd, rows: batches.MicroBatch) -> bool:
    return torch.is_grad_enabled() and batches.num_units(rows) > fault.amount


KINDS: dict[str, Kind] = {
    "nan gradient": nan_gradient,
    "nan output": nan_output,
    "kill": before_the_step(killed),
    "terminate": before_the_step(terminated),
    "terminated after another": before_the_step(terminated_after_another),
    "no report": before(result, "write_report", nothing_drawn),  # when the run has ended
    "short memory": short_memory,
    "out of memory": before(Crowd, "forward", no_memory, has_many_rows),
    "out of memory in a product": in_a_product(no_memory),
    #: Of a layer that the process gathers for the others, to whom it has promised it.
    "out of memory while following": before(
        sharded._AgreedGather, "allocate", no_memory, lambda _, gather, *__: bool(gather._layers._follows)
    ),
    "kill in a product": in_a_product(killed),
    "out of memory in an evaluation": in_an_evaluation(no_memory),
    "kill in an evaluation": in_an_evaluation(killed),  # as the kernel does
    "out of memory in the optimizer": before(torch.optim.AdamW, "step", no_memory),  # after the vote of the step
    "bug": before(Crowd, "forward", bug),
    "hang": hang,
    "hang in a worker": hang_in_worker,
    "disk full": before(store, "commit", no_space),
    "bit flipped": before(saver.Saver, "make_final", bit_flipped),
    "failure unwritten": before(run_folder, "write_failure", no_space),
}


def watch_once_it_hangs() -> None:
    """Three seconds of silence are a hang, once a process hangs: on a busy machine a healthy step may take longer."""
    look = Heartbeat.look

    def count(heartbeat: Heartbeat, seconds: float) -> None:
        if Path(FIRED).exists():
            look(heartbeat, seconds)

    Heartbeat.look = count  # type: ignore[method-assign]
    hang_watch.FIRST_S = hang_watch.LEAST_S = 3.0  # type: ignore[misc]
    hang_watch.OTHERS_S = DEADLINE_S  # type: ignore[misc]


def arm(faults: Sequence[Fault]) -> None:
    """Let these faults strike in this process, and note what it trains on."""

    def note(_trainer: object, step: int, *_: object) -> None:
        Now.step, Now.rows = step, []

    def note_rows(_crowd: Crowd, rows: batches.MicroBatch) -> None:
        if torch.is_grad_enabled() and Now.step >= 0:  # below 0 it is the digest of a layer
            Now.rows += new_rows(rows)

    def note_step(*_: object) -> None:
        with Path(SAMPLES).open("a") as file:
            file.write(json.dumps({"step": Now.step, "process": own_index(), "rows": Now.rows}) + "\n")

    wrap(Crowd, "forward", note_rows)
    register_optimizer_step_post_hook(note_step)
    if {fault.kind for fault in faults} & {"hang", "hang in a worker"}:
        watch_once_it_hangs()
        note_votes()
    for fault in faults:
        if fault.process in (None, own_index()):
            KINDS[fault.kind](fault)
    wrap(gradients, "compute_gradients", note)  # last, so that it comes first


def train_with_faults(
    folder: str, words: list[str], faults: list[dict[str, Any]], environment: Mapping[str, str]
) -> int:
    """A trial for the fork server: `train.py` in `folder`, with faults."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    os.chdir(folder)
    arm([Fault(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}) for values in faults])
    return main(["train", "--config", os.devnull, *words])


# ----------------------------------------------------------------------------------------- in the test's process

KEYS = {
    "num_agents": 3,
    "lora_rank": 2,
    "max_train_samples": 40,
    "max_train_steps": 12,
    "batch_size": 4,
    "learning_rate": 4e-3,
    "eval_steps": "null",
    "eval_samples": 4,
    "generation_eval_samples": 0,
    "logging_steps": 1,
    "save_steps": "null",
    "save_interval_seconds": "null",
    "num_workers": 0,
    "report_to": "none",
    "output_dir": "run",
}


def train(
    server: ForkServer,
    folder: Path,
    *faults: Fault,
    ranks: int = 1,
    environment: Mapping[str, str] | None = None,
    trial: Callable[..., int] = train_with_faults,
    **keys: object,
) -> list[int]:
    """One attempt; the exit codes of its processes."""
    folder.mkdir(exist_ok=True)
    return server.run(
        trial,
        folder / "log",
        ranks=ranks,
        folder=str(folder),
        words=[f"{key}={value}" for key, value in (KEYS | keys).items()],
        faults=[asdict(fault) for fault in faults],
        environment=dict(environment or {}),
    )


def fired(folder: Path) -> list[tuple[str, int, int]]:
    """(kind, step, process) of every fault that struck."""
    path = folder / FIRED
    lines = path.read_text().splitlines() if path.exists() else []
    return [(one["kind"], one["step"], one["process"]) for one in map(json.loads, lines)]


def samples(folder: Path) -> dict[tuple[int, int], list[int]]:
    """The rows that each process trained on in each optimizer step: those of the attempt that was not given up."""
    lines = [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]
    return {(line["step"], line["process"]): line["rows"] for line in lines}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl about training, in order."""
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "epoch" in line]


def weights(folder: Path, agents: Sequence[int]) -> list[bytes]:
    """The adapters of these agents at the end of a run."""
    final = folder / "run" / "final_checkpoint"
    return [(final / f"agent{k}" / "adapter_model.safetensors").read_bytes() for k in agents]


def adapters(folder: Path, agents: Sequence[int]) -> dict[str, Tensor]:
    """The adapters of these agents as tensors by name."""
    state = load_checkpoint(folder / "run" / "final_checkpoint").state
    return {f"agent{k}/{name}": tensor for k in agents for name, tensor in state[f"agent{k}/adapter_model"].items()}


def said(folder: Path) -> str:
    """The output of all processes."""
    return (folder / "log").read_text()
