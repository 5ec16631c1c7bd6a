"""One run under the eyes of a witness: what it did, step by step, and how it dies at an appointed moment.

A trial is a run that is killed and then called again; it counts as exact if nothing that can be told about it
differs from the undisturbed run: rows and weights of every optimizer step on every process, all files of the last
checkpoint, metrics, evaluation.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedModel

import ci_llm.run.job  # noqa: F401  the fork server imports all the rooms through this file
from ci_llm.checkpoints.checkpoint import load_checkpoint
from ci_llm.checkpoints.store import CheckpointStore
from ci_llm.cli.main import main
from ci_llm.crowd.crowd import Crowd
from ci_llm.mirror.head import Head
from ci_llm.mirror.writer import MirrorWriter
from tools.testbed.events import new_rows, wait_until
from tools.testbed.forkserver import ForkServer

STEPS = 12
STEPS_PER_EPOCH = 5
ROWS_PER_MICRO_BATCH = 2
#: Where the checkpoint lies from which the run resumes.
MOMENTS = {"mid epoch 0": 3, "boundary": 5, "mid epoch 1": 8}
LOST_STEPS = 2  # taken after the checkpoint and before the kill: taken again by the next attempt
WITNESSED = "witnessed: step"
BY_THE_CLOCK = {"attempt", "slurm_restarts", "time", "tokens_per_s", "step_time_s"}
BY_THE_CLOCK |= {"mirror/behind_s", "memory/resident_bytes", "memory/cuda_peak_bytes"}
DEFAULTS = ("no", "none", "null", "adamw")  # words that leave something out


@dataclass(frozen=True)
class Cell:
    """One combination of the matrix.

    Attributes:
        dropout: of the adapters' inputs and, as DropConnect, of their weights.
        workers: loader processes per rank.
        ranks: processes of the run.
    """

    moment: str = "mid epoch 0"
    accumulation: int = 1
    dropout: float = 0.0
    workers: int = 0
    ranks: int = 1
    precision: str = "no"
    diversity: str = "none"
    quantization: str = "null"

    def __str__(self) -> str:
        parts = [self.moment, f"accumulation {self.accumulation}", f"dropout {self.dropout:g}"]
        parts += [f"{self.workers} workers", f"{self.ranks} process{'es' * (self.ranks > 1)}"]
        words = (self.precision, self.diversity, self.quantization)
        parts += [word for word in words if word not in DEFAULTS]
        return ", ".join(parts)

    @property
    def saved_step(self) -> int:
        return MOMENTS[self.moment]

    @property
    def undisturbed(self) -> Cell:
        """The cell whose undisturbed run is the reference: that of all moments, with or without workers."""
        return replace(self, moment="mid epoch 0", workers=0)

    @property
    def num_rows(self) -> int:
        """The last step of an epoch finds one row: a short micro-batch, and none at all for a second process."""
        return (STEPS_PER_EPOCH - 1) * ROWS_PER_MICRO_BATCH * self.accumulation * self.ranks + 1

    def arguments(self, **keys: Any) -> list[str]:
        """The command line of train.py, complete."""
        own = {
            "max_train_samples": self.num_rows,
            "max_train_steps": STEPS,
            "batch_size": ROWS_PER_MICRO_BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "num_workers": self.workers,
            "lora_dropout": self.dropout,
            "dropconnect_p": self.dropout,
            "mixed_precision": self.precision,
            "diversity": self.diversity,
            "quantization": self.quantization,
            "num_agents": 2,
            "lora_rank": 2,
            "learning_rate": 4e-3,
            "logging_steps": 2,  # the checkpoints of two moments lie between two lines
            "eval_steps": 4,
            "eval_samples": 4,
            "max_new_tokens_eval": 8,
            "save_steps": "null",
            "save_interval_seconds": "null",
            "report_to": "none",
            "output_dir": "run",
        }
        return [f"{key}={value}" for key, value in (own | keys).items()]


def matrix(**axes: Iterable[Any]) -> list[Cell]:
    """Every combination of the given values."""
    return [Cell(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


# ------------------------------------------------------------------------------------- in the trial's process


@dataclass(frozen=True)
class Fate:
    """A signal that a process gets at the beginning of a micro-step or of an evaluation.

    Attributes:
        signal: "SIGKILL" or another, which the process sends to itself.
        steps: optimizer steps that this process has taken by then.
        micro_step: micro-steps of the window that it has taken by then; None: in the evaluation after the step.
        committed: step whose checkpoint must be committed by then; the process waits for it.
        rank: the only one it happens to; None: all of them.
        mirrored: the mirror must have that checkpoint as well.
    """

    signal: str
    steps: int
    micro_step: int | None = 0
    committed: int | None = None
    rank: int | None = None
    mirrored: bool = False


class Witness:
    """Writes one line per optimizer step: the rows of its micro-batches and a digest of the weights after it.

    Seen from outside, by hooks that torch has for everything: whoever trains, with whatever loop.
    """

    def __init__(self, folder: Path, fate: Fate | None = None) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self._folder = folder
        self._file = (folder / f"process{self.rank}.jsonl").open("a", buffering=1)
        self._fate = fate if fate and fate.rank in (None, self.rank) else None
        self._steps = 0
        self._rows: list[list[int]] = []
        register_optimizer_step_post_hook(self._stepped)

    def sees(self, rows: list[int]) -> None:
        """A micro-step over `rows` is about to begin."""
        self._meet_fate(len(self._rows))
        self._rows.append(rows)

    def sees_evaluation(self) -> None:
        """A batch is about to be judged."""
        self._meet_fate(None)

    def _meet_fate(self, micro_step: int | None) -> None:
        fate = self._fate
        if fate is None or (fate.steps, fate.micro_step) != (self._steps, micro_step):
            return
        self._fate = None
        if fate.committed is not None:
            wait_until(f"step {fate.committed} is committed", self._told(fate.committed).exists)
        os.kill(os.getpid(), signal.Signals[fate.signal])

    def tell_committed(self, step: int) -> None:
        """The checkpoint of this step is committed, as the first process knows; the others see the file.

        One that died before might owe its part of the checkpoint to the first process.
        """
        self._told(step).touch()

    def _told(self, step: int) -> Path:
        return self._folder / f"committed{step}"

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]
        digest = xxhash.xxh3_128()
        for parameter in parameters:
            digest.update(_raw(parameter))
        step = int(optimizer.state[parameters[0]]["step"])
        record = {"step": step, "rows": self._rows, "weights": digest.hexdigest()}
        self._file.write(json.dumps(record) + "\n")
        self._steps, self._rows = self._steps + 1, []


def train_watched(folder: str, arguments: list[str], fate: dict[str, Any] | None) -> int:
    """A trial for the fork server: `train.py` with a witness and perhaps a fate; returns its exit code."""
    torch.set_num_threads(1)
    os.chdir(folder)
    witness = Witness(Path(folder), Fate(**fate) if fate else None)
    commit, commit_head = CheckpointStore.save, MirrorWriter.commit

    def look(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, Crowd):
            if rows := new_rows(inputs[0]):
                witness.sees(rows)
        elif isinstance(module, PreTrainedModel) and not torch.is_grad_enabled():
            witness.sees_evaluation()

    def commit_and_tell(store: CheckpointStore, step: int, *args: Any, **kwargs: Any) -> Any:
        result = commit(store, step, *args, **kwargs)
        if fate and step == fate["committed"] and not fate["mirrored"] and witness.rank == 0:
            witness.tell_committed(step)
        return result

    def commit_head_and_tell(writer: MirrorWriter, head: Head) -> None:
        commit_head(writer, head)
        if fate and fate["mirrored"] and fate["committed"] in {entry.step for entry in head.line}:
            witness.tell_committed(fate["committed"])

    register_module_forward_pre_hook(look)
    CheckpointStore.save = commit_and_tell  # type: ignore[method-assign, assignment]
    MirrorWriter.commit = commit_head_and_tell  # type: ignore[method-assign]
    return main(["train", "--config", os.devnull, *arguments])


# ----------------------------------------------------------------------------------------- in the test's process


class Trials:
    """Runs cells in a fork server; each undisturbed reference is made once.

    Args:
        folder: where the runs leave what they leave.
        base: what they train, as `model_name`.
    """

    def __init__(self, server: ForkServer, folder: Path, base: str = "embedded") -> None:
        self._server, self._folder, self._base = server, folder, base
        self._references: dict[Cell, dict[str, Any]] = {}
        self._count = itertools.count()

    def new_folder(self) -> Path:
        folder = self._folder / f"trial{next(self._count)}"
        folder.mkdir(parents=True)
        return folder

    def arguments(self, cell: Cell, **keys: Any) -> list[str]:
        """The command line of train.py, complete."""
        return cell.arguments(**{"model_name": self._base} | keys)

    def train(
        self,
        cell: Cell,
        folder: Path,
        fate: Fate | None = None,
        trial: Callable[..., int] | None = None,
        told: Mapping[str, Any] | None = None,
        **keys: Any,
    ) -> list[int]:
        """One attempt in `folder`; returns the exit codes of its processes.

        Args:
            trial: what runs in them instead of `train_watched`; `told` are its further arguments.
        """
        return self._server.run(
            trial or train_watched,
            folder / "log",
            ranks=cell.ranks,
            folder=str(folder),
            arguments=self.arguments(cell, **keys),
            fate=asdict(fate) if fate else None,
            **told or {},
        )

    def complete(self, cell: Cell, folder: Path | None = None, **keys: Any) -> Path:
        """The folder of a run that came to its end: a new one, or one in which an attempt has ended before."""
        folder = folder or self.new_folder()
        assert self.train(cell, folder, **keys) == [0] * cell.ranks, (folder / "log").read_text()
        return folder

    def ended(self, cell: Cell, fate: Fate, folder: Path | None = None, **keys: Any) -> Path:
        """The folder of a run that its fate has ended: killed by it, or asked to stop, so that it left by itself."""
        folder = folder or self.new_folder()
        code = -signal.SIGKILL if fate.signal == "SIGKILL" else 0
        assert self.train(cell, folder, fate, **keys) == [code] * cell.ranks, (folder / "log").read_text()
        return folder

    def reference(self, cell: Cell) -> dict[str, Any]:
        """The account of the undisturbed run."""
        cell = cell.undisturbed
        if cell not in self._references:
            self._references[cell] = account(self.complete(cell))
        return self._references[cell]

    def killed(self, cell: Cell) -> dict[str, Any]:
        """The account of a run that got a SIGKILL in the middle of a step, and was called again."""
        saved = cell.saved_step
        fate = Fate("SIGKILL", saved + LOST_STEPS, cell.accumulation // 2, committed=saved)
        return self.resumed(cell, self.ended(cell, fate, save_steps=saved))

    def interrupted(self, cell: Cell) -> dict[str, Any]:
        """The account of a run of which one process got a SIGTERM, so that it saved and ended by itself."""
        if cell.saved_step % STEPS_PER_EPOCH:
            fate = Fate("SIGTERM", cell.saved_step - 1, cell.accumulation // 2, rank=cell.ranks - 1)
        else:  # the short step of an epoch: one micro-step, on the first process
            fate = Fate("SIGTERM", cell.saved_step - 1, rank=0)
        folder = self.ended(cell, fate)
        assert json.loads((folder / "run/status.json").read_text())["status"] == "interrupted"
        return self.resumed(cell, folder)

    def resumed(self, cell: Cell, folder: Path) -> dict[str, Any]:
        """Call the run again until its end; it must have gone on at the cell's step, with a promise of exactness."""
        self.complete(cell, folder)
        log = (folder / "run/training.log").read_text()
        assert f"step {cell.saved_step} of {STEPS}, verified" in log, log
        assert "exactness: bitwise" in log, log
        return account(folder)


def unwitnessed(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are in the files of the run itself."""
    return {name: fact for name, fact in facts.items() if not name.startswith(WITNESSED)}


def account(folder: Path) -> dict[str, Any]:
    """All that can be told about a run that ended: a name for each fact, and facts that can be compared."""
    final = load_checkpoint(folder / "run/final_checkpoint")
    state = {key: value for key, value in final.state.items() if not isinstance(value, bytes)}
    facts = witnessed(folder)
    facts |= {f"final checkpoint: {name}": value for name, value in _leaves(state)}
    facts["manifest"] = final.manifest.info
    facts["evaluation.json"] = json.loads((folder / "run/evaluation.json").read_text())
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    for step in sorted({line["step"] for line in metrics}):
        lines = [line for line in metrics if line["step"] == step]
        facts[f"metrics of step {step}"] = [
            {name: value for name, value in line.items() if name not in BY_THE_CLOCK} for line in lines
        ]
    return facts


def witnessed(folder: Path) -> dict[str, Any]:
    """The lines of the witnesses. A step that was taken twice must have been the same twice."""
    facts: dict[str, Any] = {}
    for file in sorted(folder.glob("process*.jsonl")):
        for line in file.read_text().splitlines():
            facts.setdefault(f"{WITNESSED} {json.loads(line)['step']} of {file.stem}", set()).add(line)
    return facts


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Names of the facts that are not the same to the last bit, or known on one side only."""
    return [name for name in {**ours, **theirs} if (name in ours, ours.get(name)) != (name in theirs, theirs.get(name))]


def _leaves(value: Any, name: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}/{key}".lstrip("/"))
    elif isinstance(value, Tensor):
        yield name, (str(value.dtype), tuple(value.shape), _raw(value))
    else:
        yield name, value


def _raw(tensor: Tensor) -> bytes:
    """The bits: torch.equal takes -0 for 0, and NaN for different from itself."""
    raw: bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw
