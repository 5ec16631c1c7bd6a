"""`ci_llm.train`: the call that trains, in a script or a notebook, many times; it restores the process afterwards."""

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
from ci_llm.config import Config, read_call
from ci_llm.config.load import IN_CALL, Reading
from ci_llm.core.imports import set_library_defaults
from ci_llm.core.remote import offline_note
from ci_llm.errors import BadInput
from ci_llm.interrupts import STOP_SIGNALS, Interrupts, die_with_parent

if TYPE_CHECKING:
    from ci_llm.run.result import Result


_training = threading.Lock()


@contextmanager
def _only_run() -> Iterator[None]:
    """Refuse a second run while one trains in this process: both would change the global settings of libraries."""
    if not _training.acquire(blocking=False):
        raise BadInput(
            "a run is already training in this process",
            where=IN_CALL,
            hint="wait for its end, or train in another process",
        )
    try:
        yield
    finally:
        _training.release()


@_only_run()
def train(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    dataset: Any = None,
    eval_dataset: Any = None,
    model: Any = None,
    tokenizer: Any = None,
    callbacks: Iterable[object] = (),
    quiet: bool = False,
    **keys: Any,
) -> Result:
    """Train a crowd, or resume the run of an earlier call in the same folder.

    It does what `ci-llm train` does, on one process; or on several, if a launcher starts them and each makes this call.
    Ctrl-C, or the stop button of a notebook, finishes the step, saves it and returns; a second one raises
    KeyboardInterrupt. Messages go through `logging.getLogger("ci_llm")`.

    Args:
        config: a YAML file, a mapping of keys, or a Config; None: the defaults of docs/keys.md.
        dataset: the rows to train on: a path or a name as `dataset_name` takes it, a list of dicts, a
            `datasets.Dataset` or `DatasetDict`, a pandas or Polars frame, an iterable of dicts, or a function that
            makes one of these. Rows in memory are kept once in a cache (`CI_LLM_CACHE`), named by their content; a
            resume with other rows is refused.
        eval_dataset: the rows to evaluate on, as `dataset`. None: a split of `dataset`, or rows held out of it.
        model: a name or a folder as `model_name` takes it, or a causal language model of Transformers that is loaded.
            Agents are trained on its weights, and it stays as it is. If no folder has its weights, they are kept
            in `base_model` in the folder of the run, where the adapters find them.
        tokenizer: the tokenizer of the loaded model.
        callbacks: objects with methods such as `on_step_end` or `on_evaluate`; see step/callbacks.py.
        quiet: show only warnings; `training.log` has everything.
        keys: other keys, such as `learning_rate=1e-3` or `lr=1e-3`; they win over `config`.

    Returns:
        the result: `status`, `step`, `metrics`, `folder`, `crowd`, `scores`, `history`, `best`, and `plot()`.

    Raises:
        CiLlmError: it says what failed, where, and what to do. If the run had begun, its folder has the reason as well.

    Examples:
        >>> rows = [{"prompt": f"What is {n} plus 1?", "completion": f"{n + 1}"} for n in range(20)]
        >>> result = ci_llm.train(dataset=rows, quiet=True, **small)  # `small`: keys that keep the example short
        >>> result.status, result.step, result.crowd.num_agents
        ('completed', 2, 2)
    """
    arguments = {"dataset": dataset, "eval_dataset": eval_dataset, "model": model}
    given = _as_keys(arguments)
    loaded = model is not None and not _is_name(model)
    if loaded or tokenizer is not None:
        set_library_defaults()
        from ci_llm.base.load import name_of, require_usable

        require_usable(model if loaded else None, tokenizer)
        folder = read_call(config, keys).config.run_folder
        given["model"] = name_of(model, folder)
    read = read_call(config, {**keys, **given}, accelerate_settings(os.environ))
    if loaded:
        _require_no_loading(read.config)
    return _run(read, (model, tokenizer) if loaded else None, callbacks, quiet=quiet)


def _run(read: Reading, loaded: tuple[Any, Any] | None, callbacks: Iterable[object], *, quiet: bool) -> Result:
    launch = replace(read_launch(), called_at=time.time())
    with Interrupts(
        describe_stop=lambda: "leaving before the first step",
        abort_grace_s=math.inf if hasattr(sys, "ps1") else 2.0,  # a notebook must survive a second Ctrl-C
    ) as interrupts:
        if not launch.forwards_sigterm:
            die_with_parent(STOP_SIGNALS[0])
        note = offline_note(read.config.names_of_inputs)
        offline = [f"the hub is {note}"] if note else []
        set_library_defaults()
        from ci_llm.base.load import base_of
        from ci_llm.run.job import run_job

        base = base_of(*loaded, read.config.model_name) if loaded else None
        sources = [*read.lines, *offline]
        with _process_as_it_was():
            return run_job(
                read.config, interrupts, launch, sources=sources, callbacks=callbacks, given=base, quiet=quiet
            )


def _is_name(given: Any) -> bool:
    """True if the argument is a path or a name, or a list of them, as a key takes it."""
    several = given if isinstance(given, list | tuple) and given else [given]
    return all(isinstance(each, str | os.PathLike) for each in several)


def _as_keys(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by the names of keys; rows in memory are written to files."""
    named = {name: value for name, value in arguments.items() if value is not None and _is_name(value)}
    rows = {name: value for name, value in arguments.items() if name != "model" and name not in named}
    if any(value is not None for value in rows.values()):
        set_library_defaults()
        from ci_llm.data.files import kept_rows

        named |= {name: kept_rows(value, name) for name, value in rows.items() if value is not None}
    return named


def _require_no_loading(config: Config) -> None:
    """Refuse keys that say how a base is loaded, if the base is loaded already."""
    about_loading = ("model_dtype", "quantization", "base_sharding")
    keys = [key for key in about_loading if getattr(config, key) not in (None, "none")]
    if keys:
        what = f"{' and '.join(keys)} cannot be set beside a model that is loaded"
        raise BadInput(what, where="train(model=...)", hint="leave it out, or give the name of the model: model=NAME")


@contextmanager
def _process_as_it_was() -> Iterator[None]:
    """Restore after the block what a run sets for the process: threads, deterministic algorithms, generators."""
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
