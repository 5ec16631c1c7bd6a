"""Do two checkouts end with the same weights? Adapters of all agents, bit for bit, undisturbed and killed and resumed.

    python -m tools.same_ends CHECKOUT                     every cell, a few minutes on an idle core
    python -m tools.same_ends CHECKOUT --cells own dpo     these two

Every cell trains in CHECKOUT and twice in this tree: once undisturbed, and once killed by SIGKILL behind its first
committed step and called again. Both have to end with the weights of CHECKOUT; the table says how many tensors do.
CHECKOUT's own .venv runs it where there is one. All keys that decide bits are given, and each process has one thread. A
key that one of the trees does not have is left out there, and named. The exit code is 1 where a tensor differs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors import safe_open

from ci_llm import embedded
from tools.real_base import real_base

HERE = Path(__file__).parent.parent
DOCSTRINGS = HERE / "configs/data/docstrings/train.jsonl"
LOOK_S = 0.005
COMMITTED = "checkpoint_step_*/manifest.json"  # a folder of that name is there once it is committed

#: What every cell begins with: all that decides bits, and a save every two of six steps.
KEYS: Mapping[str, Any] = {
    "model_name": "embedded",
    "model_dtype": "fp32",
    "quantization": None,
    "base_sharding": "none",
    "mixed_precision": "no",
    "use_gradient_checkpointing": False,
    "pass_per_agent": True,
    "kernels": "fast",
    "num_agents": 4,
    "lora_rank": 8,
    "lora_alpha": 16,
    "lora_dropout": 0,
    "lora_target_modules": "all-linear",
    "use_rslora": False,
    "initialize_adapters_rand": True,
    "dropconnect_p": 0,
    "objective": "sft",
    "diversity": "none",
    "row_weights": "uniform",
    "dataset_name": "texts.jsonl",
    "eval_dataset_name": "texts.jsonl",  # so that no row is held out
    "max_seq_length": 128,
    "max_train_samples": 20,
    "train_on_prompt": False,
    "num_workers": 0,
    "max_train_steps": 6,
    "batch_size": 3,
    "gradient_accumulation_steps": 2,
    "optimizer": "adamw",
    "learning_rate": 4e-3,
    "lr_scheduler_type": "cosine",
    "num_warmup_steps": 2,
    "weight_decay": 0.01,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 7,
    "deterministic": True,
    "eval_steps": None,
    "eval_samples": 2,
    "generation_eval_samples": 0,
    "save_steps": 2,
    "save_interval_seconds": None,
    "report_to": "none",
    "output_dir": "run",
}


@dataclass(frozen=True)
class Cell:
    """One run that is compared.

    Attributes:
        keys: beside those of `KEYS`.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    processes: int = 1


_OWN = [
    {"seed": 3, "dataset_name": "texts.jsonl", "lora_rank": 4, "learning_rate": 2e-3, "lora_dropout": 0.1},
    {"seed": 4, "dataset_name": "others.jsonl", "max_train_samples": 11, "dropconnect_p": 0.05},
    {"seed": 5, "dataset_name": "texts.jsonl", "row_weights": "bootstrap", "lora_target_modules": ["q_proj", "v_proj"]},
]

CELLS: Mapping[str, Cell] = {
    "embedded": Cell({"dataset_name": "embedded", "eval_dataset_name": None, "max_seq_length": 256}),
    "one_pass": Cell({"pass_per_agent": False, "diversity": "swd", "lambda_sw": 0.1, "kernels": "plain"}),
    "own": Cell({"agents": _OWN, "num_agents": len(_OWN)}),
    "two_processes": Cell({"batch_size": 2, "lora_dropout": 0.1}, processes=2),
    "three_processes": Cell({"batch_size": 2, "lora_dropout": 0.1}, processes=3),
    "dpo": Cell(
        {"objective": "dpo", "beta": 0.1, "loss_type": "sigmoid", "reference": "base"}
        | dict.fromkeys(("dataset_name", "eval_dataset_name"), "pairs.jsonl")
    ),
    "nf4": Cell({"quantization": "nf4", "num_agents": 2}),
    "real": Cell(
        {"model_name": "real", "model_dtype": "bf16", "mixed_precision": "bf16", "num_agents": 2, "max_train_steps": 3}
        | {"lora_rank": 16, "lora_alpha": 32, "learning_rate": 1e-3, "save_steps": 1, "max_train_samples": 12}
        | dict.fromkeys(("dataset_name", "eval_dataset_name"), "docstrings.jsonl")
    ),
}


class RunFailedError(Exception):
    """A run did not end as it has to."""


@dataclass(frozen=True)
class Checkout:
    """A folder with this program in some state, run by the Python of its own environment where it has one."""

    folder: Path

    @property
    def python(self) -> str:
        own = self.folder / ".venv/bin/python"
        return str(own if own.exists() else sys.executable)

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(self.folder)}

    def known_keys(self) -> frozenset[str]:
        """The keys that its configuration has."""
        call = [self.python, "-c", "import ci_llm; print(*ci_llm.Config.model_fields)"]
        done = subprocess.run(call, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=True)
        return frozenset(done.stdout.split())

    def train(self, cell: Cell, known: Collection[str], folder: Path, killed: bool = False) -> Path:
        """The folder of a run in `folder`, complete; `killed` once on the way if that is asked for.

        Raises:
            RunFailedError: it failed; or it was to be killed and was complete before, or began anew afterwards.
        """
        keys = {key: value for key, value in (KEYS | cell.keys).items() if key in known}
        arguments = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]
        if killed:
            self._kill_a_run(self._started(cell.processes, arguments, folder), folder)
        codes = [process.wait() for process in self._started(cell.processes, arguments, folder)]
        said = _log(folder)
        if any(codes):
            raise RunFailedError(f"a run of {self.folder} ended with {codes}:\n{said[-2000:]}")
        if killed and not re.search(r"resume +step [1-9]", said):
            raise RunFailedError(f"a killed run of {self.folder} began anew:\n{said[-2000:]}")
        return folder / "run"

    def _started(self, processes: int, arguments: Sequence[str], folder: Path) -> list[subprocess.Popen[bytes]]:
        with closing(socket.create_server(("127.0.0.1", 0))) as free:
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        started = []
        for rank in range(processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            several = meeting | {name: str(value) for name, value in place.items()} if processes > 1 else {}
            call = [self.python, str(self.folder / "train.py"), "--config", os.devnull, *arguments]
            with (folder / f"output{rank}").open("ab") as output:
                started.append(
                    subprocess.Popen(call, cwd=folder, env=self.environment | several, stdout=output, stderr=output)
                )
        return started

    def _kill_a_run(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
        while not any((folder / "run").glob(COMMITTED)) and all(process.poll() is None for process in processes):
            time.sleep(LOOK_S)
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
        if not all(codes) or (folder / "run/final_checkpoint").exists():
            raise RunFailedError(f"a run of {self.folder} was complete before it was killed:\n{_log(folder)[-2000:]}")


def _log(folder: Path) -> str:
    return "".join(file.read_text(errors="replace") for file in sorted(folder.glob("output*")))


def weights(run: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bits of each tensor of the final adapters, by the agent's folder and the tensor's name."""
    found = {}
    for file in sorted((run / "final_checkpoint").glob("agent*/adapter_model.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no dict
                tensor = tensors.get_tensor(name)
                found[f"{file.parent.name}/{name}"] = (str(tensor.dtype), tensor.shape, tensor.tobytes())
    return found


def compared(ours: Path, theirs: Path) -> tuple[int, int]:
    """Tensors with the same bits in both runs, and tensors that one of them has.

    Raises:
        RunFailedError: there are none.
    """
    one, other = weights(ours), weights(theirs)
    if not one.keys() | other.keys():
        raise RunFailedError(f"neither {ours} nor {theirs} has adapters")
    return sum(one.get(name) == tensor for name, tensor in other.items()), len(one.keys() | other.keys())


def write_rows(folder: Path) -> None:
    """The rows of all cells: texts, which need no chat template, and pairs, which do."""
    stories = list(embedded.rows("train")[:40])
    texts = [{"text": f"{row['question']}\n{row['answer']}"} for row in stories]
    pairs = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": other["answer"]}
        for row, other in pairwise(stories)
    ]
    lines = map(json.loads, DOCSTRINGS.read_text(encoding="utf-8").splitlines()[:40])
    docstrings = [{"text": f"{row['question']} {row['answer']}"} for row in lines]
    files = {"texts": texts[:20], "others": texts[20:], "pairs": pairs, "docstrings": docstrings}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def placed(cell: Cell, rows: Path) -> Cell:
    """The cell with paths in place of the names of files, and of the real base, which is fetched."""

    def of(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [
                {own: of(own, entry) for own, entry in one.items()} if isinstance(one, dict) else one for one in value
            ]
        if key == "model_name" and value == "real":
            return str(real_base())
        return str(rows / value) if str(value).endswith(".jsonl") else value

    return Cell({key: of(key, value) for key, value in (KEYS | cell.keys).items()}, cell.processes)


def compare(here: Checkout, there: Checkout, cells: Mapping[str, Cell], work: Path) -> bool:
    """Print a line for each cell; returns whether all tensors of all cells are equal."""
    known = {tree: tree.known_keys() for tree in (here, there)}
    asked = {key for cell in cells.values() for key in KEYS | cell.keys}
    for tree, keys in known.items():
        if missing := sorted(asked - keys):
            print(f"{tree.folder} does not have, and is not given: {', '.join(missing)}")
    print("| cell | tensors equal | killed and resumed |\n|---|---|---|", flush=True)
    same = True
    for name, cell in cells.items():
        runs = []
        for tree, killed in ((there, False), (here, False), (here, True)):
            folder = work / f"{name}{len(runs)}"
            folder.mkdir()
            runs.append(tree.train(cell, known[tree], folder, killed))
        found = [compared(run, runs[0]) for run in runs[1:]]
        same &= all(equal == of for equal, of in found)
        columns = [name, *(f"{equal} of {of}" for equal, of in found)]
        print(f"| {' | '.join(columns)} |", flush=True)
    return same


def main() -> int:
    """Trains, prints the table; 0 if all is equal, 1 if not."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.same_ends", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, metavar="CHECKOUT")
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=[*CELLS], metavar="NAME", help=", ".join(CELLS))
    given = parser.parse_args()
    with TemporaryDirectory(prefix="same_ends") as work:
        write_rows(Path(work))
        cells = {name: placed(CELLS[name], Path(work)) for name in given.cells}
        return 0 if compare(Checkout(HERE), Checkout(given.checkout.resolve()), cells, Path(work)) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RunFailedError as error:
        sys.exit(f"error: {error}")
