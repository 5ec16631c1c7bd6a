"""What to do where a folder holds a run with other settings: a command for a new run beside it, and the other ways.

The command is ready to be pasted: it is the one that was typed, with an `experiment_name` made of what differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ci_llm.cluster.launch import Launch
from ci_llm.config import Change, Config, as_typed
from ci_llm.run.shutdown import command_line

LONGEST_NAME: Final = 60
#: Keys that a resumed run may change, and that make another experiment of a new one.
NAMED_AS_WELL: Final = frozenset({"model_name", "dataset_name", "eval_split", "epochs", "max_train_steps"})


def other_ways(changes: Iterable[Change], config: Config, launch: Launch) -> str:
    """The hint of a refusal to resume: a new run beside the old one, or in its place, or the old one as it was.

    Args:
        changes: what differs between the run in the folder and `config`.
    """
    changes = list(changes)
    command = command_line(launch, {"experiment_name": _new_name(changes, config)})
    ways = [
        f"`{command}` begins a new run beside it",
        "overwrite_output_dir=true begins here and moves the old run aside",
    ]
    if old := [f"{each.key}={as_typed(each.old)}" for each in changes if each.kind == "sample-exact"]:
        ways.append(f"{' '.join(old)} goes on with the old run")
    return "; ".join(ways)


def _new_name(changes: Iterable[Change], config: Config) -> str:
    """A name for the new run that no folder has: `num_agents8-learning_rate0.001`."""
    named = [each for each in changes if each.kind == "sample-exact" or each.key in NAMED_AS_WELL]
    parts = [config.experiment_name or "", *(f"{each.key}{as_typed(each.new)}" for each in named)]
    name = re.sub(r"[^\w.-]+", "_", "-".join(filter(None, parts)))[:LONGEST_NAME].strip("-._") or "run"
    return name if _is_free(config, name) else next(n for i in range(2, 10**6) if _is_free(config, n := f"{name}-{i}"))


def _is_free(config: Config, name: str) -> bool:
    return name != config.experiment_name and not Path(config.output_dir, name).exists()
