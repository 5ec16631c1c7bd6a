"""The cost of a checkpoint for the loop that saves it: stall, slow-down, time until durable; ours beside six others.

    python -m benchmarks.checkpoint_stall                       134.5 MB in 2688 tensors
    python -m benchmarks.checkpoint_stall --scale 4 --rounds 5  four times the bytes

Every way to save lives in a process of its own, with the same state and the same loop. They take turns, so that all
see the same machine; the first turn of each is not counted, but shown. Figures are medians. Orbax takes part where
it is installed (`pip install orbax-checkpoint jax`).

stall        the call, and the wait of the next optimizer step for the copy
slow-down    how much longer than usual the steps are while the save is in flight, all of them together
durable      from the call until its own way says that it is done, and every file and folder is fsynced; ours has
             also read everything back then
memory       peak above that of the loop, from the first save on

The state is that of four adapters of rank 16 on all projections of a base of 12 layers (width 768): weights, both
moments of AdamW and its step, 134.5 MB in 2688 tensors. `scale` multiplies the rank. Nothing of the base is
computed: a step is a fixed amount of small matrix products and one real step of AdamW over all of it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import turn
from ci_llm.checkpoints.manager import CheckpointManager

BASELINE_STEPS = 6
LIMIT_S = 120
WIDTH, INNER, LAYERS, AGENTS, RANK = 768, 2048, 12, 4, 16
BASE_BYTES = 438_000_000
PRODUCTS = 100

Wait = Callable[[], object]
#: Begins to save the state into a folder; the loop continues when it returns. What it returns waits for the end.
Save = Callable[[Path], Wait]


class Training:
    """One process's loop.

    Attributes:
        tensors: the whole state by name, as every way to save gets it; the memory is that of model and optimizer.
        joined_s: seconds for which the last optimizer step waited for a copy.
    """

    def __init__(self, scale: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.weights = {name: nn.Parameter(torch.randn(shape) * 0.02) for name, shape in shapes(RANK * scale).items()}
        self.optimizer = torch.optim.AdamW(self.weights.values(), lr=1e-4, foreach=True)
        for weight in self.weights.values():
            weight.grad = torch.randn_like(weight) * 1e-3
        self.optimizer.step()
        self.tensors: dict[str, Tensor] = {}
        for name, weight in self.weights.items():
            self.tensors[f"model.{name}"] = weight.detach()
            self.tensors |= {f"optimizer.{name}.{key}": t for key, t in self.optimizer.state[weight].items()}
        self._factor = torch.randn(384, 384)
        self.joined_s = self._began = 0.0
        self.optimizer.register_step_pre_hook(self._note_begin)

    def after_other_hooks(self) -> None:
        """Call this when all others have registered theirs: what lies between is the wait for a copy."""
        self.optimizer.register_step_pre_hook(self._note_end)

    def step(self) -> None:
        """Forward and backward, and the optimizer's step."""
        product = self._factor
        for _ in range(PRODUCTS):
            product = (product @ self._factor) * 1e-2
        self.optimizer.step()

    def _note_begin(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _note_end(self, *_: object) -> None:
        self.joined_s = time.perf_counter() - self._began


def shapes(rank: int) -> dict[str, tuple[int, int]]:
    """Names and shapes of all adapters, as PEFT has them."""
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), (WIDTH, WIDTH))
    mlp = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
    return {
        f"layers.{layer}.{module}.lora_{ab}.agent{k}.weight": (rank, wide) if ab == "A" else (out, rank)
        for layer in range(LAYERS)
        for module, (out, wide) in (attention | mlp).items()
        for ab in "AB"
        for k in range(AGENTS)
    }


def done() -> None:
    """The end of what was saved before the call returned."""


# ---------------------------------------------------------------------------------------------------- ours


def ours(training: Training, home: Path) -> Save:
    """With `optimizers`: what the optimizer owns is copied while the next step computes."""
    return manager(home, optimizers=[training.optimizer], state=training.tensors)


def ours_at_once(training: Training, home: Path) -> Save:
    """Without `optimizers`: copied before `save` returns, written behind."""
    return manager(home, state=training.tensors)


def ours_plain(training: Training, home: Path) -> Save:
    """`async_save=False`: `save` returns when the checkpoint is committed and read back."""
    return manager(home, async_save=False, state=training.tensors)


def manager(home: Path, state: dict[str, Tensor], **options: Any) -> Save:
    writer = CheckpointManager(home, max_to_keep=1, **options)
    steps = iter(range(10_000))

    def save(folder: Path) -> Wait:
        assert writer.save(next(steps), {"state": state})
        return writer.wait_until_finished

    return save


# -------------------------------------------------------------------------------------------------- others


def torch_save(training: Training, home: Path) -> Save:
    def save(folder: Path) -> Wait:
        folder.mkdir()
        torch.save(training.tensors, folder / "state.pt")
        return done

    return save


def dcp_async(training: Training, home: Path) -> Save:
    """`torch.distributed.checkpoint.async_save` with its defaults, one process."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def save(folder: Path) -> Wait:
        future: Any = dcp.async_save(dict(training.tensors), checkpoint_id=folder)
        return future.result

    return save


def orbax_async(training: Training, home: Path) -> Save:
    """Orbax's AsyncCheckpointer over numpy arrays that share memory with the tensors."""
    import orbax.checkpoint as ocp

    writer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def save(folder: Path) -> Wait:
        arrays = {name: tensor.numpy() for name, tensor in training.tensors.items()}
        writer.save(folder, args=ocp.args.StandardSave(arrays))
        return writer.wait_until_finished

    return save


def accelerate_default(training: Training, home: Path) -> Save:
    """`Accelerator.save_state`: model with its base, optimizer, generators."""
    return saved_by(accelerated(training)[0])


def accelerate_adapters(training: Training, home: Path) -> Save:
    """`save_state` with a hook that writes the adapters and leaves the base out."""
    import safetensors.torch

    accelerator, model = accelerated(training)

    def adapters_only(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        weights.clear()
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        safetensors.torch.save_file(trained, Path(folder, "adapters.safetensors"))

    accelerator.register_save_state_pre_hook(adapters_only)
    return saved_by(accelerator)


def saved_by(accelerator: Any) -> Save:
    def save(folder: Path) -> Wait:
        accelerator.save_state(str(folder))
        return done

    return save


def accelerated(training: Training) -> tuple[Any, nn.Module]:
    from accelerate import Accelerator

    model = nn.Module()
    model.base = nn.Parameter(torch.ones(BASE_BYTES // 4), requires_grad=False)
    model.adapters = nn.ParameterDict({name.replace(".", "/"): p for name, p in training.weights.items()})
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, training.optimizer)
    return accelerator, model


WRITERS: dict[str, tuple[str, Callable[[Training, Path], Save]]] = {
    "ours": ("ours, `optimizers=[...]`", ours),
    "ours_at_once": ("ours, copied at the call", ours_at_once),
    "ours_plain": ("ours, `async_save=False`", ours_plain),
    "dcp_async": ("DCP `async_save`", dcp_async),
    "orbax_async": ("Orbax AsyncCheckpointer", orbax_async),
    "torch_save": ("`torch.save`", torch_save),
    "accelerate_adapters": ("`save_state`, adapters by a hook", accelerate_adapters),
    "accelerate_default": ("`save_state`", accelerate_default),
}


def in_background(wait: Wait) -> tuple[threading.Thread, list[float]]:
    """Wait in another thread; the list holds the time at which that ended."""
    ended: list[float] = []

    def watch() -> None:
        wait()
        ended.append(time.perf_counter())

    thread = threading.Thread(target=watch)
    thread.start()
    return thread, ended


# Measured


@dataclass(frozen=True)
class Cost:
    """One save: seconds, bytes."""

    stall_s: float
    slow_down_s: float
    durable_s: float
    nbytes: int
    memory: int


# ------------------------------------------------------------------------------------- in a process of its own


def serve(name: str, scale: int, home: Path, pipe: Connection) -> None:
    """Save into every folder that comes through the pipe, and answer with what it cost."""
    training = Training(scale)
    try:
        save = WRITERS[name][1](training, home / name)
    except ImportError as error:
        pipe.send(str(error))
        return
    training.after_other_hooks()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
    for _ in range(BASELINE_STEPS):
        training.step()
    peak = memory_peak()
    pipe.send(None)
    while (folder := pipe.recv()) is not None:
        pipe.send(one_save(training, save, folder, peak))


def one_save(training: Training, save: Any, folder: Path, peak: int = 0) -> Cost:
    """Save once while the loop runs; `peak` bytes are those of the loop without saves."""
    usual = statistics.median(timed_step(training) for _ in range(BASELINE_STEPS))
    began = time.perf_counter()
    wait = save(folder)
    stall = time.perf_counter() - began
    thread, ended = in_background(wait)
    slower, first = 0.0, True
    thread.join(1e-4)
    while thread.is_alive():
        slower += timed_step(training) - usual
        if first:
            stall, slower, first = stall + training.joined_s, slower - training.joined_s, False
        thread.join(0)
    synced = time.perf_counter()
    place = folder if folder.exists() else max(folder.parent.glob("ours*/checkpoint_step_*"), key=os.path.getmtime)
    nbytes = fsync_tree(place)
    durable = ended[0] - began + time.perf_counter() - synced
    return Cost(stall, max(slower, 0.0), durable, nbytes, memory_peak() - peak)


def timed_step(training: Training) -> float:
    began = time.perf_counter()
    training.step()
    return time.perf_counter() - began


def fsync_tree(folder: Path) -> int:
    """Make a folder durable with all it holds; the bytes of its files."""
    nbytes = 0
    for place, _, names in os.walk(folder, topdown=False):
        for path in (*(Path(place, name) for name in names), Path(place)):
            nbytes += path.stat().st_size if path.is_file() else 0
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)
    return nbytes


def memory_peak() -> int:
    """Most bytes that this process had resident since its peak was cleared."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


# --------------------------------------------------------------------------------------------- in this process


@contextmanager
def worker(name: str, scale: int, home: Path) -> Iterator[Connection | None]:
    """A process that saves in one way; None where that way is not installed."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(name, scale, home, there), daemon=True)
    process.start()
    try:
        missing = answer(here, name)
        if missing:
            print(f"{name} is left out: {missing}", flush=True)
        yield None if missing else here
        if not missing:
            here.send(None)
        process.join(LIMIT_S)
    finally:
        process.kill()
        process.join()


def answer(pipe: Connection, name: str) -> Any:
    if not pipe.poll(LIMIT_S):
        raise SystemExit(f"{name} does not answer")
    return pipe.recv()


def measure(names: list[str], scale: int, rounds: int, home: Path) -> dict[str, list[Cost]]:
    """Every way in turn, `rounds` times and once before."""
    with ExitStack() as stack:
        pipes = {name: pipe for name in names if (pipe := stack.enter_context(worker(name, scale, home)))}
        costs: dict[str, list[Cost]] = {name: [] for name in pipes}
        order = list(pipes)
        for number in range(rounds + 1):
            for name in turn(order, number):
                os.sync()
                pipes[name].send(home / f"{name}_{number}")
                costs[name].append(answer(pipes[name], name))
                shutil.rmtree(home / f"{name}_{number}", ignore_errors=True)
    return costs


def table(costs: dict[str, list[Cost]]) -> str:
    """Medians in milliseconds and megabytes."""
    head = "| | stall, ms | slow-down, ms | durable, ms | written, MB | extra memory, MB | first stall, ms |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name, (first, *saves) in costs.items():
        stall, slower, durable = (
            statistics.median(getattr(save, field) for save in saves) * 1e3
            for field in ("stall_s", "slow_down_s", "durable_s")
        )
        sizes = f"{saves[-1].nbytes / 1e6:.1f} | {saves[-1].memory / 1e6:.0f}"
        lines.append(
            f"| {WRITERS[name][0]} | {stall:.1f} | {slower:.0f} | {durable:.0f} | {sizes} | {first.stall_s * 1e3:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=1, help="multiplies the bytes of every tensor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=WRITERS, default=list(WRITERS), metavar="WAY")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        home = Path(scratch).resolve()
        print(table(measure(options.only, options.scale, options.rounds, home)))


if __name__ == "__main__":
    main()
