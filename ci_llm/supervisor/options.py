"""The command line of safe_train.py, as typed."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NoReturn

from ci_llm.errors import ConfigError
from ci_llm.supervisor.patterns import OwnPatterns
from ci_llm.supervisor.policy import Policy

_DESCRIPTION = """Run a training until it is done: watch its output, and after a failure launch it again, with a smaller
learning rate after NaN, a smaller batch after out of memory. The configuration is never changed, and no process is left
behind. What happened is told in safe_train.log."""
_EXAMPLES = """examples:
  python safe_train.py                                      our own run, as configs.yaml says
  python safe_train.py num_agents=8 -- torchrun --nproc-per-node 4 train.py
  python safe_train.py --train-script train.py --config-path configs --config-name config training.learning_rate=1e-3
  python safe_train.py --train-script fit.py --config-flag --config --config my.yaml --lr-key optim.lr
  python safe_train.py --lr-key lr -- python fit.py --lr 1e-3
  python safe_train.py --config my.yaml --lr-key optim.lr -- accelerate launch fit.py my.yaml
  python safe_train.py --on-retry --init_from=resume --goes-on-from out/ckpt.pt -- python train.py config/gpt2.py

exit codes: 0 completed, 2 bad call, 75 interrupted (run me again), 1 gave up, 130 aborted by a second
Ctrl-C"""

DEFAULT_SCRIPT: Final = Path("train.py")


@dataclass(frozen=True)
class Options:
    """What was asked for.

    Attributes:
        words: key=value and everything else that is not ours; passed on.
        command: what stood after `--`.
        config, config_path, config_name, config_flag, lr_key, batch_size_key, on_retry, goes_on_from, stop_signal: None
            where not given.
    """

    policy: Policy
    words: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    config: Path | None = None
    config_path: Path | None = None
    config_name: str | None = None
    config_flag: str | None = None
    script: Path = DEFAULT_SCRIPT
    grace_s: float | None = None
    delete_wandb_runs: bool = True
    lr_key: str | None = None
    batch_size_key: str | None = None
    scale_with_batch: tuple[str, ...] = ()
    own_patterns: OwnPatterns = field(default_factory=OwnPatterns)
    override_style: str = "hydra"
    on_retry: str | None = None
    goes_on_from: str | None = None
    stop_signal: str | None = None

    @property
    def folder_and_name(self) -> tuple[Path, str] | None:
        """Where Hydra's primary configuration is, if either was given."""
        if self.config_path is None and self.config_name is None:
            return None
        return self.config_path or Path("configs"), self.config_name or "config"

    def options_for_other_scripts(self) -> list[str]:
        """The options given that say how a script that is not ours gets its configuration."""
        given = {
            "--config-path": self.config_path,
            "--config-name": self.config_name,
            "--config-flag": self.config_flag,
            "--lr-key": self.lr_key,
            "--batch-size-key": self.batch_size_key,
            "--scale-with-batch": self.scale_with_batch,
            "--nonfinite-pattern": self.own_patterns.nonfinite,
            "--out-of-memory-pattern": self.own_patterns.out_of_memory,
            "--override-style": self.override_style != "hydra",
            "--on-retry": self.on_retry,
            "--goes-on-from": self.goes_on_from,
            "--stop-signal": self.stop_signal,
        }
        return [option for option, value in given.items() if value]


def parse_options(arguments: Sequence[str]) -> Options:
    """The call that a command line means.

    Raises:
        ConfigError: it means none.
        SystemExit: with 0, after `--help`.
    """
    own, command = _split(_with_dashes_as_value(list(arguments)))
    parser = _parser()
    known, words = parser.parse_known_args(own)
    _refuse_near_misses(words, parser)
    policy = Policy(
        max_retries=known.max_retries,
        min_learning_rate=known.min_lr,
        min_batch_size=known.min_batch_size,
    )
    if (known.config_path or known.config_name) and known.config is not None:
        raise ConfigError(
            "two configurations", where="command line", hint="either --config FILE, or --config-path and --config-name"
        )
    return Options(
        policy=policy,
        words=tuple(words),
        command=tuple(command),
        config=known.config,
        config_path=known.config_path,
        config_name=known.config_name,
        config_flag=known.config_flag,
        script=known.train_script,
        grace_s=known.grace,
        delete_wandb_runs=not known.no_delete_wandb_runs,
        lr_key=known.lr_key,
        batch_size_key=known.batch_size_key,
        scale_with_batch=tuple(known.scale_with_batch),
        own_patterns=OwnPatterns(tuple(known.nonfinite_pattern), tuple(known.out_of_memory_pattern)),
        override_style=known.override_style,
        on_retry=known.on_retry,
        goes_on_from=known.goes_on_from,
        stop_signal=known.stop_signal,
    )


def _with_dashes_as_value(arguments: list[str]) -> list[str]:
    """`--on-retry --a=b` as one word: argparse would take the second for an option of ours."""
    place = arguments.index("--on-retry") if "--on-retry" in arguments else len(arguments)
    if "--" in arguments[: place + 2] or place + 1 >= len(arguments):
        return arguments
    return [*arguments[:place], f"--on-retry={arguments[place + 1]}", *arguments[place + 2 :]]


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    if not arguments[place + 1 :]:
        raise ConfigError("no command after --", where="command line", hint="write -- python fit.py ...")
    return arguments[:place], arguments[place + 1 :]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where="command line", hint="python safe_train.py --help")

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's own says nothing where the output is refused


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="safe_train.py",
        usage="python safe_train.py [options] [key=value ...] [-- command ...]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("--train-script", type=Path, default=DEFAULT_SCRIPT, metavar="FILE", help="train.py by default")
    what.add_argument("--config", type=Path, metavar="FILE", help="the configuration; ours: configs.yaml by default")
    what.add_argument("--config-path", type=Path, metavar="DIR", help="of another script: its folder of configurations")
    what.add_argument("--config-name", metavar="NAME", help="and the name in it; configs and config by default")
    what.add_argument("--config-flag", metavar="F", help="hand the file on as F FILE, not as Hydra takes it")
    what.add_argument(
        "--lr-key", metavar="K", help="dotted key of the learning rate; training.learning_rate by default"
    )
    what.add_argument("--batch-size-key", metavar="K", help="of the batch size; training.meta_batch_size or the like")
    what.add_argument(
        "--scale-with-batch",
        metavar="K",
        action="append",
        default=[],
        help="a key that shrinks with the batch; repeatable",
    )
    says = parser.add_argument_group("what its output says")
    for failure in ("nonfinite", "out-of-memory"):
        says.add_argument(
            f"--{failure}-pattern",
            metavar="REGEX",
            type=_regex,
            action="append",
            default=[],
            help=f"a line that matches means {failure}, as the known ones do; repeatable",
        )
    what.add_argument(
        "--override-style",
        choices=("hydra", "argparse"),
        default="hydra",
        help="a key that must be added is key=value for Hydra, --key=value for argparse; hydra",
    )
    again = parser.add_argument_group("how another script goes on from its own checkpoints")
    again.add_argument("--on-retry", metavar="WORDS", help="what it gets in addition from the second attempt on")
    again.add_argument(
        "--goes-on-from",
        metavar="GLOB",
        help="its checkpoints: WORDS are given whenever there is one, {checkpoint} in them is the newest",
    )
    how = parser.add_argument_group("how far to go")
    how.add_argument(
        "--max-retries", type=_at_least(int, 0), default=10, metavar="N", help="attempts after the first; 10"
    )
    how.add_argument("--min-lr", type=_positive, default=1e-6, metavar="X", help="the smallest learning rate; 1e-6")
    how.add_argument("--min-batch-size", type=_at_least(int, 1), default=1, metavar="N", help="the smallest batch; 1")
    how.add_argument(
        "--grace", type=_at_least(float, 0), metavar="S", help="seconds from TERM to KILL; 120 for ours, 10 for others"
    )
    how.add_argument("--stop-signal", metavar="NAME", help="what another script is stopped by; the signal that came")
    how.add_argument("--no-delete-wandb-runs", action="store_true", help="keep the W&B runs of failed attempts")
    how.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _at_least(kind: type, least: float) -> Any:
    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value < float("inf"):
            raise ValueError
        return value

    read.__name__ = f"{kind.__name__} of at least {least}"
    return read


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


_positive.__name__ = "positive number"


def _regex(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"not a regular expression, {error}: {text}") from error


def _refuse_near_misses(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """A misspelt option of ours would otherwise be handed on to the script."""
    own = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        near = get_close_matches(name, own, n=1, cutoff=0.85) if name.startswith("--") else []
        if near:
            raise ConfigError(
                f"there is no option {word.partition('=')[0]}", where="command line", hint=f"did you mean {near[0]}?"
            )
