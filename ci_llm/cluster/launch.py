"""The launch of this process: its place among the processes of the run, and its round where torchrun is elastic.

It is known before torch is imported. So only the main process prints the first line of a run, and a call that cannot
work is refused within a second. Every launcher sets variables of its own; `Launch.variables` translates them into those
of torchrun, which torch and Accelerate read on every kind of device.

An elastic round has one world of processes. When a process dies or a machine joins, the agents of torchrun send SIGTERM
to the processes that are left, and start all of them again as another world. A process of this package saves, ends, and
continues in the next round.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Final, NamedTuple

import psutil

from ci_llm.errors import LaunchError

#: The agent waits so long before it kills, between two rounds, whatever TORCH_ELASTIC_SHUTDOWN_TIMEOUT says.
KILL_DELAY_S: Final = 30.0
#: The exit code after a stop, where the agent of torchrun must not take it for the end of the job.
AGAIN_EXIT_CODE: Final = 75


def has_rounds(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the agent of this process begins another round after a failure (`--max-restarts`)."""
    text = environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    return text.isdecimal() and int(text) > 0


def exit_code_after_stop(reason: str, configured: int, environ: Mapping[str, str] = os.environ) -> int:
    """The exit code of a run that was asked to stop and is saved.

    An agent whose processes all end with 0 takes the job for done and closes the rendezvous: no round follows. The
    signal may have reached the processes of another agent only, so the end of these must not look like that. An agent
    that has sent the signal itself does not look at the code.

    Args:
        reason: why the run stopped: "signal:SIGTERM", "walltime", ...
        configured: `interrupted_exit_code`.
    """
    goes_on = reason.startswith("signal:") and has_rounds(environ)
    return configured or (AGAIN_EXIT_CODE if goes_on else 0)


def job_and_round(environ: Mapping[str, str] = os.environ) -> tuple[str | None, str | None]:
    """A name of the elastic job, and one of the round within it; None where it has none.

    In a new round process 0 meets the others at a new port, unless the agents share their store.
    """
    job = environ.get("TORCHELASTIC_RUN_ID", "")
    if job in ("", "none"):  # torchrun without --rdzv-id
        return None, None
    return job, f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}"


def names_of_round(environ: Mapping[str, str] = os.environ) -> str:
    """The prefix of names in the store at which processes meet; empty where each round has a store of its own.

    An agent that is alone keeps one store for all its rounds, and in it the addresses of those that have died. It
    counts the rounds. The counts of several agents differ, so those must not share a store: see `launch_notes`.
    """
    alone = environ.get("GROUP_WORLD_SIZE") == "1" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"round {environ.get('TORCHELASTIC_RESTART_COUNT', '0')} " if alone else ""


class _Variables(NamedTuple):
    """The names of the variables in which one launcher gives the place of a process."""

    launcher: str
    num_processes: str
    process_index: str
    local_index: str


# In the order of precedence: torchrun inside an srun step sets its own variables beside SLURM's.
_LAUNCHERS: Final = (
    _Variables("torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    _Variables("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    _Variables("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    _Variables("mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)
#: Words by which a flag of Accelerate asks for nothing.
_NO: Final = ("", "0", "n", "no", "f", "false", "off", "none")
_PLAIN: Final = "--multi_gpu, or torchrun; base_sharding=layers spreads a base that one process does not hold"
#: What Accelerate's launcher may ask for and this program refuses: why, and what to use.
_REFUSED: Final = {
    "ACCELERATE_USE_DEEPSPEED": ("DeepSpeed owns backward, step and checkpoint, as this program does", _PLAIN),
    "ACCELERATE_USE_MEGATRON_LM": ("Megatron-LM brings a training loop of its own", _PLAIN),
    "PARALLELISM_CONFIG_TP_SIZE": ("each process computes whole layers", _PLAIN),
    "PARALLELISM_CONFIG_CP_SIZE": ("each process computes whole rows", f"a smaller max_seq_length, and {_PLAIN}"),
    "PARALLELISM_CONFIG_SP_SIZE": ("each process computes whole rows", f"a smaller max_seq_length, and {_PLAIN}"),
    "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": ("SageMaker's own way to share work is not supported", _PLAIN),
    **dict.fromkeys(("ACCELERATE_IN_TPU_POD", "XLA_USE_BF16", "XLA_DOWNCAST_BF16"), ("no TPU is supported", "a GPU")),
}
#: What Accelerate would act on, and is hidden from it: the value that hides it, and what becomes of it.
_HIDDEN: Final = {
    "ACCELERATE_USE_FSDP": (
        "false",
        "means base_sharding=layers (not NO_SHARD); of its other settings recomputation counts",
    ),
    "ACCELERATE_USE_PARALLELISM_CONFIG": ("false", "is taken as base_sharding=layers if DP_SHARD_SIZE is not 1"),
    "ACCELERATE_USE_SAGEMAKER": ("false", "is taken as a machine like others"),
    "ACCELERATE_FP8_BACKEND": ("NO", "is not used: mixed_precision takes no fp8"),
    "ACCELERATE_DYNAMO_BACKEND": ("no", "is not used: rows differ in length from step to step, and gain nothing by it"),
}
_STEPS: Final = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
_ACCELERATE_LAUNCH: Final = frozenset({"launch", "accelerate-launch", "accelerate.commands.launch"})
_OTHER_LAUNCHERS: Final = frozenset(
    ["torchrun", "torch.distributed.run", "torch.distributed.launch", "mpirun", "mpiexec", "orterun", "prterun"]
)
_FIRST_PORT: Final = 15000  # below the ports that Linux gives to outgoing connections (32768 on)
_NUM_PORTS: Final = 16000
#: Set in processes that `starter` has started: its folder, and the command line of the launcher that it stands in for.
STARTED: Final = "CI_LLM_STARTED"
#: Set by the supervisor of this package in the processes it starts: the seconds between its TERM and its KILL.
SUPERVISED: Final = "CI_LLM_SUPERVISED"


@dataclass(frozen=True)
class Launch:
    """The place of this process among the processes of the run, and what its launcher was asked for.

    Attributes:
        launcher: "python", "accelerate" (one process that it starts itself), "torchrun" (also what
            `accelerate launch --multi_gpu` uses), "srun" or "mpirun".
        num_processes: the processes of the whole run, over all machines.
        process_index: 0 to num_processes - 1; 0 is the main process.
        num_local_processes: processes on this machine.
        requested_processes: the `--num_processes` of an `accelerate launch` that started a single process
            nevertheless; 0 if it was asked for several and the number is not on its command line; None otherwise.
        variables: to be set in the environment before torch's process group is made.
        kill_delay_s: seconds between a signal and the kill, by the launcher or the supervisor; infinite without any.
        launcher_command: the command line of the launcher. It is read at the start, because the launcher may be gone
            when an interrupted run prints the command that resumes it. Empty if the parent is not a launcher.
        arguments: the words after the script on the command line.
        called_at: unix seconds of a call from Python, from which `max_runtime` counts; None if this process is the run.
    """

    launcher: str
    num_processes: int = 1
    process_index: int = 0
    num_local_processes: int = 1
    requested_processes: int | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    kill_delay_s: float = math.inf
    launcher_command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    called_at: float | None = None

    @property
    def is_main_process(self) -> bool:
        """True if this process prints and writes for the run."""
        return self.process_index == 0

    @property
    def threads_per_process(self) -> int:
        """CPU threads for each process of this machine: an equal share of the cores that this process may use."""
        return max(1, _num_cores() // self.num_local_processes)

    @property
    def forwards_sigterm(self) -> bool:
        """True if a SIGTERM to the launcher reaches this process; `accelerate launch` ends without forwarding it."""
        return self.launcher != "accelerate"


def read_launch(
    environ: Mapping[str, str] = os.environ,
    parent_command: Sequence[str] | None = None,
    arguments: Sequence[str] = (),
) -> Launch:
    """The place of this process.

    Args:
        environ: the environment of this process.
        parent_command: the command line of the process that started this one; looked up by default.
        arguments: the words after the script on the command line.

    Raises:
        LaunchError: the variables contradict each other, or give no address of the main process.
    """
    names = _launcher_variables(environ)
    num_processes = _integer(environ, names.num_processes) if names else 1
    parent = _parent_command(environ) if parent_command is None else parent_command
    # `accelerate launch` starts a single process without torchrun, and sets none of the variables of a launcher.
    by_accelerate = num_processes == 1 and "RANK" not in environ and _is_accelerate(parent)
    launcher = "accelerate" if by_accelerate else names.launcher if names else "python"
    number = int(accelerate_option(parent, "num_processes", environ) or 0) if by_accelerate else 1
    is_launcher = _is_accelerate(parent) or not _OTHER_LAUNCHERS.isdisjoint(PurePath(word).name for word in parent)
    launch = Launch(
        launcher=launcher,
        # Accelerate sets MASTER_ADDR whenever it was asked for more than one process.
        requested_processes=number if "MASTER_ADDR" in environ and number != 1 else None,
        kill_delay_s=_kill_delay_s(launcher, environ),
        launcher_command=tuple(parent) if is_launcher else (),
        arguments=tuple(arguments),
    )
    if names is None or num_processes == 1:
        return launch
    return _placed(launch, names, num_processes, environ)


def _placed(launch: Launch, names: _Variables, num_processes: int, environ: Mapping[str, str]) -> Launch:
    """The launch with the place of this process among several."""
    process_index = _integer(environ, names.process_index)
    if not 0 <= process_index < num_processes:
        raise LaunchError(
            f"process {process_index} of {num_processes} cannot be",
            where=f"{names.process_index}={process_index}, {names.num_processes}={num_processes}",
            hint="start all processes by one launcher: torchrun, accelerate launch or srun",
        )
    # A launcher that does not set the local index starts all processes on one machine.
    local_index = _integer(environ, names.local_index, process_index)
    num_local = _local_processes(environ, num_processes)
    this_machine = "127.0.0.1" if num_local == num_processes else None
    place = {
        "RANK": process_index,
        "WORLD_SIZE": num_processes,
        "LOCAL_RANK": local_index,
        "LOCAL_WORLD_SIZE": num_local,
        "MASTER_ADDR": environ.get("MASTER_ADDR") or this_machine or _first_host(environ),
        "MASTER_PORT": environ.get("MASTER_PORT") or _port_of_step(environ),
    }
    return replace(
        launch,
        num_processes=num_processes,
        process_index=process_index,
        num_local_processes=num_local,
        variables={name: str(value) for name, value in place.items()},
    )


def own_process_index() -> int:
    """The index of this process by its launcher's variables, without `read_launch`, which may fail; 0 if unknown."""
    names = _launcher_variables(os.environ)
    text = os.environ.get(names.process_index, "") if names else ""
    return int(text) if text.isdecimal() else 0


def require_supported(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse an Accelerate configuration that asks for another way of training.

    Raises:
        LaunchError: with what to use.
    """
    for name, (why, instead) in _REFUSED.items():
        if _asks(environ, name):
            raise LaunchError(why, where=f"accelerate launch: {name}={environ[name]}", hint=f"use {instead}")


def disable_unsupported(environ: MutableMapping[str, str]) -> list[str]:
    """Hide in `environ` what an Accelerate configuration asks for and this program does in another way or not at all.

    Returns:
        a line for people per setting, with what becomes of it.

    Raises:
        LaunchError: see `require_supported`.
    """
    require_supported(environ)
    lines = []
    for name, (hidden, what) in _HIDDEN.items():
        lines += [f"{name} {what}"] if _asks(environ, name) else []
        environ.update({name: hidden} if name in environ else {})  # also "", on which Accelerate would end
    if not (steps := environ.get(_STEPS, "1")).isdecimal():  # "auto" of DeepSpeed, on which it would end as well
        lines.append(f"{_STEPS}={steps} is not used: gradient_accumulation_steps=N says it")
        environ[_STEPS] = "1"
    return lines


def _asks(environ: Mapping[str, str], name: str) -> bool:
    if name.endswith("_SIZE"):  # of a group of processes
        return _asks(environ, "ACCELERATE_USE_PARALLELISM_CONFIG") and environ.get(name, "") not in ("", "0", "1")
    return environ.get(name, "").lower() not in _NO


def _shards(environ: Mapping[str, str]) -> bool:
    """True if an Accelerate configuration says that one process does not hold a copy of the model."""
    whole = environ.get("FSDP_VERSION") != "2" and environ.get("FSDP_SHARDING_STRATEGY", "").upper() in (
        "NO_SHARD",
        "3",
    )
    return _asks(environ, "PARALLELISM_CONFIG_DP_SHARD_SIZE") or (_asks(environ, "ACCELERATE_USE_FSDP") and not whole)


def accelerate_settings(environ: Mapping[str, str], parent_command: Sequence[str] | None = None) -> dict[str, str]:
    """Values of configuration keys from `accelerate launch` or `accelerate config`. The configuration wins over them.

    The launcher exports the gradient accumulation only with DeepSpeed, so its command line is read as well.

    Raises:
        LaunchError: see `require_supported`.
    """
    require_supported(environ)
    parent = _parent_command(environ) if parent_command is None else parent_command
    # "no" and "1" are the defaults of Accelerate: they cannot be told from a user's choice, so they count as no choice.
    steps = environ.get(_STEPS, "")
    if not steps and _is_accelerate(parent):
        steps = option(parent, "gradient_accumulation_steps")
    recomputes = _asks(environ, "ACCELERATE_USE_FSDP") and _asks(environ, "FSDP_ACTIVATION_CHECKPOINTING")
    values = {
        "mixed_precision": environ.get("ACCELERATE_MIXED_PRECISION", "").lower() or "no",
        "gradient_accumulation_steps": steps if steps.isdecimal() else "1",
        "base_sharding": "layers" if _shards(environ) else "no",
        "use_gradient_checkpointing": "true" if recomputes else "no",
    }
    return {key: value for key, value in values.items() if value not in ("no", "1")}


def launch_notes(launch: Launch, environ: Mapping[str, str], *, num_gpus: int) -> list[str]:
    """One line, with a hint, for each property of a launch that works but may not be intended.

    Args:
        num_gpus: GPUs that this process may use; 0 for a run on the CPU.
    """
    lines = []
    if launch.requested_processes is not None:
        why = f"this machine has {num_gpus} GPU(s), and each takes one" if num_gpus else "--distributed=N starts N here"
        lines.append(f"asked for {launch.requested_processes or 'several'} processes, running 1: {why}")
    if num_gpus > 1 and launch.num_processes == 1:
        way = f"`--distributed`, or `accelerate launch --num_processes={num_gpus}`"
        lines.append(f"{num_gpus} GPUs, 1 process: {way}, uses them all")
    threads, share = environ.get("OMP_NUM_THREADS", ""), launch.threads_per_process
    # Launchers set 1 where it is not set: with fewer processes than cores that leaves cores idle.
    is_idle = threads == "1" and share > 1 and launch.launcher != "python"
    if not num_gpus and launch.num_local_processes > _num_cores():
        shared = f"{launch.num_local_processes} processes share {_num_cores()} CPU core(s)"
        lines.append(f"{shared}: more of them than cores make a run slower and take more memory")
    elif not num_gpus and (is_idle or (threads.isdecimal() and int(threads) > share)):
        lines.append(f"OMP_NUM_THREADS={threads} per process: `export OMP_NUM_THREADS={share}` uses each core once")
    is_elastic = ":" in option(launch.launcher_command, "nnodes")  # 1:4, and not 4
    if is_elastic and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        lines.append(
            "a machine that joins later would not be let in, because the agents of torchrun share their store:"
            " export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before each torchrun"
        )
    return [*lines, *step_notes(environ)]


def step_notes(environ: Mapping[str, str]) -> list[str]:
    """A line about the signals that do not reach a process in a SLURM job but outside of its steps; else nothing."""
    if "SLURM_JOB_ID" not in environ or "SLURM_STEP_ID" in environ:
        return []
    job = environ["SLURM_JOB_ID"]
    return [
        f"SLURM job {job}, but no step of it: a preemption signals only steps, and after scancel or at the limit this"
        " process may be killed at once, without a last save; write `srun` before the command in the batch script"
    ]


def who_is_missing(launch: Launch, missing: Sequence[int], environ: Mapping[str, str] = os.environ) -> str:
    """Which processes have not come, which variables say that there are more than this one, and what to do."""
    names = [name for one in _LAUNCHERS if one.launcher == launch.launcher for name in one[1:]]
    said = {name: f"{name}={environ[name]}" for name in names if name in environ}
    who = f"process{'' if len(missing) == 1 else 'es'} {', '.join(map(str, missing))} of {launch.num_processes}"
    where = ":".join(launch.variables.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return f"{who} not yet at {where}, by {' '.join(said.values())}; if no launcher runs, `unset {' '.join(said)}`"


def option(command: Sequence[str], name: str) -> str:
    """The value of an option of a launcher, as `--a_b=1`, `--a-b=1` or `--a_b 1`; empty if it is missing."""
    found = re.search(rf"--{name.replace('_', '[-_]')}[=\0]([^\0]+)", "\0".join(command))
    return found[1] if found else ""


def is_cpu_wanted(environ: Mapping[str, str]) -> bool:
    """True if the environment says that processes compute on the CPU, in the words of Accelerate."""
    return _asks(environ, "ACCELERATE_USE_CPU") or environ.get("ACCELERATE_TORCH_DEVICE", "").startswith("cpu")


def shell_line(command: Sequence[str]) -> str:
    """A command line as a person would type it: programs on PATH by their bare names."""
    program, *words = command
    if words and _is_on_path(words[0]):  # a script such as torchrun names its interpreter itself
        program, *words = words
    return shlex.join([Path(program).name if _is_on_path(program) else program, *words])


def _is_on_path(program: str) -> bool:
    """True if its bare name starts this very program; `make train` starts an interpreter that is not on PATH."""
    found = shutil.which(Path(program).name)
    return found is not None and Path(found).absolute() == Path(program).absolute()


def _num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _launcher_variables(environ: Mapping[str, str]) -> _Variables | None:
    return next((one for one in _LAUNCHERS if one.num_processes in environ), None)


def _kill_delay_s(launcher: str, environ: Mapping[str, str]) -> float:
    # The shorter delay counts: whoever loses patience first kills.
    supervisor_s = float(environ.get(SUPERVISED, math.inf))
    if launcher != "torchrun":
        return supervisor_s
    between_rounds_s = KILL_DELAY_S if has_rounds(environ) else math.inf
    at_the_end_s = _integer(environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 30)  # which torchrun takes by default
    return min(supervisor_s, between_rounds_s, at_the_end_s)


def started_by(folder: str, launch: Launch) -> str:
    """The value of STARTED."""
    return shlex.join([folder, *launch.launcher_command])


def _parent_command(environ: Mapping[str, str]) -> list[str]:
    if STARTED in environ:
        return shlex.split(environ[STARTED])[1:]
    try:
        return psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # the parent is gone, or belongs to another user
        return []


def accelerate_option(command: Sequence[str], name: str, environ: Mapping[str, str] = os.environ) -> str:
    """A number that `accelerate launch` was given: on its command line, else in its file; empty if in neither."""
    if number := option(command, name):
        return number
    cache = Path(environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    home = Path(environ.get("HF_HOME", cache), "accelerate").expanduser()
    named = option(command, "config_file")
    files = [Path(named)] if named else [home / "default_config.yaml", home / "default_config.json"]
    text = next((file.read_text(encoding="utf-8") for file in files if file.is_file()), "")
    found = re.search(rf"^\W*{name}\W+(\d+)", text, re.MULTILINE)
    return found[1] if found else ""


def _is_accelerate(command: Sequence[str]) -> bool:
    names = {PurePath(word).name for word in command}
    if names & _ACCELERATE_LAUNCH == {"launch"}:  # a word that any program may have
        return bool(names & {"accelerate", "accelerate.commands.accelerate_cli"})
    return bool(names & _ACCELERATE_LAUNCH)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise LaunchError(
            f"several processes were started, but {name} is {'not set' if text is None else repr(text)}",
            where="environment",
            hint="start the run by torchrun, accelerate launch or srun, which set all of them",
        )
    return int(text)


def _local_processes(environ: Mapping[str, str], num_processes: int) -> int:
    """The number of processes on this machine; all processes if the launcher does not tell it."""
    for name in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if name in environ:
            return _integer(environ, name)
    if tasks := environ.get("SLURM_STEP_TASKS_PER_NODE"):  # "2(x3),1" is [2, 2, 2, 1]
        parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)
        counts = [int(count) for count, times in parts for _ in range(int(times or 1))]
        return counts[_integer(environ, "SLURM_NODEID", 0)]
    return num_processes


def _first_host(environ: Mapping[str, str]) -> str:
    """The first host of SLURM's "node[03-07,9],login2" -> "node03"."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise LaunchError(
            "several machines, and no address of the one with process 0",
            where="environment",
            hint="export MASTER_ADDR=<name of the machine with process 0> and a free MASTER_PORT",
        )
    found = re.match(r"([^,\[]+)(?:\[(\d+))?", nodes)
    assert found is not None
    return found[1] + (found[2] or "")


def _port_of_step(environ: Mapping[str, str]) -> int:
    """One port per SLURM job step, the same for all its processes."""
    # Computed from the numbers of job and step, because the processes cannot communicate before they know the port.
    # Jobs that share a node, and steps of one job, get different ports.
    job, step = (_integer(environ, name, 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return _FIRST_PORT + (job * 31 + step) % _NUM_PORTS
