"""`ci-llm sweep`: reads spaces and configuration, runs the sweep, and shows the ranking of its trials."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ci_llm.cli.command import print_line, take_dry_run
from ci_llm.core.help import ALL, REST, asked_help
from ci_llm.core.imports import importing
from ci_llm.core.run_folder import BEST
from ci_llm.errors import AllTrialsFailed, ConfigError

if TYPE_CHECKING:
    from ci_llm.cluster.launch import Launch
    from ci_llm.config import Config
    from ci_llm.config.sweep import SweepReading
    from ci_llm.interrupts import Interrupts
    from ci_llm.sweep.sweep import Sweep

USAGE = """ci-llm sweep [--config FILE] [--continue] [--dry-run] [key=value ...] 'key=SPACE' ...
Trains agents with different settings as one crowd. At each rung the best continue and the others leave; the last ones
are trained to the end, with the bits that they would have alone. The same command resumes where an earlier one stopped.

A SPACE is a list [a,b,c], log(low,high) or uniform(low,high); in the file also {low: , high: , log: true}. Keys:
SPACES
"""
REST_OF_USAGE = """
All other keys are those of ci-llm train. The file may have a section `sweep:` with spaces and these keys:
KEYS

--continue: refuse to start where there is no sweep yet.
--dry-run: check this machine, and say what the sweep costs in memory, disk and time; nothing is trained.
--debug: show debug lines, and the traceback of an error.

It leaves in output_dir: sweep.json (trials, scores, the best), best/ (plain PEFT), segments/ (the runs), tensorboard/.
exit codes: those of ci-llm train
"""
EXAMPLE = """
example: ci-llm sweep 'learning_rate=log(5e-4,1.6e-2)' 'lora_rank=[4,8,16]' trials=16 experiment_name=rates
"""


def sweep(words: list[str]) -> int:
    """`ci-llm sweep ...`; returns the exit code."""
    if asked := asked_help(words):
        print(_usage(in_full=asked == ALL))
        return 0
    from ci_llm.cli.train import start
    from ci_llm.cluster.launch import accelerate_settings
    from ci_llm.cluster.starter import without_options
    from ci_llm.config import default_file
    from ci_llm.config.sweep import read_sweep
    from ci_llm.interrupts import Interrupts

    with Interrupts(describe_stop=lambda: "leaving before the first step") as interrupts:
        is_dry, keys = take_dry_run(words)
        reading = read_sweep(default_file(), without_options(keys), accelerate_settings(os.environ))
        require = partial(_require_sweep, reading) if "--continue" in words else None
        launch = start("sweep", reading.config, interrupts, words, require=require)
        if is_dry:
            return _dry_run(reading, interrupts, launch, debug="--debug" in words)
        return _train(reading, interrupts, launch)


def _require_sweep(reading: SweepReading, config: Config) -> None:
    """Refuse to begin a sweep."""
    from ci_llm.sweep.sweep import known_record

    if known_record(reading) is None:
        raise ConfigError(
            "there is no sweep to continue",
            where=f"--continue, output_dir: {config.run_folder}",
            hint="leave --continue out for a fresh start, or give the output_dir or experiment_name of the sweep",
        )


def _train(reading: SweepReading, interrupts: Interrupts, launch: Launch) -> int:
    from ci_llm.cluster.launch import exit_code_after_stop

    with importing():
        from ci_llm.sweep.runner import SweepRunner, known_sweep

    known = known_sweep(reading)
    if known is not None and known.is_complete and (not known.has_winner or (known.folder / BEST).exists()):
        if launch.is_main_process:
            print_line("This sweep is complete; nothing is left to do.")
            show(known, launch.arguments)
        known.require_winner()
        return 0
    runner = SweepRunner(reading, interrupts, launch, print_line)
    try:
        found, stop = runner.run()
    except (KeyboardInterrupt, AllTrialsFailed):
        if launch.is_main_process and (known := known_sweep(reading)) is not None:
            show(known, launch.arguments)
        raise
    if launch.is_main_process:
        show(found, launch.arguments)
    return exit_code_after_stop(stop, reading.config.interrupted_exit_code) if stop else 0


def _dry_run(reading: SweepReading, interrupts: Interrupts, launch: Launch, *, debug: bool) -> int:
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


def show(found: Sweep, arguments: Sequence[str]) -> None:
    """Print the leaderboard, and what to do next once the sweep is complete."""
    from ci_llm.report.compare import aligned
    from ci_llm.report.scores import read_trials
    from ci_llm.sweep.trials import commands

    board = read_trials(found.folder)
    lines = ["no trial has reached its first rung yet"]
    if board is not None and board.rows:
        lines = [*aligned([board.columns, *board.rows])]
    if found.is_complete:
        lines += commands(found.standings, found.folder, arguments)
    for line in lines:
        print_line(line)


def _usage(*, in_full: bool) -> str:
    import textwrap

    from ci_llm.config.sweep import SPACE_KEYS, SweepKeys
    from ci_llm.config.yaml_file import dump_value

    keys = []
    for name, about in SweepKeys.model_fields.items():
        head = f"  {name}={dump_value(about.default)}".replace('"', "")
        told, column = str(about.description), " " * 28
        keys.append(textwrap.fill(told, width=110, initial_indent=f"{head:<27} ", subsequent_indent=column))
    spaces = textwrap.fill(", ".join(SPACE_KEYS), width=110, initial_indent="  ", subsequent_indent="  ")
    usage = USAGE.replace("SPACES", spaces)
    if not in_full:
        return f"{usage}{EXAMPLE}\n{REST}"
    return usage + REST_OF_USAGE.replace("KEYS", "\n".join(keys)) + EXAMPLE
