"""Named moments in the life of a run, and a trial that gets a signal in the very one.

A moment is the n-th call of a function: the signal comes just before it, and the call continues.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import ci_llm.run.job  # noqa: F401  the fork server imports all the rooms through this file
from ci_llm.cli.main import main
from ci_llm.run import emergency_save
from tools.testbed.events import DEADLINE_S, wait_until_committed

STEPS = 6
SAVE_STEPS = 2
EVAL_STEPS = 3
KEYS = {
    "num_agents": 2,
    "pass_per_agent": "false",  # moments are counted in passes
    "kernels": "plain",  # fast ones are tried, in further passes
    "lora_rank": 2,
    "lora_dropout": 0.1,
    "max_train_samples": 9,
    "max_train_steps": STEPS,
    "batch_size": 2,
    "gradient_accumulation_steps": 2,
    "eval_steps": EVAL_STEPS,
    "eval_samples": 12,
    "generation_eval_samples": 4,
    "max_new_tokens_eval": 8,
    "logging_steps": 1,
    "save_steps": SAVE_STEPS,
    "save_interval_seconds": "null",
    "save_total_limit": 2,
    "num_workers": 0,
    "report_to": "none",
    "output_dir": "run",
}


@dataclass(frozen=True)
class Moment:
    """The `call`-th call of `place`, a dotted path.

    Attributes:
        step: at which the run must have been saved when it has left.
        completed: the run was as good as over, and is completed.
        behind: the call is one of the thread that saves behind the training, which then waits for it in step 3.
    """

    place: str
    call: int = 1
    step: int = STEPS
    completed: bool = False
    behind: bool = False


MOMENTS = {
    "the configuration is read": Moment("ci_llm.cluster.launch.read_launch", step=0),
    "processes meet": Moment("ci_llm.run.job.Processes", step=0),
    "the base is loaded": Moment("ci_llm.run.start.loading.load_base", step=0),
    "rows are tokenised": Moment("ci_llm.run.start.loading.tokenize", step=0),
    "a checkpoint is looked for": Moment("ci_llm.run.start.beginning.agree_on_start", step=0),
    "the folder is claimed": Moment("ci_llm.checkpoints.store.CheckpointStore.acquire_lease", step=0),
    "the status is first written": Moment("ci_llm.core.run_status.RunStatus.start", step=0),
    "waiting for the first batch": Moment("ci_llm.data.loader.pack", step=1),
    "first forward pass": Moment("ci_llm.crowd.crowd.Crowd.forward", 2, step=1),
    "second micro-step, backward": Moment("torch.Tensor.backward", 5, step=2),
    "after the ballot": Moment("ci_llm.run.loop.apply_gradients", 4, step=5),
    "the optimizer moves": Moment("torch.optim.AdamW.step", 4, step=5),
    "a line of metrics": Moment("ci_llm.logs.run_log.RunLog.metrics", 1, step=2),
    "a checkpoint is copied": Moment("ci_llm.checkpoints.async_saver.AsyncSaver.submit", step=3),
    "a checkpoint is committed behind": Moment("ci_llm.checkpoints.store.commit", step=3, behind=True),
    "an old checkpoint is pruned": Moment("ci_llm.checkpoints.store.CheckpointStore._prune", step=3, behind=True),
    "evaluation on the way": Moment("ci_llm.crowd.scoring._score_batch", step=3),
    "the last step": Moment("ci_llm.run.loop.apply_gradients", STEPS, step=STEPS),
    "evaluation at the end": Moment("ci_llm.evaluation.evaluator.Evaluator.scores", 2, step=STEPS),
    "generation": Moment("ci_llm.crowd.questions.generate_each", 2, step=STEPS),
    "the final checkpoint is made": Moment("ci_llm.checkpoints.saver.Saver.make_final", completed=True),
    "results are written": Moment("ci_llm.core.evaluation_file.write_json", completed=True),
    "the last word": Moment("ci_llm.core.run_status.RunStatus.finish", completed=True),
}


def arguments(**keys: Any) -> list[str]:
    """The command line of train.py, complete."""
    return [f"{key}={value}" for key, value in (KEYS | keys).items()]


def train_signalled(
    folder: str,
    words: list[str],
    place: str | None = None,
    call: int = 0,
    sent: str = "SIGTERM",
    rank: int | None = None,
    tripwire: int | None = None,
    stall_s: float = 0.0,
    times: int = 1,
    behind: bool = False,
    committed: int | None = None,
    elastic: bool = False,
) -> int:
    """A trial for the fork server: `train.py`, which sends itself a signal at a moment.

    Args:
        place, call: the moment; None: never.
        rank: of the only process that does; None: all of them.
        tripwire: the call of `place` that no other process may come to any more.
        stall_s: how long the call takes from then on.
        times: how often the signal is sent.
        behind: the main thread and the one that sends the signal wait for each other, in step 3, after its ballot.
        committed: step whose checkpoint must be committed before the signal is sent; the process waits for it.
        elastic: torchrun would begin another round.
    """
    waiting, struck = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        assert struck.wait(DEADLINE_S)

    def strike() -> None:
        assert not behind or waiting.wait(DEADLINE_S)
        if committed is not None:
            wait_until_committed(Path(folder, "run"), committed)
        for _ in range(times):
            os.kill(os.getpid(), signal.Signals[sent])
        struck.set()
        time.sleep(stall_s)

    torch.set_num_threads(1)
    os.chdir(folder)
    if elastic:
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = "1"
    emergency_save.OTHERS_S = DEADLINE_S  # type: ignore[misc]  # nobody kills this run: it may wait for a busy machine
    if place is not None and rank in (None, int(os.environ.get("RANK", "0"))):
        interfere(place, call, strike)
    elif place is not None and tripwire is not None:
        interfere(place, tripwire, lambda: os._exit(99))
    if behind:
        interfere("ci_llm.run.loop.apply_gradients", 3, wait)
    return main(["train", "--config", os.devnull, *words])


def interfere(place: str, call: int, act: Callable[[], object]) -> None:
    """Do something just before the `call`-th call of the function at a dotted path."""
    owner, name = find(place)
    original, count = getattr(owner, name), 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            act()
        return original(*args, **kwargs)

    setattr(owner, name, wrapper)


def find(place: str) -> tuple[Any, str]:
    """The module or class that holds the last name of a dotted path."""
    *path, name = place.split(".")
    for end in range(len(path), 0, -1):
        try:
            owner: Any = importlib.import_module(".".join(path[:end]))
        except ModuleNotFoundError:
            continue
        for part in path[end:]:
            owner = getattr(owner, part)
        return owner, name
    raise LookupError(place)
