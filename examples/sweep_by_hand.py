"""A sweep that a program leads: it asks what trains next, trains it, and tells what came of it."""

from pathlib import Path
from typing import Any

from ci_llm import Sweep, train


def search(config: str | Path | None = "configs.yaml", **keys: Any) -> Sweep:
    """Lead a sweep to its end; called again after Ctrl-C or a kill, it resumes, to the same trials.

    Args:
        config: a file with the keys that all trials share.
        keys: over the file: spaces, keys of a sweep, keys of a run.

    Returns:
        the sweep, with its `best` trial and all `standings`.
    """
    sweep = Sweep(config, **keys)
    while pack := sweep.ask():
        result = train(pack.config)
        if result.status != "completed":
            break
        sweep.tell(pack, pack.scores(result.metrics))
    return sweep


if __name__ == "__main__":
    found = search(learning_rate="log(5e-4,1.6e-2)", lora_rank=[4, 8], trials=8, output_dir="ci_llm_output/by_hand")
    for trial in found.standings.leaderboard:
        print(trial.id, dict(trial.settings), trial.scores)
