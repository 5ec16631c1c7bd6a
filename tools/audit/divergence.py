"""The divergence of two runs of one script: where they part, by what name, and what is likely behind it.

What differs first in time is named; of what differs in the same step, what comes first in the order of causes: weights
before data, data before random numbers, those before the loss, and the optimizer last. A likely cause is one sentence
by framework, with the kind of line of the script to look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from tools.audit.runs import Step, Trace

Kind: TypeAlias = Literal[
    "weights",
    "repeated rows",
    "skipped rows",
    "data order",
    "generator",
    "dropout",
    "scaler",
    "scheduler",
    "settings",
    "moments",
    "gradients",
    "number of steps",
    "no resume",
    "unexplained",
]
#: What makes two steps the same. Generators are none of it: one that nobody asks may stand where it likes.
RESULTS = ("rows", "mode", "losses", "scale", "lr", "settings", "moments", "grads", "state")


@dataclass(frozen=True)
class Divergence:
    """One difference.

    Attributes:
        step: optimizer step of the whole run, from 1 on, in which it shows.
        detail: what exactly, for people.
        follows: it may follow from other rows: only buffers differ, which a forward pass changes.
    """

    kind: Kind
    step: int
    detail: str
    follows: bool = False


def resumed_from(killed: Trace, resumed: Trace) -> int:
    """The step from which a process resumed: the one whose weights it began with.

    Where no weights tell, it is the newest checkpoint that had appeared before the kill.
    """
    newest = max((step for step in killed.saves), default=0)
    if not resumed.state:
        return newest
    alike = {
        step: sum(resumed.state.get(name) == digest for name, digest in killed.state_after(step).items())
        for step in range(len(killed.steps) + 1)
    }
    most = max(alike.values())
    frozen = sum(all(step.state.get(name) == at for step in killed.steps) for name, at in killed.state.items())
    if most <= frozen:
        return newest
    return newest if alike.get(newest) == most else max(step for step, count in alike.items() if count == most)


def restored(killed: Trace, resumed: Trace, step: int) -> Iterator[Divergence]:
    """What a resumed process did not begin with, though the killed one had it after `step`."""
    before = killed.state_after(step)
    if wrong := [name for name, digest in before.items() if resumed.state.get(name, digest) != digest]:
        follows = {*wrong} <= {*resumed.buffers}
        yield Divergence("weights", step + 1, _weights(wrong, before, resumed), follows)
    had = killed.moments_after(step)
    missing = [name for name, digest in had.items() if resumed.moments.get(name) != digest]
    if missing and step:
        how = "are not those of the checkpoint" if resumed.moments else "are missing: the optimizer starts without them"
        yield Divergence("moments", step + 1, f"{', '.join(missing)} {how}")


def _weights(wrong: Sequence[str], before: Mapping[str, str], resumed: Trace) -> str:
    if len(wrong) == len(before) and len(resumed.rounded) > len(before) / 2:
        return f"all {len(wrong)} tensors are rounded to half precision"
    listed = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if len(wrong) > 4 else "")
    return f"{len(wrong)} of {len(before)} tensors are not those of the checkpoint: {listed}"


def compare(straight: Trace, other: Trace, offset: int = 0, unstable: frozenset[str] = frozenset()) -> list[Divergence]:
    """What differs in the first step in which anything does, the likeliest cause first; nothing if nothing does.

    Args:
        offset: step of `straight` after which `other` began.
        unstable: fields of a step that differ between two straight runs already, and tell nothing.
    """
    for number, (own, theirs) in enumerate(zip(straight.steps[offset:], other.steps, strict=False)):
        if any(getattr(own, name) != getattr(theirs, name) for name in RESULTS if name not in unstable):
            return list(_named(straight, other, offset, number, unstable))
    return []


def _named(straight: Trace, other: Trace, offset: int, number: int, unstable: frozenset[str]) -> Iterator[Divergence]:
    own, theirs, step = straight.steps[offset + number], other.steps[number], offset + number + 1
    differing = {name for name in RESULTS if getattr(own, name) != getattr(theirs, name)} - unstable
    drawn = [name for name, digest in own.generators.items() if theirs.generators.get(name, digest) != digest]
    found = False
    if "rows" in differing:
        yield _rows(straight, other, offset, number, drawn)
        found = True
    elif "mode" in differing:
        yield Divergence("dropout", step, "other modules are in training mode: dropout is on in one run only")
        found = True
    elif "losses" in differing and drawn and not _only_scaled(own, theirs):
        kind: Kind = "dropout" if own.dropout and "torch" in drawn else "generator"
        what = "the masks of dropout differ: " if kind == "dropout" else "random numbers differ: "
        yield Divergence(kind, step, f"{what}the generator of {' and '.join(drawn)} stands elsewhere")
        found = True
    for name, kind, what in (
        ("scale", "scaler", "loss scale and steps since it grew"),
        ("lr", "scheduler", "learning rate"),
        ("settings", "settings", "settings of the optimizer"),
    ):
        if name in differing:
            yield Divergence(kind, step, f"{what}: {_shown(own, name)} became {_shown(theirs, name)}")
            found = True
    if not found and {"losses", "grads"} & differing:
        yield Divergence("gradients", step, "another loss or gradient from the same data, weights and random numbers")
    elif not found and "moments" in differing:
        names = [name for name in own.moments if theirs.moments.get(name) != own.moments[name]]
        yield Divergence("moments", step, f"{', '.join(names) or 'moments'} of the optimizer")
    elif not found:
        yield Divergence("unexplained", step, "other weights from the same loss, gradient and moments")


def _only_scaled(own: Step, theirs: Step) -> bool:
    """Whether the losses differ by their scale alone."""
    if own.scale == theirs.scale or not own.scale or not theirs.scale or not theirs.scale[0][0]:
        return False
    ratio = own.scale[0][0] / theirs.scale[0][0]
    return len(own.losses) == len(theirs.losses) and all(
        one == other * ratio for one, other in zip(own.losses, theirs.losses, strict=True)
    )


def _shown(step: Step, name: str) -> str:
    return ", ".join(str(value) for value in getattr(step, name)) or "none"


def _rows(straight: Trace, other: Trace, offset: int, number: int, drawn: Sequence[str]) -> Divergence:
    """The name of a difference of rows: repeated, skipped, in another order, or changed by random numbers."""
    step = offset + number + 1
    seen = list(other.steps[number].rows)
    all_rows = [row for each in straight.steps for row in each.rows]
    here = sum(len(each.rows) for each in straight.steps[: step - 1])
    if not seen:
        return Divergence("data order", step, "no rows were seen in this step")
    if sum(row in set(all_rows) for row in seen) < len(seen) / 2:
        if drawn:
            what = f"the rows themselves differ, and the generator of {' and '.join(drawn)} stands elsewhere"
            return Divergence("generator", step, what)
        return Divergence("data order", step, "the rows are none that the straight run saw")
    window = seen + [row for each in other.steps[number + 1 : number + 3] for row in each.rows]
    others = [at for at in range(len(all_rows)) if at != here]
    places = [at for at in others if _runs_along(all_rows, at, window, len(seen))]
    if not places and len(seen) > 1:  # as after a resume near the end of an epoch: the next epoch is right again
        places = [at for at in others if _runs_along(all_rows, at, seen, len(seen))]
    if places:
        at = min(places, key=lambda place: abs(place - here))
        where = f"the rows of step {_step_of(straight, at)} come in step {step}"
        if at < here:
            return Divergence("repeated rows", step, f"{here - at} rows are seen again: {where}")
        return Divergence("skipped rows", step, f"{at - here} rows are left out: {where}")
    return Divergence("data order", step, "the same rows in another order")


def _runs_along(rows: Sequence[str], at: int, window: Sequence[str], least: int) -> bool:
    """Whether `window` stands in `rows` from `at` on, as far as both go, and at least `least` of it."""
    stretch = rows[at : at + len(window)]
    return len(stretch) >= least and list(stretch) == list(window[: len(stretch)])


def _step_of(trace: Trace, row: int) -> int:
    for number, step in enumerate(trace.steps, 1):
        row -= len(step.rows)
        if row < 0:
            return number
    return len(trace.steps)


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
