"""The only room that knows there is more than one process: the device, and every word between processes.

In one optimizer step they speak twice: a ballot (`agree`), which every process casts before it enters any
other collective, and the flat gradient (`reduce_flat_`) if nobody objects. The ballot goes over gloo on every
machine: a dead peer is then an error within milliseconds and not a kernel that waits on a GPU. A single
process says nothing at all. Accelerate owns launch, placement and precision; only this file imports it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list, gather_object
from torch import Tensor
from torch import distributed as dist

from ci_llm.cluster.launch import Launch, decline, option, read_launch, remarks
from ci_llm.config import Config
from ci_llm.core.durable import make_folders, read_json, write_json
from ci_llm.core.run_status import is_alive, pid_space
from ci_llm.distributed.ballot import Ballot, Verdict, anybody_stops, decode, encode
from ci_llm.distributed.side_channel import PeerLost
from ci_llm.errors import CiLlmError, LaunchError, ModelError

T = TypeVar("T")
_LOGGER = logging.getLogger(__name__)

# A peer that dies closes its connections and is noticed at once; this bounds the wait for a machine that went
# silent, and how long the main process may work alone (`main_first`).
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=30)
SHUTDOWN_BOUND_S: Final = 10.0


class Processes:
    """The processes of this run, from the inside of one of them. Building it is where they meet.

    Args:
        config: `mixed_precision` and `model_dtype` are read, and for the notes the size of the batch.
        log_with, project_dir: handed to the Accelerator for its trackers.
        launch: how this process was started; read from the environment by default.

    Attributes:
        accelerator: Accelerate's: the device, autocast, and what its trackers are started with.
        notes: lines for people about the way the run was started.

    Raises:
        LaunchError: the processes cannot form one world, or outnumber the GPUs.
        ModelError: the precision does not exist on this device.
    """

    def __init__(
        self,
        config: Config,
        *,
        log_with: Sequence[str] = (),
        project_dir: Path | None = None,
        launch: Launch | None = None,
    ) -> None:
        self.launch = read_launch() if launch is None else launch
        on_cpu = runs_on_cpu()
        check_precision(config)
        _check_gpus(self.launch, on_cpu)
        self.notes = decline(os.environ)
        _enter_world(self.launch, on_cpu)
        with _meeting(self.launch) if self.launch.num_processes > 1 else nullcontext():
            self.accelerator = Accelerator(
                cpu=on_cpu,
                mixed_precision=config.mixed_precision,
                log_with=list(log_with) or None,
                project_dir=project_dir,
                kwargs_handlers=[_group_settings(self.launch, on_cpu)],
            )
        if self.accelerator.num_processes != self.launch.num_processes:
            raise LaunchError(
                f"{self.launch.num_processes} processes were started, but Accelerate sees"
                f" {self.accelerator.num_processes}: each would train alone, into the same folder",
                where=f"launcher: {self.launch.launcher}",
                hint="build nothing of Accelerate's before Processes; start by torchrun or accelerate launch",
            )
        self.notes += _notes(self.launch, config, num_gpus=0 if on_cpu else torch.cuda.device_count())
        self._tokens: list[Path] = []
        _LOGGER.debug("process %d of %d on %s; %s", self.index, self.count, self.device, self.launch)

    @property
    def device(self) -> torch.device:
        """Where this process computes; "cpu", not Accelerate's "cpu:0", which equals no tensor's device."""
        device = torch.device(self.accelerator.device)
        return torch.device("cpu") if device.type == "cpu" else device

    @property
    def index(self) -> int:
        """0 to count - 1."""
        return int(self.accelerator.process_index)

    @property
    def count(self) -> int:
        """Processes of the run, over all machines."""
        return int(self.accelerator.num_processes)

    @property
    def is_main(self) -> bool:
        """Whether this process writes what is written once."""
        return self.index == 0

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of the forward pass, as `mixed_precision` says."""
        context: AbstractContextManager[Any] = self.accelerator.autocast()
        return context

    def agree(self, ballot: Ballot) -> Verdict:
        """Vote: one small all-reduce, and the step's one wait for the device. A collective.

        Only when somebody wants to stop, a second one tells everybody the reason.

        Raises:
            PeerLost: a process is gone.
        """
        votes = self.reduce_flat_(encode(ballot))
        reasons = self.gather_object(ballot.stop) if anybody_stops(votes) else []
        return decode(votes, len(ballot.nonfinite), reasons)

    def reduce_flat_(self, tensor: Tensor) -> Tensor:
        """Add a contiguous tensor over all processes, in place, by one all-reduce. A collective.

        The order of summation is fixed by the number of processes and the size: the result is the same, bit
        for bit, on every process and in every repetition.

        Raises:
            PeerLost: a process is gone.
        """
        if self.count > 1:
            with _peers():
                dist.all_reduce(tensor)
        return tensor

    def gather_object(self, value: T) -> list[T]:
        """The values of all processes, by index, on every process. A collective; not for the inner loop."""
        if self.count == 1:
            return [value]
        with _peers():
            gathered: list[T] = gather_object([value])
        return gathered

    def broadcast_object(self, value: T) -> T:
        """The main process's value, on every process. A collective."""
        if self.count == 1:
            return value
        with _peers():
            values: list[T] = broadcast_object_list([value])
        return values[0]

    def on_main(self, work: Callable[[], T]) -> T:
        """What `work` returns on the main process, on every process. A collective.

        Raises:
            CiLlmError: the main process's, on every process: one error, and no lost peer.
        """
        done: tuple[T | None, CiLlmError | None] = None, None
        if self.is_main:
            try:
                done = work(), None
            except CiLlmError as error:
                done = None, error
        value, refusal = self.broadcast_object(done)
        if refusal is not None:
            raise refusal
        return cast("T", value)

    def wait(self) -> None:
        """Return when every process is here. A collective."""
        self.reduce_flat_(torch.zeros(1))

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process goes through the block before the others; they find its cached work.

        Where an error with a hint ends the block, the others meet it themselves: one error, and no lost peer.
        """
        if not self.is_main:
            self.wait()
        try:
            yield
        except CiLlmError:
            if self.is_main:
                self.wait()
            raise
        if self.is_main:
            self.wait()

    def same_folder(self, path: Path | str) -> None:
        """Refuse a folder that is not one and the same for all, or that another world uses. A collective.

        The main process creates it, leaves a token there until `shutdown`, and everybody looks for it.

        Raises:
            LaunchError: on every process alike, so that none is left waiting.
        """
        folder = Path(path)
        token = self.broadcast_object(secrets.token_hex(8))
        if complaint := self.on_main(lambda: self._leave_token(folder, token)):
            raise LaunchError(complaint, where=str(folder), hint="give another output_dir, or start once")
        blind = [index for index, sees in enumerate(self.gather_object(_reads(folder, token))) if not sees]
        if blind:
            raise LaunchError(
                f"the folder of process 0 is not the folder of process {', '.join(map(str, blind))}",
                where=str(folder.resolve()),
                hint="give an output_dir on a disk that all machines share, as an absolute path",
            )

    def _leave_token(self, folder: Path, token: str) -> str | None:
        """Returns what speaks against the folder: an error here alone would leave the others waiting."""
        path = _token_path(folder, token)
        mine = {"pid": os.getpid(), "parent": os.getppid(), "pid_space": pid_space()}
        try:
            make_folders(folder)
            write_json(path, mine)
        except OSError as error:
            return f"the folder cannot be written: {error.strerror}"
        self._tokens.append(path)
        # Of two that come at once, each has left its token before it looks: at least one sees the other.
        rivals = [path for path in folder.glob(_token_path(folder, "*").name) if _is_rival(path, mine)]
        if rivals:
            self._tokens.pop().unlink()
            return "another process of the same launcher or shell trains here already, in a world of its own"
        return None

    def shutdown(self) -> bool:
        """Leave the world, without waiting for a peer longer than a bound; trackers have been closed before.

        Returns:
            False if the process group did not let go within the bound: then end the process by `os._exit`.
        """
        while self._tokens:
            self._tokens.pop().unlink(missing_ok=True)
        leaving = threading.Thread(target=_leave_group, name="ci_llm leave", daemon=True)
        leaving.start()
        leaving.join(SHUTDOWN_BOUND_S)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        return not leaving.is_alive()


@contextmanager
def _peers() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL know no narrower class for a connection that broke
        raise PeerLost(
            "a process of this run is gone or silent",
            where=str(error).splitlines()[0],
            hint="attempts/<n>/process_<i>.json has its reason; the run resumes from its last checkpoint",
        ) from error


def runs_on_cpu() -> bool:
    """Whether processes of this machine compute on the CPU: there is no GPU, or none is wanted."""
    wanted = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    return wanted or not torch.cuda.is_available()


def meet_oneself() -> str:
    """Form a world of this process alone, add a number up in it and leave: address, port and backend work.

    Returns:
        the backend and where it met.

    Raises:
        LaunchError: one of them does not work on this machine.
    """
    backend = "gloo" if runs_on_cpu() else "cuda:nccl,cpu:gloo"
    try:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device="cpu" if runs_on_cpu() else "cuda"))
    except (RuntimeError, OSError) as error:
        raise LaunchError(
            f"processes of this machine cannot speak to each other: {str(error).splitlines()[0]}",
            where=f"{backend}, 127.0.0.1",
            hint="let this machine's name resolve (/etc/hosts), or export GLOO_SOCKET_IFNAME=lo",
        ) from error
    finally:
        _leave_group()
    return f"{backend} on 127.0.0.1:{store.port}"


def check_precision(config: Config) -> None:
    """Refuse a precision that this device does not have.

    Raises:
        ModelError: naming the key.
    """
    on_cpu = runs_on_cpu()
    for key in ("mixed_precision", "model_dtype"):
        value = getattr(config, key)
        if value == "fp16" and on_cpu:
            raise ModelError(
                "fp16 needs a GPU: on a CPU Accelerate would train in fp32 without a word",
                where=f"{key}: fp16",
                hint=f"{key}=bf16 on this machine, or a machine with a GPU",
            )
        if value == "bf16" and not on_cpu and not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ModelError(f"{torch.cuda.get_device_name()} has no bf16", where=f"{key}: bf16", hint=f"{key}=fp16")


def _notes(launch: Launch, config: Config, num_gpus: int) -> list[str]:
    if launch.asked_for is None:
        return remarks(launch, os.environ, num_gpus=num_gpus)
    rows = None if config.global_batch_size else config.batch_size * config.gradient_accumulation_steps
    number = launch.asked_for or _configured_processes(launch.launcher_command)
    launch = replace(launch, asked_for=None if number == 1 else number)
    return remarks(launch, os.environ, num_gpus=num_gpus, rows_per_process=rows)


def _configured_processes(command: Sequence[str]) -> int:
    """The number of processes in the file that `accelerate launch` has read; 0 if that has gone meanwhile."""
    try:
        settings = load_config_from_file(option(command, "config_file") or None)
    except OSError:
        return 0
    return int(settings.num_processes)


def _check_gpus(launch: Launch, on_cpu: bool) -> None:
    if not on_cpu and launch.num_local_processes > torch.cuda.device_count():
        raise LaunchError(
            f"{launch.num_local_processes} processes on this machine, but {torch.cuda.device_count()} GPU(s)",
            where=f"launcher: {launch.launcher}",
            hint="start as many processes as GPUs, or export ACCELERATE_USE_CPU=true to run all on the CPU",
        )


def _enter_world(launch: Launch, on_cpu: bool) -> None:
    os.environ.update(launch.variables)
    if on_cpu and launch.num_processes > 1 and "OMP_NUM_THREADS" not in os.environ:
        # Else every process takes all cores, or Accelerate takes the whole machine's and not the job's.
        os.environ["OMP_NUM_THREADS"] = str(launch.fair_num_threads)
        torch.set_num_threads(launch.fair_num_threads)


def _group_settings(launch: Launch, on_cpu: bool) -> InitProcessGroupKwargs:
    if launch.num_processes == 1:
        return InitProcessGroupKwargs()
    backend = "gloo" if on_cpu else "cuda:nccl,cpu:gloo"
    return InitProcessGroupKwargs(backend=backend, timeout=COLLECTIVE_TIMEOUT)


@contextmanager
def _meeting(launch: Launch) -> Iterator[None]:
    address, port = (launch.variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        socket.getaddrinfo(address, port)  # torch would look for an unknown name for half an hour
        yield
    except (RuntimeError, OSError) as error:
        raise LaunchError(
            f"the {launch.num_processes} processes cannot meet: {str(error).splitlines()[0]}",
            where=f"{address}:{port}",
            hint="export a free MASTER_PORT, and a MASTER_ADDR that every machine can reach",
        ) from error


def _token_path(folder: Path, token: str) -> Path:
    return folder / f".launch-{token}.json"


def _reads(folder: Path, token: str) -> bool:
    return _token_path(folder, token).is_file()


def _is_rival(path: Path, mine: Mapping[str, object]) -> bool:
    """Whether another living process of the same launcher left this token; sweeps up after dead ones.

    Only the same launcher: a later attempt may take a folder over from one that still lives elsewhere.
    """
    try:
        other = read_json(path)
    except (FileNotFoundError, ValueError):  # swept up by its owner just now
        return False
    if not isinstance(other, dict) or other.get("pid_space") != mine["pid_space"]:
        return False
    if not is_alive(int(other["pid"])):
        path.unlink(missing_ok=True)
        return False
    return bool(other["parent"] == mine["parent"] and other["pid"] != mine["pid"])


def _leave_group() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
