"""`ci-llm COMMAND`: the commands and their modules, and the help that lists them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Final

from ci_llm._version import __version__
from ci_llm.cli.command import run_guarded
from ci_llm.errors import ConfigError
from ci_llm.interrupts import ends_with_process

USAGE = f"""CI-LLM {__version__}: a crowd within one model. K LoRA agents train in one fused pass on one frozen base.

  python train.py [--config FILE] [key=value ...]     train, or resume where an earlier call stopped
  ci-llm train ...                                    the same
  python dry_run_sanity_check.py [...]                check whether a run will work here (ci-llm check)
  python safe_train.py [...] [-- command ...]         supervise a training and relaunch it (ci-llm supervise)
  ci-llm sweep [--dry-run] [...] 'key=[a,b,c]'        try settings of agents: the best go on, the others are pruned
  ci-llm status [RUN | key=value ...]                 the state of a run: exit code 0 completed,
                                                      75 interrupted, 3 running, 1 failed or vanished
  ci-llm watch RUN ...                                runs side by side while they train, until they end
  ci-llm agents stop|clone RUN K [key=value ...]      change the crowd of a run while it trains
  ci-llm checkpoints list RUN                         list checkpoints: step, time, size, whether they verify
  ci-llm checkpoints verify PATH                      compare every byte with its digest
  ci-llm checkpoints diff A B                         compare bit by bit: what differs, and by how much
  ci-llm checkpoints prune RUN --keep N               remove all but the newest N
  ci-llm checkpoints pull URL --to RUN                bring a run back from its mirror
  ci-llm checkpoints push RUN URL                     send a run's folder to a mirror
  ci-llm checkpoints import SOURCE ... --to FOLDER    make a crowd of PEFT adapters
  ci-llm generate RUN "prompt" | --file F | -         ask the crowd: its answer, how sure it is, each agent's
  ci-llm chat RUN                                     talk to the crowd
  ci-llm evaluate RUN [--data F] [--failed]           ask agents and crowd the rows of a data set: scores with
                                                      intervals, and a file with every answer
  ci-llm export RUN --to DIR [--merge svd]            write PEFT folders, or one adapter made of all agents
  ci-llm push RUN --to hub:user/name                  publish the agents on the Hugging Face Hub, with their card
  ci-llm report RUN                                   write RUN/report.html: scores, curves, what each fault cost
  ci-llm compare RUN RUN ... | SWEEP                  compare configurations, scores and curves of runs, or trials

  example: python train.py num_agents=8 learning_rate=1e-3 experiment_name=eight

--help after a command shows its options; --debug shows debug lines, and the traceback of an error. --version shows the
version."""

# Each command is a function of its words after the name; its module loads when it is called.
COMMANDS: Final = {
    "train": "ci_llm.cli.train:train",
    "check": "ci_llm.cli.train:check",
    "sweep": "ci_llm.cli.sweep:sweep",
    "status": "ci_llm.cli.status:status",
    "watch": "ci_llm.cli.status:watch",
    "supervise": "ci_llm.cli.supervise:supervise",
    "agents": "ci_llm.cli.agents:agents",
    "checkpoints": "ci_llm.cli.checkpoints:run_verb",
    "generate": "ci_llm.cli.generate:generate",
    "chat": "ci_llm.cli.chat:chat",
    "evaluate": "ci_llm.cli.evaluate:evaluate_run",
    "export": "ci_llm.cli.export:export",
    "push": "ci_llm.cli.export:push",
    "report": "ci_llm.cli.report:report_run",
    "compare": "ci_llm.cli.report:compare_runs",
}


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
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if words[0] == "--version":
        print(__version__)
        return 0
    if words[0] not in COMMANDS:
        from ci_llm.config.parsing import nearest

        near = nearest(words[0], COMMANDS)
        hint = f"did you mean {near}?" if near else f"one of: {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {words[0]!r}", hint=hint)
    module, _, function = COMMANDS[words[0]].partition(":")
    command: Callable[[list[str]], int] = getattr(import_module(module), function)
    return command(words[1:])


def safe_train(words: list[str]) -> int:
    """`python safe_train.py`."""
    from ci_llm.cli.supervise import supervise

    return run_guarded(lambda: supervise(words), debug="--debug" in words)
