"""`ci_llm.train`: a run that a script or a notebook calls, any number of times; it leaves the process as it was."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ci_llm.cluster.launch import accelerate_settings, read_launch
from ci_llm.config import Config, as_typed, read_call
from ci_llm.config.auto import FOLLOWED
from ci_llm.config.load import IN_CALL
from ci_llm.config.yaml_file import dump_value
from ci_llm.core.imports import set_library_defaults
from ci_llm.core.remote import offline_note
from ci_llm.errors import BadInput
from ci_llm.interrupts import Interrupts, die_with_parent

if TYPE_CHECKING:
    from ci_llm.run.job import Result


_training = threading.Lock()


def _unlock_in_child() -> None:
    global _training
    _training = threading.Lock()


os.register_at_fork(after_in_child=_unlock_in_child)


@contextmanager
def _only_run() -> Iterator[None]:
    """Refuse a second run while one trains in this process: what the libraries set globally is for one of them."""
    lock = _training
    if not lock.acquire(blocking=False):
        raise BadInput(
            "a run is already training in this process",
            where=IN_CALL,
            hint="wait for its end, or train in another process",
        )
    try:
        yield
    finally:
        lock.release()


@_only_run()
def train(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    callbacks: Iterable[object] = (),
    **overrides: Any,
) -> Result:
    """Train a crowd, or go on with the run that an earlier call has left in the same folder.

    It does what `ci-llm train` does, on one process, or on those of a launcher if every process makes the same call.
    Ctrl-C, or the stop button of a notebook, finishes the step, saves it and returns; a second one raises
    KeyboardInterrupt.

    Args:
        config: a YAML file, a mapping of keys, or a Config; None: the defaults of docs/keys.md and no file.
        callbacks: objects with methods such as `on_step_end` or `on_evaluate`; see step/callbacks.py.
        overrides: keys that win over `config`: `learning_rate=1e-3`, or `lr=1e-3`.

    Returns:
        the result: `status`, `step`, `metrics`, `folder`, `crowd`.

    Raises:
        CiLlmError: what failed, where, and what to do. If the run had begun, its folder has the reason as well.
    """
    read = read_call(config, overrides, accelerate_settings(os.environ))
    launch = replace(read_launch(), called_at=time.time())
    with Interrupts(
        read.config.stop_signals,
        read.config.save_signals,
        describe_stop=lambda: "leaving before the first step",
        abort_grace_s=math.inf if hasattr(sys, "ps1") else 2.0,  # a notebook must survive a second Ctrl-C
    ) as interrupts:
        if not launch.forwards_sigterm:
            die_with_parent(next(iter(read.config.stop_signals), "SIGTERM"))
        note = offline_note(read.config.names_of_inputs)
        offline = [f"the hub is {note}"] if note else []
        set_library_defaults()
        from ci_llm.run.job import run_job

        launch = replace(launch, arguments=_words_for_a_shell(read.config))
        with _process_as_it_was():
            return run_job(read.config, interrupts, launch, sources=[*read.lines, *offline], callbacks=callbacks)


def _words_for_a_shell(config: Config) -> tuple[str, ...]:
    """The words that give `ci-llm train` this configuration, for the commands that a run proposes."""
    # As mappings: lists of values per key would lose the agents' names.
    agents = [f"agents={dump_value(config.agents)}"] if config.agents else []
    followed = [change for change in Config().diff(config.usual()) if change.key in FOLLOWED]
    changes = [*followed, *config.usual().diff(config.model_copy(update={"agents": ()}))]
    return ("--config", os.devnull, *(f"{change.key}={as_typed(change.new)}" for change in changes), *agents)


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Put back what a run sets for the whole process: threads, deterministic algorithms, random generators."""
    import torch
    from torch.utils import deterministic

    from ci_llm.core import determinism

    threads, generators = torch.get_num_threads(), determinism.capture()
    mode, fill = torch.get_deterministic_debug_mode(), deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        determinism.restore(generators)
