"""The processes of a run: how they meet, their `Accelerator`, and every collective of the training.

One optimizer step has two collectives, both by Accelerate. Every process first casts a ballot (`agree`), before it
enters any other collective. If no ballot objects, the processes add up the flat gradient (`reduce_flat_`). Agents that
draw completions have a vote of their own before it. The ballot goes over gloo on every machine, because gloo reports a
dead peer within milliseconds, while a kernel on a GPU would wait for it. The processes meet at one address, once, and
join a new group for every run. Only this file makes an `Accelerator`: after the precision of the run is settled,
because Accelerate fixes it in the constructor.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    broadcast_object_list,
    gather_object,
)
from torch import Tensor
from torch import distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from ci_llm.cluster.launch import (
    Launch,
    disable_unsupported,
    exit_code_after_stop,
    launch_notes,
    names_of_round,
    read_launch,
    who_is_missing,
)
from ci_llm.cluster.starter import exit_code_told
from ci_llm.config import Config
from ci_llm.config.own_keys import AUTO
from ci_llm.core.durable import make_folders, write_bytes
from ci_llm.core.memory import free_memory, is_out_of_memory
from ci_llm.core.run_folder import LAUNCH_TOKEN
from ci_llm.distributed import precision
from ci_llm.distributed.ballot import STOP, Ballot, Verdict, decode, encode
from ci_llm.errors import CiLlmError, LaunchError, PeerLost, StoppedBeforeMeeting, first_line
from ci_llm.interrupts import Interrupts

T = TypeVar("T")
logger = logging.getLogger(__name__)

# A process that dies closes its connections, which the others notice at once. This bounds the wait for a machine that
# went silent, and for the main process while it works alone (`Processes.main_process_first`).
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
#: The longest that an all-reduce of gradients may take on GPUs. All processes have just voted, so that all begin it.
REDUCE_BOUND_S: Final = 60.0
_REDUCE_LOOK_S: Final = 1e-4
#: How long a process that is asked to stop waits for others that it has not met yet.
MEETING_GRACE_S: Final = 5.0
#: After this time a process says which others it still waits for.
MISSING_S: Final = 10.0
_LOOK_S: Final = 0.1
_IDLE_LOOK_S: Final = 1.0  # how late a request to stop is seen at most; the end of a run wakes the thread at once
_RUNS: Final = itertools.count()  # of this process
SHUTDOWN_BOUND_S: Final = 10.0


class Processes:
    """The processes of this run, as one of them sees them. The constructor is a collective: it joins the process group.

    Args:
        config: for `mixed_precision` and `model_dtype`, and for the size of the batch in the notes.
        launch: how this process was started; read from the environment by default.
        interrupts: a request to stop ends the wait for processes that have not come.

    Attributes:
        follow: called before every ballot: serves processes whose passes through a sharded base are not over.
        notes: lines for people about the way the run was started.
        patience: how long a process that is asked to stop waits for the others.
        chooses_threads: this process computes on the CPU, and OMP_NUM_THREADS does not say by how many threads.

    Raises:
        LaunchError: the processes cannot join one process group, or there are more of them than GPUs.
        ModelError: the device does not support the precision.
    """

    def __init__(self, config: Config, *, launch: Launch | None = None, interrupts: Interrupts | None = None) -> None:
        self.launch = read_launch() if launch is None else launch
        precision.require_known_device()
        on_cpu = precision.runs_on_cpu()
        precision.check_precision(config)
        _check_gpus(self.launch, on_cpu)
        # The order matters: Accelerate reads the environment in its constructor, and a process must refuse before the
        # rendezvous, in which the others would wait for it.
        self.notes = disable_unsupported(os.environ)
        self.chooses_threads = on_cpu and "OMP_NUM_THREADS" not in os.environ
        _set_environment(self.launch, on_cpu)
        with rendezvous_errors(self.launch) if self.launch.num_processes > 1 else nullcontext():
            if self.launch.num_processes > 1 and not (dist.is_initialized() or is_initialized()):
                join(self.launch, _backend(on_cpu), interrupts)
            backend = {"backend": _backend(on_cpu)} if dist.is_initialized() else {}
            self._state = PartialState(on_cpu, **backend)
            if self.device.type == "cuda":  # ACCELERATE_TORCH_DEVICE may name another one than torch's current one
                torch.cuda.set_device(self.device)
            self._meet_on_devices()
        if self.chooses_threads:  # else the next run of this process would take our number for a given one
            os.environ.pop("OMP_NUM_THREADS", None)
        # An Accelerator that exists already has fixed Accelerate's global state: the new one silently adopts it.
        if self.num_processes != self.launch.num_processes:
            raise LaunchError(
                f"{self.launch.num_processes} processes were started, but Accelerate sees"
                f" {self.num_processes}: each would train alone, into the same folder",
                where=f"launcher: {self.launch.launcher}",
                hint="create no Accelerator before Processes; start by torchrun or accelerate launch",
            )
        num_gpus = 0 if on_cpu else torch.cuda.device_count()
        self.notes += launch_notes(self.launch, os.environ, num_gpus=num_gpus)
        self.follow: Callable[[], None] = lambda: None
        self.patience = Patience()
        self._tokens: list[Path] = []
        self._precision: str = config.mixed_precision
        self._accelerator: Accelerator | None = None
        logger.debug("process %d of %d on %s; %s", self.process_index, self.num_processes, self.device, self.launch)

    def _meet_on_devices(self) -> None:
        """Open the connection of the GPUs, which NCCL does at its first collective, while their memory is free.

        Raises:
            LaunchError: two processes of a machine have one GPU.
        """
        if self.num_processes == 1 or self.device.type != "cuda":
            return
        if self.launch.launcher == "srun":  # which may show each its own GPU alone
            has_few = torch.cuda.device_count() < self.launch.num_local_processes
            card = platform.node(), str(torch.cuda.get_device_properties(self.device).uuid), has_few
            cards = [(node, uuid) for node, uuid, few in self.gather_object(card) if few]
            if len({*cards}) < len(cards):
                raise _too_few_gpus(self.launch)
        dist.all_reduce(torch.zeros(1, device=self.device))
        torch.cuda.synchronize(self.device)

    @property
    def device(self) -> torch.device:
        """The device of this process. On the CPU it is "cpu": Accelerate's "cpu:0" equals no tensor's device."""
        device = torch.device(self._state.device)
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def process_index(self) -> int:
        """0 to num_processes - 1."""
        return int(self._state.process_index)

    @property
    def num_processes(self) -> int:
        """Processes of the run, over all machines."""
        return int(self._state.num_processes)

    @property
    def is_main_process(self) -> bool:
        """True if this process writes the files of which a run has one."""
        return self.process_index == 0

    @property
    def accelerator(self) -> Accelerator:
        """Accelerate's own, in the precision of `mixed_precision`; auto counts as no until it is settled.

        Gradients are summed and divided by the targets of the whole step, and the loss scale is a part of the run's
        state: so Accelerate neither divides by micro-steps nor scales.
        """
        if self._accelerator is None:
            self._accelerator = Accelerator(
                cpu=self.device.type == "cpu",
                mixed_precision="no" if self._precision == AUTO else self._precision,
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
                dataloader_config=DataLoaderConfiguration(even_batches=False),
                rng_types=[],
                kwargs_handlers=[GradScalerKwargs(enabled=False)],
            )
        return self._accelerator

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of the forward pass, in the precision of `mixed_precision`."""
        return self.accelerator.autocast()  # type: ignore[no-any-return]

    def choose_precision(self, config: Config) -> tuple[Config, str]:
        """Compute in the precision of the configuration; where it says auto, choose the same one on all processes.

        A collective.

        Returns:
            the configuration without auto, and the choice with its reason in one line; empty if none was to be made.

        Raises:
            ModelError: the device does not support the precision; a checkpoint of another machine may ask for it.
        """
        settled, line = config, ""
        if AUTO in (config.mixed_precision, config.model_dtype):
            speed = min(self.gather_object(precision.speed_of_bf16()), key=lambda each: each.bf16_is_faster)
            settled = config.model_copy(update=precision.chosen(config, speed))
            base = "" if settled.model_dtype == config.model_dtype else f", model_dtype={settled.model_dtype}"
            line = f"mixed_precision={settled.mixed_precision}{base}: {speed.why}"
        precision.check_precision(settled)
        if settled.mixed_precision != self._precision:
            AcceleratorState._reset_state()  # which keeps the precision of the first Accelerator of a process
            self._precision = settled.mixed_precision
            self._accelerator = None
        return settled, line

    def free_memory(self) -> int:
        """Bytes that are free for this process, in the memory of its device; on a CPU its part of what all share."""
        free, _ = free_memory(self.device)
        return free // self.launch.num_local_processes if self.device.type == "cpu" else free

    def agree(self, ballot: Ballot) -> Verdict:
        """Vote: one small all-reduce, and in a plain step the only wait for the device. A collective.

        A second collective follows only if a process wants to stop: it tells all of them the reason.

        Raises:
            PeerLost: a process is gone.
        """
        self.follow()
        # On the CPU tensor of `encode` torch chooses gloo, also where the gradient goes over NCCL.
        votes = self._add_in_order(encode(ballot))
        reasons = self.gather_object(ballot.stop) if votes[STOP] > 0 else []
        return decode(votes, len(ballot.nonfinite), reasons)

    def _add_in_order(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, by their index: wherever a number stands, it is the same. A collective."""
        with peer_errors():
            if self.num_processes < 3:
                return self.accelerator.reduce(tensor, "sum")  # type: ignore[no-any-return]
            each = [torch.empty_like(tensor) for _ in range(self.num_processes)]
            dist.all_gather(each, tensor)  # Accelerate would gather on the GPUs, and a ballot lies on the host
        return sum(each[1:], start=each[0])

    def reduce_flat_(self, tensor: Tensor) -> Tensor:
        """Add a contiguous tensor over all processes, in place, by one all-reduce. A collective.

        The number of processes and the size of the tensor fix the order of summation: the result is the same, bit for
        bit, on every process and in every repetition.

        Raises:
            PeerLost: a process is gone.
        """
        if self.num_processes > 1:
            with peer_errors():
                tensor.copy_(self.accelerator.reduce(tensor, "sum"))
                wait_within_bound(tensor)
        return tensor

    def gather_object(self, value: T) -> list[T]:
        """The values of all processes, by index, on every process. A collective; not for the inner loop."""
        with peer_errors():
            gathered: list[T] = gather_object([value])
        return gathered

    def broadcast_object(self, value: T) -> T:
        """The main process's value, on every process. A collective."""
        with peer_errors():
            values: list[T] = broadcast_object_list([value])
        return values[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """Run `work` on the main process; every process gets its result. A collective.

        Raises:
            CiLlmError: raised by `work`; on every process, so that none waits for the main one.
        """
        done: tuple[T | None, CiLlmError | None] = None, None
        if self.is_main_process:
            try:
                done = work(), None
            except CiLlmError as error:
                done = None, error
        value, refusal = self.broadcast_object(done)
        if refusal is not None:
            raise refusal
        return cast("T", value)

    def wait_for_everyone(self) -> None:
        """Return once every process has called this. A collective."""
        self.reduce_flat_(torch.zeros(1))

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the block before the others, which find its cached work. A collective.

        If a CiLlmError ends the block on the main process, the others run it as well and raise the same error, instead
        of losing a peer.
        """
        if not self.is_main_process:
            self.wait_for_everyone()
        try:
            yield
        except CiLlmError:
            if self.is_main_process:
                self.wait_for_everyone()
            raise
        if self.is_main_process:
            self.wait_for_everyone()

    def require_same_folder(self, folder: Path) -> None:
        """Refuse a folder that is not the same for all processes. A collective.

        The main process creates the folder and writes a token file there, which stays until `shutdown`. Every process
        looks for the token.

        Raises:
            LaunchError: on every process alike, so that none is left waiting.
        """
        token = folder / self.broadcast_object(f"{LAUNCH_TOKEN}{secrets.token_hex(8)}")
        self.on_main(lambda: self._write_launch_token(token))
        each_sees = self.gather_object(token.is_file())
        blind = [index for index, sees in enumerate(each_sees) if not sees]
        if blind:
            raise LaunchError(
                f"the folder of process 0 is not the folder of process {', '.join(map(str, blind))}",
                where=str(folder.resolve()),
                hint="give an output_dir on a disk that all machines share, as an absolute path",
            )

    def _write_launch_token(self, token: Path) -> None:
        try:
            make_folders(token.parent)
            write_bytes(token, b"")
        except OSError as error:
            what = f"the folder cannot be written: {error.strerror}"
            raise LaunchError(what, where=str(token.parent), hint="give another output_dir") from error
        self._tokens.append(token)

    def shutdown(self) -> bool:
        """Leave the process group, within a bound of 10 s; the trackers must be closed before.

        Returns:
            False if the library still waits for a peer at the bound: then the process must end by `os._exit`.
        """
        while self._tokens:
            with suppress(OSError):  # a disk that is gone; the next attempt sweeps the token
                self._tokens.pop().unlink()
        # destroy_process_group may wait for a lost peer without an end: it runs in a thread that can be abandoned.
        leaving = threading.Thread(target=leave, name="ci_llm leave", daemon=True)
        leaving.start()
        leaving.join(SHUTDOWN_BOUND_S)
        # Accelerate's state is global: without this, the next Accelerator of this process would reuse the old group.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return not leaving.is_alive()


class OneProcess:
    """A process that has met no others and joins no group: its votes are its own, in the precision of its caller."""

    process_index, num_processes = 0, 1

    def agree(self, ballot: Ballot) -> Verdict:
        return Verdict(0, stop=ballot.stop, out_of_memory=ballot.out_of_memory, failed=ballot.failed)

    def gather_object(self, value: T) -> list[T]:
        return [value]

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()


def check_process_group() -> str:
    """Prove that address, port and backend work: join a process group of this process alone, all-reduce, and leave.

    Returns:
        the backend and its address, for people.

    Raises:
        LaunchError: one of them does not work on this machine.
    """
    backend = _backend(precision.runs_on_cpu())
    try:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device="cpu" if precision.runs_on_cpu() else "cuda"))
    except (RuntimeError, OSError) as error:
        raise LaunchError(
            f"processes of this machine cannot communicate: {first_line(error)}",
            where=f"{backend}, 127.0.0.1",
            hint="let this machine's name resolve (/etc/hosts), or export GLOO_SOCKET_IFNAME=lo",
        ) from error
    finally:
        leave()
    return f"{backend} on 127.0.0.1:{store.port}"


def _check_gpus(launch: Launch, on_cpu: bool) -> None:
    """Refuse fewer GPUs than processes; under `srun --gpus-per-task=1`, which shows each its own, that shows later."""
    seen = torch.cuda.device_count()
    if not on_cpu and launch.num_local_processes > seen and (launch.launcher, seen) != ("srun", 1):
        raise _too_few_gpus(launch)


def _too_few_gpus(launch: Launch) -> LaunchError:
    return LaunchError(
        f"{launch.num_local_processes} processes on this machine, but {torch.cuda.device_count()} GPU(s)",
        where=f"launcher: {launch.launcher}",
        hint="start as many processes as GPUs, or export ACCELERATE_USE_CPU=true to run all on the CPU",
    )


def _set_environment(launch: Launch, on_cpu: bool) -> None:
    os.environ.update(launch.variables)
    if not on_cpu:
        # For deterministic products. cuBLAS reads it once, before the first product of the process, in any mode.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Every step has rows of other lengths, which leaves gaps in memory. torch reads it at its first allocation.
        if "PYTORCH_ALLOC_CONF" not in os.environ:
            os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        # A process without a peer ends as PeerLost (`wait_within_bound`), and not by a signal of NCCL's watchdog.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    if on_cpu and launch.num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        # Otherwise every process uses all cores, or Accelerate counts the cores of the machine and not of the job.
        os.environ["OMP_NUM_THREADS"] = str(launch.threads_per_process)
        torch.set_num_threads(launch.threads_per_process)


def _backend(on_cpu: bool) -> str:
    return "gloo" if on_cpu else "cuda:nccl,cpu:gloo"


def join(launch: Launch, backend: str, interrupts: Interrupts | None = None) -> None:
    """Join under names of this run alone: what an earlier run of these processes has left in the store stays apart.

    torch would wait for the others in calls that no signal ends, and say nothing. So this waits for them first.

    Raises:
        StoppedBeforeMeeting: the run is asked to stop meanwhile.
    """
    name = f"{names_of_round()}ci_llm run {next(_RUNS)}"
    place = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    wait = time.sleep if interrupts is None else interrupts.wait
    tell_at = time.monotonic() + MISSING_S
    until = time.monotonic() + COLLECTIVE_TIMEOUT.total_seconds()
    while missing := _missing(launch, name, place):
        who = who_is_missing(launch, missing)
        if interrupts is not None and interrupts.stop_reason is not None:
            raise StoppedBeforeMeeting("asked to stop before the processes had met", where=who)
        if time.monotonic() > until:
            raise RuntimeError(who)
        if time.monotonic() > tell_at:
            tell_at = math.inf
            if launch.is_main_process or 0 in missing:  # else the main process tells
                print(f"waiting   {who}", file=sys.stderr, flush=True)
        wait(_LOOK_S)
    store = PrefixStore(name, _meeting_points[place])
    index, count = launch.process_index, launch.num_processes
    dist.init_process_group(backend, store=store, rank=index, world_size=count, timeout=COLLECTIVE_TIMEOUT)


#: The store at each address. It is kept for the next run: a peer may be there first and need it.
_meeting_points: dict[tuple[str, str], Store] = {}


def _missing(launch: Launch, name: str, place: tuple[str, str]) -> list[int]:
    """The processes that are not at the store yet; this one is there from now on."""
    if place not in _meeting_points:
        leads = launch.is_main_process and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # else it is there
        if not leads and not _listens(place):
            return [0]
        host, port = place
        how: Any = {"wait_for_workers": False, "multi_tenant": True}
        store: Store = TCPStore(host, int(port), None, leads, COLLECTIVE_TIMEOUT, **how)
        _meeting_points[place] = store
    store = PrefixStore(name, _meeting_points[place])
    store.set(f"here {launch.process_index}", "")
    return [index for index in range(launch.num_processes) if not store.check([f"here {index}"])]


def _listens(place: tuple[str, str]) -> bool:
    with suppress(OSError), socket.create_connection(place, timeout=_IDLE_LOOK_S):
        return True
    return False


@contextmanager
def rendezvous_errors(launch: Launch) -> Iterator[None]:
    """Processes that cannot meet are a LaunchError with the way; not so an error of this process's own device."""
    address, port = (launch.variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    _waiting.append(time.monotonic())
    try:
        socket.getaddrinfo(address, port)  # fails at once; torch would try an unknown name for half an hour
        yield
    except (RuntimeError, OSError) as error:
        if _is_of_own_device(error):
            raise
        raise LaunchError(
            f"the {launch.num_processes} processes cannot meet: {first_line(error)}",
            where=f"{address}:{port}",
            hint="export a free MASTER_PORT, and a MASTER_ADDR that every machine can reach",
        ) from error
    finally:
        _waiting.pop()


@dataclass
class Patience:
    """How long a process that is asked to stop waits in a meeting for the others, and what it does then.

    Attributes:
        until: the time, by `time.monotonic()`, before which it waits in any case.
        record: called with the reason before the process ends.
    """

    until: Callable[[], float] = lambda: 0.0
    record: Callable[[str], object] = lambda reason: None


@contextmanager
def ends_if_stopped(interrupts: Interrupts, patience: Patience, interrupted_exit_code: int = 0) -> Iterator[None]:
    """A request to stop ends this process where its main thread waits in a meeting that a peer does not come to.

    torch waits in calls that no signal interrupts. A peer that has died is an error at once; one that is silent, or has
    died before it joined, would be waited for until the kill.
    """
    over = threading.Event()

    def watch() -> None:
        while interrupts.stop_requested_at is None and not over.wait(_IDLE_LOOK_S):
            pass
        while not over.wait(_LOOK_S):
            since = max([interrupts.stop_requested_at or 0.0, *_waiting])
            if _waiting and time.monotonic() > max(since + MEETING_GRACE_S, patience.until()):
                end(interrupts.stop_reason or "")

    def end(reason: str) -> None:
        os.write(sys.stderr.fileno(), b"asked to stop, and the other processes have not come: leaving\n")
        # In a thread that can be abandoned: it may wait for a save, and that for the silent process.
        recorder = threading.Thread(target=patience.record, args=[reason], daemon=True)
        recorder.start()
        recorder.join(SHUTDOWN_BOUND_S)
        os._exit(exit_code_told(exit_code_after_stop(reason, interrupted_exit_code)))

    watcher = threading.Thread(target=watch, name="ci_llm meeting", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


#: Since when the main thread waits for other processes, by `time.monotonic()`; empty while it does not.
_waiting: list[float] = []


def leave() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def peer_errors() -> Iterator[None]:
    """An error of a collective in the block means that a process is gone: a PeerLost.

    Not so an error of this process's own device: the first collective after it is where CUDA reports it.
    """
    _waiting.append(time.monotonic())
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL raise no narrower class for a broken connection
        if _is_of_own_device(error):
            raise
        raise PeerLost(
            "a process of this run is gone or silent",
            where=first_line(error),
            hint="attempts/<n>/process_<i>.json has its reason; the run resumes from its last checkpoint",
        ) from error
    finally:
        _waiting.pop()


def wait_within_bound(tensor: Tensor) -> None:
    """Return when a tensor is added over all processes, or a peer is gone.

    gloo tells of a dead peer at once. On a GPU the call returns before anything is added, and a kernel without its
    peer never ends. The optimizer must not move by such a gradient, so the host looks until the kernel has ended.

    Raises:
        RuntimeError: a peer is gone, or silent for `REDUCE_BOUND_S`.
    """
    if not tensor.is_cuda:
        return
    done = torch.cuda.current_stream(tensor.device).record_event()
    until = time.monotonic() + REDUCE_BOUND_S
    while not done.query():
        if time.monotonic() > until:
            raise RuntimeError(f"the sum of {tensor.numel():,} gradients has not ended within {REDUCE_BOUND_S:g} s")
        time.sleep(_REDUCE_LOOK_S)


def _is_of_own_device(error: Exception) -> bool:
    return isinstance(error, torch.AcceleratorError) or is_out_of_memory(error)
