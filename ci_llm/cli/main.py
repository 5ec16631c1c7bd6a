"""The commands: each parses its command line, calls the package, and turns errors into a message and an exit code."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci_llm._version import __version__
from ci_llm.errors import BadInput, CiLlmError, ConfigError
from ci_llm.interrupts import ABORTED_EXIT_CODE, ends_with_process

if TYPE_CHECKING:
    from ci_llm.cluster.launch import Launch
    from ci_llm.config import Config, Reading

_LOGGER = logging.getLogger(__name__)

BROKEN_PIPE_EXIT_CODE: Final = 141  # 128 + SIGPIPE: what a shell reports of a program whose reader has gone

USAGE = f"""CI-LLM {__version__}: a crowd within one model. K LoRA agents train in one fused pass on one frozen base.

  python train.py [--config FILE] [key=value ...]     train, or resume where an earlier call stopped
  ci-llm train ...                                    the same
  python dry_run_sanity_check.py [...]                try out whether it will work here (ci-llm check)
  ci-llm status [RUN | key=value ...]                 the state of a run: exit code 0 completed,
                                                      75 interrupted, 3 running, 1 failed or vanished
  ci-llm checkpoints list RUN                         list checkpoints: step, time, size, whether they verify
  ci-llm checkpoints verify PATH                      compare every byte with its digest
  ci-llm checkpoints diff A B                         compare bit by bit: what differs, and by how much
  ci-llm checkpoints prune RUN --keep N               remove all but the newest N
  ci-llm checkpoints import SOURCE ... --to FOLDER    make a crowd of PEFT adapters

  example: python train.py num_agents=8 learning_rate=1e-3 experiment_name=eight

--help after a command shows its options; --debug shows debug lines, and the traceback of an error."""

TRAIN_USAGE = """python train.py [--config FILE] [--continue] [key=value | --key value | --key=value ...]
The command line wins over the file, the file over `accelerate launch`, and that over the defaults below.
Without --config the file is configs.yaml of the current folder, else the project's own.
--continue: refuse to start without a checkpoint. --debug: show debug lines, and the traceback of an error.
Names of Trainer, PEFT and TRL work too (docs/keys.md).
example: python train.py --config configs/qwen2.5_0.5b_gsm8k.yaml dataset_name=my.jsonl experiment_name=mine
"""

CHECK_USAGE = """python dry_run_sanity_check.py [--config FILE] [key=value ...]   with the arguments of train.py
Tries at toy size on this machine what the run will need, and leaves nothing behind. Exit code 0 if all checks pass.
example: python dry_run_sanity_check.py --config configs/qwen2.5_0.5b_gsm8k.yaml batch_size=16"""

STATUS_USAGE = """ci-llm status [RUN | --config FILE | key=value ...]
Shows the state of a run and its reason, the last step, the process, a warning if there is one, and the command that
resumes it. RUN is its output_dir; with the arguments of train.py it is the run that they would train.
exit codes: 0 completed, 75 interrupted, 3 running, 1 failed or vanished, 2 bad call
example: ci-llm status ci_llm_output/mine"""


def main(arguments: Sequence[str] | None = None) -> int:
    """`ci-llm COMMAND ...`; returns the exit code.

    Args:
        arguments: None if this process is the command and ends with it.
    """
    if arguments is None:
        ends_with_process()
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_guarded(lambda: _dispatch(words), debug="--debug" in words)


def _dispatch(words: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": train,
        "check": check,
        "status": status,
        "checkpoints": checkpoints,
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

    return run_guarded(lambda: supervise(words), debug="--debug" in words)


def run_guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command; an error with a hint becomes a short explanation on stderr and its exit code.

    Args:
        debug: show the traceback of such an error, and log what is meant for developers.
    """
    _prepare_standard_files()
    if debug:
        _enable_debug_log()
    try:
        code = _exit_code_of(command)
        sys.stdout.flush()  # here, where a closed pipe can still be told from another failure
        return code
    except KeyboardInterrupt:  # the second Ctrl-C: no explanation is needed
        return ABORTED_EXIT_CODE
    except BrokenPipeError:
        if not _stdout_reader_is_gone():
            raise
        _discard_output()
        return BROKEN_PIPE_EXIT_CODE
    except OSError as error:
        if not _stdout_fails():
            raise
        _discard_output()
        refusal = BadInput(
            f"the output could not be written: {error.strerror}",
            where="standard output",
            hint="redirect it to a terminal, a pipe, or a file on a disk that has space",
        )
        print_error(refusal)
        return refusal.exit_code
    except CiLlmError as error:
        if debug:
            traceback.print_exc()
        print_error(error)
        return error.exit_code


def _exit_code_of(command: Callable[[], int]) -> int:
    """The exit code of a command, also if it raises SystemExit, as argparse does after `--help`."""
    try:
        return command()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        return end.code or 0


def _enable_debug_log() -> None:
    """Send the package's records to stderr, with the milliseconds since the start, until a run's log takes them."""
    shown = logging.StreamHandler()
    shown.setFormatter(logging.Formatter("debug %(relativeCreated)7.0f ms  %(name)s: %(message)s"))
    package = logging.getLogger("ci_llm")
    package.setLevel(logging.DEBUG)
    package.handlers[:] = [shown]
    package.propagate = False
    _LOGGER.debug("Python %s, %s, in %s", sys.version.split()[0], sys.argv, Path.cwd())


def _prepare_standard_files() -> None:
    """Open what is closed of stdin, stdout and stderr, and write characters that the locale lacks as escapes.

    Otherwise the next file that is opened takes the number of a closed one, and prints go into it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _stdout_reader_is_gone() -> bool:
    """Whether the reader of standard output has closed it, as `| head` does; another pipe may have broken instead."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # poll reports an error even if no event is asked for
    return bool(poll.poll(0))


def _stdout_fails() -> bool:
    """Whether standard output refuses to be written, as on a full disk; another file may have failed instead."""
    try:
        sys.stdout.flush()
        os.write(sys.stdout.fileno(), b"\n")  # an unbuffered stream has nothing to flush
    except OSError:
        return True
    return False


def _discard_output() -> None:
    """Redirect standard output to /dev/null, so that the flush at the exit of the interpreter cannot fail."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def print_error(error: CiLlmError) -> None:
    """Print an error to stderr: in full on the main process, as one line on the others, whose error may differ."""
    from ci_llm.cluster.launch import own_process_index

    number = own_process_index()
    told = f"error: {error}" if number == 0 else f"process {number}: error: {error.what.splitlines()[0]}"
    with contextlib.suppress(OSError):  # the exit code remains
        print(told, file=sys.stderr, flush=True)


def train(words: list[str]) -> int:
    """`ci-llm train`, and `python train.py`."""
    if "-h" in words or "--help" in words:
        return _print_train_help()
    from ci_llm.cluster.launch import read_launch
    from ci_llm.interrupts import Interrupts, die_with_parent

    with Interrupts(describe_stop=lambda: "leaving before the first step") as interrupts:
        read = _configuration(words)
        config = read.config
        interrupts.set_signals(config.stop_signals, config.save_signals)
        if "--continue" in words:
            _require_checkpoint(config.run_folder)
        launch = read_launch(arguments=words)
        if not launch.forwards_sigterm:
            die_with_parent(next(iter(config.stop_signals), "SIGTERM"))
        if launch.is_main:
            _print_line(f"ci_llm {__version__}   run {config.run_folder}   loading...")
        _go_offline_if_unreachable(config, launch)
        _set_library_defaults()
        from ci_llm.run.job import run_job

        return run_job(config, interrupts, launch, sources=read.lines)


def _configuration(words: Sequence[str]) -> Reading:
    """The configuration of a command line over configs.yaml over the settings of the launcher."""
    from ci_llm.cluster.launch import accelerate_settings
    from ci_llm.config import default_file, read_config

    keys = [word for word in words if word != "--continue"]
    read = read_config(default_file(), keys, accelerate_settings(os.environ))
    changes = type(read.config)().diff(read.config)
    _LOGGER.debug("not the default: %s", ", ".join(f"{change.key}={change.new}" for change in changes))
    return read


def _require_checkpoint(folder: Path) -> None:
    if not any(folder.glob("*/manifest.json")):
        raise ConfigError(
            "there is no checkpoint to continue from",
            where=f"--continue, output_dir: {folder}",
            hint="leave --continue out for a fresh start, or give the output_dir or experiment_name of the run",
        )


def _print_train_help() -> int:
    from ci_llm.config import describe_keys

    print(TRAIN_USAGE)
    print(describe_keys())
    return 0


def _go_offline_if_unreachable(config: Config, launch: Launch) -> None:
    """Use only the local cache if the hub is unreachable, instead of waiting for it again and again."""
    from ci_llm.cluster.hub import go_offline_if_unreachable

    unreachable = go_offline_if_unreachable(config.model_name, config.dataset_name)
    if unreachable and launch.is_main:
        _print_line(f"hub       unreachable, only its local cache is used ({unreachable})")


def _print_line(line: str) -> None:
    """Print a line at once; a terminal that is gone must not end a run."""
    try:
        print(line, flush=True)
    except OSError:
        _discard_output()


def _set_library_defaults() -> None:
    """Switch off telemetry, the warning about tokenizers in forked workers, and threads that spin while they wait."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # On a shared machine a spinning thread takes the core from the thread it waits for: two toy steps then take
    # minutes (measured).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def check(words: list[str]) -> int:
    """`ci-llm check`, and `python dry_run_sanity_check.py`."""
    if {"-h", "--help"} & {*words}:
        print(CHECK_USAGE)
        return 0
    from ci_llm.cluster.launch import read_launch
    from ci_llm.interrupts import Interrupts, die_with_parent

    with Interrupts(announce=lambda line: print(line.partition(":")[0] + ": leaving", file=sys.stderr)) as interrupts:
        read, launch = _configuration(words), read_launch(arguments=words)
        config = read.config
        if not launch.forwards_sigterm:
            die_with_parent()
        if launch.is_main:
            _print_line(f"ci_llm {__version__}   dry run for {config.run_folder}   loading...")
            for line in read.lines:
                _print_line(f"config    {line}")
        _go_offline_if_unreachable(config, launch)
        _set_library_defaults()
        from ci_llm.dry_run.plan import dry_run

        return dry_run(config, interrupts, launch, debug="--debug" in words)


def status(words: list[str]) -> int:
    """`ci-llm status RUN`, or with the arguments of train.py: the run that they would train."""
    from ci_llm.core.run_status import read_status

    if {"-h", "--help"} & {*words}:
        print(STATUS_USAGE)
        return 0
    words = [word for word in words if word != "--debug"]
    named = len(words) == 1 and "=" not in words[0] and not words[0].startswith("-")
    folder = words[0] if named else _configuration(words).config.run_folder
    _LOGGER.debug("reads %s", Path(folder, "status.json").absolute())
    found = read_status(folder)
    reason = f" ({found.reason})" if found.reason else ""
    print(f"{found.status}{reason}: step {found.step}, attempt {found.attempt}, process {found.pid} on {found.host}")
    if found.warning:
        print(f"warning: {found.warning}")
    if found.best_step is not None:
        print(f"best crowd in an evaluation so far: after step {found.best_step}")
    if found.next_command:
        print(f"go on with: {found.next_command}")
    return found.exit_code


def checkpoints(words: list[str]) -> int:
    """`ci-llm checkpoints VERB ...`."""
    _set_library_defaults()
    from ci_llm.cli.checkpoints import run_verb

    return run_verb([word for word in words if word != "--debug"])
