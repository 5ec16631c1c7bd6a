"""The command line of safe_train.py, as typed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ci_llm.errors import ConfigError
from ci_llm.supervisor.decide import Policy

_DESCRIPTION = """Run a training until it is done: watch its output, and after a failure launch it again, with a smaller
learning rate after NaN, a smaller batch after out of memory. The configuration is never changed, and no process is left
behind. What happened is told in safe_train.log."""
_EXAMPLES = """examples:
  python safe_train.py                                      our own run, as configs.yaml says
  python safe_train.py num_agents=8 -- torchrun --nproc-per-node 4 train.py
  python safe_train.py --train-script train.py --config-path configs --config-name config training.learning_rate=1e-3
  python safe_train.py --train-script fit.py --config-flag --config --config my.yaml --lr-key optim.lr
  python safe_train.py --lr-key lr -- python fit.py --lr 1e-3

exit codes: 0 completed, 2 bad call, 75 interrupted (run me again), 1 gave up"""

_FOR_OTHERS = ("--config-path", "--config-name", "--config-flag", "--lr-key", "--batch-size-key", "--scale-with-batch")


@dataclass(frozen=True)
class Call:
    """What was asked for.

    Attributes:
        words: key=value and everything else that is not ours; passed on.
        command: what stood after `--`.
        for_other_scripts: the options typed that say how a script that is not ours gets its configuration.
        config, config_path, config_name, config_flag, script, lr_key, batch_size_key: None where not given.
    """

    policy: Policy
    words: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    config: Path | None = None
    config_path: Path | None = None
    config_name: str | None = None
    config_flag: str | None = None
    for_other_scripts: tuple[str, ...] = ()
    script: Path = Path("train.py")
    grace_s: float | None = None
    delete_wandb_runs: bool = True
    lr_key: str | None = None
    batch_size_key: str | None = None
    scale_with_batch: tuple[str, ...] = ()


def read_call(arguments: Sequence[str]) -> Call:
    """The call that a command line means.

    Raises:
        ConfigError: it means none.
        SystemExit: with 0, after `--help`.
    """
    own, command = _split(list(arguments))
    parser = _parser()
    known, words = parser.parse_known_args(own)
    _refuse_near_misses(words, parser)
    policy = Policy(
        max_retries=known.max_retries,
        min_learning_rate=known.min_lr,
        min_batch_size=known.min_batch_size,
    )
    named = known.config_path is not None or known.config_name is not None
    if named and known.config is not None:
        raise ConfigError(
            "two configurations", where="command line", cure="either --config FILE, or --config-path and --config-name"
        )
    return Call(
        policy=policy,
        words=tuple(words),
        command=tuple(command),
        config=known.config,
        config_path=(known.config_path or Path("configs")) if named else None,
        config_name=(known.config_name or "config") if named else None,
        config_flag=known.config_flag,
        for_other_scripts=tuple(option for option in _FOR_OTHERS if getattr(known, option[2:].replace("-", "_"))),
        script=known.train_script,
        grace_s=known.grace,
        delete_wandb_runs=not known.no_delete_wandb_runs,
        lr_key=known.lr_key,
        batch_size_key=known.batch_size_key,
        scale_with_batch=tuple(known.scale_with_batch),
    )


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    place = arguments.index("--")
    if not arguments[place + 1 :]:
        raise ConfigError("no command after --", where="command line", cure="write -- python fit.py ...")
    return arguments[:place], arguments[place + 1 :]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, where="command line", cure="python safe_train.py --help")

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
    what.add_argument("--train-script", type=Path, default=Path("train.py"), metavar="FILE", help="train.py by default")
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
    how = parser.add_argument_group("how far to go")
    how.add_argument(
        "--max-retries", type=_at_least(int, 0), default=10, metavar="N", help="attempts after the first; 10"
    )
    how.add_argument("--min-lr", type=_positive, default=1e-6, metavar="X", help="the smallest learning rate; 1e-6")
    how.add_argument("--min-batch-size", type=_at_least(int, 1), default=1, metavar="N", help="the smallest batch; 1")
    how.add_argument(
        "--grace", type=_at_least(float, 0), metavar="S", help="seconds from TERM to KILL; 120 for ours, 10 for others"
    )
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


def _refuse_near_misses(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """A misspelt option of ours would otherwise be handed on to the script."""
    own = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        near = get_close_matches(name, own, n=1, cutoff=0.85) if name.startswith("--") else []
        if near:
            raise ConfigError(
                f"there is no option {word.partition('=')[0]}", where="command line", cure=f"did you mean {near[0]}?"
            )
