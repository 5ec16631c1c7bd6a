"""`ci-llm train`, its dry run `check`, and `ci-llm sweep`: signals, configuration and launcher, and then the run."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ci_llm._version import __version__
from ci_llm.cli.command import help_of, print_line, take_dry_run
from ci_llm.cluster.launch import STARTED, Launch, accelerate_settings, read_launch
from ci_llm.cluster.starter import processes_to_start, start_again, tell, without_options
from ci_llm.core.help import ALL, REST, asked_help
from ci_llm.core.imports import importing
from ci_llm.core.remote import offline_note
from ci_llm.core.run_folder import BEST
from ci_llm.errors import AllTrialsFailed, ConfigError
from ci_llm.interrupts import STOP_SIGNALS, Interrupts, die_with_parent

if TYPE_CHECKING:
    from ci_llm.config import Config, Reading
    from ci_llm.config.sweep import SweepReading
    from ci_llm.sweep.sweep import Sweep


def start(
    what: str, config: Config, interrupts: Interrupts, words: Sequence[str], *, lines: Sequence[str] = ()
) -> Launch:
    """Handle the signals of the configuration, read the launcher, and print the first line on the main process.

    If the command asks for processes that no launcher has started, it starts them, and ends when they have ended. In a
    batch script of SLURM they are a step of the job.

    Args:
        what: the thing that is loading, for the first line: "run".
        words: the words of the command line.
        lines: lines about where the values of `config` come from, to be printed here.

    Returns:
        the place of this process.

    Raises:
        SystemExit: with the exit code of the processes that this one has started instead.
        LaunchError: the memory of this machine does not hold a base for each of them.
    """
    launch = read_launch(arguments=words)
    if not launch.forwards_sigterm or STARTED in os.environ:
        die_with_parent(STOP_SIGNALS[0])
    if (number := processes_to_start(launch, words)) > 1:
        from ci_llm.base.fits import require_memory  # here, because it loads huggingface_hub

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

#: The keys that most people give.
COMMON_KEYS = ("model_name", "dataset_name", "num_agents", "epochs", "experiment_name")


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
        if "--continue" in words and not _has_checkpoint(config):
            raise _not_begun("checkpoint", config)
        launch = start("run", config, interrupts, words)
        with importing():
            from ci_llm.run.job import run_job

        return run_job(config, interrupts, launch, sources=read.lines).exit_code(config)


def read_configuration(words: Sequence[str]) -> Reading:
    """The configuration of a command line over configs.yaml over the settings of the launcher."""
    from ci_llm.config import default_file, read_config

    read = read_config(default_file(), without_options(words), accelerate_settings(os.environ))
    changes = type(read.config)().diff(read.config)
    _LOGGER.debug("not the default: %s", ", ".join(f"{change.key}={change.new}" for change in changes))
    return read


def _not_begun(what: str, config: Config) -> ConfigError:
    """The refusal of `--continue`; `what` is lacking."""
    return ConfigError(
        f"there is no {what} to continue from",
        where=f"--continue, output_dir: {config.run_folder}",
        hint="leave --continue out for a fresh start, or give the output_dir or experiment_name of what has begun",
    )


def _has_checkpoint(config: Config) -> bool:
    """True if a run has a checkpoint, on this disk or in its mirror."""
    if any(config.run_folder.glob("*/manifest.json")):
        return True
    if config.mirror is None:
        return False
    from ci_llm.mirror.objects import open_objects
    from ci_llm.mirror.reader import MirrorReader

    head = MirrorReader(open_objects(config.mirror)).head()
    return head is not None and bool(head.line)


def _print_train_help(*, in_full: bool) -> int:
    from ci_llm.config import describe_keys

    usage, options, example = help_of("train").split("\n\n")
    if in_full:
        print(f"{usage}\n{options}", example, describe_keys(), sep="\n\n")
    else:
        print(usage, describe_keys(COMMON_KEYS), example, "--help all: every option and every key", sep="\n\n")
    return 0


def check(words: list[str]) -> int:
    """`ci-llm check`, and `python dry_run_sanity_check.py`."""
    if asked_help(words):
        print(help_of("check"))
        return 0
    with Interrupts(announce=lambda line: print(line.partition(":")[0] + ": leaving", file=sys.stderr)) as interrupts:
        read = read_configuration(words)
        if "--continue" in words and not _has_checkpoint(read.config):
            raise _not_begun("checkpoint", read.config)
        launch = start("dry run for", read.config, interrupts, words, lines=read.lines)
        with importing():
            from ci_llm.dry_run.plan import dry_run

        return dry_run(read.config, interrupts, launch, debug="--debug" in words)


def sweep(words: list[str]) -> int:
    """`ci-llm sweep ...`; returns the exit code."""
    if asked := asked_help(words):
        print(_sweep_usage(in_full=asked == ALL))
        return 0
    from ci_llm.config import default_file
    from ci_llm.config.sweep import read_sweep
    from ci_llm.sweep.sweep import known_record

    with Interrupts(describe_stop=lambda: "leaving before the first step") as interrupts:
        is_dry, keys = take_dry_run(words)
        reading = read_sweep(default_file(), without_options(keys), accelerate_settings(os.environ))
        if "--continue" in words and known_record(reading) is None:
            raise _not_begun("sweep", reading.config)
        launch = start("sweep", reading.config, interrupts, words)
        if is_dry:
            return _dry_run_sweep(reading, interrupts, launch, debug="--debug" in words)
        return _train_sweep(reading, interrupts, launch)


def _train_sweep(reading: SweepReading, interrupts: Interrupts, launch: Launch) -> int:
    with importing():
        from ci_llm.sweep.runner import SweepRunner, known_sweep

    known = known_sweep(reading)
    if known is not None and known.is_complete and (not known.has_winner or (known.folder / BEST).exists()):
        if launch.is_main_process:
            print_line("This sweep is complete; nothing is left to do.")
            _show(known, launch.arguments)
        known.require_winner()
        return 0
    runner = SweepRunner(reading, interrupts, launch, print_line)
    try:
        found, code = runner.run()
    except (KeyboardInterrupt, AllTrialsFailed):
        if launch.is_main_process and (known := known_sweep(reading)) is not None:
            _show(known, launch.arguments)
        raise
    if launch.is_main_process and found is not None:
        _show(found, launch.arguments)
    return code


def _dry_run_sweep(reading: SweepReading, interrupts: Interrupts, launch: Launch, *, debug: bool) -> int:
    """The dry run of a full pack that trains as many steps as all segments together."""
    with importing():
        from ci_llm.dry_run.plan import dry_run
        from ci_llm.sweep.runner import SweepRunner, as_one_run, described, known_sweep

    known_sweep(reading)  # refuses what the sweep itself would refuse
    plan = SweepRunner(reading, interrupts, launch, print_line).plan()
    code = dry_run(as_one_run(reading, plan), interrupts, launch, debug=debug)
    if launch.is_main_process:
        for line in described(plan, reading):
            print_line(line)
        count = len(plan.segment_steps)
        print_line(f"time is of all {count} segments together; storage is of one: {count} times that at most")
    return code


def _show(found: Sweep, arguments: Sequence[str]) -> None:
    """Print the leaderboard, and what to do next once the sweep is complete."""
    from ci_llm.report.compare import aligned
    from ci_llm.report.scores import read_trials

    board = read_trials(found.folder)
    lines = ["no trial has reached its first rung yet"]
    if board is not None and board.rows:
        lines = [*aligned([board.columns, *board.rows])]
    if found.is_complete:
        lines += _next_commands(found, arguments)
    for line in lines:
        print_line(line)


#: Trials of the crowd that is proposed.
_CROWD: Final = 4


def _next_commands(found: Sweep, arguments: Sequence[str]) -> list[str]:
    """Lines for people: what to do with the best trial, and with the best ones.

    Args:
        arguments: the words of the command line that began the sweep.
    """
    from ci_llm.config import as_typed
    from ci_llm.config.yaml_file import dump_value

    best = found.best
    if best is None or best.failed:
        return []
    steps = found.standings.plan.steps[-1]
    settings = ", ".join(f"{key} {as_typed(value)}" for key, value in best.settings.items())
    lines = [f"best       {found.folder / BEST}   trial {best.id}, plain PEFT: {settings}"]
    own = [f"{key}={as_typed(value)}" for key, value in best.settings.items()]
    start = [f"init_from={found.folder / BEST}", f"max_train_steps={steps}", "experiment_name=longer"]
    lines.append(f"longer     {_train_command(arguments, best.settings, ['num_agents=1', *own, *start])}")
    able = [trial for trial in found.standings.leaderboard if not trial.failed][:_CROWD]
    if len(able) > 1:
        agents = dump_value([dict(trial.settings) for trial in able])
        words = [f"agents={agents}", f"max_train_steps={steps}", f"experiment_name=crowd_of_{len(able)}"]
        lines.append(f"crowd      {_train_command(arguments, best.settings, words)}")
    return lines


def _train_command(arguments: Sequence[str], swept: Iterable[str], words: Sequence[str]) -> str:
    """`ci-llm train` with these words, in place of the keys of the sweep and of those that were swept."""
    from ci_llm.config import arguments_without
    from ci_llm.config.sweep import SweepKeys

    given = {word.partition("=")[0] for word in words}
    dropped = {*SweepKeys.model_fields, *given, *swept, "num_agents"}
    kept = [word for word in arguments_without(arguments, dropped) if word not in ("--dry-run", "--debug")]
    return shlex.join(["ci-llm", "train", *kept, *words])


def _sweep_usage(*, in_full: bool) -> str:
    import textwrap

    from ci_llm.config.config import WIDTH, describe
    from ci_llm.config.sweep import SPACE_KEYS, SweepKeys

    spaces = textwrap.fill(", ".join(SPACE_KEYS), width=WIDTH, initial_indent="  ", subsequent_indent="  ")
    keys = describe(SweepKeys, SweepKeys.model_fields)
    parts = help_of("sweep").replace("SPACES", spaces).replace("KEYS", keys).split("\n\n")
    return "\n\n".join(parts if in_full else [*parts[:2], parts[-1], REST])
