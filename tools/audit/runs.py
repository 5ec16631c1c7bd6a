"""One run of the script under audit: its folder, environment and end, and the probe's record as plain values."""

from __future__ import annotations

import json
import os
import select
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

from ci_llm.core.typed_json import load_json
from ci_llm.errors import ConfigError
from ci_llm.interrupts import signal_number
from ci_llm.supervisor.shim import start_shim


@dataclass(frozen=True)
class Step:
    """One optimizer step. Digests are short texts.

    Attributes:
        rows: of the data, of all micro-batches, in order.
        losses: at each backward.
        generators: at the first forward, by library.
        mode: which modules were in training mode.
        dropout: whether the model holds active dropout.
        scale: (scale, steps since it grew) of each loss scaler.
        lr, settings: of each parameter group.
        moments: of the optimizer, after the step.
        state: of every parameter and buffer, after the step.
        saved_before: whether a checkpoint has appeared since the step before.
    """

    rows: Sequence[str] = ()
    losses: Sequence[float] = ()
    generators: Mapping[str, str] = field(default_factory=dict)
    mode: str = ""
    dropout: bool = False
    scale: Sequence[Sequence[float]] = ()
    lr: Sequence[float] = ()
    settings: Sequence[Mapping[str, str]] = ()
    moments: Mapping[str, str] = field(default_factory=dict)
    grads: str = ""
    state: Mapping[str, str] = field(default_factory=dict)
    saved_before: bool = False
    time: float = 0.0


@dataclass(frozen=True)
class Trace:
    """One process of one run.

    Attributes:
        state, moments: before its first step.
        buffers: which of the state no optimizer changes.
        rounded: parameters that then held nothing that half precision could not hold.
        places: lines of the script, by what they do; the last one of each.
        enough: it was ended after as many steps as asked for.
    """

    steps: Sequence[Step]
    state: Mapping[str, str]
    moments: Mapping[str, str]
    buffers: Sequence[str]
    rounded: Sequence[str]
    framework: str
    places: Mapping[str, str]
    enough: bool

    @property
    def saves(self) -> list[int]:
        """Steps after which a checkpoint appeared before the next step was done."""
        return [number for number, step in enumerate(self.steps) if step.saved_before]

    def state_after(self, step: int) -> Mapping[str, str]:
        """Weights and buffers after so many steps."""
        return self.steps[step - 1].state if step else self.state

    def moments_after(self, step: int) -> Mapping[str, str]:
        """Of the optimizer, after so many steps."""
        return self.steps[step - 1].moments if step else self.moments


def read_traces(folder: Path) -> list[Trace]:
    """Of every process that took an optimizer step, by rank; none if the probe saw none."""
    paths = sorted(folder.glob("process_*.jsonl"), key=lambda path: int(path.stem.partition("_")[2]))
    return [trace for trace in map(_read, paths) if trace.steps or trace.state]


def _read(path: Path) -> Trace:
    # A kill may tear the last line, which then has no end.
    lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
    begun = [line for line in lines if line["kind"] == "begin"]
    known = Step.__dataclass_fields__
    return Trace(
        steps=[
            Step(**{name: value for name, value in line.items() if name in known})
            for line in lines
            if line["kind"] == "step"
        ],
        state=_joined(begun, "state"),
        moments=_joined(begun, "moments"),
        buffers=[name for line in begun for name in line.get("buffers", [])],
        rounded=[name for line in begun for name in line.get("rounded", [])],
        framework=begun[0]["framework"] if begun else "torch",
        places={line["what"]: line["at"] for line in lines if line["kind"] == "place"},
        enough=any(line["kind"] == "enough" for line in lines),
    )


def _joined(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, str]:
    return {name: digest for line in lines for name, digest in line.get(key, {}).items()}


#: Placeholders in the words of the user.
OUT: Final = "{out}"
NEWEST: Final = "{newest}"
INSIDE: Final = Path(__file__).parent / "inside"
LARGEST_COPY: Final = 256 * 2**20
_NOT_COPIED: Final = (".git", ".venv", "venv", "node_modules", "__pycache__", ".mypy_cache", ".ruff_cache")
_LAST_LINES: Final = 12
_GRACE_S: Final = 30.0  # between SIGTERM and SIGKILL, where a command is ended


#: (command, environment, folder, file of the output, seconds) -> (exit code, whether its time was over)
Execute: TypeAlias = Callable[[Sequence[str], Mapping[str, str], Path, Path, float], tuple[int | None, bool]]


def execute(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, output: Path, limit_s: float
) -> tuple[int | None, bool]:
    """Run a command, and all that it starts, to the end.

    Returns:
        its exit code, minus the number of a signal; and whether it was killed because its time was over.

    Raises:
        ConfigError: it cannot be started.
    """
    control_end, control = os.pipe()
    report, report_end = os.pipe()
    with output.open("wb") as written:
        shim = start_shim(
            command,
            environment,
            grace_s=_GRACE_S,
            control_fd=control_end,
            report_fd=report_end,
            stdout_fd=written.fileno(),
            stderr_fd=written.fileno(),
            folder=folder,
        )
    os.close(control_end)
    os.close(report_end)
    try:
        said, over_time = _listen(report, control, limit_s)
    finally:
        os.close(control)  # where this is interrupted, the shim ends the command
        os.close(report)
        shim.wait()
    facts = [fact for line in said.splitlines() if isinstance(fact := load_json(line), dict)]
    if error := next((fact["error"] for fact in facts if "error" in fact), None):
        raise ConfigError(f"the command cannot be started: {error}", where=command[0], hint="is it on the path?")
    code = next((fact["returncode"] for fact in facts if "returncode" in fact), None)
    return (code if isinstance(code, int) else None), over_time


@dataclass(frozen=True)
class Plan:
    """What the user asked for.

    Attributes:
        command: their words.
        resume: words that are added where a run resumes; none for a script that looks for its checkpoints by itself.
        newest: a pattern below the folder of a run; its newest match replaces {newest}.
        steps: optimizer steps of a run.
        limit_s: seconds of each process.
        execute: runs a command.
    """

    command: Sequence[str]
    resume: Sequence[str] = ()
    newest: str = ""
    steps: int = 30
    kill_at: int | None = None
    limit_s: float = 900.0
    execute: Execute = execute

    @property
    def takes_folder(self) -> bool:
        """Whether the command names where it writes; otherwise it runs in a copy of the working folder."""
        return any(OUT in word for word in (*self.command, *self.resume))


@dataclass(frozen=True)
class Ending:
    """How one process of an audit ended.

    Attributes:
        code: exit code; minus the number of a signal.
        over_time: it was ended because its time was over.
        last_lines: of its output.
    """

    traces: Sequence[Trace]
    code: int | None
    seconds: float
    over_time: bool
    last_lines: str

    @property
    def succeeded(self) -> bool:
        return self.code == 0 and not self.over_time


class Place:
    """The folder of one run and of those that resume from it."""

    def __init__(self, scratch: Path, name: str, plan: Plan) -> None:
        self._plan, self.folder = plan, scratch / name
        self.folder.mkdir(parents=True)
        if plan.takes_folder:
            self._works_in, self.out = Path.cwd(), self.folder / "out"
            self.out.mkdir()
        else:
            self._works_in = self.out = self.folder / "work"
            copy_folder(Path.cwd(), self.out)

    def run(
        self, name: str, *, resumes: bool = False, strike: str = "", at: int = 0, steps: int | None = None
    ) -> Ending:
        """Run the script once.

        Args:
            name: of the record.
            resumes: whether the words for resuming are added.
            strike: name of the signal that the probe sends its own process.
            at: the step after which it does.
            steps: after which it is ended.
        """
        record = self.folder / name
        record.mkdir()
        words = [*self._plan.command, *(self._plan.resume if resumes else ())]
        environment = {
            "WANDB_MODE": "disabled",  # four runs are no experiment of theirs
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")])),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CI_LLM_AUDIT_RECORD": str(record),
            "CI_LLM_AUDIT_WATCH": str(self.out),
            "CI_LLM_AUDIT_STEPS": str(self._plan.steps if steps is None else steps),
            "CI_LLM_AUDIT_STRIKE": f"{signal_number(strike) if strike else 0}@{at}",
        }
        began = time.monotonic()
        command = [self._filled(word) for word in words]
        output = record / "output.txt"
        code, over_time = self._plan.execute(command, environment, self._works_in, output, self._plan.limit_s)
        said = output.read_text(encoding="utf-8", errors="replace")
        lines = [line for line in said.splitlines() if line.strip()][-_LAST_LINES:]
        return Ending(read_traces(record), code, time.monotonic() - began, over_time, "\n".join(lines))

    def _filled(self, word: str) -> str:
        word = word.replace(OUT, str(self.out))
        if NEWEST not in word:
            return word
        found = sorted(self.out.glob(self._plan.newest), key=lambda path: path.stat().st_mtime_ns)
        if not found:
            raise ConfigError(
                f"no checkpoint matches {self._plan.newest}",
                where=str(self.out),
                hint="--newest is a pattern below the folder in which the script writes, for instance 'out/step_*'",
            )
        return word.replace(NEWEST, str(found[-1]))


def _listen(report: int, control: int, limit_s: float) -> tuple[bytes, bool]:
    """What the shim reports until it is gone; after `limit_s` it is told to kill."""
    until, output, over_time = time.monotonic() + limit_s, b"", False
    while True:
        left_s = None if over_time else max(0.0, until - time.monotonic())
        if select.select([report], [], [], left_s)[0]:
            data = os.read(report, 4096)
            output += data
            if not data:
                return output, over_time
        else:
            over_time = True
            os.write(control, bytes([signal_number("SIGKILL")]))


def copy_folder(source: Path, target: Path) -> None:
    """Copy the working folder, so that a script that writes beside itself writes beside its copy.

    Raises:
        ConfigError: it is too large for that.
    """
    size = 0
    for folder, folders, names in os.walk(source):
        folders[:] = [name for name in folders if name not in _NOT_COPIED]
        size += sum(path.stat().st_size for path in (Path(folder, name) for name in names) if path.is_file())
        if size > LARGEST_COPY:
            raise ConfigError(
                f"each run works in a copy of this folder, which is larger than {LARGEST_COPY >> 20} MiB",
                where=str(source),
                hint="write {out} where the script takes its output folder: python train.py --output_dir {out}",
            )
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)
