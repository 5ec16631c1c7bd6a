"""`ci-llm train`, and its dry run `ci-llm check`: signals, configuration and launcher, and then the run.

`ci-llm sweep` starts by `start` as well.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ci_llm._version import __version__
from ci_llm.cli.command import print_line, take_dry_run
from ci_llm.cluster.launch import STARTED, Launch, read_launch
from ci_llm.cluster.starter import processes_to_start, start_again, tell, without_options
from ci_llm.core.help import ALL, asked_help
from ci_llm.core.imports import importing
from ci_llm.core.remote import offline_note
from ci_llm.errors import ConfigError
from ci_llm.interrupts import STOP_SIGNALS, Interrupts, die_with_parent

if TYPE_CHECKING:
    from ci_llm.config import Config, Reading


def start(
    what: str,
    config: Config,
    interrupts: Interrupts,
    words: Sequence[str],
    *,
    lines: Sequence[str] = (),
    require: Callable[[Config], None] | None = None,
) -> Launch:
    """Handle the signals of the configuration, read the launcher, and print the first line on the main process.

    If the command asks for processes that no launcher has started, it starts them, and ends when they have ended. In a
    batch script of SLURM they are a step of the job.

    Args:
        what: the thing that is loading, for the first line: "run".
        words: the words of the command line.
        lines: lines about where the values of `config` come from, to be printed here.
        require: refuses the configuration before the first line.

    Returns:
        the place of this process.

    Raises:
        SystemExit: with the exit code of the processes that this one has started instead.
        LaunchError: the memory of this machine does not hold a base for each of them.
    """
    if require is not None:
        require(config)
    launch = read_launch(arguments=words)
    if not launch.forwards_sigterm or STARTED in os.environ:
        die_with_parent(STOP_SIGNALS[0])
    if (number := processes_to_start(launch, words)) > 1:
        from ci_llm.base.files import require_memory  # here, because it loads huggingface_hub

        require_memory(config, number)
    code = start_again(number, launch, interrupts, print_line)
    if code is not None:
        raise SystemExit(code)
    if number == 1 and launch.num_processes == 1 and "--distributed" in words:
        print_line("launch    --distributed: one process, for there is no GPU; --distributed=N starts N on the CPU")
    tell()
    if launch.is_main_process:
        print_line(f"ci_llm {__version__}   {what} {config.run_folder}   loading...")
        for line in lines:
            print_line(f"config    {line}")
    if (note := offline_note(config.names_of_inputs)) and launch.is_main_process:
        print_line(f"hub       {note}")
    return launch


_LOGGER = logging.getLogger(__name__)

TRAIN_USAGE = """python train.py [--config FILE] [--continue] [key=value | --key value | --key=value ...]
Trains, or resumes where an earlier call stopped.
The command line wins over the file, the file over `accelerate launch`, and that over the defaults below.
Without --config the file is configs.yaml of the current folder, else the project's own.
"""
TRAIN_OPTIONS = """--continue: refuse to start without a checkpoint. --dry-run: only check that the run will work here.
--distributed: one process per GPU of this machine; --distributed=N: N processes.
--debug: show debug lines, and the traceback of an error.
Names of Trainer, PEFT and TRL work too (docs/keys.md).
"""
TRAIN_EXAMPLE = """
example: python train.py --config configs/qwen2.5_0.5b_gsm8k.yaml dataset_name=my.jsonl experiment_name=mine
"""
#: The keys that most people give.
COMMON_KEYS = ("model_name", "dataset_name", "num_agents", "epochs", "experiment_name")

CHECK_USAGE = """python dry_run_sanity_check.py [--config FILE] [key=value ...]   with the arguments of train.py
Tries at toy size on this machine what the run will need, and leaves nothing but the cache of the data set.
Exit code 0 if all checks pass.
example: python dry_run_sanity_check.py --config configs/qwen2.5_0.5b_gsm8k.yaml batch_size=16"""


def train(words: list[str]) -> int:
    """`ci-llm train`, and `python train.py`."""
    if asked := asked_help(words):
        return _print_train_help(in_full=asked == ALL)
    is_dry, keys = take_dry_run(words)
    if is_dry:
        return check(keys)
    with Interrupts(describe_stop=lambda: "leaving before the first step") as interrupts:
        read = read_configuration(words)
        config = read.config
        launch = start("run", config, interrupts, words, require=_require_checkpoint if "--continue" in words else None)
        with importing():
            from ci_llm.run.job import run_job

        return run_job(config, interrupts, launch, sources=read.lines).exit_code(config)


def read_configuration(words: Sequence[str]) -> Reading:
    """The configuration of a command line over configs.yaml over the settings of the launcher."""
    from ci_llm.cluster.launch import accelerate_settings
    from ci_llm.config import default_file, read_config

    read = read_config(default_file(), without_options(words), accelerate_settings(os.environ))
    changes = type(read.config)().diff(read.config)
    _LOGGER.debug("not the default: %s", ", ".join(f"{change.key}={change.new}" for change in changes))
    return read


def _require_checkpoint(config: Config) -> None:
    """Refuse a run that has no checkpoint, neither on this disk nor in its mirror."""
    folder = config.run_folder
    if any(folder.glob("*/manifest.json")) or (config.mirror and _holds_a_step(config.mirror)):
        return
    raise ConfigError(
        "there is no checkpoint to continue from",
        where=f"--continue, output_dir: {folder}",
        hint="leave --continue out for a fresh start, or give the output_dir or experiment_name of the run",
    )


def _holds_a_step(mirror: str) -> bool:
    from ci_llm.mirror.objects import open_objects
    from ci_llm.mirror.reader import MirrorReader

    head = MirrorReader(open_objects(mirror)).head()
    return head is not None and bool(head.line)


def _print_train_help(*, in_full: bool) -> int:
    from ci_llm.config import describe_keys

    if in_full:
        print(f"{TRAIN_USAGE}{TRAIN_OPTIONS}{TRAIN_EXAMPLE}\n{describe_keys()}")
    else:
        print(f"{TRAIN_USAGE}\n{describe_keys(COMMON_KEYS)}\n{TRAIN_EXAMPLE}\n--help all: every option and every key")
    return 0


def check(words: list[str]) -> int:
    """`ci-llm check`, and `python dry_run_sanity_check.py`."""
    if asked_help(words):
        print(CHECK_USAGE)
        return 0
    with Interrupts(announce=lambda line: print(line.partition(":")[0] + ": leaving", file=sys.stderr)) as interrupts:
        read = read_configuration(words)
        require = _require_checkpoint if "--continue" in words else None
        launch = start("dry run for", read.config, interrupts, words, lines=read.lines, require=require)
        with importing():
            from ci_llm.dry_run.plan import dry_run

        return dry_run(read.config, interrupts, launch, debug="--debug" in words)
