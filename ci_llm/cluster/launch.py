"""How this process was started: its place among the processes of the run, read from the environment.

Known before torch is imported, so that the first line of a run is printed once and a call that cannot work is
refused in a second. Every launcher speaks through variables of its own; `Launch.variables` translates them
into those of torchrun, which torch and Accelerate understand on every kind of device.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Final

import psutil

from ci_llm.errors import LaunchError


@dataclass(frozen=True)
class _Dialect:
    """The names that one launcher gives to a process's place."""

    launcher: str
    num_processes: str
    process_index: str
    local_index: str


_DIALECTS: Final = (
    _Dialect("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    _Dialect("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    _Dialect("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
)
#: What Accelerate's launcher asks for and this program does without: the variable, its word for "no", and why.
_DECLINED: Final = (
    ("ACCELERATE_USE_DEEPSPEED", "false", "it owns backward, step and checkpoint, which are this program's business"),
    ("ACCELERATE_USE_FSDP", "false", "the trainable state is a few MB, and the frozen base is not sharded"),
    ("ACCELERATE_USE_MEGATRON_LM", "false", "it brings a training loop of its own"),
    ("ACCELERATE_USE_PARALLELISM_CONFIG", "false", "every process holds the whole base and trains on rows of its own"),
    ("ACCELERATE_DYNAMO_BACKEND", "no", "packed rows differ in length from step to step, and are no faster compiled"),
)
_ACCELERATE_LAUNCH: Final = frozenset({"launch", "accelerate-launch", "accelerate.commands.launch"})
_MPIRUNS: Final = frozenset({"mpirun", "mpiexec", "orterun", "prterun"})
_TORCHRUNS: Final = frozenset({"torchrun", "torch.distributed.run", "torch.distributed.launch"})
_FIRST_PORT: Final = 15000  # below the ports that Linux gives to outgoing connections (32768 on)
_NUM_PORTS: Final = 16000
_TORCHRUN_PATIENCE_S: Final = 30
#: Set by a supervisor of ours for what it starts, to the seconds between its TERM and its KILL.
SUPERVISED: Final = "CI_LLM_SUPERVISED"


@dataclass(frozen=True)
class Launch:
    """The place of this process, and what its launcher was asked for.

    Attributes:
        launcher: "python", "accelerate" (one process that it starts itself), "torchrun" (also what
            `accelerate launch --multi_gpu` uses), "srun" or "mpirun".
        num_processes: of the whole run, over all machines.
        process_index: 0 to num_processes - 1; 0 is the main process.
        local_index: the number of this process on its machine.
        num_local_processes: processes on this machine.
        asked_for: the `--num_processes` of an `accelerate launch` that started a single process nevertheless;
            0 if it asked for several and the number is not in its command line.
        variables: to be set in the environment before torch's process group is made.
        patience_s: seconds that launcher and supervisor wait for this process after a signal, before it is killed.
        launcher_command: the command line of the launcher, read while it is there: it may be gone when a run that was
            told to stop says how it goes on. Empty where the parent of this process is no launcher.
        words: what stands behind the script on the command line.
    """

    launcher: str
    num_processes: int
    process_index: int
    local_index: int
    num_local_processes: int
    asked_for: int | None
    variables: Mapping[str, str]
    patience_s: float = math.inf
    launcher_command: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for the run."""
        return self.process_index == 0

    @property
    def fair_num_threads(self) -> int:
        """CPU threads for each process of this machine, if they share the cores that this one may use."""
        return max(1, _num_cores() // self.num_local_processes)

    @property
    def dies_unheard(self) -> bool:
        """Whether the launcher would die of a SIGTERM without handing it on to this process."""
        return self.launcher == "accelerate"


def read_launch(
    environ: Mapping[str, str] = os.environ,
    parent_command: Sequence[str] | None = None,
    words: Sequence[str] = (),
) -> Launch:
    """The place of this process.

    Args:
        parent_command: the command line of the process that started this one; looked up by default.
        words: what stands behind the script on the command line.

    Raises:
        LaunchError: the variables contradict each other, or name no address where processes can meet.
    """
    dialect = _dialect(environ)
    num_processes = _integer(environ, dialect.num_processes) if dialect else 1
    parent = _command_of_parent() if parent_command is None else parent_command
    if dialect is None or num_processes == 1:
        return _alone(dialect, environ, parent, words)
    process_index = _integer(environ, dialect.process_index)
    if not 0 <= process_index < num_processes:
        raise LaunchError(
            f"process {process_index} of {num_processes} cannot be",
            where=f"{dialect.process_index}={process_index}, {dialect.num_processes}={num_processes}",
            hint="start all processes by one launcher: torchrun, accelerate launch or srun",
        )
    local_index = _integer(environ, dialect.local_index, process_index)
    num_local = _local_processes(environ, num_processes)
    place = {
        "RANK": process_index,
        "WORLD_SIZE": num_processes,
        "LOCAL_RANK": local_index,
        "LOCAL_WORLD_SIZE": num_local,
        **_meeting_point(environ, alone_on_machine=num_local == num_processes),
    }
    return Launch(
        launcher=dialect.launcher,
        num_processes=num_processes,
        process_index=process_index,
        local_index=local_index,
        num_local_processes=num_local,
        asked_for=None,
        variables={name: str(value) for name, value in place.items()},
        patience_s=_patience_s(dialect.launcher, environ),
        launcher_command=_if_launcher(dialect.launcher, parent),
        words=tuple(words),
    )


def number_of_this_process(environ: Mapping[str, str] = os.environ) -> int:
    """Its index by the word of its launcher, for whoever speaks before `read_launch` or of its failure."""
    dialect = _dialect(environ)
    text = environ.get(dialect.process_index, "") if dialect else ""
    return int(text) if text.isdecimal() else 0


def decline(environ: MutableMapping[str, str]) -> list[str]:
    """Switch off what an Accelerate configuration asks for and this program does without; say why."""
    lines = []
    for name, no, why in _DECLINED:
        if environ.get(name, no).lower() not in (no, "", "0"):
            environ[name] = no
            lines.append(f"{name} is not used: {why}")
    return lines


def accelerate_settings(environ: Mapping[str, str], parent_command: Sequence[str] | None = None) -> dict[str, str]:
    """Values of our keys that `accelerate launch` or `accelerate config` names, for where our configuration is silent.

    The launcher hands on the accumulation with DeepSpeed only, so it is looked up on its command line as well.
    """
    parent = _command_of_parent() if parent_command is None else parent_command
    steps = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if not steps and _is_accelerate(parent):
        steps = option(parent, "gradient_accumulation_steps")
    said = {
        "mixed_precision": environ.get("ACCELERATE_MIXED_PRECISION", "no").lower(),
        "gradient_accumulation_steps": steps if steps.isdecimal() else "1",
    }
    return {key: value for key, value in said.items() if value not in ("no", "1")}


def remarks(
    launch: Launch, environ: Mapping[str, str], *, num_gpus: int, rows_per_process: int | None = None
) -> list[str]:
    """A line, with the hint, for each thing about a launch that works but is perhaps not what was meant.

    Args:
        num_gpus: GPUs that this process may use; 0 for a run on the CPU.
        rows_per_process: rows of one process in an optimizer step; None where their number is that of all together.
    """
    lines = []
    if launch.asked_for is not None:
        lines.append(_asked_for_more(launch, environ, num_gpus, rows_per_process))
    if num_gpus > 1 and launch.num_processes == 1:
        lines.append(f"{num_gpus} GPUs, 1 process: `accelerate launch --num_processes={num_gpus}` uses them all")
    if not num_gpus and launch.num_local_processes > _num_cores():
        told = f"{launch.num_local_processes} processes share {_num_cores()} CPU core(s)"
        lines.append(f"{told}: more of them than cores make a run slower and take more memory")
    throttled = launch.launcher != "python" and environ.get("OMP_NUM_THREADS") == "1" and not num_gpus
    if throttled and launch.fair_num_threads > 1:
        lines.append(
            "one CPU thread per process, as launchers set it:"
            f" `export OMP_NUM_THREADS={launch.fair_num_threads}` uses all cores"
        )
    return [*lines, *outside_of_a_step(environ)]


def outside_of_a_step(environ: Mapping[str, str]) -> list[str]:
    """What SLURM will not tell this process, if it runs in a job and in no step of it; nothing otherwise."""
    if "SLURM_JOB_ID" not in environ or "SLURM_STEP_ID" in environ:
        return []
    job = environ["SLURM_JOB_ID"]
    return [
        f"SLURM job {job}, but no step of it: the signal of a preemption reaches only steps, so this process would be"
        " killed without a last save; write `srun` before the command in the batch script"
    ]


def option(command: Sequence[str], name: str) -> str:
    """The value of an option of a launcher, as `--a_b=1`, `--a-b=1` or `--a_b 1`; empty if it is not there."""
    found = re.search(rf"--{name.replace('_', '[-_]')}[=\0]([^\0]+)", "\0".join(command))
    return found[1] if found else ""


def shell_line(command: Sequence[str]) -> str:
    """A command line as a person would type it: programs that the path finds by their bare names."""
    program, *words = command
    if words and _is_on_path(words[0]):  # a script such as torchrun knows its interpreter
        program, *words = words
    return shlex.join([Path(program).name if _is_on_path(program) else program, *words])


def _is_on_path(program: str) -> bool:
    """Whether its bare name starts this very program, and not another one or none; `make train` calls one off it."""
    found = shutil.which(Path(program).name)
    return found is not None and Path(found).absolute() == Path(program).absolute()


def _num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _dialect(environ: Mapping[str, str]) -> _Dialect | None:
    return next((one for one in _DIALECTS if one.num_processes in environ), None)


def _asked_for_more(launch: Launch, environ: Mapping[str, str], num_gpus: int, rows: int | None) -> str:
    """One process runs, where several were asked for: what that changes, and the command that starts them."""
    number = launch.asked_for
    told = f"asked for {number or 'several'} processes, running 1, for this machine has"
    told += f" {num_gpus} GPU(s), and each takes one process" if num_gpus else " no GPU"
    if rows and number:
        share = {2: "half", 3: "a third", 4: "a quarter"}.get(number, f"1/{number}")
        told += f"; the effective batch of a run that begins like this is {share}: {rows} rows and not {number * rows}"
    return told if num_gpus else f"{told}; this starts them on the CPU:\n          {_on_the_cpu(launch, environ)}"


def _on_the_cpu(launch: Launch, environ: Mapping[str, str]) -> str:
    """The same command, with processes of their own on a machine that has no GPU: by --multi_gpu, oddly."""
    command = launch.launcher_command
    place = next(n for n, word in enumerate(command) if PurePath(word).name in _ACCELERATE_LAUNCH) + 1
    end = len(command) - len(launch.words)
    options = [word for word in command[place:end] if word.replace("-", "_") not in ("__cpu", "__use_cpu")]
    number = [] if option(options, "num_processes") else [f"--num_processes={launch.asked_for or 'N'}"]
    line = shell_line([*command[:place], "--multi_gpu", *number, *options, *command[end:]])
    return f"ACCELERATE_USE_CPU=true {line}" if environ.get("ACCELERATE_USE_CPU", "").lower() == "true" else line


def _alone(
    dialect: _Dialect | None, environ: Mapping[str, str], parent_command: Sequence[str], words: Sequence[str]
) -> Launch:
    lone = "RANK" not in environ and _is_accelerate(parent_command)
    launcher = "accelerate" if lone else dialect.launcher if dialect else "python"
    return Launch(
        launcher=launcher,
        num_processes=1,
        process_index=0,
        local_index=0,
        num_local_processes=1,
        asked_for=_asked_for(environ, parent_command) if lone else None,
        variables={},
        patience_s=_patience_s(launcher, environ),
        launcher_command=_if_launcher(launcher, parent_command),
        words=tuple(words),
    )


def _patience_s(launcher: str, environ: Mapping[str, str]) -> float:
    supervisor_s = float(environ.get(SUPERVISED, math.inf))
    if launcher != "torchrun":
        return supervisor_s
    return min(supervisor_s, _integer(environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _TORCHRUN_PATIENCE_S))


def _command_of_parent() -> list[str]:
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # gone, or not ours to read: then nothing is known about it
        return []


def _asked_for(environ: Mapping[str, str], command: Sequence[str]) -> int | None:
    """Accelerate sets the meeting point whenever more than one process was asked for, and may then start one."""
    number = int(option(command, "num_processes") or 0)
    return number if "MASTER_ADDR" in environ and number != 1 else None


def _if_launcher(launcher: str, command: Sequence[str]) -> tuple[str, ...]:
    """The command, if it is one of that launcher: else the parent is a stranger, whose words are not to be repeated."""
    names = {PurePath(word).name for word in command}
    is_launcher = {
        "accelerate": _is_accelerate(command),
        "torchrun": bool(names & _TORCHRUNS) or _is_accelerate(command),
        "mpirun": bool(names & _MPIRUNS),
    }
    return tuple(command) if is_launcher.get(launcher) else ()


def _is_accelerate(command: Sequence[str]) -> bool:
    names = {PurePath(word).name for word in command}
    if names & _ACCELERATE_LAUNCH == {"launch"}:  # a word of anybody's
        return bool(names & {"accelerate", "accelerate.commands.accelerate_cli"})
    return bool(names & _ACCELERATE_LAUNCH)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise LaunchError(
            f"several processes are announced, but {name} is {'not set' if text is None else repr(text)}",
            where="environment",
            hint="start the run by torchrun, accelerate launch or srun, which set all of them",
        )
    return int(text)


def _local_processes(environ: Mapping[str, str], num_processes: int) -> int:
    """Processes on this machine; all of them where no launcher says otherwise."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if name in environ:
            return _integer(environ, name)
    if "SLURM_STEP_TASKS_PER_NODE" in environ:
        counts = _tasks_per_node(environ["SLURM_STEP_TASKS_PER_NODE"])
        return counts[_integer(environ, "SLURM_NODEID", 0)]
    return num_processes


def _tasks_per_node(text: str) -> list[int]:
    """SLURM's "2(x3),1" -> [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def _meeting_point(environ: Mapping[str, str], *, alone_on_machine: bool) -> dict[str, str]:
    """Address and port where the processes meet: what is set, else this machine or SLURM's first."""
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if alone_on_machine else _first_node(environ))
    port = environ.get("MASTER_PORT") or str(_port(environ))
    return {"MASTER_ADDR": address, "MASTER_PORT": port}


def _first_node(environ: Mapping[str, str]) -> str:
    """The first host of SLURM's "node[03-07,9],login2" -> "node03"."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise LaunchError(
            "several machines, and no address where their processes can meet",
            where="environment",
            hint="export MASTER_ADDR=<name of the machine with process 0> and a free MASTER_PORT",
        )
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    assert found is not None
    return found[1] + (found[2] or "")


def _port(environ: Mapping[str, str]) -> int:
    """One port per SLURM job step, the same for all its processes."""
    job, step = (_integer(environ, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 31 + step) % _NUM_PORTS
