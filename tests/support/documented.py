"""Run the blocks of a page as a reader types them: what is cheap is executed, the rest is read by the real parsers."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import ci_llm
from ci_llm.cli import supervise
from ci_llm.cli.main import COMMANDS, main
from ci_llm.cli.train import read_configuration
from ci_llm.config import default_file, load_config
from ci_llm.config.sweep import read_sweep
from tests.cli.test_documented_lines import words_of_the_job
from tests.support import campaign
from tests.support.children import python
from tests.support.markdown import ROOT, Block

#: What a program says or writes, a tree of files, a drawing.
NO_CODE = {"text", "json"}
TRAINS = {"train", "check", "sweep"}
#: Programs of others that a page names, and why their lines are not run here.
OF_OTHERS = {
    "curl": "asks a server",
    "hf": "needs an account on the hub",
    "jupyter": "serves until it is stopped",
    "llama-cli": "is not installed",
    "lm_eval": "needs the hub",
    "ollama": "is not installed",
    "tensorboard": "serves until it is stopped",
    "vllm": "needs a GPU",
    "wandb": "needs an account",
}
#: The base that pages name where any small real base would do.
NAMED_BASE = "HuggingFaceTB/SmolLM2-135M-Instruct"
#: The bases that pages name where a tool chat, or a base of half a billion parameters, is what the reader has.
STAND_INS = {"Qwen/Qwen3-8B": "tool_base", "Qwen/Qwen2.5-0.5B-Instruct": "embedded", "Qwen/Qwen2.5-0.5B": "embedded"}
SHELL = re.compile(r"[|<>;&]|\$\(")  # anything that only a shell can do
TENTH = re.compile(r"((?:_steps|eval_samples|restart_from)(?:: |=))(\d+)0\b")
#: What every run of a page is given that does not say it, so that it is short.
SHORT = {
    "max_train_steps": "2",
    "num_agents": "2",
    "lora_rank": "4",
    "batch_size": "2",
    "eval_samples": "2",
    "generation_eval_samples": "0",
    "num_workers": "0",
    "report_to": "none",
}


def run(block: Block, stage: Path, *, trains: bool = False, base: str = "embedded") -> None:
    """Run a block in the folder `stage`, which is the current one.

    Args:
        trains: execute commands that train, with a tenth of their steps; else they are read only. A block that
            needs what is not here is read only.
        base: in the place of `NAMED_BASE`.
    """
    if "file" in block.marks:
        (stage / block.marks["file"]).write_text(shorter(block.text))
        return
    match block.language:
        case "python":
            run_python(block)
        case "yaml":
            (stage / "block.yaml").write_text(block.text)
            load_config(stage / "block.yaml")
        case "bash" | "console":
            for line in block.commands:
                for name, stand_in in {NAMED_BASE: base, **STAND_INS}.items():
                    line = line.replace(name, stand_in)
                run_line(line, stage, trains=trains, reads="needs" in block.marks)


def run_python(block: Block) -> None:
    given = GIVEN[block.marks["given"]]() if "given" in block.marks else {}
    names = {"__name__": "__main__", **given}
    with contextlib.suppress(SystemExit) if "sys.exit" in block.text else contextlib.nullcontext():
        exec(compile(block.text, str(block), "exec"), names)
    for value in names.values():
        if isinstance(value, ci_llm.CheckpointManager):
            value.close()  # as the end of the process does


def shorter(text: str) -> str:
    """A tenth of the steps and of the rows to judge by, outside of a campaign."""
    return text if campaign.in_full else TENTH.sub(r"\1\2", text)


def short_run(words: list[str]) -> list[str]:
    """The words of a run with a tenth of their steps, and with what `SHORT` adds; in a campaign as they are."""
    if campaign.in_full:
        return [*words, "num_workers=0"]
    given = {word.partition("=")[0] for word in words}
    added = {key: value for key, value in SHORT.items() if key not in given}
    if "init_from" in given:
        added.pop("lora_rank", None)  # it follows the adapters
    if "--config" in words or any("=[" in word for word in words):  # these say themselves who and how long
        added = {
            key: value for key, value in added.items() if key not in ("max_train_steps", "num_agents", "lora_rank")
        }
    return [*map(shorter, words), *(f"{key}={value}" for key, value in added.items())]


def run_line(line: str, stage: Path, *, trains: bool = False, reads: bool = False) -> None:
    """Execute a line that is cheap, or every line that `trains`; let the real parsers read the others.

    Args:
        reads: execute nothing at all.
    """
    line = re.sub(r" > [\w./-]+$", "", line.partition("  #")[0].partition(" # ")[0].strip())
    if line.split()[0] in OF_OTHERS:
        return
    assert not SHELL.search(line), f"{line}: only a shell can run this; say why it is not run"
    program, *words = shlex.split(line)
    match program, *words:
        case "ci-llm", verb, *rest if reads and verb in COMMANDS and verb not in TRAINS | {"supervise"}:
            assert rest, f"{line}: of what?"
        case "ci-llm", "evaluate", *rest if "--split" in rest and not campaign.in_full:
            execute(["evaluate", *rest, "--max-samples", "20"])
        case "ci-llm", "export", *rest if "distilled" in rest and not campaign.in_full:
            execute(["export", *rest, "--prompts", "questions.jsonl", "--steps", "12"])
        case "ci-llm", verb, *rest if verb in COMMANDS and verb not in TRAINS | {"supervise"}:
            execute([verb, *rest])
        case ("ci-llm", "train", *rest) | ("python", "train.py", *rest):
            execute(["train", *short_run(rest)]) if trains and not reads else read_configuration(rest)
        case ("ci-llm", "sweep", *rest):
            execute(["sweep", *short_run(rest)]) if trains and not reads else read_sweep(
                default_file(), [word for word in rest if word != "--dry-run"]
            )
        case ("ci-llm", "check", *rest) | ("python", "dry_run_sanity_check.py", *rest):
            execute(["check", *rest]) if trains and not reads else read_configuration(rest)
        case ("ci-llm", "supervise", *rest) | ("python", "safe_train.py", *rest):
            watch(rest) if trains and not reads else supervise.parse_options(rest)
        case ("accelerate", "launch", *rest) | ("torchrun", *rest):
            script = next(n for n, word in enumerate(rest) if word.endswith(".py"))
            assert (stage / rest[script]).is_file()
            read_configuration(rest[script + 1 :])
            if trains and not reads:
                launch(program, rest[:script], rest[script:])
        case "sbatch", *rest:
            script = next(n for n, word in enumerate(rest) if word.endswith(".sbatch"))
            assert (stage / rest[script]).is_file()
            if rest[script].endswith("/train.sbatch"):
                shutil.rmtree(stage / "commands", ignore_errors=True)
                words = words_of_the_job(rest[script:], stage)
                read_configuration([word for word in words if word != "--continue"])
        case "make", target:
            assert f"\n{target}:" in (stage / "Makefile").read_text()
        case "pip", "install", what:
            extra = re.fullmatch(r"(?:ci-llm|\.)\[([\w-]+)\]|ci-llm|[\w-]+(?:\[\w+\])?", what)
            assert extra
            assert extra[1] is None or f"\n{extra[1]} = [" in (ROOT / "pyproject.toml").read_text()
        case "cp", "-r", source, target if (stage / source).is_dir():
            shutil.copytree(stage / source, stage / target)
        case ("source", ".venv/bin/activate") | ("cd", _) | ("export", _) | ("cp", _, _):
            pass
        case "python", "-m", module, *_:
            assert importlib.util.find_spec(module), f"there is no module {module}"
        case _:
            raise AssertionError(f"{line}: nothing here knows how to run this; say why it is not run")


def execute(words: list[str]) -> str:
    """Call a verb of the command line in this process; returns what it said."""
    said, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
        code = main(words)
    assert code == 0, f"{shlex.join(words)}: {code}\n{said.getvalue()}{complained.getvalue()}"
    return said.getvalue()


def watch(words: list[str]) -> None:
    """Call the supervisor in a process of its own: it handles signals."""
    done = python("-m", "ci_llm", "supervise", *words)
    assert done.returncode == 0, done.stdout + done.stderr


def launch(program: str, options: list[str], script: list[str]) -> None:
    """Start the processes of a launcher, outside of a campaign half of them, on the CPU, with a thread each."""
    module = {"accelerate": "accelerate.commands.launch", "torchrun": "torch.distributed.run"}[program]
    options = [word for word in options if word != "launch"]
    if not campaign.in_full:
        options = [str(max(1, int(word) // 2)) if word.isdigit() else word for word in options]
    own = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = python("-m", module, *options, script[0], *short_run(script[1:]), **own)
    assert done.returncode == 0, done.stdout + done.stderr


# What the fragments of loops are given


def a_loop() -> dict[str, Any]:
    """A model that learns nothing much, its optimizer, and rows."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(objects: dict[str, Any], batch: torch.Tensor) -> None:
        objects["optimizer"].zero_grad()
        objects["model"](batch).sum().backward()
        objects["optimizer"].step()

    names = {"StatefulSampler": ci_llm.StatefulSampler, "DataLoader": DataLoader, "sys": sys}
    return {**names, "model": model, "optimizer": optimizer, "train_step": train_step, "num_steps": 3} | {
        "rows": torch.randn(64, 2)
    }


def an_orbax_loop() -> dict[str, Any]:
    """A state, and a step that makes the next one."""
    state = {"weights": {"w": torch.zeros(2)}, "n": 0}
    return {"directory": "runs/orbax", "state": state, "start": 0, "num_steps": 5, "train_step": lambda old: old}


GIVEN = {"a loop": a_loop, "an Orbax loop": an_orbax_loop}
