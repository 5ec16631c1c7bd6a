"""A real SLURM cluster on one machine: munge, a controller and several nodes, as root, all below one folder.

No systemd, no cgroups, no database. Every daemon runs in the foreground as a child of the test's process and dies
with it; whatever a job leaves behind is found by the name of this cluster in its environment.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import psutil

from ci_llm.core.run_status import is_alive
from tools.testbed.forkserver import free_port

#: No wait is expected to come near this, on a machine under any load: it only ends a test that will never end.
CEILING_S = 900.0
LOOK_S = 0.1
ASK_S = 2.0  # a question to SLURM starts a program
END_S = 0.5  # where the end of a job is waited for, by several at once
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "srun", "scancel", "munged", "setpriv")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "BOOT_FAIL"}

T = TypeVar("T")

GRACE_S = 600
KILL_WAIT_S = 500

#: What many clusters do at the end of a job, by this or by a cgroup: what is left of it is killed.
EPILOG = """\
#!/bin/sh
for process in /proc/[0-9]*; do
  if tr '\\0' '\\n' <"$process/environ" 2>/dev/null | grep -qx "SLURM_JOB_ID=$SLURM_JOB_ID" &&
    tr '\\0' '\\n' <"$process/environ" 2>/dev/null | grep -qx "SLURM_CONF={config}"; then
    [ "${{process#/proc/}}" = $$ ] || kill -KILL "${{process#/proc/}}"
  fi
done
exit 0
"""

#: `cred_expire` is also how long a job that was put back waits before it may start again. GraceTime, KillWait and the
#: timeouts are long enough for a machine under any load, and cost nothing: who is done earlier is gone earlier. Only
#: SlurmdTimeout costs what it says: so long it takes to notice that a node is gone.
SETTINGS = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait={kill_wait}
Epilog={epilog}
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout=20
BatchStartTimeout=300
MessageTimeout=60
TCPTimeout=30
ReturnToService=2
SlurmdParameters=config_overrides
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here; None if one can."""
    absent = [name for name in PROGRAMS if not _program(name)]
    if absent:
        return f"there is no {', '.join(absent)}; apt-get install slurmctld slurmd slurm-client munge"
    return None if os.geteuid() == 0 else "slurmd needs root; sudo make test-slurm"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def until(what: str, look: Callable[[], T | bool | None], *, every_s: float = LOOK_S) -> T:
    """Call `look` until it returns something, and return that."""
    end = time.monotonic() + CEILING_S
    while time.monotonic() < end:
        if seen := look():
            return seen  # type: ignore[return-value]
        threading.Event().wait(every_s)
    raise AssertionError(f"not within {CEILING_S:.0f} s: {what}")


class Cluster:
    """Starts with `with`; at its end nothing of it is left.

    Args:
        folder: for everything that the cluster writes; a short path, because it holds sockets.
        num_nodes: each takes one job at a time.
        kills_leftovers: what outlives the steps of a job is killed.
    """

    def __init__(
        self, folder: Path, num_nodes: int, *, kills_leftovers: bool = False, kill_wait_s: int = KILL_WAIT_S
    ) -> None:
        self.folder, self.config = folder, folder / "slurm.conf"
        self._kills_leftovers, self._kill_wait_s = kills_leftovers, kill_wait_s
        self.nodes = [f"node{i}" for i in range(1, num_nodes + 1)]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        try:
            self._configure()
            self._start_munge()
            self._start("slurmctld", "slurmctld", "-D", "-f", self.config)
            for node in self.nodes:
                self._start(node, "slurmd", "-D", "-f", self.config, "-N", node)
            until("all nodes are idle", self._is_ready)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the daemons first, so that nothing starts again, then what their jobs have left."""
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        # A slurmstepd has no environment, and the folder of the slurmd that started it.
        keepers = [one for one in psutil.process_iter(["name", "cwd"]) if one.info["name"] == "slurmstepd"]
        for one in [*(keeper for keeper in keepers if keeper.info["cwd"] == str(self.folder)), *self.processes()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def call(self, *command: object, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """The output of one of SLURM's commands."""
        done = subprocess.run(
            [str(word) for word in command],
            env={**os.environ, "SLURM_CONF": str(self.config), **(environment or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=CEILING_S,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def submit(self, *words: object, environment: Mapping[str, str] | None = None, cwd: Path | None = None) -> Job:
        """`sbatch WORDS`, from the folder `cwd`."""
        cwd = cwd or self.folder
        number = self.call("sbatch", "--parsable", *words, environment=environment, cwd=cwd)
        return Job(self, number, cwd / f"slurm-{number}.out")

    def preempt(self, node: str) -> None:
        """Send a job of higher priority to a node."""
        options = ["--partition=high", f"--nodelist={node}", "--output=/dev/null", "--time=10"]
        self.call("sbatch", *options, "--wrap=true", cwd=self.folder)

    def lose_node(self, node: str) -> None:
        """The controller hears nothing more of a node; what runs there continues."""
        self._daemons[node].kill()
        self._daemons[node].wait()

    def kill_node(self, node: str, job: Job) -> None:
        """A node is gone, with all that the job runs there."""
        self.lose_node(node)
        victims = [one for one in self.processes(job) if _environment(one).get("SLURMD_NODENAME") == node]
        for victim in victims:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in (*(parent for parent in victim.parents() if parent.name() == "slurmstepd"), victim):
                    one.kill()

    def processes(self, job: Job | None = None) -> list[psutil.Process]:
        """The processes of jobs of this cluster, or of one job, that are more than zombies."""
        return [one for one in psutil.process_iter() if self._is_ours(one, job)]

    def _is_ours(self, process: psutil.Process, job: Job | None) -> bool:
        if process.pid == os.getpid() or not is_alive(process.pid):
            return False
        environ = _environment(process)
        mine = environ.get("SLURM_CONF") == str(self.config) and "SLURM_JOB_ID" in environ
        return mine and (job is None or environ["SLURM_JOB_ID"] == job.number)

    # Starting

    def _configure(self) -> None:
        host = socket.gethostname().split(".")[0]
        port, *ports = _free_ports(1 + len(self.nodes))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000 State=UNKNOWN"
            for node, port in zip(self.nodes, ports, strict=True)
        )
        self.folder.chmod(0o755)
        for name in ("state", *(f"spool.{node}" for node in self.nodes)):
            (self.folder / name).mkdir()
        epilog = self.folder / "epilog"
        epilog.write_text(EPILOG.format(config=self.config) if self._kills_leftovers else "#!/bin/sh\n")
        epilog.chmod(0o755)
        self.config.write_text(
            SETTINGS.format(
                host=host,
                port=port,
                folder=self.folder,
                nodes=nodes,
                grace=GRACE_S,
                kill_wait=self._kill_wait_s,
                epilog=epilog,
            )
        )

    def _start_munge(self) -> None:
        """Start munge, by which the daemons authenticate each other, with its own key."""
        home = self.folder / "munge"
        home.mkdir(mode=0o700)
        (home / "key").write_bytes(secrets.token_bytes(1024))
        (home / "key").chmod(0o400)
        names = {"key": "key", "pid": "pid", "log": "log", "seed": "seed"}
        files = [f"--{option}-file={home / name}" for option, name in names.items()]
        connection = self.folder / "munge.socket"
        self._start("munged", "munged", "--foreground", "--force", f"--socket={connection}", *files)
        until("munge listens", connection.exists)

    def _start(self, name: str, program: str, *arguments: object) -> None:
        words = [_program("setpriv"), "--pdeathsig", "KILL", _program(program), *map(str, arguments)]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [str(word) for word in words],
                env={**os.environ, "SLURM_CONF": str(self.config)},
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _is_ready(self) -> bool:
        for name, daemon in self._daemons.items():
            assert daemon.poll() is None, f"{name} has ended: {(self.folder / f'{name}.log').read_text()[-2000:]}"
        try:
            states = self.call("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split()
        except AssertionError:  # the controller does not answer yet
            return False
        return states == ["idle"] * len(self.nodes)


class Job:
    """One job of a cluster, over all the times it is started."""

    def __init__(self, cluster: Cluster, number: str, output: Path) -> None:
        self.cluster, self.number, self.output = cluster, number, output

    def show(self) -> dict[str, str]:
        """What scontrol says of it, by SLURM's names."""
        words = self.cluster.call("scontrol", "show", "job", "-o", self.number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def said(self) -> str:
        """Its output so far."""
        return self.output.read_text() if self.output.exists() else ""

    def until(self, what: str, look: Callable[[], T | bool | None]) -> T:
        """Look until there is something to see; at once an error if the job ends without it."""

        asked = time.monotonic()

        def look_at_both() -> T | bool | None:
            nonlocal asked
            ended = False
            if time.monotonic() - asked > ASK_S:
                ended, asked = self.show()["JobState"] in ENDED, time.monotonic()
            seen = look()
            assert seen or not ended, f"job {self.number} ended before: {what}\n{self.show()}\n{self.said()}"
            return seen

        return until(what, look_at_both)

    def until_ended(self) -> dict[str, str]:
        """Wait for its end; what SLURM says of it then."""

        def ended() -> dict[str, str] | None:
            shown = self.show()
            return shown if shown["JobState"] in ENDED else None

        return until(f"job {self.number} has ended", ended, every_s=END_S)

    @property
    def node(self) -> str:
        """The name of its first node."""
        return self.show()["BatchHost"]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        return {}


def _free_ports(count: int) -> list[int]:
    """Different ones, and none that an outgoing connection may be given before a daemon listens there."""
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return [*ports]
