"""Callbacks: a program's own code, called while a run trains, at the events of Transformers' Trainer.

A callback is an object with one or more methods of these names:

    class Prune:
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            control.should_training_stop = metrics["eval/crowd/nll"] > 0.3

`args` is the `Config`, `state` a `TrainerState`, `control` a `TrainerControl`. All values are plain and the same on
every process. The random generators are restored after a callback, so that it cannot change the bits of a run. A
callback can ask the run to stop, and an error that it raises ends the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from ci_llm.config import Config
from ci_llm.core import determinism
from ci_llm.errors import ConfigError

Event = Literal["on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end"]
EVENTS: Final[tuple[str, ...]] = get_args(Event)
_BASE_OF_THE_TRAINER: Final = "TrainerCallback"  # has a method for every event, each of which does nothing
_WHERE: Final = "train(callbacks=...)"


@dataclass(frozen=True)
class TrainerState:
    """The position of the run.

    Attributes:
        global_step: optimizer steps taken.
        max_steps: optimizer steps of the whole run.
        epoch: passes over the rows, with its fraction.
        is_world_process_zero: this is the main process; every process calls its callbacks.
    """

    global_step: int
    max_steps: int
    epoch: float
    is_world_process_zero: bool


@dataclass(slots=True)
class TrainerControl:
    """The requests of a callback.

    Attributes:
        should_training_stop: save the step just taken and end, as after a signal. The same call resumes later.
    """

    should_training_stop: bool = False


class Callbacks:
    """The callbacks of one run.

    Attributes:
        may_stop: those of some process may ask for a stop after any step, so that all vote there too.

    Args:
        callbacks: objects with methods named after events.

    Raises:
        ConfigError: an object has no such method, or one for an unknown event; or it is one of Transformers' own
            callbacks, which need more than this package offers.
    """

    def __init__(self, callbacks: Iterable[object] = ()) -> None:
        if not isinstance(callbacks, Iterable):
            what = f"callbacks is a {type(callbacks).__name__}, but takes a list"
            raise ConfigError(what, where=_WHERE, hint="write brackets around a single one: callbacks=[it]")
        self.may_stop, known = False, tuple(callbacks)
        for callback in known:
            _check(callback)
        found = {event: [getattr(callback, event, None) for callback in known] for event in EVENTS}
        self._methods = {event: [*filter(None, methods)] for event, methods in found.items()}

    def hears(self, *events: Event) -> bool:
        """True if a callback has a method for one of these events."""
        return any(self._methods[event] for event in events)

    def call_event(
        self, event: Event, config: Config, state: TrainerState, values: Mapping[str, Mapping[str, Any]]
    ) -> bool:
        """Call every callback that has a method for the event, in their order.

        Args:
            config: the `args` of the call.
            values: the keyword arguments of the event, each a mapping; a callback gets a copy.

        Returns:
            True if a callback asks for a stop.
        """
        generators = determinism.capture()
        control = TrainerControl()
        try:
            for method in self._methods[event]:
                method(config, state, control, **{name: dict(value) for name, value in values.items()})
        finally:
            determinism.restore(generators)
        return control.should_training_stop


def _check(callback: object) -> None:
    if isinstance(callback, type):
        name = callback.__name__
        raise ConfigError(f"the callback {name} is a class", where=_WHERE, hint=f"callbacks=[{name}()]")
    if type(callback).__module__.startswith("transformers."):
        raise ConfigError(
            f"{type(callback).__name__} is a callback of Transformers, and asks for more than there is here",
            where=_WHERE,
            hint=f"write a plain class with some of these methods: {', '.join(EVENTS)}",
        )
    methods = {
        name
        for kind in type(callback).__mro__
        if kind.__name__ != _BASE_OF_THE_TRAINER
        for name in vars(kind)
        if name.startswith("on_")
    }
    unknown = sorted(methods - {*EVENTS})
    if unknown or not methods:
        problem = f"has {', '.join(unknown)}, which nothing calls" if unknown else "has no method for an event"
        raise ConfigError(f"the callback {callback!r} {problem}", where=_WHERE, hint=f"events: {', '.join(EVENTS)}")
