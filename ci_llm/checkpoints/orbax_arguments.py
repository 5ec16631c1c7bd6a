"""Orbax's arguments and options for `save`, `restore` and the manager, translated to ours.

What has no counterpart here is refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from ci_llm.errors import CheckpointError


@dataclass(frozen=True)
class StandardSave:
    """A state that is to be saved."""

    item: Any


@dataclass(frozen=True)
class StandardRestore:
    """A state that is to be restored.

    Args:
        item: filled in place, as by `restore(step, into=item)`; None for new dicts and tensors.
    """

    item: Any = None


class PyTreeSave(StandardSave):
    """Another name of `StandardSave`."""


class PyTreeRestore(StandardRestore):
    """Another name of `StandardRestore`."""


class JsonSave(StandardSave):
    """Plain values."""


class JsonRestore(StandardRestore):
    """Plain values."""


class Composite(dict[str, Any]):
    """Items by name; each is an attribute as well."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no item {name!r}; items: {', '.join(self) or 'none'}") from None


def state_of(state: Any, args: Any) -> Any:
    """The state that a call of `save` means.

    Raises:
        CheckpointError: it gives a state and `args`, or neither; or `args` that hold no item.
    """
    if (state is None) == (args is None):
        raise CheckpointError("save takes a state or args=, and one of them only", where="save")
    return state if args is None else items_of(args)


def items_of(args: Any) -> Any:
    """The item that arguments hold, or a dict of items by name for a `Composite`. Raises CheckpointError."""
    if isinstance(args, Mapping):
        return {name: items_of(part) for name, part in args.items()}
    if hasattr(args, "item"):
        return args.item
    raise CheckpointError(
        f"a {type(args).__name__} holds no item",
        where="args=",
        hint="StandardSave(state), JsonSave(values), or Composite(name=..., ...) of these",
    )


# Options of a manager

#: Orbax's field, and our keyword.
KEYWORDS: Final = {
    "save_interval_steps": "save_interval_steps",
    "save_on_steps": "save_on_steps",
    "max_to_keep": "max_to_keep",
    "keep_period": "keep_period",
    "best_fn": "best_fn",
    "best_mode": "best_mode",
    "read_only": "read_only",
    "enable_async_checkpointing": "async_save",
}

#: Fields that change nothing: here it is always so, or there is nothing to set.
WITHOUT_EFFECT: Final = frozenset(
    {
        "create",  # the folder is made by the first save
        "cleanup_tmp_directories",  # what dead attempts left is swept at the first save
        "enable_background_delete",  # pruning happens in the thread of the save
        "num_deletion_threads",
        "async_options",
        "multiprocessing_options",
        "file_options",
        "save_root_metadata",
        "lightweight_initialize",
        "enable_should_save_is_saving_in_progress_check",
        "enable_per_process_directory_creation",
    }
)


class CheckpointManagerOptions:
    """Options under Orbax's names, for `CheckpointManager(directory, options=...)`.

    Raises:
        CheckpointError: a field that has no counterpart here; the message names it.
    """

    def __init__(self, **fields: Any) -> None:
        _require_known(fields)
        self.fields = fields


@dataclass(frozen=True)
class Rules:
    """When a manager saves and what it keeps: its keywords of these names.

    Attributes:
        initially: whether the first save of an empty folder is due at any step.
    """

    save_interval_steps: int | None
    save_on_steps: Collection[int]
    max_to_keep: int | None
    keep_period: int | None
    best_fn: Callable[[Any], float] | None
    best_mode: str
    read_only: bool
    async_save: bool
    initially: bool = False

    def under(self, positional: Sequence[Any], options: Any) -> Rules:
        """These rules, or what Orbax's options say instead; then as Orbax does where nothing is committed yet.

        Args:
            positional: what follows the directory in Orbax's older call: checkpointers, options. The checkpointers say
                how Orbax writes its items; a state of ours is always written in one way, so they are not used.
            options: our class, or Orbax's own.

        Raises:
            CheckpointError: an argument that is neither, or a field that has no counterpart here.
        """
        options = _options_among(positional, options)
        return self if options is None else replace(self, **_read(options), initially=True)


def _read(options: Any) -> dict[str, Any]:
    fields = options.fields if isinstance(options, CheckpointManagerOptions) else _changed(options)
    _require_known(fields)
    if fields.get("read_only"):  # Orbax then sets its interval to 0, which is not an interval
        fields = {name: value for name, value in fields.items() if name != "save_interval_steps"}
    found = {KEYWORDS[name]: value for name, value in fields.items() if name in KEYWORDS}
    return {name: () if name == "save_on_steps" and value is None else value for name, value in found.items()}


def _options_among(positional: Sequence[Any], options: Any) -> Any:
    for argument in positional:
        if hasattr(argument, "save_interval_steps") or isinstance(argument, CheckpointManagerOptions):
            options = argument
        elif not _is_checkpointer(argument):
            raise CheckpointError(
                f"a {type(argument).__name__} is neither a checkpointer nor options",
                where="CheckpointManager(directory, ...)",
                hint="name what you set: CheckpointManager(directory, save_interval_steps=100, max_to_keep=3)",
            )
    return options


def _is_checkpointer(argument: Any) -> bool:
    if isinstance(argument, Mapping):
        return all(map(_is_checkpointer, argument.values()))
    return argument is None or (hasattr(argument, "save") and hasattr(argument, "restore"))


def _changed(options: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(options):
        raise CheckpointError(f"a {type(options).__name__} holds no options", where="options=")
    own = {field.name: _own(options, field) for field in dataclasses.fields(options)}
    return {name: value for name, value in own.items() if value is not None}


def _own(options: Any, field: Any) -> Any:
    """The value of a field where it is not the default; None where it is."""
    value = getattr(options, field.name)
    made = field.default_factory is not dataclasses.MISSING
    return None if made or value == field.default else value


def _require_known(fields: Mapping[str, Any]) -> None:
    strange = sorted(name for name in fields if name not in KEYWORDS and name not in WITHOUT_EFFECT)
    if fields.get("keep_checkpoints_without_metrics") is True:
        strange.remove("keep_checkpoints_without_metrics")
    if strange:
        raise CheckpointError(
            f"{', '.join(strange)} of Orbax's options has no counterpart here",
            where="CheckpointManagerOptions",
            hint="leave it out; docs/coming_from.md has what is there instead, and why",
        )
