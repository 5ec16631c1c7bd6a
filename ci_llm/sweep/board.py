"""The leaderboard of a sweep, for a terminal, and the commands for what comes next."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from ci_llm.config import arguments_without, as_typed
from ci_llm.config.sweep import SweepKeys
from ci_llm.core.run_folder import BEST
from ci_llm.sweep.trials import Standings, Trial

#: Trials of the crowd that is proposed.
CROWD: Final = 4


def leaderboard(standings: Standings) -> Table:
    """All trials that were scored: those that went furthest first, and within a rung the best first."""
    plan, trials = standings.plan, standings.leaderboard
    table = Table(box=None, pad_edge=False, title=None)
    table.add_column("trial", justify="right")
    table.add_column("status")
    table.add_column("step", justify="right")
    table.add_column(plan.metric, justify="right")
    keys = [*dict.fromkeys(key for trial in trials for key in trial.settings)]
    for key in keys:
        table.add_column(key)
    for trial in trials:
        score = "" if trial.failed or trial.score is None else f"{trial.score:.4f}"
        status = standings.status(trial)
        marked = f"[bold]{status}[/]" if trial is standings.best else status
        values = [as_typed(trial.settings[key]) for key in keys]
        table.add_row(str(trial.id), marked, str(plan.steps[len(trial.scores) - 1]), score, *values)
    return table


def commands(standings: Standings, folder: Path, arguments: Sequence[str]) -> list[str]:
    """Lines for people: what to do with the best trial, and with the best ones.

    Args:
        folder: of the sweep.
        arguments: the words of the command line that began it.
    """
    best = standings.best
    if best is None or best.failed:
        return []
    steps = standings.plan.steps[-1]
    lines = [f"best       {folder / BEST}   trial {best.id}, plain PEFT: {_as_text(best.settings)}"]
    own = [f"{key}={as_typed(value)}" for key, value in best.settings.items()]
    start = [f"init_from={folder / BEST}", f"max_train_steps={steps}", "experiment_name=longer"]
    lines.append(f"longer     {_train(arguments, best.settings, ['num_agents=1', *own, *start])}")
    able = [trial for trial in standings.leaderboard if not trial.failed][:CROWD]
    if len(able) > 1:
        words = [f"agents={agents_of(able)}", f"max_train_steps={steps}", f"experiment_name=crowd_of_{len(able)}"]
        lines.append(f"crowd      {_train(arguments, best.settings, words)}")
    return lines


def agents_of(trials: Iterable[Trial]) -> str:
    """The value of `agents:` for a crowd with the settings of these trials."""
    return f"[{', '.join(_mapping(trial) for trial in trials)}]"


def _train(arguments: Sequence[str], swept: Iterable[str], words: Sequence[str]) -> str:
    given = {word.partition("=")[0] for word in words}
    dropped = {*SweepKeys.model_fields, *given, *swept, "num_agents"}
    kept = [word for word in arguments_without(arguments, dropped) if word not in ("--dry-run", "--debug")]
    return shlex.join(["ci-llm", "train", *kept, *words])


def _mapping(trial: Trial) -> str:
    return "{" + ", ".join(f"{key}: {_in_yaml(value)}" for key, value in trial.settings.items()) + "}"


def _in_yaml(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else as_typed(value)


def _as_text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {as_typed(value)}" for key, value in settings.items())
