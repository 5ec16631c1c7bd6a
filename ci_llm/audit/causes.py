"""What is likely behind a divergence, by framework: one sentence, and the kind of line of the script to look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ci_llm.audit.divergence import Kind

#: Which noted lines of the script a kind points at, the best first.
PLACES: Final[Mapping[Kind, tuple[str, ...]]] = {
    "weights": ("load", "save"),
    "repeated rows": ("data",),
    "skipped rows": ("data",),
    "data order": ("data",),
    "generator": ("load", "data"),
    "dropout": ("load", "save"),
    "scaler": ("scaler", "load"),
    "scheduler": ("scheduler", "load"),
    "settings": ("optimizer",),
    "moments": ("optimizer", "load"),
    "gradients": ("optimizer",),
}

_TORCH: Final[Mapping[Kind, str]] = {
    "weights": "a module or buffer is not in what is saved, or not loaded: save state_dict() of the whole model",
    "repeated rows": "the position in the data is not saved: count the batches of the epoch and skip them on a resume",
    "skipped rows": "more batches are skipped than were trained on: count at the optimizer step",
    "data order": "the shuffle depends on a generator that is not restored: seed it by (seed, epoch)",
    "generator": "torch, numpy and random are not all saved and set again after the loader's iterator exists",
    "dropout": "torch's generator is not saved, or set before iter(loader), which draws; or train() is missing",
    "scaler": "scaler.state_dict() is not saved or not loaded",
    "scheduler": "scheduler.state_dict() is not saved or not loaded",
    "settings": "the optimizer is made with other settings after a resume",
    "moments": "optimizer.state_dict() is not saved or not loaded",
    "gradients": "gradients that were accumulated before the save are lost: save at the end of a window",
    "number of steps": "the number of steps left is not derived from the step of the checkpoint",
    "no resume": "another --resume-arg is needed, or no checkpoint was there yet: save earlier, or a later --kill-at",
    "unexplained": "nothing watched explains it: an operation without a fixed order, or state outside of torch",
}

_OWN: Final[Mapping[str, Mapping[Kind, str]]] = {
    "accelerate": {
        "weights": "save_state() holds prepared models only: prepare() all, or register_for_checkpointing()",
        "repeated rows": "save_state() holds no position: skip_first_batches(loader, n) with the batches of this epoch",
        "skipped rows": "skip_first_batches() is given more batches than were trained on in this epoch",
        "data order": "prepare the loader with use_seedable_sampler=True, and call set_epoch(epoch)",
        "generator": "load_state() restores generators before the loader draws from them, and hides its failures",
        "dropout": "load_state() restores generators before the loader draws from them, and hides its failures",
        "scheduler": "the scheduler is not prepared: prepare() it, or register_for_checkpointing()",
        "moments": "the optimizer is not prepared, or load_state() is not called",
        "scaler": "load_state() is not called, or the scaler is not Accelerate's",
    },
    "trainer": {
        "weights": "resume_from_checkpoint is not passed to train(), or a part of the model is not saved",
        "repeated rows": "ignore_data_skip=True begins the epoch again",
        "skipped rows": "the batch size or accumulation has changed since the checkpoint",
        "data order": "set seed or data_seed to what it was, and keep ignore_data_skip=False",
        "generator": "rng_state.pth is missing or not of this number of processes",
        "dropout": "rng_state.pth is missing or not of this number of processes; or the save was asked for by a signal",
        "scheduler": "scheduler.pt is missing: save_only_model=True leaves it out",
        "moments": "optimizer.pt is missing: save_only_model=True leaves it out",
        "scaler": "scaler.pt is missing: save_only_model=True leaves it out",
    },
    "lightning": {
        "weights": "ckpt_path is not passed to fit(), or a part of the module is not in its state_dict()",
        "repeated rows": "a checkpoint inside an epoch holds no position of a plain DataLoader: take a stateful one,"
        " or save at the end of epochs",
        "skipped rows": "the loader skips what the loops have counted already",
        "data order": "Lightning restores no generator: give the sampler a generator seeded by the epoch",
        "generator": "Lightning restores no generators: save and set them in on_save_checkpoint, on_load_checkpoint",
        "dropout": "Lightning restores no generators: save and set them in on_save_checkpoint, on_load_checkpoint",
        "scheduler": "save_weights_only=True leaves the scheduler out",
        "moments": "save_weights_only=True leaves the optimizer out",
    },
    "ci_llm": {
        "data order": "another configuration or other data: the log names what changed; otherwise report this",
    },
}


def cause(kind: Kind, framework: str) -> str:
    """One sentence about what is likely behind a divergence."""
    return _OWN.get(framework, {}).get(kind, _TORCH[kind])


def place(kind: Kind, places: Mapping[str, str]) -> str | None:
    """The line of the script to look at; None if no such line was seen."""
    return next((places[what] for what in PLACES.get(kind, ()) if what in places), None)
