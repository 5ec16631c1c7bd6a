"""What a checkpoint of a run holds, how a run is brought back to it, and how like the undisturbed run that will be.

Two grades, as the log says: `bitwise` (same processes, micro-batch, threads, versions, device) and `sample-exact` (the
same samples in the same optimizer steps; sums may round differently).
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ci_llm._version import __version__
from ci_llm.checkpoints.checkpoint import Checkpoint, load_checkpoint
from ci_llm.checkpoints.manager import CheckpointManager
from ci_llm.checkpoints.manifest import read_manifest
from ci_llm.checkpoints.votes import EachProcess
from ci_llm.config import Change, Config, parse_config
from ci_llm.core import determinism
from ci_llm.crowd.base import short_name
from ci_llm.crowd.recognise import require_checkpoint, require_run
from ci_llm.errors import BadInput, CheckpointError, ConfigError, DamagedCheckpoint, ForeignCheckpoint
from ci_llm.run.context import Run
from ci_llm.run.nonfinite import guard_state, restore_guard
from ci_llm.run.state import TrainState

LIBRARIES = ("accelerate", "numpy", "safetensors", "tokenizers", "torch", "transformers")


@dataclass(frozen=True)
class Source:
    """Where a run goes on: a verified checkpoint, and its folder."""

    checkpoint: Checkpoint
    folder: Path

    @property
    def step(self) -> int:
        return self.checkpoint.manifest.step


def newest_source(manager: CheckpointManager, at_most: int | None = None) -> Source | None:
    """The newest checkpoint of a run's own folder that verifies; None if there is none.

    Args:
        at_most: one of this step or before, because what came after is not trusted; None: any.
    """
    step = manager.latest_step(at_most=at_most)
    return None if step is None else Source(found := manager.read(step), found.folder)


def open_source(given: Path, where: str) -> Source:
    """The checkpoint behind a path that somebody gave: itself, or the newest of a run's folder.

    Args:
        where: how it was given, for the error.

    Raises:
        ConfigError: it is none of a run.
        DamagedCheckpoint: it is not as it was written.
    """
    folder = require_checkpoint(given, where)
    try:
        require_run(read_manifest(folder), folder, where)
        return Source(load_checkpoint(folder), folder)
    except DamagedCheckpoint as damage:
        damage.hint = f"ci-llm checkpoints list {folder.parent} says which others are whole: give one of them"
        raise


# ------------------------------------------------------------------------------------------------ what is kept


def contents(run: Run, generators: Sequence[dict[str, Any] | None] = ()) -> dict[str, Any]:
    """The state of a run as the manager wants it: keys name files.

    Args:
        generators: `determinism.capture()` of every process by index, None where it is not known; by default `save`
            collects them.
    """
    known = {f"process{i}": state for i, state in enumerate(generators) if state is not None}
    return {
        **run.crowd.adapter_files(),
        "ci_llm_meta_config": run.crowd.meta(run.base.fingerprint),
        "optimizer": _optimizer_state(run),
        "scheduler": {
            "type": run.config.lr_scheduler_type,
            "last_step": run.state.step,
            "last_learning_rate": run.learning_rate(max(run.state.step - 1, 0)),
        },
        "train_state": run.state.to_dict(),
        "guard": guard_state(run),
        "trackers": run.log.tracker_state(),
        "rng": known if generators else EachProcess(determinism.capture()),
        "config.yaml": run.config.dump().encode(),
        **run.tokenizer_files,
    }


def describe(run: Run) -> dict[str, Any]:
    """The manifest's account of a checkpoint: position, and the fingerprints that a resume compares."""
    return {
        "epoch": run.plan.epoch(run.state.step),
        "position": run.state.samples_seen,
        "fingerprints": fingerprints(run),
        "surroundings": surroundings(run),
    }


def fingerprints(run: Run) -> dict[str, str]:
    """What must be the same for a run to be the same run."""
    return {
        "base": run.base.fingerprint,
        "base_rounded": run.base.rounded_fingerprint,
        "data": run.rows.fingerprint,
    }


def surroundings(run: Run) -> dict[str, Any]:
    """What must be the same for a run to have the same bits."""
    return {
        "processes": run.processes.count,
        "micro_batch": run.micro_batch_size,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if run.crowd.device.type == "cuda" else _processor(),
        "deterministic": torch.are_deterministic_algorithms_enabled() or run.crowd.device.type == "cpu",
        "versions": {"ci_llm": __version__} | {name: version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    """Architecture and vector units: with others, sums are made in another order."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _optimizer_state(run: Run) -> dict[str, Any]:
    return {f"agent{k}": dict(run.optimizer.state[row]) for k, row in enumerate(run.crowd.agents.rows)}


# ----------------------------------------------------------------------------------------------- coming back


def restore(run: Run, source: Source) -> list[str]:
    """Bring the run to where the checkpoint stands; nothing of it is touched if the checkpoint does not fit.

    Returns:
        lines for people: what changed, and the grade of exactness.

    Raises:
        ForeignCheckpoint: another K, rank, base or data.
        BadInput: a changed configuration would train on other samples or with other maths.
    """
    saved, where = source.checkpoint.state, str(source.folder)
    _check_crowd(run, source, where)
    changes = _check_config(run.config, saved["config.yaml"], where)
    _check_data(run, source)
    state = TrainState.from_dict(saved["train_state"])
    for k in range(run.crowd.num_agents):
        run.crowd.agents.load_agent(k, saved[f"agent{k}/adapter_model"], where)
        row = run.crowd.agents.rows[k]
        run.optimizer.state[row] = {n: _like(n, t, row) for n, t in saved["optimizer"].get(f"agent{k}", {}).items()}
    run.state = state
    restore_guard(run, saved.get("guard", {}))
    run.remembered_trackers = dict(saved.get("trackers", {}))
    lines = [f"changed since then: {c.key} {c.old} -> {c.new}" for c in changes if c.kind != "free" or not c.keeps_bits]
    if any(c.kind == "schedule" and not c.keeps_bits for c in changes):
        lines.append("the schedule follows the new length from here: not the run that would have been that long")
    return lines


def _like(name: str, tensor: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Moments go where the weights are; the step counter of AdamW stays an fp32 scalar there."""
    return tensor.to(row.device) if name == "step" else tensor.to(row)


def _check_crowd(run: Run, source: Source, where: str) -> None:
    meta: Any = source.checkpoint.state["ci_llm_meta_config"]
    own = run.crowd.meta(run.base.fingerprint)
    lora = ("rank", "alpha", "target_modules", "use_rslora")
    pairs = {"num_agents": (meta["num_agents"], own["num_agents"])}
    pairs |= {f"lora_{key}": (meta["lora"][key], own["lora"][key]) for key in lora}
    if not _same_base(run, source):
        pairs |= {
            "model_name": (short_name(meta["base_model_name_or_path"]), short_name(run.base.name)),
            "fingerprint of the base": (meta["base_fingerprint"], own["base_fingerprint"]),
        }
    odd = [f"{name} was {before!r}, is {now!r}" for name, (before, now) in pairs.items() if before != now]
    if odd:
        raise ForeignCheckpoint(
            f"the checkpoint belongs to another crowd: {'; '.join(odd)}",
            where=where,
            hint="put the old values back, or give another output_dir or experiment_name for a new run",
        )


def _same_base(run: Run, source: Source) -> bool:
    """Whether the weights are those of the checkpoint, bit by bit; or rounded, where another device loads them in
    another precision (`model_dtype: null`)."""
    prints: Any = source.checkpoint.manifest.info["fingerprints"]
    before, now = _precisions(run, source)
    if before == now:
        return bool(prints["base"] == run.base.fingerprint)
    return bool(prints.get("base_rounded") == run.base.rounded_fingerprint)


def _precisions(run: Run, source: Source) -> tuple[str, str]:
    """Of the base, in the checkpoint and here."""
    meta: Any = source.checkpoint.state["ci_llm_meta_config"]
    return meta["base_dtype"], run.crowd.meta(run.base.fingerprint)["base_dtype"]


def _check_data(run: Run, source: Source) -> None:
    prints: Any = source.checkpoint.manifest.info["fingerprints"]
    if prints["data"] != run.rows.fingerprint and not run.config.allow_inexact_resume:
        raise ForeignCheckpoint(
            "the training rows are not those of the checkpoint: another data set, tokenizer, template or length",
            where=str(source.folder),
            hint="put the old data back, or allow_inexact_resume=true to go on with the new rows from this step",
        )


def _check_config(config: Config, saved: bytes, where: str) -> list[Change]:
    try:
        before = parse_config(saved.decode(), where)
    except ConfigError as error:
        raise CheckpointError(f"its config.yaml cannot be read: {error.what}", where=where) from error
    changes = before.diff(config)
    breaking = [c for c in changes if c.kind == "sample-exact"]
    if breaking and not config.allow_inexact_resume:
        listed = "; ".join(f"{c.key} was {c.old}, is {c.new}" for c in breaking)
        raise BadInput(
            f"the configuration changed, and the run would not be the same: {listed}",
            where=where,
            hint="put them back, or allow_inexact_resume=true to go on all the same, or a new experiment_name",
        )
    return changes


def restore_surroundings(run: Run, source: Source) -> str:
    """Threads and generators as they were; returns the grade, and every field that lowers it."""
    before: Any = source.checkpoint.manifest.info["surroundings"]
    if run.crowd.device.type == "cpu" and before["processes"] == run.processes.count:
        torch.set_num_threads(before["threads"])
    now = surroundings(run)
    odd = [f"{key} {before[key]} -> {now[key]}" for key in now if key != "versions" and before.get(key) != now[key]]
    odd += [
        f"{name} {version} -> {now['versions'][name]}"
        for name, version in before["versions"].items()
        if now["versions"].get(name) != version
    ]
    precision, precision_now = _precisions(run, source)
    if precision != precision_now:
        odd.append(f"precision of the base {precision} -> {precision_now}")
    if before["processes"] == run.processes.count:
        generators: Any = source.checkpoint.state["rng"]
        odd += [f"no generators of process {i}" for i in range(run.processes.count) if f"process{i}" not in generators]
        own = generators.get(f"process{run.processes.index}")
        if own is not None and (hindrance := determinism.restore(own)):
            odd.append(hindrance)
    if not now["deterministic"]:
        odd.append("no deterministic algorithms on this device")
    return f"exactness: {'sample-exact' if odd else 'bitwise'}{' (' + '; '.join(odd) + ')' if odd else ''}"
