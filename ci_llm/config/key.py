"""How a key is declared: its type, what a change of it means for a resumed run, and its traits.

A key is declared by one of five functions. They say what it means if a resumed run has another value:

exact       other samples, other mathematics or another order: refused unless `allow_inexact_resume`
schedule    a longer or shorter run: allowed, and logged
ending      where the run ends and which step is its best; the steps themselves stay the same: allowed, and logged
rounding    the same sums in another order: allowed, but the bits differ
free        logging, saving, paths: allowed, and not worth a line
"""

from __future__ import annotations

import os
from datetime import date
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from ci_llm.core.imports import plugin_names
from ci_llm.core.measures import METRICS

ChangeKind = Literal["free", "schedule", "sample-exact"]


class DurationMark:
    """Marks a number of seconds that may also be written 90, 1h30m or HH:MM:SS."""


class SeveralMark:
    """Marks a text that may also be written as a list: its parts are joined by commas."""


def _joined(value: object) -> object:
    parts = list(value) if isinstance(value, list | tuple) else []
    return ",".join(parts) if parts and all(isinstance(part, str) for part in parts) else value


def _as_tuple(value: object) -> object:
    """A list as a tuple; text as the command line reads it: a name alone is a list of one, as in Transformers."""
    if isinstance(value, str):
        whole = value[1:-1] if value.startswith("[") and value.endswith("]") else value
        value = [part.strip() for part in whole.split(",")]
    return tuple(value) if isinstance(value, list) else value


def _as_day(value: object) -> object:
    """A date as YYYY-MM-DD; nothing stays nothing."""
    return value if value is None else date.fromisoformat(str(value)).isoformat()


Text = Annotated[str, StringConstraints(min_length=1)]
PathText = Annotated[Text, AfterValidator(os.path.expanduser)]  # a file has no shell that expands `~`
Sources = Annotated[PathText, BeforeValidator(_joined), SeveralMark()]
Weights = Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1), BeforeValidator(_as_tuple)]
Factors = Annotated[tuple[float, ...], MinLen(1), BeforeValidator(_as_tuple)]
Names = Annotated[tuple[Text, ...], MinLen(1), BeforeValidator(_as_tuple)]
Numbers = Annotated[tuple[Annotated[int, Ge(0)], ...], MinLen(1), BeforeValidator(_as_tuple)]
Day = Annotated[str, BeforeValidator(_as_day)]
Count = Annotated[int, Ge(1)]
Seed = Annotated[int, Ge(0), Lt(2**32)]
Size = Annotated[int, Ge(0)]
Amount = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
Share = Annotated[float, Ge(0), Le(1)]
TopShare = Annotated[float, Gt(0), Le(1)]
Several = Annotated[int, Ge(2)]
BelowOne = Annotated[float, Ge(0), Lt(1)]
Seconds = Annotated[float, Gt(0), Le(10**9), DurationMark()]  # 31 years: dates beyond overflow
# To read, these are numbers: config/auto.py puts one where `auto` is written, run/start/loading.py where rows decide.
if TYPE_CHECKING:
    AutoCount = int
    AutoLength = int
    AutoRate = float
    AutoAmount = float
    AutoLimit = int | None
else:
    AutoCount = Count | Literal["auto"]
    AutoLength = Annotated[int, Ge(2)] | Literal["auto"]
    AutoRate = Positive | Literal["auto"]
    AutoAmount = Amount | Literal["auto"]
    AutoLimit = Count | Literal["auto"] | None
# The values of these keys are the modules of a package, so that a new one needs no edit here.
if TYPE_CHECKING:
    Diversity = str
    Objective = str
    Aggregator = str
    Tracker = str
    Backend = str
    Metric = str
else:
    Metric = Literal[tuple(METRICS)]
    Diversity = Literal[plugin_names("ci_llm.crowd.diversity")]
    Objective = (
        Literal[("auto", *plugin_names("ci_llm.objectives", first="sft"))]
        | Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    )
    Aggregator = Literal[plugin_names("ci_llm.crowd.aggregators")]
    Tracker = Literal[plugin_names("ci_llm.logs.trackers")]
    Backend = Literal[plugin_names("ci_llm.checkpoints.backends")]
Trackers = Annotated[tuple[Tracker, ...], BeforeValidator(_as_tuple)]


class Traits(TypedDict, total=False):
    """The rest of what holds of a key; each trait is optional.

    Attributes:
        own: an agent may have a value of its own; the number is the key's place among such keys, a new one comes last.
        shape: such a key gives an adapter its shape and scale: a copy of an agent has the same value.
        rows: such a key says which rows an agent trains on.
        stronger_than: the other key for the same thing; within one source this one decides, unless it is null.
        rivals: other ways to the same thing, of which one source may name one.
        no_sweep: why a sweep cannot take the key, and what to do instead.
        evaluable: `ci-llm evaluate` may change it.
        recorded: its effect is recorded with the environment of a checkpoint, and compared there.
        place: it says where a run lies, not what it is.
    """

    own: int
    shape: bool
    rows: bool
    stronger_than: str
    rivals: tuple[str, ...]
    no_sweep: tuple[str, str]
    evaluable: bool
    recorded: bool
    place: bool


def _key(default: Any, doc: str, kind: ChangeKind, keeps_bits: bool, traits: Traits) -> Any:
    meaning: dict[str, Any] = {"kind": kind, "keeps_bits": keeps_bits, **traits}
    return Field(default, description=doc, json_schema_extra=meaning)


def exact(default: Any, doc: str, **traits: Unpack[Traits]) -> Any:
    """A key whose change would train on other samples, with other mathematics or in another order."""
    return _key(default, doc, "sample-exact", False, traits)


def schedule(default: Any, doc: str, **traits: Unpack[Traits]) -> Any:
    """A key that says how long the run is."""
    return _key(default, doc, "schedule", False, traits)


def ending(default: Any, doc: str, **traits: Unpack[Traits]) -> Any:
    """A key that decides where the run ends or which step is its best; every step keeps its bits."""
    return _key(default, doc, "schedule", True, traits)


def rounding(default: Any, doc: str, **traits: Unpack[Traits]) -> Any:
    """A key whose change keeps samples and mathematics, but may round differently."""
    return _key(default, doc, "free", False, traits)


def free(default: Any, doc: str, **traits: Unpack[Traits]) -> Any:
    """A key about logging, saving or paths."""
    return _key(default, doc, "free", True, traits)


class Keys(BaseModel):
    """Strict, frozen values; an unknown key, NaN and infinity are errors."""

    # Pydantic builds what checks the values at first use, which a group alone never has.
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )
