"""The doors: every command reads its line, hands over, and turns errors into one short explanation and an exit code."""

from __future__ import annotations

import io
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci_llm._version import __version__
from ci_llm.errors import CiLlmError, ConfigError
from ci_llm.interrupts import ABORTED_EXIT_CODE

if TYPE_CHECKING:
    from ci_llm.cluster.launch import Launch
    from ci_llm.config import Config, Reading

READER_GONE: Final = 141  # what a shell says of a program that wrote to a pipe that nobody reads any more

USAGE = f"""CI-LLM {__version__}: a crowd within one model. K LoRA agents train in one fused pass on one frozen base.

  python train.py [--config FILE] [key=value ...]     train, or go on where an earlier call stopped
  ci-llm train ...                                    the same
  python dry_run_sanity_check.py [...]                proves that it will work on this machine (ci-llm check)
  ci-llm status [RUN | key=value ...]                 how a run stands: exit code 0 completed, 75 interrupted,
                                                      3 running, 1 failed or vanished
  ci-llm checkpoints list RUN                         its checkpoints: step, time, size, whether they verify
  ci-llm checkpoints verify PATH                      every byte against its digest
  ci-llm checkpoints diff A B                         bit-identical, or what differs and by how much
  ci-llm checkpoints prune RUN --keep N               removes older ones
  ci-llm checkpoints import SOURCE ... --to FOLDER    adapters of others become a crowd
  ci-llm report RUN                                   writes RUN/report.html: scores, curves, what each fault cost
  ci-llm compare RUN RUN ...                          what differs: configuration, scores with intervals, curves

  example: python train.py num_agents=8 learning_rate=1e-3 experiment_name=eight

--help after a command says more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """`ci-llm COMMAND ...`; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return guarded(lambda: _obey(words), debug="--debug" in words)


def _obey(words: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": train,
        "check": check,
        "status": status,
        "checkpoints": checkpoints,
        "report": report,
        "compare": compare,
    }
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in commands:
        raise ConfigError(f"there is no command {words[0]!r}", hint=f"one of: {', '.join(commands)}")
    return commands[words[0]](words[1:])


def safe_train(words: list[str]) -> int:
    """`python safe_train.py`."""
    from ci_llm.cli.supervise import supervise

    return guarded(lambda: supervise(words), debug="--debug" in words)


def guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command; an error with a hint becomes a short explanation on stderr and its exit code."""
    _prepare_standard_files()
    try:
        code = command()
        sys.stdout.flush()  # while a reader that has gone can still be told from a failure
        return code
    except KeyboardInterrupt:  # a person who insists knows why
        return ABORTED_EXIT_CODE
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        _lead_nowhere()
        return READER_GONE
    except CiLlmError as error:
        if debug:
            traceback.print_exc()
        explain(error)
        return error.exit_code


def _prepare_standard_files() -> None:
    """A closed standard file must not give its number to the next file that is opened, nor a sign end a run."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):  # of a locale that lacks a sign which a data set has
        sys.stdout.reconfigure(errors="backslashreplace")


def _reader_is_gone() -> bool:
    """Whether standard output is what broke: `| head` has seen enough."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # an error is told unasked
    return bool(poll.poll(0))


def _lead_nowhere() -> None:
    """What is still to be written, at the exit of the interpreter at the latest, goes where it cannot fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def explain(error: CiLlmError) -> None:
    """The main process of a run explains; the others need a line, as what stops one of them may be its own."""
    from ci_llm.cluster.launch import number_of_this_process

    number = number_of_this_process()
    told = f"error: {error}" if number == 0 else f"process {number}: error: {error.what.splitlines()[0]}"
    print(told, file=sys.stderr, flush=True)


def train(words: list[str]) -> int:
    """`ci-llm train`, and `python train.py`."""
    if "-h" in words or "--help" in words:
        return _help_train()
    from ci_llm.cluster.launch import read_launch
    from ci_llm.interrupts import Interrupts, die_with_parent

    with Interrupts() as interrupts:
        interrupts.plan = "leaving before the first step"
        read = _configuration(words)
        config = read.config
        interrupts.listen_to(config.stop_signals, config.save_signals)
        if "--continue" in words:
            _require_checkpoint(config.run_folder)
        launch = read_launch(words=words)
        if launch.dies_unheard:
            die_with_parent(next(iter(config.stop_signals), "SIGTERM"))
        if launch.is_main:
            _tell(f"ci_llm {__version__}   run {config.run_folder}   loading...")
        _mind_the_hub(config, launch)
        _quiet_libraries()
        from ci_llm.run.job import run_job

        return run_job(config, interrupts, launch, sources=read.lines)


def _configuration(words: Sequence[str]) -> Reading:
    """What train.py is called with, on top of configs.yaml, on top of what its launcher was told."""
    from ci_llm.cluster.launch import accelerate_settings
    from ci_llm.config import default_file, read_config

    keys = [word for word in words if word != "--continue"]
    return read_config(default_file(), keys, accelerate_settings(os.environ))


def _require_checkpoint(folder: Path) -> None:
    if not any(folder.glob("*/manifest.json")):
        raise ConfigError(
            "there is no checkpoint to continue from",
            where=f"--continue, output_dir: {folder}",
            hint="leave --continue away for a fresh start, or give the output_dir or experiment_name of the run",
        )


def _help_train() -> int:
    from ci_llm.config import describe_keys

    print("python train.py [--config FILE] [key=value | --key value | --key=value ...]")
    print("The command line wins over the file, the file over what `accelerate launch` says, that over these defaults.")
    print("The file: configs.yaml of the current folder, else the project's own, where --config names no other.")
    print(
        "example: python train.py --config configs/qwen2.5_0.5b_gsm8k.yaml dataset_name=my.jsonl experiment_name=mine\n"
    )
    print(describe_keys())
    return 0


def _mind_the_hub(config: Config, launch: Launch) -> None:
    """Nobody asks a hub that is out of reach."""
    from ci_llm.cluster.hub import go_offline_if_unreachable

    unreachable = go_offline_if_unreachable(config.model_name, config.dataset_name)
    if unreachable and launch.is_main:
        _tell(f"hub       out of reach, only its local cache is used ({unreachable})")


def _tell(line: str) -> None:
    """Print a line at once; a run is worth more than its terminal."""
    try:
        print(line, flush=True)
    except OSError:
        _lead_nowhere()


def _quiet_libraries() -> None:
    """Nothing is ever sent anywhere, and forked loader workers need no warning about tokenizer threads."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # On a shared machine threads that spin while they wait take the core from the one they wait for: two toy steps
    # then last minutes (measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def check(words: list[str]) -> int:
    """`ci-llm check`, and `python dry_run_sanity_check.py`."""
    if {"-h", "--help"} & {*words}:
        return _help_check()
    from ci_llm.cluster.launch import read_launch
    from ci_llm.interrupts import Interrupts, die_with_parent

    with Interrupts(announce=lambda line: print(line.partition(":")[0] + ": leaving", file=sys.stderr)) as interrupts:
        read, launch = _configuration(words), read_launch(words=words)
        config = read.config
        if launch.dies_unheard:
            die_with_parent()
        if launch.is_main:
            _tell(f"ci_llm {__version__}   dry run for {config.run_folder}   loading...")
            for line in read.lines:
                _tell(f"config    {line}")
        _mind_the_hub(config, launch)
        _quiet_libraries()
        from ci_llm.dry_run.plan import dry_run

        return dry_run(config, interrupts, launch, debug="--debug" in words)


def _help_check() -> int:
    print(
        "python dry_run_sanity_check.py [--config FILE] [key=value ...]   with the words of train.py, or its launcher's"
    )
    print("Tries on this machine what the run will need, at toy size, and leaves nothing behind; 0 only if all passes.")
    print("example: python dry_run_sanity_check.py --config configs/qwen2.5_0.5b_gsm8k.yaml batch_size=16")
    return 0


def status(words: list[str]) -> int:
    """`ci-llm status RUN`, or with the words of train.py: the run that they would train."""
    from ci_llm.core.run_status import read_status

    if {"-h", "--help"} & {*words}:
        print(USAGE)
        return 0
    words = [word for word in words if word != "--debug"]
    named = len(words) == 1 and "=" not in words[0] and not words[0].startswith("-")
    found = read_status(words[0] if named else _configuration(words).config.run_folder)
    reason = f" ({found.reason})" if found.reason else ""
    print(f"{found.status}{reason}: step {found.step}, attempt {found.attempt}, process {found.pid} on {found.host}")
    if found.best_step is not None:
        print(f"best crowd in an evaluation so far: after step {found.best_step}")
    if found.next_command:
        print(f"go on with: {found.next_command}")
    return found.exit_code


def checkpoints(words: list[str]) -> int:
    """`ci-llm checkpoints VERB ...`."""
    _quiet_libraries()
    from ci_llm.cli.checkpoints import run_verb

    return run_verb([word for word in words if word != "--debug"])


def report(words: list[str]) -> int:
    """`ci-llm report RUN`."""
    from ci_llm.cli.report import report_run

    return report_run([word for word in words if word != "--debug"])


def compare(words: list[str]) -> int:
    """`ci-llm compare RUN RUN ...`."""
    from ci_llm.cli.report import compare_runs

    return compare_runs([word for word in words if word != "--debug"])
