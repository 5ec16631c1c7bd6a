"""A crowd in any Accelerate loop: `save_state` writes agents and not the base, `load_state` resumes bit for bit.

    crowd, optimizer, loader = accelerator.prepare(crowd, optimizer, loader)
    register_hooks(accelerator)
    ...
    accelerator.save_state(folder)
    ...
    accelerator.load_state(latest_state(folders))
    rest = accelerator.skip_first_batches(loader, batches_done)

    FOLDER/ci_llm/     a committed checkpoint of ours: K adapters, optimizers, schedulers, loss scale, order of the
                       data, generators and unfinished gradients of every process
    FOLDER/*           Accelerate's own files in Accelerate's format, neither atomic nor verified; no model weights

What Accelerate leaves out, and what the hooks do about it:
- `model.safetensors` would hold the base, which never changes: the hooks keep the crowd out of saving and loading.
- The order of a shuffled loader is not saved: a `StatefulSampler` computes it.
- The loader that `prepare` returned counts its passes, and tells the sampler. The pass of the copy that
  `skip_first_batches` makes would not count, so the sampler counts it.
- Every new iterator of a loader draws from the global generator, which shifts all later dropout: the loaders of our
  sampler get a generator of their own.
- Gradients inside an accumulation window are not saved: the hooks save them.
- A generator that cannot be restored is only a line in the log: here it is an error.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import SequentialSampler

from ci_llm.base.load import fingerprint_of
from ci_llm.checkpoints.checkpoint import load_checkpoint, write_checkpoint
from ci_llm.checkpoints.manifest import MANIFEST, read_manifest, verify_folder
from ci_llm.core import determinism
from ci_llm.crowd.crowd import Crowd, load_state, shape_of, state_of
from ci_llm.crowd.given_path import HOOKS_FOLDER, META
from ci_llm.data.stateful_sampler import StatefulSampler
from ci_llm.distributed.side_channel import SideChannel, TorchProcessGroup, run_collectively
from ci_llm.errors import CheckpointError, ConfigError
from ci_llm.integrations.saver import OWN_CHECKPOINTS, gather, require_same, restore_generators

# The last file that Accelerate writes on the main process, unless objects were registered for checkpointing. The files
# of the other processes hold nothing that is not in our folder as well.
LAST_FILE = "random_states_0.pkl"

logger = logging.getLogger(__name__)


def register_hooks(accelerator: Any) -> None:
    """Make `save_state` and `load_state` of an `Accelerator` exact for a `Crowd`. A collective, called once.

    From then on both are collectives, as Accelerate documents them: every process calls them, at the same step. Warns
    about everything that `load_state` will not restore.

    Args:
        accelerator: the one that has prepared the crowd, its optimizers, schedulers and loaders.

    Raises:
        ConfigError: no crowd was prepared, or more than one; or FSDP, DeepSpeed or Megatron-LM writes the checkpoints.

    Examples:
        >>> model, optimizer = accelerator.prepare(crowd, torch.optim.AdamW(crowd.storage.rows))
        >>> ci_llm.register_hooks(accelerator)
        >>> _ = accelerator.save_state(str(folder / "state"))
        >>> (folder / "state" / "ci_llm" / "agent0" / "adapter_model.safetensors").is_file()
        True
    """
    hooks = _Hooks(accelerator)
    for note in hooks.notes():
        logger.warning(note)
    accelerator.register_save_state_pre_hook(hooks.save)
    accelerator.register_load_state_pre_hook(hooks.load)


def latest_state(folder: Path | str) -> Path | None:
    """The newest folder in `folder` that `save_state` has finished; every byte of its `ci_llm/` is verified.

    Folders that are unfinished or damaged are passed over with a warning. None if no folder is left.

    Examples:
        >>> ci_llm.latest_state(folder) is None
        True
    """
    found = []
    for place in Path(folder).glob(f"*/{HOOKS_FOLDER}"):
        try:
            _require_whole(place.parent)
            found.append((verify_folder(place).wall_time, place.parent))
        except CheckpointError as error:
            logger.warning("passed over: %s (%s)", error.what, place.parent)
    return max(found)[1] if found else None


class _Hooks:
    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        if (kind := str(getattr(accelerator.distributed_type, "value", ""))) in OWN_CHECKPOINTS:
            raise ConfigError(
                f"{kind} writes its checkpoints itself", where="register_hooks", hint="launch without it: under DDP"
            )
        crowds = [model for model in map(accelerator.unwrap_model, accelerator._models) if isinstance(model, Crowd)]
        if len(crowds) != 1:
            raise ConfigError(
                f"{len(crowds) or 'no'} crowd was prepared by this accelerator, and there must be one",
                where="register_hooks",
                hint="prepare a Crowd first; ci_llm.CheckpointManager saves any other model (docs/recipes/own_code.md)",
            )
        self._crowd, self._channel = crowds[0], SideChannel()
        self._fingerprint = fingerprint_of(self._crowd.model)
        self._samplers = {
            number: (loader, sampler)
            for number, loader in enumerate(accelerator._dataloaders)
            if isinstance(sampler := _sampler_of(loader), StatefulSampler)
        }
        for loader, sampler in self._samplers.values():
            loader.base_dataloader.generator = torch.Generator()
            sampler.pass_ended = self._counter_of(loader)

    def notes(self) -> list[str]:
        """The loaders whose order will not be restored, a line each."""
        others = [
            f"loader {number} ({type(sampler).__name__})"
            for number, loader in enumerate(self._accelerator._dataloaders)
            if not isinstance(sampler := _sampler_of(loader), (StatefulSampler, SequentialSampler))
        ]
        return [f"not restored by load_state: the order of {name}; give it a StatefulSampler" for name in others]

    def _counter_of(self, loader: Any) -> Callable[[int], None]:
        def count(epoch: int) -> None:
            if self._accelerator.gradient_state.active_dataloader is not loader:
                loader.iteration = epoch + 1

        return count

    # Accelerate calls these before it writes and reads its own files.

    def save(self, models: list[Any], weights: list[Any], folder: str) -> None:
        """Write our folder, and remove the crowd from the weights that Accelerate is about to write."""
        weights[:] = [weight for model, weight in zip(models, weights, strict=True) if not self._is_crowd(model)]
        everyone = gather(
            self._channel,
            {"rng": determinism.capture(), "gradients": self._unfinished_gradients(), "step": self._accelerator.step},
        )
        run_collectively(TorchProcessGroup(self._accelerator.device), lambda: self._write(Path(folder), everyone))

    def load(self, models: list[Any], folder: str) -> None:
        """Restore from our folder, and remove the crowd from the models that Accelerate is about to fill.

        Raises:
            CheckpointError: the folder is not one that these hooks wrote, or not a whole one.
            ForeignCheckpoint: it is of another crowd, another base, or another number of processes or objects.
        """
        models[:] = [model for model in models if not self._is_crowd(model)]
        state = self._read(Path(folder))
        load_state(self._crowd, state, folder)
        for name, objects in self._stateful().items():
            for own, saved in zip(objects, state["accelerate"][name], strict=True):
                own.load_state_dict(saved)
        for number, (loader, sampler) in self._samplers.items():
            sampler.load_state_dict({**state["samplers"][number], "position": 0})  # the loop skips what was used
            loader.iteration = sampler.epoch
        own = state["processes"][self._accelerator.process_index]
        for name, parameter in self._crowd.named_parameters():
            gradient: Tensor | None = own["gradients"].get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter.device)
        self._accelerator.step = own["step"]
        restore_generators(own["rng"], str(folder))

    def _read(self, folder: Path) -> dict[str, Any]:
        """The state in our folder; an error on every process if it does not fit on one. A collective."""
        found: list[dict[str, Any]] = []

        def look() -> list[int]:
            _require_whole(folder)
            found.append(load_checkpoint(folder / HOOKS_FOLDER).state)
            self._require_same(found[0], folder)
            return []

        run_collectively(TorchProcessGroup(self._accelerator.device), look)
        return found[0]

    def _is_crowd(self, model: Any) -> bool:
        return self._accelerator.unwrap_model(model) is self._crowd

    def _write(self, folder: Path, everyone: list[dict[str, Any]]) -> list[int]:
        if self._accelerator.is_main_process:
            state = {
                **state_of(self._crowd, self._fingerprint),
                "accelerate": {
                    name: [one.state_dict() for one in objects] for name, objects in self._stateful().items()
                },
                "samplers": {number: self._order_of(*pair) for number, pair in self._samplers.items()},
                "processes": everyone,
            }
            others = len(self._accelerator._custom_objects)
            last = f"custom_checkpoint_{others - 1}.pkl" if others else LAST_FILE
            # What an earlier save_state has left here must not make a new one look finished.
            (folder / last).unlink(missing_ok=True)
            write_checkpoint(folder / HOOKS_FOLDER, state, info={"last_file": last})
        return []

    def _stateful(self) -> dict[str, list[Any]]:
        """The objects with a state that Accelerate keeps beside models and loaders."""
        accelerator = self._accelerator
        scaler = [] if accelerator.scaler is None else [accelerator.scaler]
        return {"optimizers": accelerator._optimizers, "schedulers": accelerator._schedulers, "scaler": scaler}

    def _order_of(self, loader: Any, sampler: StatefulSampler) -> dict[str, Any]:
        """The sampler's state. Loaders read ahead, so the sampler may have left the epoch in which the loop is."""
        active = self._accelerator.gradient_state.active_dataloader
        within = active is not None and _sampler_of(active) is sampler and not active.end_of_dataloader
        epoch = sampler.epoch if within else sampler.next_epoch
        return {"seed": sampler.seed, "num_rows": sampler.num_rows, "epoch": epoch}

    def _unfinished_gradients(self) -> dict[str, Tensor]:
        if self._accelerator.sync_gradients:
            return {}
        named = self._crowd.named_parameters()
        return {name: parameter.grad.cpu() for name, parameter in named if parameter.grad is not None}

    def _require_same(self, state: dict[str, Any], folder: Path) -> None:
        def about(crowd: dict[str, Any]) -> dict[str, Any]:
            return shape_of(crowd) | {"fingerprint of the base": crowd[META]["base_fingerprint"]}

        there = about(state) | {name: len(objects) for name, objects in state["accelerate"].items()}
        there["processes"] = len(state["processes"])
        there["rows by loader"] = {number: saved["num_rows"] for number, saved in state["samplers"].items()}
        here = about({META: self._crowd.meta(self._fingerprint)})
        here |= {name: len(objects) for name, objects in self._stateful().items()}
        here["processes"] = self._accelerator.num_processes
        here["rows by loader"] = {number: sampler.num_rows for number, (_, sampler) in self._samplers.items()}
        require_same(there, here, str(folder))


def _require_whole(folder: Path) -> None:
    if not (folder / HOOKS_FOLDER / MANIFEST).is_file():
        what = "this folder was not saved with register_hooks"
        raise CheckpointError(what, where=str(folder), hint=f"give one that was: it holds {HOOKS_FOLDER}/{MANIFEST}")
    last = folder / str(read_manifest(folder / HOOKS_FOLDER).info.get("last_file", LAST_FILE))
    if not zipfile.is_zipfile(last):  # as torch.save writes them, with the directory of the archive at the end
        raise CheckpointError(
            "save_state was interrupted before Accelerate had written its own files",
            where=str(folder),
            hint="load the folder saved before this one: latest_state finds it",
        )


def _sampler_of(loader: Any) -> Any:
    """The sampler inside the wrappers of `prepare` and `skip_first_batches`."""
    at = loader.batch_sampler or loader.sampler
    while (inner := getattr(at, "batch_sampler", None)) is not None:
        at = inner
    return getattr(at, "sampler", at)
