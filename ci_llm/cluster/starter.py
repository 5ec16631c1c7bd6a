"""The second start of this command: as several processes of this machine, or as a step of its SLURM job, or both.

`accelerate launch --num_processes=4` runs a script once on a machine without a GPU, whatever the number. And `train.py
--distributed` has no launcher. Then this process starts the agent of torchrun with the same command, and stands in for
the others: it passes each signal on to them, and ends with their exit code. The agent alone would pass few signals on,
kill 30 s after one, and end with 1 after a clean stop.

What a batch script of SLURM starts without `srun` hears nothing of a preemption, and dies with the shell of the script,
in the same moment as the signal after `scancel`. Then this process starts `srun` in the same way.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import psutil

from ci_llm.cluster.launch import STARTED, SUPERVISED, Launch, accelerate_option, is_cpu_wanted, option, started_by
from ci_llm.core.run_status import is_alive
from ci_llm.errors import BadInput, CiLlmError
from ci_llm.interrupts import ABORTED_EXIT_CODE, BROKEN_PIPE_EXIT_CODE, Interrupts, ignore, notify_of_parent_death, send

COME_UP_S: Final = 30.0
_LOOK_S: Final = 0.1
_FAILURES: Final = (CiLlmError.exit_code, BadInput.exit_code, BROKEN_PIPE_EXIT_CODE)  # others are orderly ends
_UP: Final = "up"
_WORKING_S: Final = 0.5  # of a processor: an agent that only waits needs minutes for it
_DISTRIBUTED: Final = re.compile(r"(?:--)?distributed(?:=(\d+|true|false))?", re.IGNORECASE)
#: What the driver of a GPU leaves in /dev: of NVIDIA, of AMD, of WSL, of Jetson.
_DEVICES: Final = ("nvidia*", "kfd", "dxg", "nvmap")
#: One task on this node with all that the job has there, whatever else runs in the job.
_STEP: Final = (
    *("--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none"),
    *("--input=none", "--export=ALL", "--kill-on-bad-exit=0"),
)
#: Variables of sbatch by which srun would take a share of one task.
_SHARES: Final = ("SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_NTASKS_PER_GPU")
#: A sign of life before Python has loaded. Where the folder is another one than here, the step ends at once.
_BEGIN: Final = ("sh", "-c", ': >"$0/000000.$$.begun" && exec "$@"')


def without_options(words: Sequence[str]) -> list[str]:
    """The words of a command line without those that are not keys: `--continue`, `--debug`, `--distributed`."""
    return [word for word in words if word not in ("--continue", "--debug") and not _DISTRIBUTED.fullmatch(word)]


def processes_to_start(launch: Launch, words: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> int:
    """The number of processes of this machine that the command asks for, if nobody has started them yet; else 1.

    `--distributed` asks for one per GPU, and one without a GPU; `--distributed=N` for N. A number that Accelerate was
    asked for counts without a GPU only: with one, each process takes a GPU, and Accelerate starts as many.
    """
    found = [match for match in map(_DISTRIBUTED.fullmatch, words) if match]
    asked = (found[-1][1] or "true") if found else ""  # the last one counts
    is_started = STARTED in environ or launch.num_processes > 1 or launch.launcher == "torchrun"
    if is_started or asked == "false" or not (asked or launch.requested_processes):
        return 1
    if asked.isdecimal():
        return max(1, int(asked))
    num_gpus = _num_gpus(environ)
    if num_gpus:
        return num_gpus if asked else 1
    on_one_machine = accelerate_option(launch.launcher_command, "num_machines") in ("", "1")
    return launch.requested_processes or 1 if on_one_machine else 1


def _num_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> int:
    """GPUs that a run would take. torch, which loads for seconds, is asked only where a driver has left its devices."""
    if is_cpu_wanted(environ) or not any(any(devices.glob(name)) for name in _DEVICES):
        return 0
    import torch

    return torch.cuda.device_count()


def step_command(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The words that make a command a step of this SLURM job when they stand before it.

    There are none outside of a batch script, in a step, under mpirun, and in a process that was started this way.
    """
    node, srun = environ.get("SLURMD_NODENAME", ""), shutil.which("srun", path=environ.get("PATH"))
    is_started = {STARTED, SUPERVISED, "SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE"} & environ.keys()
    if is_started or "SLURM_JOB_ID" not in environ or not node or srun is None:
        return []
    return [srun, *_STEP, f"--nodelist={node}"]


def start_again(number: int, launch: Launch, interrupts: Interrupts, say: Callable[[str], None]) -> int | None:
    """Run this command again where it is to be a step, several processes, or both, and wait for its end.

    Args:
        number: how many processes.
        say: told what is started, and what is lost if it does not come up.

    Returns:
        the exit code; None if this process is to run the command, and nothing is left of the others.
    """
    if step := step_command():
        if launch.is_main_process:
            say(f"launch    starting again as a step of SLURM job {os.environ['SLURM_JOB_ID']}, by srun --overlap")
        code = _run_again(number, launch, interrupts, step)
        if code is not None or interrupts.stop_reason is not None:
            return code
        say(
            f"launch    the step does not come up ({COME_UP_S:g} s without a sign): this process continues in the batch"
            " script, and a preemption, scancel or the limit may lose what was done since the last save"
        )
    if number == 1:
        return None
    say(f"launch    starting {number} processes, by torch.distributed.run --nproc-per-node={number}")
    code = _run_again(number, launch, interrupts)
    if code is None and interrupts.stop_reason is None:
        say(f"launch    the {number} processes do not come up ({COME_UP_S:g} s without a sign): this one runs alone")
    return code


def _run_again(number: int, launch: Launch, interrupts: Interrupts, step: Sequence[str] = ()) -> int | None:
    """Run this command as `number` processes, and wait for their end.

    Args:
        step: the words of `step_command`, where they are to be in a step.

    Returns:
        the exit code; None if they did not come up and nothing happened for 30 s, or this process was asked to stop
        before: nothing is left of them, and this process is to run the command alone.
    """
    with TemporaryDirectory(prefix="ci_llm_") as name, _agent(number, launch, interrupts, name, step) as agent:
        folder, sent = Path(name), list[str]()
        pids = _wait_until_up(agent, folder, number, interrupts)

        def pass_on(signal_name: str) -> None:
            sent.append(signal_name)
            for pid in pids:
                send(pid, signal_name)

        interrupts.pass_on = pass_on
        has_failed = len(pids) > 0 and agent.poll() is not None
        if (interrupts.stop_reason and not sent) or (len(pids) < number and not has_failed):
            interrupts.pass_on = None
            return None
        agent.wait()
        while any(map(is_alive, pids)):  # the agent was killed, and they save
            time.sleep(_LOOK_S)
        codes = [int(word) for pid in pids for told, word in _told(folder) if told == pid and word.isdecimal()]
        aborted = ABORTED_EXIT_CODE if sent.count("SIGINT") > 1 else 0
        # That of the main process, or of another one that failed; one that was killed has told none.
        return next(filter(None, codes), aborted or int(len(codes) < max(1, len(pids))))


@contextmanager
def _agent(
    number: int, launch: Launch, interrupts: Interrupts, folder: str, step: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """torchrun or srun, in a session of its own: a Ctrl-C comes to this process alone, which passes it on once."""
    port = option(launch.launcher_command, "main_process_port")
    place = ["--master-addr=127.0.0.1", f"--master-port={port}"] if port.strip("0") else ["--standalone"]
    ignored = interrupts.signals - {"SIGTERM"}

    def prepare() -> None:
        ignore(ignored)  # torchrun, which knows four signals, would end at any other that its group gets
        notify_of_parent_death("SIGTERM")

    several = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={number}", *place, "--no-python"]
    environ = {name: value for name, value in os.environ.items() if name not in _SHARES}
    agent = subprocess.Popen(
        [
            *([*step, *_BEGIN, folder] if step else []),
            *(several if number > 1 else []),
            *(sys.executable, *sys.orig_argv[1:]),
        ],
        env={**({"OMP_NUM_THREADS": "1"} if number > 1 else {}), **environ, STARTED: started_by(folder, launch)},
        start_new_session=True,
        preexec_fn=prepare,
    )
    try:
        yield agent
    finally:
        if agent.poll() is None and step:
            agent.terminate()  # srun then ends its step, which would outlive a kill
            with suppress(subprocess.TimeoutExpired):
                agent.wait(COME_UP_S)
        if agent.poll() is None:
            _kill(agent)


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill the agent and its processes, which have done nothing yet; stopped before, it starts no more of them."""
    with suppress(psutil.NoSuchProcess):
        tree = psutil.Process(agent.pid)
        tree.suspend()
        for one in [*tree.children(recursive=True), tree]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    agent.wait()


def _wait_until_up(agent: subprocess.Popen[bytes], folder: Path, number: int, interrupts: Interrupts) -> list[int]:
    """Pids of the processes that are up, by process index, when all are or something else is to be done.

    Python and torch load for long from a slow disk or on a busy machine: while they do, the time does not count.
    """
    used, until, pids = 0.0, time.monotonic() + COME_UP_S, list[int]()
    while len(pids) < number and time.monotonic() < until and agent.poll() is None and not interrupts.stop_reason:
        time.sleep(_LOOK_S)
        told = _told(folder)
        pids = [pid for pid, word in told if word == _UP]
        now = sum(map(_processor_seconds, {agent.pid, *(pid for pid, _ in told)}))
        if now > used + _WORKING_S:
            used, until = now, time.monotonic() + COME_UP_S
    return pids


def _processor_seconds(pid: int) -> float:
    """Seconds of processor time of a process and its descendants; 0 if one of them ends at this moment."""
    with suppress(psutil.NoSuchProcess):
        tree = psutil.Process(pid)
        return sum(sum(one.cpu_times()[:2]) for one in (tree, *tree.children(recursive=True)))
    return 0.0


def tell(word: str = _UP, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the process that started this one, if one did, that this one is up and heeds signals, or its exit code.

    Raises:
        SystemExit: this one comes up too late, and that process runs the command itself, or has ended.
    """
    if STARTED in environ:
        folder = Path(shlex.split(environ[STARTED])[0])
        try:
            (folder / f"{int(environ.get('RANK', 0)):06}.{os.getpid()}.{word}").touch()
        except OSError:
            if word == _UP:
                raise SystemExit(1) from None


def exit_code_told(code: int) -> int:
    """Tell the exit code of this process to the process that started it, if one did.

    Returns:
        what this process is to end with: torchrun takes each code but 0 for a failure, and prints a table of errors.
    """
    if STARTED not in os.environ:
        return code
    tell(str(code))
    return code if code in _FAILURES else 0


def _told(folder: Path) -> list[tuple[int, str]]:
    """(pid, word), in the order of the process indices."""
    names = sorted(path.name.split(".") for path in folder.iterdir())
    return [(int(pid), word) for _, pid, word in names]
