"""The command line of safe_train.py: its own options, and the words that it passes on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ci_llm.core.help import HelpfulParser, at_least
from ci_llm.errors import ConfigError

if TYPE_CHECKING:
    from ci_llm.supervisor.policy import Policy

DEFAULT_SCRIPT: Final = Path("train.py")
_OF_EXTERNAL_SCRIPTS: Final = (
    *("config_path", "config_name", "config_flag", "lr_key", "batch_size_key", "scale_with_batch"),
    *("on_retry", "goes_on_from", "stop_signal"),
)


@dataclass(frozen=True)
class Options:
    """The options as typed; None where an option was not given.

    Attributes:
        words: key=value, and everything else that is not an option of the supervisor; passed on.
        command: the words after `--`.
    """

    policy: Policy
    words: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    config: Path | None = None
    config_path: Path | None = None
    config_name: str | None = None
    config_flag: str | None = None
    train_script: Path = DEFAULT_SCRIPT
    grace_s: float | None = None
    delete_wandb_runs: bool = True
    lr_key: str | None = None
    batch_size_key: str | None = None
    scale_with_batch: Sequence[str] = ()
    on_retry: str | None = None
    goes_on_from: str | None = None
    stop_signal: str | None = None

    @property
    def folder_and_name(self) -> tuple[Path, str] | None:
        """The folder and the name of Hydra's primary configuration, if either was given."""
        if self.config_path is None and self.config_name is None:
            return None
        return self.config_path or Path("configs"), self.config_name or "config"

    def external_script_options(self) -> list[str]:
        """The given options that only make sense for an external script."""
        return [f"--{name.replace('_', '-')}" for name in _OF_EXTERNAL_SCRIPTS if getattr(self, name)]


def parse_options(arguments: Sequence[str]) -> Options:
    """Read the command line.

    Raises:
        ConfigError: an option is unknown, wrong, or contradicts another one.
        SystemExit: with 0, after `--help`.
    """
    before_command, command = _split(_with_dashes_as_value(list(arguments)))
    parser = _parser()
    known, words = parser.parse_known_args(before_command)
    _refuse_near_misses(words, parser)
    if (known.config_path or known.config_name) and known.config is not None:
        raise ConfigError(
            "two configurations", where="command line", hint="either --config FILE, or --config-path and --config-name"
        )
    from ci_llm.supervisor.policy import Policy  # here, so that --help answers at once

    policy = Policy(known.max_retries, known.min_lr, known.min_batch_size)
    given = {one.name: getattr(known, one.name) for one in fields(Options) if hasattr(known, one.name)}
    return Options(policy=policy, words=tuple(words), command=tuple(command), **given)


def _with_dashes_as_value(arguments: list[str]) -> list[str]:
    """Join `--on-retry --a=b` into one word: argparse would take the second for an option of the supervisor."""
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


def _parser() -> argparse.ArgumentParser:
    does, _, examples = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").strip().partition("\n\n")
    parser = HelpfulParser(
        prog="python safe_train.py",
        usage="python safe_train.py [options] [key=value ...] [-- command ...]",
        description=does,
        epilog=examples,
        common=("--config", "--train-script", "--lr-key", "--max-retries", "--grace"),
    )
    add = parser.add_argument_group("what to run").add_argument
    add("--train-script", type=Path, default=DEFAULT_SCRIPT, metavar="FILE", help="the script; default train.py")
    add("--config", type=Path, metavar="FILE", help="its configuration; default configs.yaml, for train.py")
    add("--config-path", type=Path, metavar="DIR", help="Hydra's folder of configurations; default configs")
    add("--config-name", metavar="NAME", help="the name of the configuration in it; default config")
    add("--config-flag", metavar="F", help="pass the file as F FILE instead of in Hydra's way")
    add = parser.add_argument_group("which keys are adjusted").add_argument
    add("--lr-key", metavar="K", help="dotted key of the learning rate; default training.learning_rate")
    add("--batch-size-key", metavar="K", help="of the batch size; default training.meta_batch_size and others")
    add("--scale-with-batch", metavar="K", action="append", default=[], help="a key that shrinks with it; repeatable")
    add = parser.add_argument_group("how an external script resumes from its own checkpoints").add_argument
    add("--on-retry", metavar="WORDS", help="words added to its command from the second attempt on")
    does = "its checkpoints: WORDS are added whenever there is one, {checkpoint} in them is the newest"
    add("--goes-on-from", metavar="GLOB", help=does)
    add = parser.add_argument_group("limits").add_argument
    add("--max-retries", type=at_least(0), default=10, metavar="N", help="attempts after the first; default 10")
    add("--min-lr", type=at_least(1e-12, float), default=1e-6, metavar="X", help="the smallest rate; default 1e-6")
    add("--min-batch-size", type=at_least(1), default=1, metavar="N", help="the smallest batch; default 1")
    does = "seconds from TERM to KILL; default 120 for this project's trainer, 10 for other scripts"
    add("--grace", dest="grace_s", type=at_least(0, float), metavar="S", help=does)
    add("--stop-signal", metavar="NAME", help="the signal that stops an external script; default the one that came")
    does = "keep the W&B runs of failed attempts"
    add("--no-delete-wandb-runs", dest="delete_wandb_runs", action="store_false", help=does)
    add("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _refuse_near_misses(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Refuse a misspelt option of the supervisor, which would otherwise be passed on to the script."""
    known = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        near = get_close_matches(name, known, n=1, cutoff=0.85)
        if name.startswith("--") and near:
            raise ConfigError(
                f"there is no option {word.partition('=')[0]}", where="command line", hint=f"did you mean {near[0]}?"
            )
